"""Memory that server and host both see: memfds, each with one writer.

An arena has its full size from the start, but is sparse: only pages that have been written to take memory. What
does not fit travels in a memfd of its own (one-shot), so that the memory of a rare large batch is given back.
Sizes are sealed: a host that truncates a file the server has mapped would kill the server with SIGBUS.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence

from naiad.datatypes import Buffer
from naiad.errors import Internal, ResourceExhausted

ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: The kernel copies no more than 2 GiB in one call, and takes 1024 buffers at once.
_WRITE_LIMIT = 2**30
_IOV_LIMIT = 1024


def aligned(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def create(name: str, byte_size: int) -> int:
    """The descriptor of a new memfd of exactly `byte_size` > 0. Raises ResourceExhausted."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ResourceExhausted(f"no memory file for {byte_size} bytes of tensors: {error.strerror}") from error
    try:
        os.ftruncate(fd, byte_size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ResourceExhausted(f"no memory file for {byte_size} bytes of tensors: {error.strerror}") from error
    return fd


def map_shared(fd: int, byte_size: int) -> memoryview:
    """All bytes of a memfd, writable; unmapped when the last view is gone. Raises ResourceExhausted."""
    try:
        return memoryview(mmap.mmap(fd, byte_size))
    except OSError as error:
        raise ResourceExhausted(f"cannot map {byte_size} bytes of tensors: {error.strerror}") from error


def map_foreign(fd: int, byte_size: int) -> memoryview:
    """All bytes of a memfd another process made, read-only, if it can neither shrink nor is too small."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < byte_size:
        raise Internal(f"the host sent a memory file that is not sealed or smaller than {byte_size} bytes")
    return memoryview(mmap.mmap(fd, byte_size, prot=mmap.PROT_READ))


def private(byte_size: int) -> memoryview:
    """Sparse memory of this process only. Raises ResourceExhausted."""
    try:
        return memoryview(mmap.mmap(-1, byte_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise ResourceExhausted(f"cannot map {byte_size} bytes of tensors: {error.strerror}") from error


def write(fd: int, offset: int, parts: Sequence[Buffer]) -> int:
    """Writes buffers one behind the other into a memfd, without mapping it; the offset behind them."""
    for start in range(0, len(parts), _IOV_LIMIT):
        some = parts[start : start + _IOV_LIMIT]
        size = sum(map(len, some))
        if size <= _WRITE_LIMIT and os.pwritev(fd, some, offset) == size:
            offset += size
            continue
        for part in some:
            view = memoryview(part)
            while view:
                count = os.pwrite(fd, view[:_WRITE_LIMIT], offset)
                offset += count
                view = view[count:]
    return offset
