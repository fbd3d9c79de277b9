"""Memory of clients that this process reads inputs from and writes outputs to: files whose descriptors come with a batch.
Runs in a host.

To copy through a mapping takes a third of the time of `pread` and `pwrite`. So objects that come again are mapped as long
as they are in use. One that has become smaller is noticed, and holes, which there may be no memory to fill, are not touched
through a mapping; one that its client makes smaller right while it is copied ends this process (SIGBUS), which is
started anew. The server never maps it.
"""

import mmap
import os
from time import monotonic_ns

#: Mappings that have not been used for so long are dropped: they keep memory that its client may have freed.
UNUSED_NS = 1_000_000_000
_MOST = 256
#: What `st_blocks` counts, whatever the file system.
_BLOCK = 512
#: Other threads get a turn in between.
_AT_ONCE = 16 * 1024 * 1024


class _Object:
    __slots__ = ("used_ns", "view")

    def __init__(self, view: memoryview | None, used_ns: int) -> None:
        #: None for one that has been seen once.
        self.view = view
        self.used_ns = used_ns


class ClientMemory:
    """The objects of clients by device and inode, which are not given to others as long as they are mapped."""

    def __init__(self) -> None:
        self._objects: dict[tuple[int, int], _Object] = {}

    def write(self, fd: int, position: int, data: memoryview) -> bool:
        """Whether `data`, bytes, have been written there; not beyond the end, which would make the object grow. Raises OSError."""
        status = os.fstat(fd)
        end = position + len(data)
        if status.st_size < end:
            return False
        view = self._mapped(fd, status, position, end)
        if view is None:
            while data:
                count = os.pwrite(fd, data, position)
                position += count
                data = data[count:]
        else:
            for at in range(0, len(data), _AT_ONCE):
                part = data[at : at + _AT_ONCE]
                view[position + at : position + at + len(part)] = part
        return True

    def read(self, fd: int, position: int, target: memoryview) -> bool:
        """Whether `target`, bytes, has been filled with what lies there. Raises OSError."""
        status = os.fstat(fd)
        end = position + len(target)
        if status.st_size < end:
            return False
        view = self._mapped(fd, status, position, end)
        if view is None:
            while target:
                count = os.preadv(fd, (target,), position)
                if not count:
                    return False
                position += count
                target = target[count:]
        else:
            for at in range(0, len(target), _AT_ONCE):
                part = target[at : at + _AT_ONCE]
                part[:] = view[position + at : position + at + len(part)]
        return True

    def clear(self) -> None:
        """For a process that model code has forked: it is to keep nothing of a client's."""
        self._objects.clear()

    def _mapped(self, fd: int, status: os.stat_result, position: int, end: int) -> memoryview | None:
        """The memory of the object, all of which is there from `position` to `end`."""
        key = status.st_dev, status.st_ino
        now = monotonic_ns()
        known = self._objects.get(key)
        if known is None:
            if len(self._objects) >= _MOST:
                self._objects.clear()
            self._objects[key] = _Object(None, now)
            return None
        known.used_ns = now
        if position == end or (
            status.st_blocks * _BLOCK < status.st_size and os.lseek(fd, position, os.SEEK_HOLE) < end
        ):
            return None
        view = known.view
        if view is None or len(view) < end:
            try:
                view = known.view = memoryview(mmap.mmap(fd, status.st_size))
            except (OSError, ValueError):
                # No room for it in this process, or it has become smaller since.
                return None
        return view

    def drop_unused(self) -> bool:
        """Unmaps what has not been used for a while; whether there is anything left."""
        if not self._objects:
            return False
        since = monotonic_ns() - UNUSED_NS
        for key, known in list(self._objects.items()):
            if known.used_ns < since:
                self._objects.pop(key, None)
        return bool(self._objects)


#: That of this process, whose instances share it.
client_memory = ClientMemory()
