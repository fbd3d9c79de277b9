"""gzip and deflate of messages. Pure."""

import zlib

from naiad.errors import Internal
from naiad.frontends.grpc.errors import MessageTooLarge
from naiad.frontends.grpc.stream import MAX_MESSAGE, Message

_WINDOW = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
#: What a client may send messages with.
ENCODINGS = ("identity", "deflate", "gzip")
#: From this size on, compressing a message is work for a thread; and decompressing one, which may become 1000 times
#: as large.
LARGE = 64 * 1024
LARGE_COMPRESSED = 4096


def decompress(message: Message, encoding: str) -> bytes:
    """Raises Internal for what cannot be, MessageTooLarge for more than a message may be."""
    window = _WINDOW.get(encoding)
    if window is None:
        raise Internal("a message is compressed, and the metadata 'grpc-encoding' does not say how")
    stream = zlib.decompressobj(window)
    try:
        plain = stream.decompress(message, MAX_MESSAGE)
    except zlib.error as error:
        raise Internal(f"Unexpected error decompressing data for algorithm {encoding}: {error}") from error
    if stream.unconsumed_tail:
        raise MessageTooLarge(f"Received message larger than max (more than {MAX_MESSAGE} bytes decompressed)")
    if not stream.eof or stream.unused_data:
        raise Internal(f"Unexpected error decompressing data for algorithm {encoding}: it is cut short, or too long")
    return plain


def compress(message: bytes, encoding: str) -> bytes:
    """The compressed message; the same where that is not smaller."""
    packed = zlib.compress(message, wbits=_WINDOW[encoding])
    return packed if len(packed) < len(message) else message


def choose(level: str, accepted: tuple[str, ...]) -> str:
    """The encoding of answers for `--grpc-infer-response-compression-level`, as gRPC's C++ library chooses it; "" for
    none."""
    possible = [encoding for encoding in ("gzip", "deflate") if encoding in accepted]
    if level == "none" or not possible:
        return ""
    return possible[{"low": 0, "medium": len(possible) // 2, "high": -1}[level]]
