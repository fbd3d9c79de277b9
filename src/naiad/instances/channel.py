"""Frames over a Unix stream socket, with file descriptors beside them: the blocking end and the loop's end.

A frame is two little-endian uint32, the byte size of the message and the number of descriptors it brings, and
then the message. Descriptors travel with the first bytes of their frame, so they are never later than it.
"""

import array
import asyncio
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from naiad.errors import ResourceExhausted
from naiad.instances.busy_poll import Awaited, BusyPoll

T = TypeVar("T")

_HEADER: Final = struct.Struct("<II")
#: A longer message than this is a broken peer, not a frame.
_MESSAGE_LIMIT: Final = 2**31
#: The kernel takes 253 descriptors at once.
_FDS_AT_ONCE: Final = 250
_ANCILLARY_SIZE: Final = socket.CMSG_SPACE(_FDS_AT_ONCE * 4)
_FLAGS: Final = socket.MSG_CMSG_CLOEXEC
_BUFFER_SIZE: Final = 128 * 1024

_encoder: Final = msgspec.msgpack.Encoder()


class BrokenFrame(Exception):
    """The peer sent what is no frame."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection. Raises ResourceExhausted."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise ResourceExhausted(f"no connection to a model's process: {error.strerror}") from error


def encode(message: Any, fds: Sequence[int] = (), into: bytearray | None = None) -> bytearray:
    """The bytes of a frame, written to `into` if given. Raises ResourceExhausted for one the peer would not take."""
    frame = bytearray(_HEADER.size) if into is None else into
    _encoder.encode_into(message, frame, _HEADER.size)
    size = len(frame) - _HEADER.size
    if size > _MESSAGE_LIMIT:
        del frame[_HEADER.size :]
        raise ResourceExhausted(
            f"a message of {size} bytes between the server and a model's process, the limit is {_MESSAGE_LIMIT}"
        )
    _HEADER.pack_into(frame, 0, size, len(fds))
    return frame


class FrameReader(Generic[T]):
    """Received bytes and descriptors on their way to becoming messages. Pure but for `receive`."""

    __slots__ = ("_buffer", "_decoder", "_end", "_fds", "_start", "_view")

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray(_BUFFER_SIZE)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> int:
        """Reads once; the number of bytes, 0 at the end. Raises what recvmsg raises."""
        count, ancillary, _, _ = sock.recvmsg_into((self._view[self._end :],), _ANCILLARY_SIZE, _FLAGS)
        self._end += count
        if ancillary:
            for _, kind, data in ancillary:
                if kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                    self._fds.extend(fds)
        return count

    def next(self) -> tuple[T, list[int]] | None:
        """The next complete message and its descriptors, which are the caller's then. Raises BrokenFrame."""
        start = self._start
        available = self._end - start
        if available < 8:
            self._make_room(8)
            return None
        size, fd_count = _HEADER.unpack_from(self._buffer, start)
        if size > _MESSAGE_LIMIT or fd_count > 65536:
            raise BrokenFrame(f"a message of {size} bytes with {fd_count} descriptors")
        if available < 8 + size:
            self._make_room(8 + size)
            return None
        try:
            message = self._decoder.decode(self._view[start + 8 : start + 8 + size])
        except msgspec.DecodeError as error:
            raise BrokenFrame(str(error)) from error
        self._start = start + 8 + size
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _BUFFER_SIZE:
                self._resize(_BUFFER_SIZE)
        if not fd_count:
            return message, _NO_FDS
        if len(self._fds) < fd_count:
            raise BrokenFrame(f"{fd_count} descriptors announced, {len(self._fds)} received")
        return message, [self._fds.popleft() for _ in range(fd_count)]

    def close(self) -> None:
        """Closes descriptors that nobody has taken."""
        while self._fds:
            os.close(self._fds.popleft())

    def _make_room(self, needed: int) -> None:
        """Sees to it that a frame of `needed` bytes fits behind `_start`, and that there is room to read."""
        if self._start and self._start + needed > len(self._buffer):
            rest = self._buffer[self._start : self._end]
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if needed > len(self._buffer):
            self._resize(needed)

    def _resize(self, size: int) -> None:
        buffer = bytearray(size)
        buffer[: self._end] = self._view[: self._end]
        self._view = memoryview(buffer)
        self._buffer = buffer


#: Shared, since most frames have none; nobody writes to it.
_NO_FDS: Final[list[int]] = []


def _pieces(frame: Any, fds: Sequence[int]) -> list[tuple[memoryview, Sequence[int]]]:
    """A frame cut so that each piece brings no more descriptors than the kernel takes."""
    view = memoryview(frame)
    pieces: list[tuple[memoryview, Sequence[int]]] = []
    at = 0
    while len(fds) > _FDS_AT_ONCE:
        pieces.append((view[at : at + 1], fds[:_FDS_AT_ONCE]))
        fds = fds[_FDS_AT_ONCE:]
        at += 1
    pieces.append((view[at:], fds))
    return pieces


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, Any]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


_LONG_MS: Final = 1000


class BlockingChannel(Generic[T]):
    """The end of a host or zygote. `send` may be called from any thread, `receive` from one."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[T],
        busy_poll: BusyPoll | None = None,
        before_sleep: Callable[[], bool] | None = None,
    ) -> None:
        """`before_sleep` is called before `receive` waits, and again after each second as long as it answers True."""
        sock.setblocking(True)
        self.sock = sock
        self._reader = FrameReader(decoder)
        self._lock = threading.Lock()
        self._frame = bytearray(_HEADER.size)
        # Who sleeps in `recvmsg` of a Unix socket is woken also when the peer takes what has been sent to it.
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        self._poll = poll.poll
        self._before_sleep = before_sleep
        self._busy_poll = busy_poll
        self._awaited = Awaited()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Sends all of it. Raises OSError when the peer is gone."""
        with self._lock:
            frame = encode(message, fds, self._frame)
            if not fds:
                self.sock.sendall(frame)
            else:
                for piece, piece_fds in _pieces(frame, fds):
                    sent = self.sock.sendmsg((piece,), _ancillary(piece_fds))
                    if sent < len(piece):
                        self.sock.sendall(piece[sent:])
            if len(frame) > _BUFFER_SIZE:
                self._frame = bytearray(_HEADER.size)

    def receive(self) -> tuple[T, list[int]] | None:
        """The next message and its descriptors; None when the peer has ended, or somebody has closed or replaced the
        descriptor, as model code can."""
        while (frame := self._reader.next()) is None:
            if self._busy_poll is None:
                self._sleep()
            else:
                self._busy_poll.wait(self._awaited, self._sleep)
            try:
                if not self._reader.receive(self.sock):
                    return None
            except OSError:
                return None
        return frame

    def _sleep(self, ms: int | None = None) -> Any:
        if ms is None and self._before_sleep is not None:
            while self._before_sleep():
                if found := self._poll(_LONG_MS):
                    return found
        return self._poll(ms)

    def received(self) -> tuple[T, list[int]] | None:
        """The next message that has already been read from the socket; does not block."""
        return self._reader.next()

    def close(self) -> None:
        self._reader.close()
        self.sock.close()


class LoopChannel(Generic[T]):
    """The server's end, on the event loop: never blocks, keeps what the socket does not take yet.

    `on_message` gets each message with its descriptors, `on_end(reason)` is called once when the peer has ended
    (reason None) or sent what is no frame; not after `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[T],
        on_message: Callable[[T, list[int]], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._reader = FrameReader(decoder)
        self._on_message = on_message
        self._on_end = on_end
        self._frame = bytearray(_HEADER.size)
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.is_open = True
        loop.add_reader(self._fd, self.read)

    @property
    def unsent_byte_size(self) -> int:
        """What the socket has not taken yet."""
        return sum([len(piece) for piece, _ in self._unsent]) if self._unsent else 0

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Sends now what the socket takes and the rest when it can. `fds` are duplicated if they must wait."""
        if not self.is_open:
            return
        if not fds and not self._unsent:
            frame = encode(message, fds, self._frame)
            try:
                sent = self._sock.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the peer is gone; reading finds out
            if sent < len(frame):
                self._keep([(memoryview(bytes(frame))[sent:], ())])
            if len(frame) > _BUFFER_SIZE:
                self._frame = bytearray(_HEADER.size)
            return
        pieces = _pieces(bytes(encode(message, fds)), fds)
        if self._unsent:
            self._keep(pieces)
            return
        for index, (piece, piece_fds) in enumerate(pieces):
            try:
                sent = self._sock.sendmsg((piece,), _ancillary(piece_fds))
            except BlockingIOError:
                self._keep(pieces[index:])
                return
            except OSError:
                return
            if sent < len(piece):
                self._keep([(piece[sent:], ()), *pieces[index + 1 :]])
                return

    def _keep(self, pieces: list[tuple[memoryview, Sequence[int]]]) -> None:
        if not self._unsent:
            self._loop.add_writer(self._fd, self._write)
        self._unsent.extend((piece, [os.dup(fd) for fd in fds]) for piece, fds in pieces)

    def _write(self) -> None:
        while self._unsent:
            piece, fds = self._unsent[0]
            try:
                sent = self._sock.sendmsg((piece,), _ancillary(fds))
            except BlockingIOError:
                return
            except OSError:
                break
            for fd in fds:
                os.close(fd)
            if sent < len(piece):
                self._unsent[0] = (piece[sent:], ())
                return
            self._unsent.popleft()
        self._drop_unsent()
        self._loop.remove_writer(self._fd)

    def _drop_unsent(self) -> None:
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()

    def read(self) -> None:
        """Takes one portion of what the peer has sent."""
        try:
            if not self._reader.receive(self._sock):
                self._end(None)
                return
        except BlockingIOError:
            return
        except OSError:
            self._end(None)
            return
        try:
            while self.is_open and (frame := self._reader.next()) is not None:
                self._on_message(*frame)
        except BrokenFrame as error:
            self._end(f"sent what is no frame: {error}")

    def drain(self) -> None:
        """Takes all that the peer has sent; for one that has died and may have said something before."""
        while self.is_open:
            try:
                if not self._reader.receive(self._sock):
                    return
                while self.is_open and (frame := self._reader.next()) is not None:
                    self._on_message(*frame)
            except (OSError, BrokenFrame):
                return

    def _end(self, reason: str | None) -> None:
        self.close()
        self._on_end(reason)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._fd)
            if self._unsent:
                self._loop.remove_writer(self._fd)
                self._drop_unsent()
            self._reader.close()
            self._sock.close()
