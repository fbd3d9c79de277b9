import os

import pytest

from naiad.errors import Internal
from naiad.instances import arena


@pytest.mark.parametrize(("offset", "wanted"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_tensors_begin_at_multiples_of_64(offset, wanted):
    assert arena.aligned(offset) == wanted


def test_both_sides_see_what_is_written():
    fd = arena.create("test", 1000)
    view = arena.map_shared(fd, 1000)
    view[10:13] = b"abc"
    assert bytes(arena.map_foreign(fd, 1000)[9:14]) == b"\0abc\0"
    os.close(fd)


def test_nobody_can_make_it_shorter():
    fd = arena.create("test", 1000)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 999])
def test_a_foreign_file_that_could_shrink_or_is_too_small_is_refused(size):
    fd = arena.create("test", 999) if size else os.memfd_create("test")
    with pytest.raises(Internal):
        arena.map_foreign(fd, 1000)
    os.close(fd)


def test_many_buffers_are_written_one_behind_the_other():
    parts = [bytes([n % 256]) * (n % 5) for n in range(3000)]
    whole = b"".join(parts)
    fd = arena.create("test", len(whole) + 7)
    assert arena.write(fd, 7, parts) == len(whole) + 7
    assert os.pread(fd, len(whole), 7) == whole
    os.close(fd)
