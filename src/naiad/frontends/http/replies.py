"""Statuses, headers and the ways to answer a request over HTTP."""

from typing import Protocol

from naiad.errors import NaiadError
from naiad.protocol.json_text import error_document

Headers = list[tuple[str, str]]

_STATUSES = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNSUPPORTED": 501}

JSON: Headers = [("content-type", "application/json")]
#: Errors of routing, access and models carry JSON too, but Triton labels them so.
PLAIN: Headers = [("content-type", "text/plain")]
EVENTS: Headers = [("content-type", "text/event-stream; charset=utf-8")]


class RequestHeaders(Protocol):
    """Names are in lower case."""

    def get(self, key: str, default: str | None = None) -> str | None: ...

    def items(self) -> list[tuple[str, str]]: ...


class Scope(Protocol):
    """What an RSGI server says about a request. `path` is percent-decoded, `client` an address with a port."""

    method: str
    path: str
    client: str

    @property
    def headers(self) -> RequestHeaders: ...


class StreamTransport(Protocol):
    async def send_bytes(self, data: bytes) -> None: ...


class HttpProtocol(Protocol):
    """The RSGI connection of one request: calling it reads the body."""

    async def __call__(self) -> bytes: ...

    async def client_disconnect(self) -> None: ...

    def response_empty(self, status: int, headers: Headers) -> None: ...

    def response_bytes(self, status: int, headers: Headers, body: bytes) -> None: ...

    def response_stream(self, status: int, headers: Headers) -> StreamTransport: ...


def status_of(error: NaiadError) -> int:
    return _STATUSES.get(error.triton_code, 400)


def reply_error(proto: HttpProtocol, error: NaiadError, headers: Headers) -> None:
    proto.response_bytes(status_of(error), headers, error_document(error.message))


def reply_json(proto: HttpProtocol, body: bytes) -> None:
    proto.response_bytes(200, JSON, body)
