"""Memory that tensors have left, as glibc's malloc keeps it: for those of the next batch while a process works, back to the
system when it rests. Otherwise the kernel has to make and clear the pages of large tensors anew for each batch.

Where the C library is another one, or the environment has wishes of its own, nothing of this happens.
"""

import ctypes
import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns

#: Parameters of mallopt(3), their values as long as nothing else is asked for, and the largest that glibc takes.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_USUAL = 128 << 10
_LARGEST_PIECE = 32 << 20
#: The heaps of threads are parts of this size, each of which goes back as soon as it is free and the one before it has this
#: much less the pad.
_HEAP_PART = 64 << 20
#: To free this much makes malloc look at the end of the thread's heap.
_ENOUGH = 128 << 10
#: What the environment says otherwise.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

#: A batch that takes so long has tensors that it pays to keep memory for.
LONG_NS = 1_000_000
#: A process without such a batch for so long gives memory back: as long as jemalloc waits.
REST_NS = 10_000_000_000


def keep(size: int, heap_parts: bool = False) -> bool:
    """Up to `size` bytes of what has been freed at the end of the heap stay with the process; with `heap_parts` all of the
    heaps of threads too. Whether that could be arranged."""
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_PIECE)
    mallopt(_M_TRIM_THRESHOLD, size)
    if heap_parts:
        mallopt(_M_TOP_PAD, _HEAP_PART)
    return True


class Heap:
    """When a process that executes batches keeps memory, and when it gives it back."""

    def __init__(self, size: int, clock: Callable[[], int] = monotonic_ns) -> None:
        self._size = size
        self._clock = clock
        self._keeps = False
        self._used_ns = 0
        #: Threads that may have something to give back: each can only do so for its own heap.
        self._threads: set[int] = set()

    def used(self, begin_ns: int, end_ns: int) -> None:
        """This thread has executed a batch."""
        if end_ns - begin_ns < LONG_NS:
            return
        if not self._keeps:
            if not keep(self._size, heap_parts=True):
                return
            self._keeps = True
        self._used_ns = end_ns
        self._threads.add(get_ident())

    def trim_unused(self) -> bool:
        """For the thread that has executed batches and is about to sleep: gives back what has not been used for a while.
        Whether there is something left to give back later."""
        thread = get_ident()
        if thread not in self._threads:
            return False
        if self._clock() - self._used_ns < REST_NS:
            return True
        self._threads.discard(thread)
        self._keeps = False
        _give_back()
        return False


def _give_back() -> None:
    """All that is free, but for the ends of other threads' heaps."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_TRIM_THRESHOLD, _USUAL)
    libc.mallopt(_M_TOP_PAD, _USUAL)
    libc.malloc_trim(0)
    libc.malloc.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(_ENOUGH)))
