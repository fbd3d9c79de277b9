"""Memory of clients, as a host copies from and to it."""

import itertools
import os
from pathlib import Path

import pytest

from naiad.instances import client_memory as module
from naiad.instances.client_memory import UNUSED_NS, ClientMemory

SIZE = 3 << 16
_numbers = itertools.count()


class Object:
    """An object of a client's, filled with `-`."""

    def __init__(self, name: str, size: int = SIZE) -> None:
        self.name = f"client-memory-{name}-{next(_numbers)}"
        self.fd = os.memfd_create(self.name)
        os.pwrite(self.fd, b"-" * size, 0)

    @property
    def data(self) -> bytes:
        return os.pread(self.fd, 1 << 20, 0)

    @property
    def is_mapped(self) -> bool:
        return self.name in Path("/proc/self/maps").read_text()


@pytest.fixture
def found() -> Object:
    return Object("first")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [UNUSED_NS]
    monkeypatch.setattr(module, "monotonic_ns", lambda: now[0])
    return now


def read(memory: ClientMemory, found: Object, position: int, size: int) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if memory.read(found.fd, position, memoryview(target)) else None


def test_what_comes_again_is_mapped_and_is_the_same_memory(found: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 1000)
    memory = ClientMemory()
    for turn in range(4):
        data = bytes([turn]) * 5000
        assert memory.write(found.fd, 77, memoryview(data))
        assert found.data == b"-" * 77 + data + b"-" * (SIZE - 5077)
        assert read(memory, found, 70, 5100) == b"-" * 7 + data + b"-" * 93
        assert found.is_mapped


def test_once_is_not_worth_a_mapping(found: Object) -> None:
    memory = ClientMemory()
    assert read(memory, found, 0, SIZE) == b"-" * SIZE
    assert not found.is_mapped


def test_other_descriptors_of_an_object_are_the_same_object(found: Object) -> None:
    memory = ClientMemory()
    read(memory, found, 0, 1)
    again = os.open(f"/proc/self/fd/{found.fd}", os.O_RDWR)
    os.close(found.fd)
    found.fd = again
    assert read(memory, found, 0, 2) == b"--"
    assert found.is_mapped


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_smaller_and_larger_ones_are_noticed(found: Object, turns: int) -> None:
    memory = ClientMemory()
    for _ in range(turns):
        assert read(memory, found, SIZE - 10, 10) == b"-" * 10
    os.truncate(found.fd, SIZE - 1)
    assert read(memory, found, SIZE - 10, 10) is None
    assert not memory.write(found.fd, SIZE - 10, memoryview(b"x" * 10))
    assert len(found.data) == SIZE - 1
    assert read(memory, found, SIZE - 10, 9) == b"-" * 9
    os.pwrite(found.fd, bytes(SIZE + 1), SIZE - 1)
    for data in (b"x" * 10, b"y" * 10, b"z" * 10):
        assert memory.write(found.fd, 2 * SIZE - 10, memoryview(data))
        assert read(memory, found, 2 * SIZE - 11, 11) == b"\0" + data


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_holes_are_not_filled_through_a_mapping(found: Object, turns: int) -> None:
    memory = ClientMemory()
    for _ in range(turns):
        assert read(memory, found, 0, 1) == b"-"
    os.truncate(found.fd, 4 * SIZE)
    for data in (b"x" * 10, b"y" * 10, b"z" * 10):
        blocks = os.fstat(found.fd).st_blocks
        assert read(memory, found, 3 * SIZE, 1 << 12) == bytes(1 << 12)
        assert os.fstat(found.fd).st_blocks == blocks
        assert memory.write(found.fd, 4 * SIZE - 10, memoryview(data))
        assert read(memory, found, 4 * SIZE - 11, 11) == b"\0" + data
    # What lies beside a hole is read through a mapping.
    assert read(memory, found, SIZE - 5, 5) == b"-" * 5
    assert found.is_mapped


def test_an_empty_object(found: Object) -> None:
    memory = ClientMemory()
    os.truncate(found.fd, 0)
    for _ in range(3):
        assert memory.write(found.fd, 0, memoryview(b""))
        assert read(memory, found, 0, 0) == b""
        assert read(memory, found, 0, 1) is None


def test_one_that_shrinks_before_it_is_mapped(found: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ClientMemory()
    read(memory, found, 0, SIZE)
    before = os.fstat(found.fd)
    os.truncate(found.fd, SIZE // 2)
    monkeypatch.setattr(module.os, "fstat", lambda fd: before)
    assert read(memory, found, 0, SIZE) is None
    assert not found.is_mapped


def test_what_is_not_used_is_given_back(found: Object, clock: list[int]) -> None:
    memory = ClientMemory()
    other = Object("second")
    assert not memory.drop_unused()
    for _ in range(2):
        read(memory, found, 0, 1)
        read(memory, other, 0, 1)
    clock[0] += UNUSED_NS
    assert memory.drop_unused()
    read(memory, other, 0, 1)
    clock[0] += 1
    assert memory.drop_unused()
    assert not found.is_mapped
    assert other.is_mapped
    clock[0] += UNUSED_NS
    assert not memory.drop_unused()
    assert not other.is_mapped


def test_not_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    memory = ClientMemory()
    for number in range(5):
        found = Object(f"many-{number}", 4096)
        for _ in range(2):
            assert read(memory, found, 0, 1) == b"-"
    assert Path("/proc/self/maps").read_text().count("client-memory-many") <= 2
    assert len(memory._objects) <= 2


def test_what_cannot_be_mapped_is_copied_all_the_same(found: Object) -> None:
    memory = ClientMemory()
    path = f"/proc/self/fd/{os.dup(found.fd)}"
    os.close(found.fd)
    found.fd = os.open(path, os.O_RDONLY)
    for _ in range(3):
        assert read(memory, found, 0, 3) == b"---"
    with pytest.raises(OSError, match="Bad file descriptor"):
        memory.write(found.fd, 0, memoryview(b"x"))
