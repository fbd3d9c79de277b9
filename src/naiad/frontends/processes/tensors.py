"""The bytes of tensors between the engine's process and a front end: small ones in the frame, large ones in an arena.

Each direction has an arena, a sealed memfd that its sender divides into blocks. The receiver reads a block where it
lies and gives it back when nothing refers to it any more. What finds no room travels in a memfd of its own.
"""

import os
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from naiad.datatypes import BY_NUMBER, Buffer
from naiad.errors import NaiadError, ResourceExhausted
from naiad.frontends.processes.frames import Sendable, SentTensor, Stored
from naiad.instances import arena
from naiad.messages import Tensor

#: Address space of an arena; only pages that have been written to take memory.
ARENA_BYTE_SIZE = 64 * 1024 * 1024
#: Up to this size the four copies through the socket cost less than a block.
IN_FRAME = 8 * 1024
_PAGE = 4096


class Blocks:
    """Which parts of `byte_size` bytes are taken. The first that is large enough is given away. Pure."""

    def __init__(self, byte_size: int) -> None:
        #: Where free parts begin, ascending, and the size of each; no two of them touch.
        self._starts = [0]
        self._sizes = [byte_size]
        self._taken: dict[int, int] = {}

    def take(self, byte_size: int) -> int | None:
        """The offset of a block of at least `byte_size` > 0 bytes, None where there is no room."""
        needed = (byte_size + _PAGE - 1) & -_PAGE
        for index, size in enumerate(self._sizes):
            if size >= needed:
                start = self._starts[index]
                if size == needed:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] = start + needed
                    self._sizes[index] = size - needed
                self._taken[start] = needed
                return start
        return None

    def free(self, start: int) -> None:
        """Takes a block back. Raises KeyError for what is none."""
        size = self._taken.pop(start)
        starts, sizes = self._starts, self._sizes
        index = bisect_left(starts, start)
        if index < len(starts) and start + size == starts[index]:
            size += sizes[index]
            del starts[index], sizes[index]
        if index and starts[index - 1] + sizes[index - 1] == start:
            sizes[index - 1] += size
        else:
            starts.insert(index, start)
            sizes.insert(index, size)


class Sender:
    """Puts bytes on their way; one for each direction, on the loop. `fds` are for the next frame, and the sender's."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        try:
            self._view = arena.map_shared(fd, ARENA_BYTE_SIZE)
        finally:
            os.close(fd)
        self._blocks = Blocks(ARENA_BYTE_SIZE)
        #: Bytes that are not in frames and have not been given back.
        self.outstanding = 0
        self._sizes: dict[int, int] = {}
        self._memfds = 0
        self.fds: list[int] = []

    def put_all(self, tensors: Sequence[Tensor], *, keep: bool) -> list[SentTensor]:
        """How tensors are sent; with `keep`, small ones may change before their frame has gone. Raises
        ResourceExhausted."""
        sent: list[SentTensor] = []
        try:
            for tensor in tensors:
                data = tensor.data
                if keep and type(data) is not bytes and len(data) <= IN_FRAME:
                    data = bytes(data)
                sent.append(SentTensor(tensor.name, tensor.datatype.number, tensor.shape, self.put(data)))
        except NaiadError:
            self.take_back(sent)
            raise
        return sent

    def take_back(self, sent: Sequence[SentTensor]) -> None:
        """What was put on its way last does not go."""
        places = [tensor.data.place for tensor in sent if isinstance(tensor.data, Stored)]
        for place in places:
            if place < 0:
                os.close(self.fds.pop())
        self.freed(places)

    def put(self, data: Buffer) -> Sendable:
        """How `data` is sent. Small data may be sent by reference: it must not change until its frame has gone. Raises
        ResourceExhausted."""
        size = data.nbytes if type(data) is memoryview else len(data)
        if size <= IN_FRAME:
            return data  # type: ignore[return-value] # all buffers are bytes on the wire
        place = self._blocks.take(size)
        if place is not None:
            self._view[place : place + size] = data
        else:
            fd = arena.create("naiad tensor", size)
            try:
                arena.write(fd, 0, [data])
            except OSError as error:
                os.close(fd)
                raise ResourceExhausted(f"cannot store {size} bytes of a tensor: {error.strerror}") from error
            self.fds.append(fd)
            self._memfds += 1
            place = -self._memfds
        self._sizes[place] = size
        self.outstanding += size
        return Stored(place, size)

    def freed(self, places: list[int]) -> None:
        for place in places:
            self.outstanding -= self._sizes.pop(place)
            if place >= 0:
                self._blocks.free(place)

    def sent(self) -> None:
        """The frame has gone, with all of `fds`."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class Receiver:
    """Finds what the other side has put on its way. `freed` are the places that can be given back."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        try:
            self._view = arena.map_foreign(fd, ARENA_BYTE_SIZE)
        finally:
            os.close(fd)
        #: Threads may let go of a tensor too: they only ever add here.
        self.freed: deque[int] = deque()
        self._held: dict[int, weakref.ref[Any]] = {}

    def get(self, sent: Sendable, fds: list[int]) -> Buffer:
        """The bytes, read-only; takes the descriptors it needs out of `fds`. Their place is free when the last view of
        them has gone."""
        if type(sent) is bytes:
            return sent
        assert isinstance(sent, Stored)
        place, size = sent.place, sent.byte_size
        # A view of the memory itself would say nothing when it goes; an array in between does.
        if place >= 0:
            held = np.frombuffer(self._view, np.uint8, size, place)
        else:
            fd = fds.pop(0)
            try:
                held = np.frombuffer(arena.map_foreign(fd, size), np.uint8)
            finally:
                os.close(fd)
        self._held[place] = weakref.ref(held, _Freeing(self, place))
        return held.data

    def tensors(self, sent: Sequence[SentTensor], fds: list[int]) -> tuple[Tensor, ...]:
        return tuple(
            [
                Tensor(tensor.name, BY_NUMBER[tensor.datatype], tensor.shape, self.get(tensor.data, fds))
                for tensor in sent
            ]
        )

    def take_freed(self) -> list[int]:
        freed = self.freed
        return [freed.popleft() for _ in range(len(freed))]


class _Freeing:
    """Notes that a place is free."""

    __slots__ = ("_place", "_receiver")

    def __init__(self, receiver: Receiver, place: int) -> None:
        self._receiver = receiver
        self._place = place

    def __call__(self, _: object) -> None:
        del self._receiver._held[self._place]
        self._receiver.freed.append(self._place)
