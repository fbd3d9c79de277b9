"""One HTTP/2 connection of gRPC clients, on the event loop: frames in, streams' messages out, and back.

A frame is read in the turn in which it arrives, and a call whose message is complete is handed on before that returns:
there is no thread to hand over to and no task per call. Numbers in parentheses are sections of RFC 9113.
"""

import asyncio
from time import monotonic
from typing import Any, Final

from naiad.frontends.connections import OpenConnections
from naiad.frontends.grpc.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FIRST_WINDOW,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE,
    FRAME_SIZE_ERROR,
    GOAWAY,
    GOAWAY_START,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_MAX_FRAME,
    LARGEST_WINDOW,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    NO_ERROR,
    NUMBER,
    PADDED,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTING,
    SETTINGS,
    SMALLEST_MAX_FRAME,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    frame,
    head_frames,
)
from naiad.frontends.grpc.head import MAX_HEADER_LIST, Head, HeaderDecoder
from naiad.frontends.grpc.stream import COPIED, WINDOW, Application, Message, Stream

#: What a client may send before we have used it is no limit: what keeps a client waiting are its streams.
_CONNECTION_WINDOW: Final = 1 << 30
_MAX_FRAME: Final = 1 << 20
_MAX_STREAMS: Final = 1 << 16
#: The block of a head, and its frames, may not be larger.
_MAX_BLOCK: Final = 64 * 1024
#: What one read of the socket may bring; shared by all connections, since a read is used up before the next.
_scratch: Final = memoryview(bytearray(256 * 1024))
#: What is left of a frame of data is received in place from this size on.
_IN_PLACE: Final = 32 * 1024
#: As many bytes of answers may wait in a connection's transport.
_WRITE_LIMIT: Final = 1 << 20
#: So long a client may still send after an error of its connection.
_LINGER_S: Final = 0.5
#: So many bytes of messages may wait for one who streams to take them.
_HELD_BYTES: Final = 1 << 20
#: Streams that we have ended before their client has, which may still send; so many of them.
_KEPT_LEFT: Final = 4096
#: Without calls, clients may ping as rarely as this, unless they may at any time.
_IDLE_PING_INTERVAL_S: Final = 7200.0


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


class Connection:
    """One of the `connections` of a listener: an asyncio.BufferedProtocol for uvloop, which asks for no type."""

    def __init__(self, application: Application, connections: OpenConnections, limits: Limits) -> None:
        self._application = application
        self._connections = connections
        self._limits = limits
        self._transport: Any = None
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        #: What is sent at the end of this turn, and how much that is.
        self._outgoing: list[Message] = []
        self._outgoing_size = 0
        self._peer = ""
        self._decoder = HeaderDecoder()
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._is_greeted = False
        self._is_set = False
        #: What has come of a frame that is not complete.
        self._held = b""
        # The frame of data under way: what is missing of it and of its padding, whose it is, and whether it is the last
        # one.
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
        self.send_window = FIRST_WINDOW
        self._first_window = FIRST_WINDOW
        #: No stream has been granted more, some may have been.
        self._most_granted = 0
        self._max_frame: int = SMALLEST_MAX_FRAME
        #: Streams of whose answers something waits for a window or for the transport, in their order.
        self._waiting: dict[int, Stream] = {}
        #: Streams that we have ended before their client has.
        self._left: dict[int, None] = {}
        self._is_pumping = False
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
        loop = self._loop
        limits = self._limits
        self.waiting_since = loop.time()
        self._keepalive = loop.call_later(limits.keepalive_s, self._look_alive)
        if limits.age_s is not None:
            self._age = loop.call_later(limits.age_s, self._grow_old)
        settings = (
            (MAX_CONCURRENT_STREAMS, _MAX_STREAMS),
            (INITIAL_WINDOW_SIZE, WINDOW),
            (MAX_FRAME_SIZE, _MAX_FRAME),
            (MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST),
        )
        body = b"".join([SETTING.pack(key, value) for key, value in settings])
        grant = NUMBER.pack(_CONNECTION_WINDOW - FIRST_WINDOW)
        self._write(frame(SETTINGS, 0, 0, body) + frame(WINDOW_UPDATE, 0, 0, grant))

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
        """Sends it with all else of this turn."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        self._outgoing_size += len(data)

    def write_answer(self, data: bytes) -> None:
        self._note_answer()
        self._write(data)

    def _note_answer(self) -> None:
        # Whoever is sent something may ping again.
        self._pinged_at = 0.0
        self._strikes = 0
        self._pings = 0

    def _flush(self) -> None:
        outgoing = self._outgoing
        size = self._outgoing_size
        if not outgoing:
            return
        self._outgoing = []
        self._outgoing_size = 0
        if self._transport is None:
            return
        if len(outgoing) == 1:
            self._transport.write(outgoing[0])
        elif size <= COPIED:
            self._transport.write(b"".join(outgoing))
        else:
            self._transport.writelines(outgoing)

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
        self._write(frame(GOAWAY, 0, 0, GOAWAY_START.pack(self._last_id, code) + why))
        self._forget_all()
        if code == NO_ERROR or self._is_paused:
            self._hang_up()
        else:
            # With something of its unread, the client might be told of a broken connection instead.
            self._loop.call_later(_LINGER_S, self._hang_up)

    def _hang_up(self) -> None:
        self.waiting_since = self._loop.time()
        self._flush()
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
        self._write(frame(GOAWAY, 0, 0, GOAWAY_START.pack(LARGEST_WINDOW, NO_ERROR) + b"max_age"))
        if grace_s is not None:
            self._age = self._loop.call_later(grace_s, self._close, NO_ERROR, b"max_age")
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
            self._write(frame(PING, 0, 0, bytes(8)))
            delay_s = limits.keepalive_timeout_s
        self._has_received = False
        self._keepalive = self._loop.call_later(delay_s, self._look_alive)

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
            self._note_end(stream)
            stream.filled(count)
            self.grant(stream, count)
            self._set_in_place()
            if not self._data_left and not self._padding_left:
                self._end_data()
            self._note_progress()
            return
        if self._is_over:
            return
        # Much is not copied, as it goes on to its place in this turn.
        data: Message = bytes(_scratch[:count]) if count < _IN_PLACE else _scratch[:count]
        if self._held:
            data = self._held + data
            self._held = b""
        self._receive(data)

    def _receive(self, data: Message) -> None:
        at = 0
        end = len(data)
        if not self._is_greeted:
            if data[: len(PREFACE)] != PREFACE[:end]:
                self._fail(PROTOCOL_ERROR, b"this is a gRPC server, which speaks HTTP/2 only")
                return
            if end < len(PREFACE):
                self._held = bytes(data)
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
            if end - at < FRAME_SIZE:
                break
            kind, flags, id = FRAME.unpack_from(data, at)
            size = kind >> 8
            kind &= 0xFF
            id &= LARGEST_WINDOW
            if size > _MAX_FRAME:
                self._fail(FRAME_SIZE_ERROR, b"a frame is larger than the settings allow")
            elif self._block_stream and (kind != CONTINUATION or id != self._block_stream):
                self._fail(PROTOCOL_ERROR, b"a head is not continued")
            elif not self._is_set and kind != SETTINGS:
                self._fail(PROTOCOL_ERROR, b"the settings are to come first")
            elif kind == DATA:
                if flags & PADDED and end - at == FRAME_SIZE and size:
                    break
                at = self._begin_data(data, at + FRAME_SIZE, end, size, flags, id)
                continue
            elif kind > CONTINUATION:
                self._skipped = size
                at += FRAME_SIZE
                continue
            elif size > _MAX_BLOCK:
                code = ENHANCE_YOUR_CALM if kind in (HEADERS, CONTINUATION) else FRAME_SIZE_ERROR
                self._fail(code, b"a frame is too large")
            elif end - at < FRAME_SIZE + size:
                break
            else:
                at += FRAME_SIZE
                self._take_frame(kind, flags, id, bytes(data[at : at + size]))
                at += size
                continue
            return
        if self._is_over:
            return
        self._held = bytes(data[at:]) if at < end else b""
        self._note_progress()

    def _note_progress(self) -> None:
        is_owed = self._held or self._block_stream or self._data_left or self._padding_left or self._skipped
        self.waiting_since = self._loop.time() if is_owed else 0.0

    # ---------------------------------------------------------------- data

    def _begin_data(self, data: Message, at: int, end: int, size: int, flags: int, id: int) -> int:
        """The frame's contents begin at `at`. It is taken at once if all of it is there; what is returned is where to go on."""
        padding = 0
        if flags & PADDED:
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
            self._write(frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(_CONNECTION_WINDOW - self._receive_window)))
            self._receive_window = _CONNECTION_WINDOW
        if stream is None:
            if not id or id > self._last_id or not id & 1:
                self._fail(PROTOCOL_ERROR, b"data of a stream that has not begun")
                return at
            if id not in self._left:
                self._write(frame(RST_STREAM, 0, id, NUMBER.pack(STREAM_CLOSED)))
        elif stream.is_ended:
            self.reset(stream, STREAM_CLOSED)
            stream = None
        else:
            stream.receive_window -= size
            stream.received += size - padding - (1 if flags & PADDED else 0)
            if stream.receive_window < 0:
                self.reset(stream, FLOW_CONTROL_ERROR)
                stream = None
            elif not flags & PADDED and end - at >= size:
                self._take_data(stream, data, at, size, flags & END_STREAM != 0)
                return at + size
            elif padding:
                self.grant(stream, padding + 1)
        self._padding_left = padding
        self._data_left = size - padding - (1 if flags & PADDED else 0)
        self._data_stream = stream
        self._data_ends = flags & END_STREAM != 0
        if not self._data_left and not self._padding_left:
            self._end_data()
        return at

    def _take_data(self, stream: Stream, data: Message, at: int, size: int, ends: bool) -> None:
        """A frame as nearly all are: without padding, and all of it is there."""
        # An answer in this turn shall find that these were the last bytes.
        stream.is_ended = ends
        stream.feed(data, at, at + size)
        if not stream.is_open:
            return
        if ends:
            stream.end()
        else:
            self.grant(stream, size)

    def _receive_data(self, data: Message, at: int, end: int) -> int:
        """Takes what is there of the frame of data under way; where it ends, or the bytes do."""
        count = min(self._data_left, end - at)
        stream = self._data_stream
        if count:
            self._data_left -= count
            if stream is not None and stream.is_open:
                self._note_end(stream)
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

    def _note_end(self, stream: Stream) -> None:
        """An answer to the last bytes, in this turn, shall find that they are."""
        if self._data_ends and not self._data_left:
            stream.is_ended = True

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
        """So many bytes have been used: the client may send as many more. It is told so when half of the window is used,
        unless messages wait to be taken."""
        stream.used += count
        if stream.receive_window < WINDOW // 2 and stream.held <= _HELD_BYTES and stream.used and stream.is_open:
            self._write(frame(WINDOW_UPDATE, 0, stream.id, NUMBER.pack(stream.used)))
            stream.receive_window += stream.used
            stream.used = 0

    # ---------------------------------------------------------------- other frames

    def _take_frame(self, kind: int, flags: int, id: int, content: bytes) -> None:
        if kind == HEADERS:
            self._begin_head(flags, id, content)
        elif kind == WINDOW_UPDATE:
            self._widen(id, content)
        elif kind == SETTINGS:
            self._set(flags, id, content)
        elif kind == PING:
            self._pong(flags, id, content)
        elif kind == RST_STREAM:
            self._be_reset(id, content)
        elif kind == CONTINUATION:
            if not self._block_stream:
                self._fail(PROTOCOL_ERROR, b"a continuation of nothing")
            else:
                self._continue_head(flags, content)
        elif kind == GOAWAY:
            if id:
                self._fail(PROTOCOL_ERROR, b"GOAWAY is about the connection")
            elif len(content) < 8:
                self._fail(FRAME_SIZE_ERROR, b"GOAWAY has eight bytes and more")
            else:
                self.finish()
        elif kind == PUSH_PROMISE:
            self._fail(PROTOCOL_ERROR, b"clients do not push")
        elif not id:
            self._fail(PROTOCOL_ERROR, b"a priority is about a stream")
        elif len(content) != 5:
            self._fail(FRAME_SIZE_ERROR, b"a priority has five bytes")
        elif NUMBER.unpack_from(content)[0] & LARGEST_WINDOW == id:
            self._fail(PROTOCOL_ERROR, b"a stream that depends on itself")

    def _begin_head(self, flags: int, id: int, content: bytes) -> None:
        start = 0
        padding = 0
        if flags & PADDED:
            if not content:
                self._fail(FRAME_SIZE_ERROR, b"a head without its padding")
                return
            padding = content[0]
            start = 1
        if flags & WITH_PRIORITY:
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
        depends_on_itself = flags & WITH_PRIORITY and NUMBER.unpack_from(content, start - 5)[0] & LARGEST_WINDOW == id
        if depends_on_itself:
            self._fail(PROTOCOL_ERROR, b"a stream that depends on itself")
            return
        self._block_ends = flags & END_STREAM != 0
        block = content[start : len(content) - padding]
        if flags & END_HEADERS:
            self._decode_head(id, block)
        else:
            self._block_stream = id
            self._block_size = 0
            self._continue_head(flags, block)

    def _continue_head(self, flags: int, content: bytes) -> None:
        self._block.append(content)
        self._block_size += len(content) + FRAME_SIZE
        if self._block_size > _MAX_BLOCK:
            self._fail(ENHANCE_YOUR_CALM, b"a head is too large")
        elif flags & END_HEADERS:
            block = b"".join(self._block)
            self._block.clear()
            id, self._block_stream = self._block_stream, 0
            self._decode_head(id, block)

    def _decode_head(self, id: int, block: bytes) -> None:
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
            elif not self._block_ends or not head.is_trailers:
                self.reset(stream, PROTOCOL_ERROR)
            else:
                stream.end()
            return
        if id <= self._last_id:
            return  # trailers of a stream that we have ended
        self._last_id = id
        if head.malformed:
            self._reset_id(id, PROTOCOL_ERROR)
        elif len(self._streams) >= _MAX_STREAMS:
            self._reset_id(id, REFUSED_STREAM)
        else:
            stream = self._streams[id] = Stream(self, id, head)
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
        if flags & ACK:
            if content:
                self._fail(FRAME_SIZE_ERROR, b"an acknowledgement says nothing")
            elif not self._is_set:
                self._fail(PROTOCOL_ERROR, b"the settings are to come first")
            return
        if len(content) % 6:
            self._fail(FRAME_SIZE_ERROR, b"a setting has six bytes")
            return
        self._is_set = True
        for key, value in SETTING.iter_unpack(content):
            if key == INITIAL_WINDOW_SIZE:
                if value > LARGEST_WINDOW:
                    self._fail(FLOW_CONTROL_ERROR, b"a window is too large")
                    return
                # The windows of all streams change with it, whose number thus costs nothing.
                self._first_window = value
                if value + self._most_granted > LARGEST_WINDOW:
                    self._most_granted = max([stream.granted for stream in self._streams.values()], default=0)
                    if value + self._most_granted > LARGEST_WINDOW:
                        self._fail(FLOW_CONTROL_ERROR, b"a window is too large")
                        return
            elif key == MAX_FRAME_SIZE:
                if not SMALLEST_MAX_FRAME <= value <= LARGEST_MAX_FRAME:
                    self._fail(PROTOCOL_ERROR, b"frames cannot be so large, or so small")
                    return
                self._max_frame = value
            elif key == ENABLE_PUSH and value > 1:
                self._fail(PROTOCOL_ERROR, b"ENABLE_PUSH is 0 or 1")
                return
        self._write(frame(SETTINGS, ACK, 0, b""))
        self._pump_soon()

    def _pong(self, flags: int, id: int, content: bytes) -> None:
        if id or len(content) != 8:
            self._fail(PROTOCOL_ERROR if id else FRAME_SIZE_ERROR, b"a ping has eight bytes and no stream")
            return
        limits = self._limits
        if flags & ACK:
            if self._is_awaiting_pong and self._keepalive is not None:
                # It has answered in time: from now on it may be silent again.
                self._is_awaiting_pong = self._has_received = False
                self._keepalive.cancel()
                self._keepalive = self._loop.call_later(limits.keepalive_s, self._look_alive)
            return
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
        self._write(frame(PING, ACK, 0, content))

    def _widen(self, id: int, content: bytes) -> None:
        if len(content) != 4:
            self._fail(FRAME_SIZE_ERROR, b"WINDOW_UPDATE has four bytes")
            return
        count = NUMBER.unpack(content)[0] & LARGEST_WINDOW
        if not id:
            self.send_window += count
            if not count:
                self._fail(PROTOCOL_ERROR, b"a window grows by nothing")
            elif self.send_window > LARGEST_WINDOW:
                self._fail(FLOW_CONTROL_ERROR, b"a window is too large")
            else:
                self._pump_soon()
            return
        stream = self._streams.get(id)
        if stream is None:
            if id > self._last_id or not id & 1:
                self._fail(PROTOCOL_ERROR, b"a window of a stream that has not begun")
            return
        stream.granted += count
        self._most_granted = max(self._most_granted, stream.granted)
        if not count:
            self.reset(stream, PROTOCOL_ERROR)
        elif self._window_of(stream) > LARGEST_WINDOW:
            self.reset(stream, FLOW_CONTROL_ERROR)
        elif stream.waiting_bytes:
            self.pump(stream)

    # ---------------------------------------------------------------- sending

    def has_room(self, stream: Stream, size: int) -> bool:
        """Whether so many bytes can be sent in one frame, at once."""
        return (
            size <= self._max_frame
            and size <= self.send_window
            and size <= self._window_of(stream)
            and not self._is_paused
        )

    def _window_of(self, stream: Stream) -> int:
        return self._first_window + stream.granted

    def pump(self, stream: Stream) -> None:
        """Sends what can be sent of an answer."""
        size = 0
        while stream.waiting_bytes and not self._is_paused and size < _WRITE_LIMIT:
            limit = min(self._max_frame, self.send_window, self._window_of(stream))
            if limit <= 0:
                break
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            count = stream.take_frame(limit, self._outgoing)
            self._outgoing_size += FRAME_SIZE + count
            self.send_window -= count
            stream.granted -= count
            size += count
        if size:
            self._note_answer()
            if self._outgoing_size >= _WRITE_LIMIT:
                # To be told when that is more than the socket takes.
                self._flush()
        if stream.waiting_bytes:
            self._waiting[stream.id] = stream
            if size >= _WRITE_LIMIT and not self._is_paused:
                # All of it is out already: who waits for the same comes before it goes on.
                self._pump_soon()
            return
        if trailers := stream.ending():
            self.write_answer(head_frames(stream.id, trailers, END_STREAM))
            self.close(stream)
        elif stream.id in self._waiting:
            del self._waiting[stream.id]
            if stream.receiver is not None:
                stream.receiver.room()

    def _pump_soon(self) -> None:
        """Once for all that comes in this turn: many streams may wait, and clients may send many small grants."""
        if self._waiting and not self._is_pumping:
            self._is_pumping = True
            self._loop.call_soon(self._pump_all)

    def _pump_all(self) -> None:
        self._is_pumping = False
        for stream in list(self._waiting.values()):
            if self._is_paused:
                return
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
        self._write(frame(RST_STREAM, 0, id, NUMBER.pack(code)))
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
