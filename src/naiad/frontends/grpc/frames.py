"""Frames of HTTP/2, as bytes. Pure. Numbers in parentheses are sections of RFC 9113."""

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Kinds of frames (6).
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

# Codes of errors (7).
NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

# Settings (6.5.2).
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

#: Length and kind of a frame in one number, flags, stream.
FRAME: Final = Struct(">IBI")
FRAME_SIZE: Final = 9
SETTING: Final = Struct(">HI")
NUMBER: Final = Struct(">I")
GOAWAY_START: Final = Struct(">II")
#: What a message of gRPC begins with: whether it is compressed, and its length.
PREFIX: Final = Struct(">BI")
PREFIX_SIZE: Final = 5

LARGEST_WINDOW: Final = 2**31 - 1
#: Of a stream and of a connection, until something else is said (6.9.2).
FIRST_WINDOW: Final = 65535
#: Any peer takes frames up to this size, and none may refuse to take those of 16 MiB but for the last byte (6.5.2).
SMALLEST_MAX_FRAME: Final = 16384
LARGEST_MAX_FRAME: Final = (1 << 24) - 1


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return FRAME.pack(len(content) << 8 | kind, flags, stream) + content


def head_frames(stream: int, block: bytes, flags: int) -> bytes:
    """A head, or trailers, in as many frames as any peer takes."""
    size = SMALLEST_MAX_FRAME
    if len(block) <= size:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [frame(HEADERS, flags, stream, block[:size])]
    for at in range(size, len(block), size):
        is_last = at + size >= len(block)
        parts.append(frame(CONTINUATION, END_HEADERS if is_last else 0, stream, block[at : at + size]))
    return b"".join(parts)
