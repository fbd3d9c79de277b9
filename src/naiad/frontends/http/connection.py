"""One HTTP/1.1 connection on the event loop: bytes in, requests out, replies back in order.

httptools (llhttp) reads the heads; bodies of known length are received straight into their final place, so that a
tensor is copied once on its way in. There is no thread to hand over to and no task per request: an application that
can answer at once does so before the call returns. Knows nothing of routes.

    application.accept(exchange)      the head is there; it may already reply, which refuses the body
    application.handle(exchange)      head and body are there; it replies now or later
"""

import asyncio
import enum
import select
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
import numpy as np

from naiad.frontends.connections import OpenConnections
from naiad.frontends.http.head import Chunks, Head, RequestHeaders
from naiad.protocol.json_text import error_document

#: What one read of the socket may bring; shared by all connections, since a read is used up before the next.
_SCRATCH_SIZE: Final = 256 * 1024
_scratch: Final = memoryview(bytearray(_SCRATCH_SIZE))
#: The head of a request may not be larger.
MAX_HEAD: Final = 64 * 1024
#: Bodies from this size on are received in place.
_IN_PLACE: Final = 32 * 1024
#: No body may be larger: gRPC's limit, and some room for JSON.
MAX_BODY: Final = 4 << 30
#: A refused body that is no larger than this is read and dropped, so that the connection can go on; and so that its
#: client, which may still be sending, gets to read why: what comes to a closed connection takes the answer away.
_MAX_DROPPED: Final = 64 << 20
#: So many chunks a body may have, and another one for each KiB: each takes some memory besides.
MAX_CHUNKS: Final = 65536
_LARGE_CHUNK: Final = 1024
#: Bodies larger than this get their memory as they come.
_AT_ONCE: Final = 64 << 20
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
#: How soon a client that sends no more is looked at, then after twice as long each time, and when for the last time.
_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 2.0

Headers = list[tuple[str, str]]


class ConnectionClosed(Exception):
    """The client has left while something was read from or written to it."""


#: Heads seen, up to this size and number.
_KEPT_HEAD_SIZE: Final = 1024
_KEPT_HEADS: Final = 1024


class Stream:
    """A reply that is sent piece by piece, as they come; in chunks, but to a client of HTTP/1.0, which knows none."""

    __slots__ = ("_connection", "_in_chunks")

    def __init__(self, connection: "Connection", in_chunks: bool) -> None:
        self._connection = connection
        self._in_chunks = in_chunks

    async def send_bytes(self, data: bytes) -> None:
        """Raises ConnectionClosed when the client has left; waits while it reads slowly."""
        if data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._in_chunks else data)
        await self._connection.drained()


class Exchange:
    """A request and its reply. Exactly one `response_...` is due.

    `path` is raw, without the query. `on_disconnect` is called if the client leaves before it has been answered.
    """

    __slots__ = (
        "_connection",
        "body",
        "head",
        "is_answered",
        "is_streaming",
        "keep_alive",
        "on_disconnect",
    )

    def __init__(self, connection: "Connection", head: Head, keep_alive: bool) -> None:
        self._connection = connection
        self.head = head
        self.keep_alive = keep_alive
        self.body: bytes | memoryview = b""
        self.is_answered = False
        self.is_streaming = False
        self.on_disconnect: Callable[[], None] | None = None

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def headers(self) -> RequestHeaders:
        return self.head.headers

    @property
    def connection_header(self) -> bytes:
        """What has to be said about the connection: that it ends, or to an old client that it goes on."""
        if not self.keep_alive:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self.head.is_http_1_0 else b""

    @property
    def client(self) -> str:
        """The peer's address and port, or "unix:"."""
        return self._connection.client

    def require_client(self) -> None:
        """Raises ConnectionClosed when the client has left: who has set `on_disconnect` is told, nobody else."""
        self._connection.require_client()

    def response_empty(self, status: int, headers: Headers) -> None:
        self.response_bytes(status, headers, b"")

    def response_bytes(self, status: int, headers: Headers, body: bytes) -> None:
        self._begin()
        self.on_disconnect = None
        connection = self._connection
        end = b"content-length: %d\r\n\r\n" % len(body)
        if not self.keep_alive or self.head.is_http_1_0:
            end = self.connection_header + end
        if self.head.method == "HEAD":
            body = b""
        head = _head(status, headers) + end
        if len(body) <= _IN_PLACE:
            connection.write(head + body)
        else:
            connection.write(head)
            connection.write(body)
        connection.answered(self)

    def response_stream(self, status: int, headers: Headers) -> Stream:
        """Begins a reply in chunks; `end_stream` is due after the last one."""
        self._begin()
        in_chunks = not self.head.is_http_1_0
        if in_chunks:
            end = b"transfer-encoding: chunked\r\n\r\n"
        else:
            # The end of the connection is the end of the reply.
            self.keep_alive = False
            end = b"\r\n"
        if not self.keep_alive:
            end = self.connection_header + end
        self._connection.write(_head(status, headers) + end)
        self.is_streaming = True
        return Stream(self._connection, in_chunks)

    def end_stream(self) -> None:
        self.is_streaming = False
        self.on_disconnect = None
        if not self.head.is_http_1_0:
            self._connection.write(b"0\r\n\r\n")
        self._connection.answered(self)

    def _begin(self) -> None:
        assert not self.is_answered, "this is a bug: a request is answered twice"
        self.is_answered = True


class Application(Protocol):
    def accept(self, request: Exchange) -> None:
        """The head is there. Replying here refuses the request before its body is read."""

    def handle(self, request: Exchange) -> None:
        """The body is there too. Must not raise; replies now or later."""


_heads: Final[dict[tuple[int, tuple[tuple[str, str], ...]], bytes]] = {}


def _head(status: int, headers: Headers) -> bytes:
    """Status line and headers. Most replies have one of a few heads; those are made once."""
    key = (status, tuple(headers))
    head = _heads.get(key)
    if head is None:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = ""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"HTTP/1.1 {status} {reason}\r\n{lines}".encode("latin-1")
        if len(_heads) < 1024:
            _heads[key] = head
    return head


class _State(enum.Enum):
    #: The head of a request is to come, or the rest of it.
    HEAD = enum.auto()
    #: The application looks at a head.
    ACCEPTING = enum.auto()
    #: The body is to come: of known length, in chunks, or to be dropped.
    BODY = enum.auto()
    CHUNKS = enum.auto()
    DROPPING = enum.auto()
    #: The application has the request.
    HANDLING = enum.auto()
    #: Nothing that comes is of interest any more.
    CLOSED = enum.auto()


class Connections(OpenConnections):
    """The open connections of a listener, and the heads that have come through them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: dict[bytes, Head] = {}


class Connection:
    """One of the `connections` of a listener: an asyncio.BufferedProtocol for uvloop, which does not ask for the type."""

    def __init__(self, application: Application, connections: Connections) -> None:
        self._application = application
        self._connections = connections
        self._transport: Any = None
        self._client: str | None = None
        self._state = _State.HEAD
        #: What has come of a head that is not complete.
        self._head = b""
        #: The request whose body is being received or which is being handled.
        self._request: Exchange | None = None
        #: A body of known length, where it goes and how much of it is there; bytes to drop of a refused one.
        self._body: memoryview | None = None
        self._expected = 0
        self._received = 0
        self._chunks: Chunks | None = None
        #: What the client has sent of its next requests.
        self._rest = b""
        self._paused = False
        self._drain: asyncio.Future[None] | None = None
        self._closing = False
        #: The client sends no more.
        self._ended = False
        #: Loop time of the last progress of a request that is not complete; 0 where none is owed.
        self.waiting_since = 0.0

    def __repr__(self) -> str:
        return f"<Connection {self._state.name.lower()} {self._request.path if self._request else ''}>"

    # ---------------------------------------------------------------- the transport

    @property
    def client(self) -> str:
        if self._client is None:
            peer = self._transport.get_extra_info("peername") if self._transport is not None else None
            if not isinstance(peer, tuple):
                self._client = "unix:"
            elif ":" in peer[0]:
                self._client = f"[{peer[0]}]:{peer[1]}"
            else:
                self._client = f"{peer[0]}:{peer[1]}"
        return self._client

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connections.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.lost(self)
        self._transport = None
        self._state = _State.CLOSED
        request, self._request = self._request, None
        if self._drain is not None and not self._drain.done():
            self._drain.set_exception(ConnectionClosed())
            self._drain.exception()  # nobody may be waiting for it
        if request is not None and request.on_disconnect is not None:
            leave, request.on_disconnect = request.on_disconnect, None
            leave()

    def eof_received(self) -> bool:
        """The client sends no more: whether the transport stays open, to answer what it has sent.

        It may have left as well, which looks the same. So it is told to go on, which a client that waits passes over
        and to which the system of one that has left answers that nobody is there. That cannot be said with TLS, which
        has no half-closed connections, to HTTP/1.0, or within a reply: then the client counts as one that has left.
        """
        request = self._request
        if self._state is _State.HANDLING and request is not None:
            waits = not request.is_answered and not request.head.is_http_1_0
        else:
            waits = self._state is _State.HEAD and bool(self._rest)
        if not waits or self._transport.get_extra_info("sslcontext") is not None:
            return False
        self._ended = True
        self.write(_CONTINUE)
        self._look(_FIRST_LOOK_S)
        return True

    def _look(self, next_s: float) -> None:
        """Hangs up if the client has left. No event says so where nothing is read any more."""
        if self._transport is None:
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):
            self._transport.abort()
        elif next_s <= _LAST_LOOK_S:
            asyncio.get_running_loop().call_later(next_s, self._look, 2 * next_s)

    def pause_writing(self) -> None:
        self._drain = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)
        self._drain = None
        if self._state is _State.HEAD:
            self._take_up()

    def require_client(self) -> None:
        if self._transport is None:
            raise ConnectionClosed

    async def drained(self) -> None:
        self.require_client()
        if self._drain is not None:
            await self._drain

    def write(self, data: bytes) -> None:
        """Sends; what a client that has left would have got is dropped."""
        if self._transport is not None:
            self._transport.write(data)

    def finish(self) -> None:
        """Closes when the request under way has been answered, at once if there is none."""
        self._closing = True
        request = self._request
        if request is not None and (not request.is_answered or request.is_streaming):
            request.keep_alive = False
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------------- receiving

    def get_buffer(self, size_hint: int) -> memoryview:
        return _scratch if self._body is None else self._body[self._received :]

    def buffer_updated(self, count: int) -> None:
        body = self._body
        if body is None:
            self._receive(bytes(_scratch[:count]))
            return
        self._received += count
        if self._received == self._expected:
            self._body = None
            self._handle(body.toreadonly(), b"")
            return
        self._progress()
        if self._received == len(body):
            larger = np.empty(min(self._expected, 2 * len(body)), np.uint8).data
            larger[: len(body)] = body
            self._body = larger

    def _receive(self, data: bytes) -> None:
        state = self._state
        if state is _State.HEAD:
            if self._rest or self._drain is not None:
                # That is taken up first, and nothing before the client has read its replies.
                self._hold(data)
            else:
                self._receive_head(self._head + data if self._head else data)
        elif state is _State.HANDLING:
            self._hold(data)
        elif state is _State.CHUNKS:
            self._receive_chunks(data)
        elif state is _State.DROPPING:
            self._drop(data)

    def _hold(self, data: bytes) -> None:
        """A pipelined request: it waits for its turn, and its sender for us once it has sent much."""
        self._rest += data
        if len(self._rest) > MAX_HEAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _receive_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end > MAX_HEAD or (end < 0 and len(data) > MAX_HEAD):
            self._refuse(431, f"the head of a request may not be larger than {MAX_HEAD} bytes")
        elif end < 0:
            self._head = data
            self._progress()
        else:
            self._head = b""
            self._begin(data, end + 4)

    def _begin(self, data: bytes, end: int) -> None:
        """The head of a request ends at `end` of `data`."""
        text = data[:end]
        heads = self._connections.heads
        head = heads.get(text)
        if head is None:
            try:
                head = Head(text)
            except httptools.HttpParserError as error:
                self._refuse(400, f"malformed HTTP request: {error}")
                return
            if end <= _KEPT_HEAD_SIZE:
                if len(heads) >= _KEPT_HEADS:
                    heads.clear()
                heads[text] = head
        keep_alive = head.keep_alive and not self._closing
        self._expected = expected = head.body_size
        # Who is refused is told whether the connection goes on.
        request = self._request = Exchange(self, head, keep_alive and expected <= _MAX_DROPPED)
        self._state = _State.ACCEPTING
        self._application.accept(request)
        received = data[end:]
        if request.is_answered:
            self._after_refusal(request, received)
            return
        request.keep_alive = keep_alive
        if expected > MAX_BODY:
            self._refuse(413, f"a body of {expected} bytes is more than the {MAX_BODY} that are accepted")
        elif head.is_chunked:
            self._chunks = Chunks()
            self._state = _State.CHUNKS
            self._invite(head, received)
            self._receive_chunks(received)
        elif len(received) == expected:
            self._handle(received, b"")
        elif len(received) > expected:
            self._handle(received[:expected], received[expected:])
        else:
            self._state = _State.BODY
            self._body = np.empty(min(expected, max(_AT_ONCE, len(received))), np.uint8).data
            self._body[: len(received)] = received
            self._received = len(received)
            self._invite(head, received)
            self._progress()

    def _invite(self, head: Head, received: bytes) -> None:
        if head.expects_invitation and not received:
            self.write(_CONTINUE)

    def _receive_chunks(self, data: bytes) -> None:
        chunks, request = self._chunks, self._request
        assert chunks is not None
        assert request is not None
        self._progress()
        try:
            chunks.feed(data)
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
            return
        if request.is_answered:
            chunks.parts.clear()
        if chunks.size > (_MAX_DROPPED if request.is_answered else MAX_BODY):
            self._refuse(413, f"a body of more than {MAX_BODY} bytes is not accepted")
        elif chunks.count > MAX_CHUNKS + chunks.size // _LARGE_CHUNK:
            self._refuse(400, f"a body of {chunks.size} bytes in more than {MAX_CHUNKS} chunks is not accepted")
        elif chunks.is_complete:
            self._chunks = None
            if request.is_answered:
                self.waiting_since = 0.0
                self._rest = chunks.rest
                self._next(request)
            else:
                self._handle(b"".join(chunks.parts), chunks.rest)

    def _handle(self, body: bytes | memoryview, rest: bytes) -> None:
        request = self._request
        assert request is not None, "this is a bug: a body without a request"
        self.waiting_since = 0.0
        self._rest = rest
        request.body = body
        self._state = _State.HANDLING
        self._application.handle(request)

    def answered(self, request: Exchange) -> None:
        """The reply to `request` is complete."""
        if self._state is _State.HANDLING and request is self._request:
            self._next(request)

    def _next(self, request: Exchange) -> None:
        self._request = None
        self._state = _State.HEAD
        if not request.keep_alive or self._closing:
            self._state = _State.CLOSED
            self._transport.close()
            return
        if self._drain is None:
            self._take_up()

    def _take_up(self) -> None:
        """Goes on with what the client has sent meanwhile."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._rest or self._ended:
            # In a turn of its own: the application that has just answered has not returned yet.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._state is _State.HEAD and self._drain is None:
            rest, self._rest = self._rest, b""
            if rest:
                self._receive(rest)
            if self._ended and not self._rest and self._state not in (_State.HANDLING, _State.CLOSED):
                self._state = _State.CLOSED
                self._transport.close()

    def _after_refusal(self, request: Exchange, received: bytes) -> None:
        """The request was answered before its body was read: a small body is dropped, for another one we hang up."""
        if self._expected > _MAX_DROPPED:
            self._next(request)
        elif request.head.is_chunked:
            self._chunks = Chunks()
            self._state = _State.CHUNKS
            self._receive_chunks(received)
        else:
            self._received = 0
            self._state = _State.DROPPING
            self._drop(received)

    def _drop(self, data: bytes) -> None:
        missing = self._expected - self._received
        self._received += len(data)
        if len(data) < missing:
            self._progress()
            return
        self.waiting_since = 0.0
        assert self._request is not None
        self._rest = data[missing:]
        self._next(self._request)

    def _refuse(self, status: int, text: str) -> None:
        """Answers what is no request and hangs up: where the next one begins is not known. One that has its answer gets
        no other one."""
        if self._request is None or not self._request.is_answered:
            body = error_document(text)
            head = _head(status, [("content-type", "application/json"), ("connection", "close")])
            self.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._state = _State.CLOSED
        self._request = None
        self.waiting_since = 0.0
        if self._transport is not None:
            self._transport.close()

    def _progress(self) -> None:
        self.waiting_since = asyncio.get_running_loop().time()
