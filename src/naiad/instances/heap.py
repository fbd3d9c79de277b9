"""Memory that tensors have left, as glibc's malloc keeps it: for those of the next batch while a process works, back to the
system when it rests. Otherwise the kernel has to make and clear the pages of large tensors anew for each batch.

Where the C library is another one, or the environment has wishes of its own, nothing of this happens.
"""

import ctypes
import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
#: The largest piece that is not given back at once, and what of the first thread's heap may be left at its end: so far
#: glibc goes by itself, as long as nobody asks for anything.
_LARGEST_PIECE = 32 << 20
_KEPT_ANYWAY = 64 << 20
#: The heaps of other threads are parts of this size. One that is free goes back, unless the pad is as large.
_HEAP_PART = 64 << 20
_SMALL_PAD = 128 << 10
#: To free this much makes malloc look at the end of the thread's heap.
_ENOUGH = 128 << 10
#: What the environment says otherwise, for malloc.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")

#: A batch that takes so long has tensors that it pays to keep memory for.
LONG_NS = 1_000_000
#: A process without such a batch for so long gives memory back: as long as jemalloc waits.
REST_NS = 10_000_000_000


def _find_malloc() -> ctypes.CDLL | None:
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    return libc


_libc = _find_malloc()


def keep() -> None:
    """What is freed stays with the process, but for large pieces and more than 64 MB at the end of its heap."""
    if _libc is not None:
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_PIECE)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_ANYWAY)


def _keep_all(size: int) -> None:
    """Keeps up to `size` bytes at the end of the first thread's heap, and all of the heaps of others."""
    assert _libc is not None
    keep()
    _libc.mallopt(_M_TRIM_THRESHOLD, size)
    _libc.mallopt(_M_TOP_PAD, _HEAP_PART)


def _give_back() -> None:
    """All that is free, but for the ends of other threads' heaps; and keeps no more than `keep` does."""
    assert _libc is not None
    _libc.mallopt(_M_TRIM_THRESHOLD, 0)
    _libc.mallopt(_M_TOP_PAD, _SMALL_PAD)
    _libc.malloc_trim(0)
    _libc.free(ctypes.c_void_p(_libc.malloc(_ENOUGH)))
    keep()


class Heap:
    """When a process that executes batches keeps memory, and when it gives it back. Its threads use it without a lock: a
    batch may go unkept."""

    def __init__(self, size: int, clock: Callable[[], int] = monotonic_ns) -> None:
        self._size = size
        self._clock = clock
        self._keeps = False
        self._used_ns = 0
        #: Threads that may have something to give back: each can only do so for its own heap.
        self._threads: set[int] = set()

    def used(self, begin_ns: int, end_ns: int) -> None:
        """This thread has executed a batch."""
        if end_ns - begin_ns < LONG_NS or _libc is None:
            return
        if not self._keeps:
            _keep_all(self._size)
            self._keeps = True
        self._used_ns = end_ns
        self._threads.add(get_ident())

    def trim_unused(self) -> bool:
        """For a thread that executes batches and is about to sleep: gives back what has not been used for a while. Whether
        there is something left to give back later."""
        if get_ident() not in self._threads:
            return False
        if self._clock() - self._used_ns < REST_NS:
            return True
        self.leave()
        return False

    def leave(self) -> None:
        """This thread gives back what it has kept: it rests, or executes no more."""
        thread = get_ident()
        if thread in self._threads:
            self._threads.discard(thread)
            _give_back()
            # Others that work go on keeping, from their next batch on.
            self._keeps = False

    def forked(self) -> None:
        """For a process that model code has forked, which rests."""
        self._threads = {get_ident()} if self._keeps else set()
        self.leave()
