"""Header blocks of HTTP/2: what a call begins with, read, and what answers begin and end with, written. Pure.

`hpack` decodes blocks. Clients send the same block again and again, as their tables allow: those are decoded once.
Blocks of ours refer to nothing but the static table, so that they are the same for all connections.
"""

import base64
import binascii
import re
from typing import Any, Final

from hpack import Decoder, HPACKDecodingError

#: The header list of a call may not be larger (RFC 9113, 6.5.2: with 32 bytes for each pair).
MAX_HEADER_LIST: Final = 64 * 1024
#: Blocks seen, up to this size and number, of each connection.
_KEPT_BLOCK_SIZE: Final = 1024
_KEPT_BLOCKS: Final = 256
#: A block that begins so changes the size of the table.
_SIZE_UPDATE_MASK: Final = 0xE0
_SIZE_UPDATE: Final = 0x20

_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MOST_TIMEOUT_DIGITS: Final = 8
#: What belongs to a connection of HTTP/1.1 makes a call of HTTP/2 malformed (RFC 9113, 8.2.2).
_OF_CONNECTIONS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
#: What is about the call itself is no metadata.
_OF_CALLS: Final = frozenset(
    (b"te", b"content-type", b"content-length", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-timeout")
)

#: What names and values are made of (8.2.1).
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE: Final = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")

Metadata = tuple[tuple[str, str | bytes], ...]


class Head:
    """What a call begins with.

    `malformed` says why it is no request of HTTP/2, `error` why no call of gRPC, both "" for a good one; `timeout_s`
    and `content_length` are -1 where there are none. `route` and `answer_encoding`, what answers are
    compressed with, are the application's: the same head will come again.
    """

    __slots__ = (
        "accepted",
        "answer_encoding",
        "content_length",
        "content_type",
        "encoding",
        "error",
        "is_trailers",
        "malformed",
        "metadata",
        "method",
        "path",
        "route",
        "timeout_s",
    )

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self.malformed = ""
        self.error = ""
        self.method = ""
        self.path = ""
        self.content_type = ""
        self.content_length = -1
        self.encoding = "identity"
        #: What answers may be compressed with.
        self.accepted: tuple[str, ...] = ()
        self.timeout_s = -1.0
        self.metadata: Metadata = ()
        #: What a call may end with.
        self.is_trailers = False
        self.route: Any = None
        self.answer_encoding = ""
        pseudo: dict[bytes, bytes] = {}
        metadata: list[tuple[str, str | bytes]] = []
        is_regular = False
        for name, value in pairs:
            if name.startswith(b":"):
                if is_regular or name in pseudo:
                    self.malformed = f"the header {name!r} is late or twice there"
                    return
                pseudo[name] = value
                continue
            is_regular = True
            if not _NAME.fullmatch(name) or name in _OF_CONNECTIONS or not _VALUE.fullmatch(value):
                self.malformed = f"the header {name!r} is not allowed"
                return
            if name not in _OF_CALLS:
                _add(metadata, name, value)
            else:
                self._take(name, value.decode("latin-1"))
        self.is_trailers = not pseudo
        if not (_NEEDED_PSEUDO.issubset(pseudo) and _PSEUDO.issuperset(pseudo) and pseudo[b":path"]):
            self.malformed = (
                "a request has the headers :method, :scheme and :path, and no others with a colon but :authority"
            )
            return
        self.method = pseudo[b":method"].decode("latin-1")
        self.path = pseudo[b":path"].decode("latin-1")
        self.metadata = tuple(metadata)

    def _take(self, name: bytes, value: str) -> None:
        if name == b"te":
            if value.lower() != "trailers":
                self.malformed = "the header te has to say trailers"
        elif name == b"content-type":
            self.content_type = value
        elif name == b"content-length":
            if value.isascii() and value.isdigit():
                self.content_length = int(value)
            else:
                self.malformed = "the header content-length is no number"
        elif name == b"grpc-encoding":
            self.encoding = value
        elif name == b"grpc-accept-encoding":
            self.accepted = tuple([each.strip() for each in value.split(",")])
        elif (timeout_s := _timeout(value)) is None:
            self.error = f"malformed grpc-timeout '{value}'"
        else:
            self.timeout_s = timeout_s


_NEEDED_PSEUDO: Final = frozenset((b":method", b":scheme", b":path"))
_PSEUDO: Final = frozenset((*_NEEDED_PSEUDO, b":authority"))


def _timeout(text: str) -> float | None:
    """Seconds of a grpc-timeout; None for what is none."""
    digits, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not (digits.isascii() and digits.isdigit()) or len(digits) > _MOST_TIMEOUT_DIGITS:
        return None
    return int(digits) * unit


def _add(metadata: list[tuple[str, str | bytes]], name: bytes, value: bytes) -> None:
    """Values of keys ending in -bin are base64, several of them with commas in between."""
    key = name.decode("latin-1")
    if not name.endswith(b"-bin"):
        metadata.append((key, value.decode("utf-8", "replace")))
        return
    for part in value.split(b","):
        part = part.strip()
        try:
            metadata.append((key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)))
        except binascii.Error:
            metadata.append((key, part))


class HeaderDecoder:
    """The heads of the calls of one connection."""

    __slots__ = ("_decoder", "_known")

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_HEADER_LIST)
        self._known: dict[bytes, Head] = {}

    def decode(self, block: bytes) -> Head:
        """Raises HPACKError, or what else `hpack` raises for a block that is none."""
        head = self._known.get(block)
        if head is not None:
            return head
        changes_size = len(block) > 0 and block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE
        if changes_size:
            _check_size_updates(block)
        # Any: compiled, a tuple of a known kind is another one each time it is looked at.
        entries: Any = self._decoder.header_table.dynamic_entries
        count = len(entries)
        newest: Any = entries[0] if count else None
        head = Head([(bytes(pair[0]), bytes(pair[1])) for pair in self._decoder.decode(block, raw=True)])
        if len(entries) != count or (count and entries[0] is not newest):
            # The same bytes mean something else from now on.
            self._known.clear()
        elif len(block) <= _KEPT_BLOCK_SIZE and not changes_size:
            if len(self._known) >= _KEPT_BLOCKS:
                self._known.clear()
            self._known[block] = head
        return head


def _check_size_updates(block: bytes) -> None:
    """A block begins with two at most (RFC 7541, 4.2). `hpack` takes any number, and its time for each."""
    at = 0
    for _ in range(3):
        if at == len(block) or block[at] & _SIZE_UPDATE_MASK != _SIZE_UPDATE:
            return
        is_longer = block[at] & 0x1F == 0x1F
        at += 1
        while is_longer and at < len(block):
            is_longer = block[at] & 0x80 != 0
            at += 1
    raise HPACKDecodingError("the size of the table changes more than twice")


# ---------------------------------------------------------------- answers


def _string(text: bytes) -> bytes:
    """A string literal without Huffman's code (RFC 7541, 5.2)."""
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    rest = size - 0x7F
    prefix = bytearray((0x7F,))
    while rest >= 0x80:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + text


def literal(name: bytes, value: bytes) -> bytes:
    """A pair that no table keeps (RFC 7541, 6.2.2)."""
    return b"\0" + _string(name) + _string(value)


#: `:status: 200`, which the static table has, and the content type, whose name it has.
HEAD: Final = b"\x88\x0f\x10" + _string(b"application/grpc")
#: What an answer ends with that is no error.
OK_TRAILERS: Final = literal(b"grpc-status", b"0")


def encoded_head(encoding: str) -> bytes:
    """What an answer begins with whose messages may be compressed."""
    return HEAD + literal(b"grpc-encoding", encoding.encode())


def trailers(code: int, details: str) -> bytes:
    """What an answer ends with."""
    block = literal(b"grpc-status", b"%d" % code)
    return block + literal(b"grpc-message", _percent_encoded(details)) if details else block


def http_error(status: int) -> bytes:
    """The answer to what is no call of gRPC."""
    return literal(b":status", b"%d" % status) + literal(b"content-length", b"0")


def _percent_encoded(text: str) -> bytes:
    """As gRPC has it: printable ASCII but for the percent sign stays."""
    data = text.encode("utf-8", "replace")
    if text.isascii() and text.isprintable() and "%" not in text:
        return data
    return b"".join([_PERCENT[byte] for byte in data])


_PERCENT: Final = [
    bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte  # ' ' to '~' without '%'
    for byte in range(256)
]
