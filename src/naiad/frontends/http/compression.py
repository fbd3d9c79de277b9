"""gzip and deflate, of requests and of responses. Pure."""

import zlib

from naiad.datatypes import Buffer
from naiad.errors import InvalidArgument

_AUTOMATIC = zlib.MAX_WBITS | 32
_WINDOW = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
ENCODINGS = frozenset(_WINDOW)
#: What says that the rest is compressed.
_MAGIC_SIZE = 2
#: So much is given to zlib at once, which copies what it does not take at each step, and comes out of it at most.
_INPUT_SIZE = 64 << 10
_OUTPUT_SIZE = 1 << 20


def decompress(body: Buffer, max_size: int) -> bytes:
    """The plain body. As in Triton, what is cut short is taken as far as it goes, and what is not compressed at all is
    empty; but what is damaged is not taken.

    gzip and deflate are told apart by their first bytes. Raises InvalidArgument where there is nothing, where it is
    damaged, and beyond `max_size` bytes.
    """
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    stream = zlib.decompressobj(_AUTOMATIC)
    parts: list[bytes] = []
    size = 0
    view = memoryview(body)
    try:
        stream.decompress(view[:_MAGIC_SIZE])
    except zlib.error:
        return b""
    for start in range(_MAGIC_SIZE, len(view), _INPUT_SIZE):
        rest: Buffer = view[start : start + _INPUT_SIZE]
        while rest and not stream.eof:
            try:
                part = stream.decompress(rest, _OUTPUT_SIZE)
            except zlib.error as error:
                raise InvalidArgument(f"the request's body cannot be decompressed, it is damaged: {error}") from error
            size += len(part)
            if size > max_size:
                raise InvalidArgument(
                    f"decompressed request is larger than the maximum allowed input size of {max_size} bytes. "
                    "Use --http-max-input-size to increase the limit."
                )
            parts.append(part)
            rest = stream.unconsumed_tail
    return b"".join(parts)


def choose(accepted: str) -> str | None:
    """The encoding that an Accept-Encoding asks for: gzip, deflate, or None for plain.

    The highest quality wins, the first of equals; encodings that are not known do not count.
    """
    best = ""
    highest = 0.0
    for item in accepted.split(","):
        name, _, parameters = item.partition(";")
        name = name.strip()
        if name not in _WINDOW and name != "identity":
            continue
        quality = 1.0
        key, _, value = parameters.strip().partition("=")
        if key.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                continue
        if quality > highest:
            best, highest = name, quality
    return best if best in _WINDOW else None


def compress(encoding: str, body: bytes) -> bytes:
    return zlib.compress(body, wbits=_WINDOW[encoding])
