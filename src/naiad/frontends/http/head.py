"""What a request says before and around its body: head and chunks, read by httptools (llhttp). Pure."""

import re
from contextlib import suppress
from typing import Any

import httptools

_METHOD = re.compile(rb"[A-Z]+(?= )")


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
        self.body_size = int(length) if length and not self.is_chunked else 0
        if length and self.is_chunked:
            # The chunks count. Proxies may see it otherwise: whatever comes next is not theirs to smuggle in.
            self.keep_alive = False
        expect = headers.get("expect")
        self.expects_invitation = expect is not None and expect.lower() == "100-continue"
        #: Whatever the application and its handler have found out about requests with this head.
        self.memo: Any = None
        self.facts: Any = None


class _HeadReader:
    """Takes down what the parser finds in a head."""

    def __init__(self) -> None:
        self.headers = RequestHeaders()
        self.url = b""
        self.keep_alive = False
        self.parser = _parser(self)

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


_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class Chunks:
    """The body of a request in chunks."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.count = 0
        self.is_complete = False
        #: Something came behind this request, in the same read.
        self.is_followed = False
        self._parser = _parser(self)
        # Not the head itself: the parser would stop at the end of a request that offers an upgrade.
        self._parser.feed_data(_CHUNKED_HEAD)

    def feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        with suppress(httptools.HttpParserUpgrade):  # offered by what follows
            self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.is_followed = self.is_complete

    def on_body(self, body: bytes) -> None:
        if not self.is_followed:
            self.parts.append(body)
            self.size += len(body)

    def on_chunk_header(self) -> None:
        self.count += 1

    def on_message_complete(self) -> None:
        self.is_complete = True


def _parser(reader: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(reader)
    parser.set_dangerous_leniencies(lenient_chunked_length=True)  # a length beside chunks: see Head
    return parser


def _path(url: bytes) -> str:
    """The raw path of a request target, without query; of the form that proxies get, too."""
    text = url.partition(b"?")[0].decode("latin-1")
    if not text.startswith("/") and "://" in text:
        text = "/" + text.partition("://")[2].partition("/")[2]
    return text
