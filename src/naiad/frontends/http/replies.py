"""Statuses, headers and the ways to answer a request over HTTP."""

from naiad.errors import NaiadError
from naiad.frontends.http.connection import Exchange, Headers
from naiad.protocol.json_text import error_document

_STATUSES = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNSUPPORTED": 501}

JSON: Headers = [("content-type", "application/json")]
#: Errors of routing, access and models carry JSON too, but Triton labels them so.
PLAIN: Headers = [("content-type", "text/plain")]
EVENTS: Headers = [("content-type", "text/event-stream; charset=utf-8")]
LINES: Headers = [("content-type", "application/x-ndjson")]


def status_of(error: NaiadError) -> int:
    return _STATUSES.get(error.triton_code, 400)


def reply_error(exchange: Exchange, error: NaiadError, headers: Headers) -> None:
    exchange.response_bytes(status_of(error), headers, error_document(error.message))


def reply_json(exchange: Exchange, body: bytes) -> None:
    exchange.response_bytes(200, JSON, body)
