"""One HTTP/2 connection of gRPC clients, on the event loop: bytes in, messages out; answers in, frames out.

A frame is read in the turn in which it arrives, and a call whose message is complete is handed on before that returns:
there is no thread to hand over to and no task per call. Large messages are received straight into their final place.
Knows of gRPC only that messages have a length before them and that answers end with trailers; knows nothing of methods.

    application.begin(stream)      the head of a call is there; it sets `stream.receiver`, or answers
    receiver.received(...)         a message of the call is complete
    receiver.ended()               the client sends no more
    receiver.left()                nobody waits for the answer any more: the client has left, or its time is over
    receiver.room()                what had to wait of an answer is out

The rules are those of RFC 9113; numbers in parentheses are its sections.
"""

import asyncio
from collections import deque
from struct import Struct
from time import monotonic
from typing import Any

import numpy as np

from naiad.frontends.connections import OpenConnections
from naiad.frontends.grpc import head as heads
from naiad.frontends.grpc.head import Head, HeaderDecoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_DATA = 0
_HEADERS = 1
_PRIORITY = 2
_RST_STREAM = 3
_SETTINGS = 4
_PUSH_PROMISE = 5
_PING = 6
_GOAWAY = 7
_WINDOW_UPDATE = 8
_CONTINUATION = 9

_END_STREAM = 0x1
_ACK = 0x1
_END_HEADERS = 0x4
_PADDED = 0x8
_WITH_PRIORITY = 0x20

NO_ERROR = 0
PROTOCOL_ERROR = 1
FLOW_CONTROL_ERROR = 3
STREAM_CLOSED = 5
FRAME_SIZE_ERROR = 6
REFUSED_STREAM = 7
CANCEL = 8
COMPRESSION_ERROR = 9
ENHANCE_YOUR_CALM = 11

_MAX_CONCURRENT_STREAMS = 3
_INITIAL_WINDOW_SIZE = 4
_MAX_FRAME_SIZE = 5
_MAX_HEADER_LIST_SIZE = 6

#: Length and kind of a frame in one number, flags, stream.
_FRAME = Struct(">IBI")
_FRAME_SIZE = 9
#: What an answer that is one message begins with: a frame of headers, and the beginning of one of data.
_ANSWER = Struct(f">IBI{len(heads.HEAD)}sIBIBI")
_PREFIX = Struct(">BI")
_PREFIX_SIZE = 5
_SETTING = Struct(">HI")
_NUMBER = Struct(">I")
_GOAWAY_START = Struct(">II")

_LARGEST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65535
#: What a client may send of a stream before we have taken it. Only who streams ever waits for that.
WINDOW = 16 << 20
#: The same for a whole connection, which is no limit: what keeps a client waiting are its streams.
_CONNECTION_WINDOW = 1 << 30
MAX_FRAME = 1 << 20
MAX_STREAMS = 1 << 16
#: gRPC's own limit of a message.
MAX_MESSAGE = 2**31 - 1
#: The block of a head, and its frames, may not be larger.
_MAX_BLOCK = 64 * 1024
#: What one read of the socket may bring; shared by all connections, since a read is used up before the next.
_scratch = memoryview(bytearray(256 * 1024))
#: What is left of a frame of data is received in place from this size on.
_IN_PLACE = 32 * 1024
#: Messages larger than this get their memory as they come.
_AT_ONCE = 64 << 20
#: As many bytes of answers may wait in a connection's transport.
_WRITE_LIMIT = 1 << 20
#: Answers from this size on are written piece by piece, not copied.
_COPIED = 32 * 1024
#: So long a client may still send after an error of its connection.
_LINGER_S = 0.5
#: So many bytes of messages may wait for one who streams to take them.
_HELD_BYTES = 1 << 20
#: Streams that we have ended before their client has, which may still send; so many of them.
_KEPT_LEFT = 4096

Message = bytes | memoryview


class Receiver:
    """What becomes of a call. Its methods may not raise."""

    def received(self, message: Message, is_compressed: bool) -> None:
        raise NotImplementedError

    def ended(self) -> None:
        raise NotImplementedError

    def left(self) -> None:
        raise NotImplementedError

    def room(self) -> None:
        """For who has to know."""


class Application:
    """Who serves the calls of all connections."""

    def begin(self, stream: "Stream") -> None:
        raise NotImplementedError


class Stream:
    """One call: its messages as they come, its answer as it goes."""

    __slots__ = (
        "_compressed",
        "_deadline",
        "_expected",
        "_filled",
        "_message",
        "_out",
        "_out_at",
        "_prefix",
        "_received",
        "_trailers",
        "connection",
        "head",
        "held",
        "id",
        "is_begun",
        "is_ended",
        "is_open",
        "is_taken_in_turn",
        "receive_window",
        "receiver",
        "send_window",
        "used",
        "waiting_bytes",
    )

    def __init__(self, connection: "Connection", id: int, head: Head, send_window: int) -> None:
        self.connection = connection
        self.id = id
        self.head = head
        self.receiver: Receiver | None = None
        #: Neither answered in full nor left.
        self.is_open = True
        #: The client sends no more.
        self.is_ended = False
        #: The head of the answer is out.
        self.is_begun = False
        #: Messages wait to be taken one after the other: as long as there are many, no more are asked for.
        self.is_taken_in_turn = False
        self.send_window = send_window
        #: What the client may still send; what we have used of it since it was told so; messages that wait to be taken.
        self.receive_window = WINDOW
        self.used = 0
        self.held = 0
        self._received = 0
        # The message under way: its prefix as far as it is there, then where it goes.
        self._prefix = b""
        self._compressed = False
        self._message: memoryview | None = None
        self._expected = 0
        self._filled = 0
        # What could not be sent at once: messages with their prefix, how much of the first one is out, and how it ends.
        self.waiting_bytes = 0
        self._out: deque[Message] = deque()
        self._out_at = 0
        self._trailers = b""
        self._deadline: asyncio.TimerHandle | None = None
        if head.timeout_s >= 0:
            self._deadline = asyncio.get_running_loop().call_later(head.timeout_s, self._expire)

    @property
    def encoding(self) -> str:
        """What the messages of the answer may be compressed with, "" for nothing."""
        return self.head.answer_encoding

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.head.path} {'open' if self.is_open else 'closed'}>"

    # ---------------------------------------------------------------- what comes

    def feed(self, data: bytes, at: int, end: int) -> None:
        """Takes the bytes from `at` to `end`."""
        self._received += end - at
        if not self._prefix and self._message is None and end - at >= _PREFIX_SIZE:
            # A message in one frame, as nearly all are.
            is_compressed, size = _PREFIX.unpack_from(data, at)
            if end - at == _PREFIX_SIZE + size and is_compressed <= 1:
                self._deliver(data[at + _PREFIX_SIZE : end], is_compressed == 1)
                return
        while at < end and self.is_open:
            if self._message is None:
                missing = _PREFIX_SIZE - len(self._prefix)
                self._prefix += data[at : min(end, at + missing)]
                at += missing
                if len(self._prefix) < _PREFIX_SIZE:
                    return
                self._begin_message()
            else:
                count = min(end - at, self._expected - self._filled)
                self.place(count)[:count] = data[at : at + count]
                at += count
                self.filled(count)

    def _begin_message(self) -> None:
        compressed, size = _PREFIX.unpack(self._prefix)
        self._prefix = b""
        if compressed > 1:
            self.fail(13, f"a message begins with {compressed}, which is neither 0 nor 1")
        elif size > MAX_MESSAGE:
            self.fail(8, f"Received message larger than max ({size} vs. {MAX_MESSAGE})")
        elif not size:
            self._deliver(b"", compressed == 1)
        else:
            self._compressed = compressed == 1
            self._expected = size
            self._filled = 0
            self._message = np.empty(min(size, _AT_ONCE), np.uint8).data

    def place(self, count: int) -> memoryview:
        """Where the next bytes of the message under way go: at least `count`."""
        message = self._message
        assert message is not None
        if self._filled + count > len(message):
            size = min(self._expected, max(2 * len(message), self._filled + count))
            larger = np.empty(size, np.uint8).data
            larger[: self._filled] = message[: self._filled]
            self._message = message = larger
        return message[self._filled :]

    def filled(self, count: int) -> None:
        """So many bytes have been put to that place."""
        self._filled += count
        message = self._message
        if self._filled == self._expected and message is not None:
            self._message = None
            self._deliver(message.toreadonly(), self._compressed)

    def missing(self) -> int:
        """How many bytes of the message under way are missing; 0 where there is none."""
        return 0 if self._message is None else self._expected - self._filled

    def count_in_place(self, count: int) -> None:
        self._received += count

    def _deliver(self, message: Message, is_compressed: bool) -> None:
        receiver = self.receiver
        if receiver is not None:
            if self.is_taken_in_turn:
                self.held += len(message)
            receiver.received(message, is_compressed)

    def end(self) -> None:
        """The client sends no more."""
        self.is_ended = True
        expected = self.head.content_length
        if self._prefix or self._message is not None:
            self.fail(13, "the call ends in the middle of a message")
        elif expected >= 0 and expected != self._received:
            self.connection.reset(self, PROTOCOL_ERROR)
        elif self.receiver is not None:
            self.receiver.ended()

    def release(self, message: Message) -> None:
        """One that is taken in turn has been taken."""
        self.held -= len(message)
        if self.is_open:
            self.connection.grant(self, 0)

    def _expire(self) -> None:
        receiver = self.receiver
        self.fail(4, "Deadline Exceeded")
        if receiver is not None:
            receiver.left()

    # ---------------------------------------------------------------- what goes

    def respond(self, data: bytes) -> None:
        """Answers with one message."""
        connection = self.connection
        if not self.is_open:
            return
        size = len(data) + _PREFIX_SIZE
        if self.encoding or not connection.has_room(self, size) or size > _COPIED:
            self.send(data)
            self.finish(heads.OK_TRAILERS)
            return
        id = self.id
        connection.send_window -= size
        begin = _ANSWER.pack(
            len(heads.HEAD) << 8 | _HEADERS, _END_HEADERS, id, heads.HEAD, size << 8 | _DATA, 0, id, 0, len(data)
        )
        connection.write_answer(b"".join((begin, data, _FRAME.pack(_OK_TRAILERS, _ENDING, id), heads.OK_TRAILERS)))
        connection.close(self)

    def send(self, data: bytes, is_compressed: bool = False) -> None:
        """Answers with a message, after which others or the end come."""
        if not self.is_open:
            return
        if not self.is_begun:
            self.is_begun = True
            block = heads.encoded_head(self.encoding) if self.encoding else heads.HEAD
            self.connection.write_answer(_frames(self.id, block, 0))
        prefix = _PREFIX.pack(1 if is_compressed else 0, len(data))
        self.waiting_bytes += _PREFIX_SIZE + len(data)
        if len(data) <= _COPIED:
            self._out.append(prefix + data)
        else:
            self._out.append(prefix)
            self._out.append(data)
        self.connection.pump(self)

    def fail(self, code: int, details: str) -> None:
        """Ends the answer with an error."""
        self.finish(heads.trailers(code, details))

    def finish(self, trailers: bytes) -> None:
        """Ends the answer, when what has been sent before is out."""
        if self.is_open and not self._trailers:
            self._trailers = trailers if self.is_begun else heads.HEAD + trailers
            self.connection.pump(self)

    def refuse(self, status: int) -> None:
        """Answers what is no call of gRPC."""
        self._trailers = heads.http_error(status)
        self.connection.pump(self)

    def drop_waiting(self) -> None:
        """What could not be sent of the answer shall not be: all but its end."""
        self._out.clear()
        self._out_at = 0
        self.waiting_bytes = 0

    def closed(self) -> None:
        """Nothing comes or goes any more."""
        self.is_open = False
        self.receiver = None
        self._message = None
        self.drop_waiting()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def take_frame(self, limit: int, parts: list[Message]) -> int:
        """Adds a frame of at most `limit` bytes of data to `parts`; how many bytes those are."""
        at = len(parts)
        parts.append(b"")
        size = 0
        while self._out and size < limit:
            message = self._out[0]
            left = len(message) - self._out_at
            count = min(left, limit - size)
            if count == len(message):
                parts.append(message)
            else:
                parts.append(memoryview(message)[self._out_at : self._out_at + count])
            size += count
            if count == left:
                self._out.popleft()
                self._out_at = 0
            else:
                self._out_at += count
        parts[at] = _FRAME.pack(size << 8 | _DATA, 0, self.id)
        self.waiting_bytes -= size
        return size

    def ending(self) -> bytes:
        """How the answer ends; "" if it does not yet."""
        return self._trailers


_ENDING = _END_HEADERS | _END_STREAM
_OK_TRAILERS = len(heads.OK_TRAILERS) << 8 | _HEADERS


class Limits:
    """What connections may do, and how long. Times in seconds; 0 pings are as many as they like."""

    __slots__ = (
        "age_grace_s",
        "age_s",
        "keepalive_always",
        "keepalive_s",
        "keepalive_timeout_s",
        "ping_interval_s",
        "ping_strikes",
        "pings_without_data",
    )

    def __init__(
        self,
        keepalive_s: float,
        keepalive_timeout_s: float,
        keepalive_always: bool,
        pings_without_data: int,
        ping_interval_s: float,
        ping_strikes: int,
        age_s: float | None,
        age_grace_s: float | None,
    ) -> None:
        self.keepalive_s = keepalive_s
        self.keepalive_timeout_s = keepalive_timeout_s
        self.keepalive_always = keepalive_always
        self.pings_without_data = pings_without_data
        self.ping_interval_s = ping_interval_s
        self.ping_strikes = ping_strikes
        self.age_s = age_s
        self.age_grace_s = age_grace_s

    def aged(self, factor: float) -> "Limits":
        """The same for connections that may get so much older."""
        return Limits(
            self.keepalive_s,
            self.keepalive_timeout_s,
            self.keepalive_always,
            self.pings_without_data,
            self.ping_interval_s,
            self.ping_strikes,
            None if self.age_s is None else self.age_s * factor,
            self.age_grace_s,
        )


#: Without calls, clients may ping as rarely as this, unless they may at any time.
_IDLE_PING_INTERVAL_S = 7200.0


class Connection:
    """One of the `connections` of a listener: an asyncio.BufferedProtocol for uvloop, which does not ask for the type."""

    def __init__(self, application: Application, connections: OpenConnections, limits: Limits) -> None:
        self._application = application
        self._connections = connections
        self._limits = limits
        self._transport: Any = None
        self._peer = ""
        self._decoder = HeaderDecoder()
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._is_greeted = False
        self._is_set = False
        #: What has come of a frame that is not complete.
        self._held = b""
        # The frame of data under way: what is missing of it and of its padding, whose it is, and whether it is the last.
        self._data_left = 0
        self._padding_left = 0
        self._data_stream: Stream | None = None
        self._data_ends = False
        #: Whether the next bytes of it are received in place.
        self._in_place = False
        #: What is to be passed over of a frame of a kind that is not known.
        self._skipped = 0
        # The head under way: its stream, 0 for none, its block, how much that and its frames are, and the flags.
        self._block_stream = 0
        self._block: list[bytes] = []
        self._block_size = 0
        self._block_ends = False
        self._receive_window = _CONNECTION_WINDOW
        self.send_window = _FIRST_WINDOW
        self._first_window = _FIRST_WINDOW
        self._max_frame = 16384
        #: Streams of whose answers something waits for a window or for the transport, in their order.
        self._waiting: dict[int, Stream] = {}
        #: Streams that we have ended before their client has.
        self._left: dict[int, None] = {}
        self._is_paused = False
        self._is_finishing = False
        self._is_over = False
        self._pinged_at = 0.0
        self._strikes = 0
        self._pings = 0
        self._is_awaiting_pong = False
        self._has_received = False
        self._keepalive: asyncio.TimerHandle | None = None
        self._age: asyncio.TimerHandle | None = None
        #: Loop time of the last progress of a frame that is not complete; 0 where none is owed.
        self.waiting_since = 0.0

    def __repr__(self) -> str:
        return f"<Connection of {self._peer or 'nobody'} with {len(self._streams)} streams>"

    # ---------------------------------------------------------------- the transport

    @property
    def peer(self) -> str:
        """As gRPC writes it: `ipv4:127.0.0.1:80`, `ipv6:[::1]:80` or `unix:`."""
        return self._peer

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_LIMIT)
        self._connections.open.add(self)
        name = transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            self._peer = "unix:"
        elif ":" in name[0]:
            self._peer = f"ipv6:[{name[0]}]:{name[1]}"
        else:
            self._peer = f"ipv4:{name[0]}:{name[1]}"
        loop = asyncio.get_running_loop()
        limits = self._limits
        self.waiting_since = loop.time()
        self._keepalive = loop.call_later(limits.keepalive_s, self._look_alive)
        if limits.age_s is not None:
            self._age = loop.call_later(limits.age_s, self._grow_old)
        settings = (
            (_MAX_CONCURRENT_STREAMS, MAX_STREAMS),
            (_INITIAL_WINDOW_SIZE, WINDOW),
            (_MAX_FRAME_SIZE, MAX_FRAME),
            (_MAX_HEADER_LIST_SIZE, heads.MAX_HEADER_LIST),
        )
        body = b"".join([_SETTING.pack(key, value) for key, value in settings])
        grant = _NUMBER.pack(_CONNECTION_WINDOW - _FIRST_WINDOW)
        self._write(_frame(_SETTINGS, 0, 0, body) + _frame(_WINDOW_UPDATE, 0, 0, grant))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_over = True
        self._forget_all()
        for timer in (self._keepalive, self._age):
            if timer is not None:
                timer.cancel()
        self._connections.lost(self)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        # Who does not read is not read from either: what it sends would only make more that it does not read.
        self._is_paused = True
        if not self._is_over:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if not self._is_over:
            self._transport.resume_reading()
            self._pump_all()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def write_answer(self, data: bytes) -> None:
        # Whoever is sent something may ping again.
        self._pinged_at = 0.0
        self._strikes = 0
        self._pings = 0
        if self._transport is not None:
            self._transport.write(data)

    # ---------------------------------------------------------------- the end

    def finish(self) -> None:
        """Closes when the calls under way have been answered, at once if there are none."""
        self._is_finishing = True
        if not self._streams:
            self._close(NO_ERROR, b"")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _close(self, code: int, why: bytes) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._write(_frame(_GOAWAY, 0, 0, _GOAWAY_START.pack(self._last_id, code) + why))
        self._forget_all()
        if code == NO_ERROR or self._is_paused:
            self._hang_up()
        else:
            # With something of its unread, the client might be told of a broken connection instead.
            asyncio.get_running_loop().call_later(_LINGER_S, self._hang_up)

    def _hang_up(self) -> None:
        self.waiting_since = asyncio.get_running_loop().time()
        if self._transport is not None:
            self._transport.close()

    def _forget_all(self) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        self._waiting.clear()
        self._data_stream = None
        self._in_place = False
        for stream in streams:
            receiver = stream.receiver
            stream.closed()
            if receiver is not None:
                receiver.left()

    def _fail(self, code: int, why: bytes) -> None:
        """An error of the connection: where the next frame begins, or what it means, is not known (5.4.1)."""
        self._close(code, why)

    def _grow_old(self) -> None:
        grace_s = self._limits.age_grace_s
        # The client is told to take another connection, and may go on with what it has begun.
        self._write(_frame(_GOAWAY, 0, 0, _GOAWAY_START.pack(_LARGEST_WINDOW, NO_ERROR) + b"max_age"))
        if grace_s is not None:
            self._age = asyncio.get_running_loop().call_later(grace_s, self._close, NO_ERROR, b"max_age")
        self.finish()

    def _look_alive(self) -> None:
        """Pings a client of which nothing has come for long, and hangs up if it does not answer."""
        limits = self._limits
        if self._is_over:
            return
        delay_s = limits.keepalive_s
        if self._is_awaiting_pong and not self._has_received:
            self._close(NO_ERROR, b"keepalive_timeout")
            return
        self._is_awaiting_pong = False
        is_wanted = (self._streams or limits.keepalive_always) and not self._has_received
        if is_wanted and (not limits.pings_without_data or self._pings < limits.pings_without_data):
            self._pings += 1
            self._is_awaiting_pong = True
            self._write(_frame(_PING, 0, 0, bytes(8)))
            delay_s = limits.keepalive_timeout_s
        self._has_received = False
        self._keepalive = asyncio.get_running_loop().call_later(delay_s, self._look_alive)

    # ---------------------------------------------------------------- receiving

    def get_buffer(self, size_hint: int) -> memoryview:
        if self._in_place:
            stream = self._data_stream
            if stream is not None and stream.is_open:
                count = min(self._data_left, stream.missing())
                return stream.place(count)[:count]
            self._in_place = False
        return _scratch

    def buffer_updated(self, count: int) -> None:
        self._has_received = True
        stream = self._data_stream
        if self._in_place and stream is not None:
            self._data_left -= count
            stream.count_in_place(count)
            stream.filled(count)
            self.grant(stream, count)
            self._set_in_place()
            if not self._data_left and not self._padding_left:
                self._end_data()
            return
        if self._is_over:
            return
        data = bytes(_scratch[:count])
        if self._held:
            data = self._held + data
            self._held = b""
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        at = 0
        end = len(data)
        if not self._is_greeted:
            if not data.startswith(PREFACE[:end]):
                self._fail(PROTOCOL_ERROR, b"this is a gRPC server, which speaks HTTP/2 only")
                return
            if end < len(PREFACE):
                self._held = data
                return
            at = len(PREFACE)
            self._is_greeted = True
        while not self._is_over:
            if self._data_left or self._padding_left:
                at = self._receive_data(data, at, end)
                if self._data_left or self._padding_left:
                    break
            if self._skipped:
                count = min(self._skipped, end - at)
                self._skipped -= count
                at += count
            if end - at < _FRAME_SIZE:
                break
            kind, flags, id = _FRAME.unpack_from(data, at)
            size = kind >> 8
            kind &= 0xFF
            id &= _LARGEST_WINDOW
            if size > MAX_FRAME:
                self._fail(FRAME_SIZE_ERROR, b"a frame is larger than the settings allow")
            elif self._block_stream and (kind != _CONTINUATION or id != self._block_stream):
                self._fail(PROTOCOL_ERROR, b"a head is not continued")
            elif not self._is_set and kind != _SETTINGS:
                self._fail(PROTOCOL_ERROR, b"the settings are to come first")
            elif kind == _DATA:
                if flags & _PADDED and end - at == _FRAME_SIZE and size:
                    break
                at = self._begin_data(data, at + _FRAME_SIZE, size, flags, id)
                continue
            elif kind > _CONTINUATION:
                self._skipped = size
                at += _FRAME_SIZE
                continue
            elif size > _MAX_BLOCK:
                code = ENHANCE_YOUR_CALM if kind in (_HEADERS, _CONTINUATION) else FRAME_SIZE_ERROR
                self._fail(code, b"a frame is too large")
            elif end - at < _FRAME_SIZE + size:
                break
            else:
                at += _FRAME_SIZE
                self._take_frame(kind, flags, id, data[at : at + size])
                at += size
                continue
            return
        if self._is_over:
            return
        self._held = data[at:] if at < end else b""
        self.waiting_since = asyncio.get_running_loop().time() if self._held or self._block_stream else 0.0

    # ---------------------------------------------------------------- data

    def _begin_data(self, data: bytes, at: int, size: int, flags: int, id: int) -> int:
        """The frame's contents begin at `at`; where what follows its first byte, if that says how long its padding is, does."""
        padding = 0
        if flags & _PADDED:
            if not size or data[at] >= size:
                self._fail(PROTOCOL_ERROR if size else FRAME_SIZE_ERROR, b"a frame has more padding than bytes")
                return at
            padding = data[at]
            at += 1
        stream = self._streams.get(id)
        self._receive_window -= size
        if self._receive_window < 0:
            self._fail(FLOW_CONTROL_ERROR, b"more data than the window of the connection allows")
            return at
        if self._receive_window < _CONNECTION_WINDOW // 2:
            self._write(_frame(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(_CONNECTION_WINDOW - self._receive_window)))
            self._receive_window = _CONNECTION_WINDOW
        if stream is None:
            if not id or id > self._last_id or not id & 1:
                self._fail(PROTOCOL_ERROR, b"data of a stream that has not begun")
                return at
            if id not in self._left:
                self._write(_frame(_RST_STREAM, 0, id, _NUMBER.pack(STREAM_CLOSED)))
        elif stream.is_ended:
            self.reset(stream, STREAM_CLOSED)
            stream = None
        else:
            stream.receive_window -= size
            if stream.receive_window < 0:
                self.reset(stream, FLOW_CONTROL_ERROR)
                stream = None
            elif padding:
                self.grant(stream, padding + 1)
        self._padding_left = padding
        self._data_left = size - padding - (1 if flags & _PADDED else 0)
        self._data_stream = stream
        self._data_ends = flags & _END_STREAM != 0
        if not self._data_left and not self._padding_left:
            self._end_data()
        return at

    def _receive_data(self, data: bytes, at: int, end: int) -> int:
        """Takes what is there of the frame of data under way; where it ends, or the bytes do."""
        count = min(self._data_left, end - at)
        stream = self._data_stream
        if count:
            self._data_left -= count
            if stream is not None and stream.is_open:
                stream.feed(data, at, at + count)
                self.grant(stream, count)
            at += count
        if not self._data_left:
            count = min(self._padding_left, end - at)
            self._padding_left -= count
            at += count
            if not self._padding_left:
                self._end_data()
                return at
        self._set_in_place()
        return at

    def _set_in_place(self) -> None:
        stream = self._data_stream
        self._in_place = stream is not None and stream.is_open and min(self._data_left, stream.missing()) >= _IN_PLACE

    def _end_data(self) -> None:
        stream = self._data_stream
        self._data_stream = None
        self._in_place = False
        if self._data_ends and stream is not None and stream.is_open:
            stream.end()

    def grant(self, stream: Stream, count: int) -> None:
        """So many bytes have been used: the client may send as many more, and is told so when half of the window is used,
        unless messages wait to be taken."""
        stream.used += count
        if stream.receive_window < WINDOW // 2 and stream.held <= _HELD_BYTES and stream.used and stream.is_open:
            self._write(_frame(_WINDOW_UPDATE, 0, stream.id, _NUMBER.pack(stream.used)))
            stream.receive_window += stream.used
            stream.used = 0

    # ---------------------------------------------------------------- other frames

    def _take_frame(self, kind: int, flags: int, id: int, content: bytes) -> None:
        if kind == _HEADERS:
            self._begin_head(flags, id, content)
        elif kind == _WINDOW_UPDATE:
            self._widen(id, content)
        elif kind == _SETTINGS:
            self._set(flags, id, content)
        elif kind == _PING:
            self._pong(flags, id, content)
        elif kind == _RST_STREAM:
            self._be_reset(id, content)
        elif kind == _CONTINUATION:
            if not self._block_stream:
                self._fail(PROTOCOL_ERROR, b"a continuation of nothing")
            else:
                self._continue_head(flags, content)
        elif kind == _GOAWAY:
            if id:
                self._fail(PROTOCOL_ERROR, b"GOAWAY is about the connection")
            else:
                self.finish()
        elif kind == _PUSH_PROMISE:
            self._fail(PROTOCOL_ERROR, b"clients do not push")
        elif not id:
            self._fail(PROTOCOL_ERROR, b"a priority is about a stream")
        elif len(content) != 5:
            self._fail(FRAME_SIZE_ERROR, b"a priority has five bytes")
        elif _NUMBER.unpack_from(content)[0] & _LARGEST_WINDOW == id:
            self._fail(PROTOCOL_ERROR, b"a stream that depends on itself")

    def _begin_head(self, flags: int, id: int, content: bytes) -> None:
        start = 0
        padding = 0
        if flags & _PADDED:
            if not content:
                self._fail(FRAME_SIZE_ERROR, b"a head without its padding")
                return
            padding = content[0]
            start = 1
        if flags & _WITH_PRIORITY:
            start += 5
        if start + padding > len(content):
            self._fail(PROTOCOL_ERROR, b"a frame has more padding than bytes")
            return
        if not id & 1:
            self._fail(PROTOCOL_ERROR, b"streams of clients have odd numbers")
            return
        if id <= self._last_id and id not in self._streams and id not in self._left:
            self._fail(STREAM_CLOSED, b"a head of a stream that is over, or was passed over")
            return
        depends_on_itself = (
            flags & _WITH_PRIORITY and _NUMBER.unpack_from(content, start - 5)[0] & _LARGEST_WINDOW == id
        )
        if depends_on_itself:
            self._fail(PROTOCOL_ERROR, b"a stream that depends on itself")
            return
        self._block_stream = id
        self._block_size = 0
        self._block_ends = flags & _END_STREAM != 0
        self._continue_head(flags, content[start : len(content) - padding])

    def _continue_head(self, flags: int, content: bytes) -> None:
        self._block.append(content)
        self._block_size += len(content) + _FRAME_SIZE
        if self._block_size > _MAX_BLOCK:
            self._fail(ENHANCE_YOUR_CALM, b"a head is too large")
        elif flags & _END_HEADERS:
            block = self._block[0] if len(self._block) == 1 else b"".join(self._block)
            self._block.clear()
            id, self._block_stream = self._block_stream, 0
            try:
                head = self._decoder.decode(block)
            except Exception as error:
                self._fail(COMPRESSION_ERROR, str(error).encode()[:200])
            else:
                self._begin(id, head)

    def _begin(self, id: int, head: Head) -> None:
        stream = self._streams.get(id)
        if stream is not None:
            # Trailers, which nothing is expected of but the end (8.1).
            if stream.is_ended:
                self.reset(stream, STREAM_CLOSED)
            elif not self._block_ends:
                self.reset(stream, PROTOCOL_ERROR)
            else:
                stream.end()
            return
        if id <= self._last_id:
            return  # trailers of a stream that we have ended
        self._last_id = id
        if head.malformed:
            self._reset_id(id, PROTOCOL_ERROR)
        elif len(self._streams) >= MAX_STREAMS:
            self._reset_id(id, REFUSED_STREAM)
        else:
            stream = self._streams[id] = Stream(self, id, head, self._first_window)
            self._application.begin(stream)
            if self._block_ends and stream.is_open:
                stream.end()

    def _be_reset(self, id: int, content: bytes) -> None:
        if len(content) != 4:
            self._fail(FRAME_SIZE_ERROR, b"RST_STREAM has four bytes")
        elif not id or id > self._last_id:
            self._fail(PROTOCOL_ERROR, b"the end of a stream that has not begun")
        elif (stream := self._streams.get(id)) is not None:
            receiver = stream.receiver
            stream.is_ended = True
            self.close(stream)
            if receiver is not None:
                receiver.left()

    def _set(self, flags: int, id: int, content: bytes) -> None:
        if id:
            self._fail(PROTOCOL_ERROR, b"settings are about the connection")
            return
        if flags & _ACK:
            if content:
                self._fail(FRAME_SIZE_ERROR, b"an acknowledgement says nothing")
            elif not self._is_set:
                self._fail(PROTOCOL_ERROR, b"the settings are to come first")
            return
        if len(content) % 6:
            self._fail(FRAME_SIZE_ERROR, b"a setting has six bytes")
            return
        self._is_set = True
        for key, value in _SETTING.iter_unpack(content):
            if key == _INITIAL_WINDOW_SIZE:
                if value > _LARGEST_WINDOW:
                    self._fail(FLOW_CONTROL_ERROR, b"a window is too large")
                    return
                change = value - self._first_window
                self._first_window = value
                for stream in self._streams.values():
                    stream.send_window += change
                    if stream.send_window > _LARGEST_WINDOW:
                        self._fail(FLOW_CONTROL_ERROR, b"a window is too large")
                        return
            elif key == _MAX_FRAME_SIZE:
                if not 16384 <= value < 1 << 24:
                    self._fail(PROTOCOL_ERROR, b"frames cannot be so large, or so small")
                    return
                self._max_frame = value
            elif key == 2 and value > 1:
                self._fail(PROTOCOL_ERROR, b"ENABLE_PUSH is 0 or 1")
                return
        self._write(_frame(_SETTINGS, _ACK, 0, b""))
        self._pump_all()

    def _pong(self, flags: int, id: int, content: bytes) -> None:
        if id or len(content) != 8:
            self._fail(PROTOCOL_ERROR if id else FRAME_SIZE_ERROR, b"a ping has eight bytes and no stream")
            return
        if flags & _ACK:
            self._is_awaiting_pong = False
            return
        limits = self._limits
        now = monotonic()
        interval_s = limits.ping_interval_s
        if not self._streams and not limits.keepalive_always:
            interval_s = max(interval_s, _IDLE_PING_INTERVAL_S)
        if self._pinged_at and now - self._pinged_at < interval_s:
            self._strikes += 1
            if limits.ping_strikes and self._strikes > limits.ping_strikes:
                self._fail(ENHANCE_YOUR_CALM, b"too_many_pings")
                return
        self._pinged_at = now
        self._write(_frame(_PING, _ACK, 0, content))

    def _widen(self, id: int, content: bytes) -> None:
        if len(content) != 4:
            self._fail(FRAME_SIZE_ERROR, b"WINDOW_UPDATE has four bytes")
            return
        count = _NUMBER.unpack(content)[0] & _LARGEST_WINDOW
        if not id:
            self.send_window += count
            if not count:
                self._fail(PROTOCOL_ERROR, b"a window grows by nothing")
            elif self.send_window > _LARGEST_WINDOW:
                self._fail(FLOW_CONTROL_ERROR, b"a window is too large")
            else:
                self._pump_all()
            return
        stream = self._streams.get(id)
        if stream is None:
            if id > self._last_id or not id & 1:
                self._fail(PROTOCOL_ERROR, b"a window of a stream that has not begun")
            return
        stream.send_window += count
        if not count:
            self.reset(stream, PROTOCOL_ERROR)
        elif stream.send_window > _LARGEST_WINDOW:
            self.reset(stream, FLOW_CONTROL_ERROR)
        elif stream.waiting_bytes:
            self.pump(stream)

    # ---------------------------------------------------------------- sending

    def has_room(self, stream: Stream, size: int) -> bool:
        """Whether so many bytes can be sent in one frame, at once."""
        return (
            size <= self._max_frame and size <= self.send_window and size <= stream.send_window and not self._is_paused
        )

    def pump(self, stream: Stream) -> None:
        """Sends what can be sent of an answer."""
        parts: list[Message] = []
        size = 0
        while stream.waiting_bytes and not self._is_paused and size < _WRITE_LIMIT:
            limit = min(self._max_frame, self.send_window, stream.send_window)
            if limit <= 0:
                break
            count = stream.take_frame(limit, parts)
            self.send_window -= count
            stream.send_window -= count
            size += count
        if parts:
            self.write_answer(b"".join(parts)) if size <= _COPIED else self._write_parts(parts)
        if stream.waiting_bytes:
            self._waiting[stream.id] = stream
            if size >= _WRITE_LIMIT and not self._is_paused:
                # All of it is out already: who waits for the same comes before it goes on.
                asyncio.get_running_loop().call_soon(self._pump_all)
            return
        if trailers := stream.ending():
            self.write_answer(_frames(stream.id, trailers, _END_STREAM))
            self.close(stream)
        elif stream.id in self._waiting:
            del self._waiting[stream.id]
            if stream.receiver is not None:
                stream.receiver.room()

    def _write_parts(self, parts: list[Message]) -> None:
        if self._transport is not None:
            self.write_answer(b"")
            self._transport.writelines(parts)

    def _pump_all(self) -> None:
        if self._waiting and not self._is_paused:
            for stream in list(self._waiting.values()):
                if stream.is_open:
                    # To the end of those that wait.
                    del self._waiting[stream.id]
                    self._waiting[stream.id] = stream
                    self.pump(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """An error of a stream: nothing more of it comes or goes (5.4.2)."""
        receiver = stream.receiver
        self._reset_id(stream.id, code)
        stream.is_ended = True
        self.close(stream)
        if receiver is not None:
            receiver.left()

    def _reset_id(self, id: int, code: int) -> None:
        self._write(_frame(_RST_STREAM, 0, id, _NUMBER.pack(code)))
        self._leave(id)

    def _leave(self, id: int) -> None:
        """What its client still sends of it is passed over."""
        self._left[id] = None
        if len(self._left) > _KEPT_LEFT:
            del self._left[next(iter(self._left))]

    def close(self, stream: Stream) -> None:
        """The answer is out, or nobody waits for it."""
        if not stream.is_ended:
            # The client need not send the rest (8.1).
            self._reset_id(stream.id, NO_ERROR)
        self._streams.pop(stream.id, None)
        self._waiting.pop(stream.id, None)
        stream.closed()
        if self._is_finishing and not self._streams:
            self._close(NO_ERROR, b"")


def _frame(kind: int, flags: int, id: int, content: bytes) -> bytes:
    return _FRAME.pack(len(content) << 8 | kind, flags, id) + content


def _frames(id: int, block: bytes, flags: int) -> bytes:
    """A head, or trailers, in as many frames as any client takes."""
    if len(block) <= 16384:
        return _frame(_HEADERS, flags | _END_HEADERS, id, block)
    parts = [_frame(_HEADERS, flags, id, block[:16384])]
    for at in range(16384, len(block), 16384):
        is_last = at + 16384 >= len(block)
        parts.append(_frame(_CONTINUATION, _END_HEADERS if is_last else 0, id, block[at : at + 16384]))
    return b"".join(parts)
