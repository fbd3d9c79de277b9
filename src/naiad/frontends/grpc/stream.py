"""One call over HTTP/2: its messages as they come, its answer as it goes. On the event loop.

Large messages are received straight into their final place. Knows of gRPC only that messages have a length before them
and that answers end with trailers; knows nothing of methods.

    application.begin(stream)      the head of a call is there; it sets `stream.receiver`, or answers
    receiver.received(...)         a message of the call is complete
    receiver.ended()               the client sends no more
    receiver.left()                nobody waits for the answer any more: the client has left, or its time is over
    receiver.room()                what had to wait of an answer is out
"""

import asyncio
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from naiad.frontends.grpc import head as heads
from naiad.frontends.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    PREFIX,
    PREFIX_SIZE,
    PROTOCOL_ERROR,
    head_frames,
)
from naiad.frontends.grpc.head import Head

if TYPE_CHECKING:
    from naiad.frontends.grpc.connection import Connection

#: What a client may send of a stream before we have used it. Only who streams ever waits for that.
WINDOW: Final = 16 << 20
#: gRPC's own limit of a message.
MAX_MESSAGE: Final = 2**31 - 1
#: Messages larger than this get their memory as they come.
_AT_ONCE: Final = 64 << 20
#: Answers from this size on are written piece by piece, not copied.
COPIED: Final = 32 * 1024
#: What an answer that is one message begins with: a frame of headers, and the beginning of one of data.
_ANSWER: Final = Struct(f">IBI{len(heads.HEAD)}sIBIBI")
_HEAD_KIND: Final = len(heads.HEAD) << 8 | HEADERS
_TRAILERS_KIND: Final = len(heads.OK_TRAILERS) << 8 | HEADERS

# Status codes of gRPC.
_DEADLINE_EXCEEDED: Final = 4
_RESOURCE_EXHAUSTED: Final = 8
_INTERNAL: Final = 13

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
        "_trailers",
        "connection",
        "granted",
        "head",
        "held",
        "id",
        "is_begun",
        "is_ended",
        "is_open",
        "is_taken_in_turn",
        "receive_window",
        "received",
        "receiver",
        "used",
        "waiting_bytes",
    )

    def __init__(self, connection: "Connection", id: int, head: Head) -> None:
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
        #: What the client grants of answers beyond the window that all its streams begin with, less what is out.
        self.granted = 0
        #: What the client may still send; what we have used of it since it was told so; messages that wait to be taken.
        self.receive_window = WINDOW
        self.used = 0
        self.held = 0
        #: Bytes of data, of frames that have begun.
        self.received = 0
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

    def feed(self, data: Message, at: int, end: int) -> None:
        """Takes the bytes from `at` to `end`."""
        if not self._prefix and self._message is None and end - at >= PREFIX_SIZE:
            # A message in one frame, as nearly all are.
            is_compressed, size = PREFIX.unpack_from(data, at)
            if end - at == PREFIX_SIZE + size and is_compressed <= 1:
                self._deliver(bytes(data[at + PREFIX_SIZE : end]), is_compressed == 1)
                return
        while at < end and self.is_open:
            if self._message is None:
                missing = PREFIX_SIZE - len(self._prefix)
                self._prefix += bytes(data[at : min(end, at + missing)])
                at += missing
                if len(self._prefix) < PREFIX_SIZE:
                    return
                self._begin_message()
            else:
                count = min(end - at, self._expected - self._filled)
                self.place(count)[:count] = data[at : at + count]
                at += count
                self.filled(count)

    def _begin_message(self) -> None:
        compressed, size = PREFIX.unpack(self._prefix)
        self._prefix = b""
        if compressed > 1:
            self._break_off(_INTERNAL, f"a message begins with {compressed}, which is neither 0 nor 1")
        elif size > MAX_MESSAGE:
            self._break_off(_RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {MAX_MESSAGE})")
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
            self._break_off(_INTERNAL, "the call ends in the middle of a message")
        elif expected >= 0 and expected != self.received:
            self.connection.reset(self, PROTOCOL_ERROR)
        elif self.receiver is not None:
            self.receiver.ended()

    def release(self, message: Message) -> None:
        """One that is taken in turn has been taken."""
        self.held -= len(message)
        if self.is_open:
            self.connection.grant(self, 0)

    def _expire(self) -> None:
        self._break_off(_DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _break_off(self, code: int, details: str) -> None:
        """Ends the answer with an error that the receiver has not found itself, and knows nothing of."""
        receiver = self.receiver
        self.drop_waiting()
        self.fail(code, details)
        if receiver is not None:
            receiver.left()

    # ---------------------------------------------------------------- what goes

    def respond(self, data: bytes) -> None:
        """Answers with one message."""
        connection = self.connection
        if not self.is_open:
            return
        size = len(data) + PREFIX_SIZE
        if self.encoding or not connection.has_room(self, size) or size > COPIED:
            self.send(data)
            self.finish(heads.OK_TRAILERS)
            return
        id = self.id
        connection.send_window -= size
        begin = _ANSWER.pack(_HEAD_KIND, END_HEADERS, id, heads.HEAD, size << 8 | DATA, 0, id, 0, len(data))
        connection.write_answer(
            b"".join((begin, data, FRAME.pack(_TRAILERS_KIND, END_HEADERS | END_STREAM, id), heads.OK_TRAILERS))
        )
        connection.close(self)

    def send(self, data: bytes, is_compressed: bool = False) -> None:
        """Answers with a message, after which others or the end come."""
        if not self.is_open:
            return
        if not self.is_begun:
            self.is_begun = True
            block = heads.encoded_head(self.encoding) if self.encoding else heads.HEAD
            self.connection.write_answer(head_frames(self.id, block, 0))
        prefix = PREFIX.pack(1 if is_compressed else 0, len(data))
        self.waiting_bytes += PREFIX_SIZE + len(data)
        if len(data) <= COPIED:
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
        parts[at] = FRAME.pack(size << 8 | DATA, 0, self.id)
        self.waiting_bytes -= size
        return size

    def ending(self) -> bytes:
        """How the answer ends; "" if it does not yet."""
        return self._trailers
