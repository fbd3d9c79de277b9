"""What a request says before and around its body: heads, read by httptools (llhttp), and chunks. Pure."""

import re
from contextlib import suppress
from typing import Any, Final

import httptools

_METHOD: Final = re.compile(rb"[A-Z]+(?= )")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\r\n]*)?")
#: Of a line with the size of a chunk and its extensions, or of a trailer.
_LONGEST_LINE: Final = 16 * 1024


class RequestHeaders:
    """The headers of a request. Names are looked up in lower case, of several values the first counts; `items` has them
    as they were sent."""

    __slots__ = ("_pairs", "_values")

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._pairs: list[tuple[bytes, bytes]] = []

    def add(self, name: bytes, value: bytes) -> None:
        self._values.setdefault(name.lower(), value)
        self._pairs.append((name, value))

    def get(self, key: str, default: str | None = None) -> str | None:
        value = self._values.get(key.encode())
        return default if value is None else value.decode("latin-1")

    def items(self) -> list[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._pairs]


class Head:
    """What the head of a request says. Clients send the same head again and again, so heads are kept and shared."""

    __slots__ = (
        "body_size",
        "expects_invitation",
        "facts",
        "headers",
        "is_chunked",
        "is_http_1_0",
        "keep_alive",
        "memo",
        "method",
        "path",
    )

    def __init__(self, data: bytes) -> None:
        """Raises HttpParserError."""
        reading = _HeadReader()
        try:
            reading.read(data)
            self.method: str = reading.parser.get_method().decode("latin-1")
        except httptools.HttpParserInvalidMethodError:
            name = _METHOD.match(data)
            if name is None:
                raise
            # One that the parser has not heard of is still a method, if one that nothing here allows.
            self.method = name[0].decode()
            reading = _HeadReader()
            reading.read(b"PATCH" + data[name.end() :])
        self.headers = headers = reading.headers
        parser = reading.parser
        self.path = _path(reading.url)
        self.keep_alive = reading.keep_alive
        self.is_http_1_0 = parser.get_http_version() == "1.0"
        if not reading.url:
            raise httptools.HttpParserError("a head of empty lines")
        length = headers.get("content-length")
        encoding = headers.get("transfer-encoding")
        if encoding is not None:
            encoding = ",".join([value for name, value in headers.items() if name.lower() == "transfer-encoding"])
        self.is_chunked = encoding is not None
        if encoding is not None and encoding.rpartition(",")[2].strip().lower() != "chunked":
            raise httptools.HttpParserError(f"the end of a body with Transfer-Encoding {encoding} cannot be found")
        # Python reads no number of thousands of digits, even if they are zeros.
        self.body_size = int(length.lstrip("0") or 0) if length and not self.is_chunked else 0
        if length and self.is_chunked:
            # The chunks count. Proxies may see it otherwise: whatever comes next is not theirs to smuggle in.
            self.keep_alive = False
        # Whatever is expected, as with Triton: a client that waits for nothing passes over it.
        self.expects_invitation = headers.get("expect") is not None
        #: Whatever the application and its handler have found out about requests with this head.
        self.memo: Any = None
        self.facts: Any = None


class _HeadReader:
    """Takes down what the parser finds in a head."""

    def __init__(self) -> None:
        self.headers = RequestHeaders()
        self.url = b""
        self.keep_alive = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_chunked_length=True)  # a length beside chunks: see Head

    def read(self, data: bytes) -> None:
        with suppress(httptools.HttpParserUpgrade):  # an offer that is not taken up
            self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.add(name, value)

    def on_headers_complete(self) -> None:
        # Asked later, of a request without a body, the parser speaks of the next message.
        self.keep_alive = self.parser.should_keep_alive()


class Chunks:
    """The body of a request in chunks (RFC 9112, 7.1); extensions and trailers are passed over. Not read by llhttp, which
    does not say where it ends and the next request begins."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.count = 0
        self.is_complete = False
        #: What has come behind the body.
        self.rest = b""
        #: What has come of a line that is not complete.
        self._line = b""
        #: How much of a chunk is still to come; whether the end of its line is.
        self._missing = 0
        self._is_chunk_open = False
        #: The last chunk has come, the lines behind it are trailers.
        self._is_last = False

    def feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        if self._line:
            data, self._line = self._line + data, b""
        at = 0
        while not self.is_complete:
            if self._missing:
                part = data[at : at + self._missing]
                if not part:
                    return
                self.parts.append(part)
                self.size += len(part)
                self._missing -= len(part)
                at += len(part)
                continue
            end = data.find(b"\r\n", at)
            if end - at > _LONGEST_LINE or (end < 0 and len(data) - at > _LONGEST_LINE):
                raise httptools.HttpParserError(f"a line of more than {_LONGEST_LINE} bytes around chunks")
            if end < 0:
                if data.find(b"\n", at) >= 0:
                    raise httptools.HttpParserError("half an end of line around chunks")
                self._line = data[at:]
                return
            self._take(data[at:end])
            at = end + 2
        self.rest = data[at:]

    def _take(self, line: bytes) -> None:
        if self._is_chunk_open:
            if line:
                raise httptools.HttpParserError("a chunk is longer than its size says")
            self._is_chunk_open = False
        elif self._is_last:
            if b"\n" in line or b"\r" in line:
                raise httptools.HttpParserError("half an end of line around chunks")
            self.is_complete = not line
        else:
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise httptools.HttpParserError("a line that is no size of a chunk")
            self.count += 1
            self._missing = int(match[1], 16)
            self._is_last = not self._missing
            self._is_chunk_open = not self._is_last


def _path(url: bytes) -> str:
    """The raw path of a request target, without query; of the form that proxies get, too."""
    text = url.partition(b"?")[0].decode("latin-1")
    if not text.startswith("/") and "://" in text:
        text = "/" + text.partition("://")[2].partition("/")[2]
    return text
