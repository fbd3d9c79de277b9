"""The shared-memory regions of a server with several front-end processes: one registry, a copy in each of them.

The registry, in the engine's process, checks, registers and counts the uses; front ends open the same memory and read
and write it themselves.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from naiad.frontends.processes.frames import RegionAdded, RegionsRemoved, RegionUsed
from naiad.protocol.regions import RegionPolicy, Regions


class SharedRegions(Regions):
    """The registry. `tell(frame, fds)` passes a change on to all front ends, with the next of `next_change`."""

    def __init__(self, allow: RegionPolicy) -> None:
        super().__init__(allow)
        self.next_change: Callable[[], int]
        self.tell: Callable[[Any, list[int]], None]
        #: How each region was made known.
        self._added: dict[str, RegionAdded] = {}
        self._names: dict[int, str] = {}

    def register_system(self, name: str, key: str, offset: int, byte_size: int, local: bool = True) -> None:
        super().register_system(name, key, offset, byte_size, local)
        self._add(RegionAdded(self.next_change(), name, key, offset, byte_size, -1, b""))

    async def register_cuda(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, local: bool = True
    ) -> None:
        await super().register_cuda(name, raw_handle, device_id, byte_size, local)
        self._add(RegionAdded(self.next_change(), name, "", 0, byte_size, device_id, raw_handle))

    def all(self) -> list[tuple[RegionAdded, list[int]]]:
        """All regions, for a front end that starts."""
        return [(frame, self._descriptors(frame)) for frame in self._added.values()]

    def count_use(self, change: int, by: int) -> None:
        """Of the region made known with `change`, if there still is one."""
        name = self._names.get(change)
        if name is not None:
            self._regions[name].uses += by

    def refused(self, change: int) -> None:
        """A front end cannot open the region made known with `change`."""
        name = self._names.get(change)
        if name is not None:
            self.drop((name,))
            self._tell_removed()

    def _forget(self, name: str, cuda: bool) -> None:
        try:
            super()._forget(name, cuda)
        finally:
            self._tell_removed()

    def _add(self, frame: RegionAdded) -> None:
        self._added[frame.name] = frame
        self._names[frame.change] = frame.name
        self.tell(frame, self._descriptors(frame))

    def _tell_removed(self) -> None:
        removed = [name for name in self._added if name not in self._regions]
        for name in removed:
            del self._names[self._added.pop(name).change]
        if removed:
            self.tell(RegionsRemoved(self.next_change(), removed), [])

    def _descriptors(self, frame: RegionAdded) -> list[int]:
        memory: Any = self._regions[frame.name].memory
        return [] if frame.device_id >= 0 else [memory.fd]


class CopiedRegions(Regions):
    """The copy of a front end. `tell` passes uses on to the engine."""

    def __init__(self, tell: Callable[[RegionUsed], None]) -> None:
        super().__init__()
        self._tell = tell

    def add(self, frame: RegionAdded, fds: list[int]) -> "asyncio.Future[None] | None":
        """Takes the descriptor out of `fds`. Memory of a GPU is open when the future is done. Both raise NaiadError where
        it cannot be opened."""

        def on_use(used: bool) -> None:
            self._tell(RegionUsed(frame.change, used))

        if frame.device_id >= 0:
            return self.adopt_cuda(frame.name, frame.raw_handle, frame.device_id, frame.byte_size, on_use)
        self.adopt_system(frame.name, fds.pop(), frame.key, frame.offset, frame.byte_size, on_use)
        return None
