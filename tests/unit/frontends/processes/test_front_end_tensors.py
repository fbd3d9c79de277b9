"""Bytes between the engine's process and a front end: the blocks of an arena, and what goes through one."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.datatypes import DataType
from naiad.errors import ResourceExhausted
from naiad.frontends.processes import tensors
from naiad.frontends.processes.frames import Stored
from naiad.frontends.processes.tensors import ARENA_BYTE_SIZE, IN_FRAME, Blocks, Receiver, Sender
from naiad.instances import arena
from naiad.messages import Tensor

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * PAGE), st.integers(0, 20))))
def test_blocks_never_overlap_and_come_back_whole(steps: list[tuple[bool, int, int]]) -> None:
    blocks = Blocks(16 * PAGE)
    taken: dict[int, int] = {}
    for takes, size, which in steps:
        if takes:
            start = blocks.take(size)
            if start is not None:
                assert start >= 0
                assert start + size <= 16 * PAGE
                assert all(start + size <= other or start >= other + length for other, length in taken.items())
                taken[start] = size
            else:
                assert sum(-(-length // PAGE) for length in taken.values()) + -(-size // PAGE) > 16 or taken
        elif taken:
            start = sorted(taken)[which % len(taken)]
            del taken[start]
            blocks.free(start)
    for start in taken:
        blocks.free(start)
    assert blocks.take(16 * PAGE) == 0


def test_a_block_is_freed_once() -> None:
    blocks = Blocks(PAGE)
    assert blocks.take(1) == 0
    assert blocks.take(1) is None
    blocks.free(0)
    with pytest.raises(KeyError):
        blocks.free(0)


@pytest.fixture
def ends() -> Iterator[tuple[Sender, Receiver]]:
    fd = arena.create("test", ARENA_BYTE_SIZE)
    yield Sender(os.dup(fd)), Receiver(fd)
    gc.collect()


def tensor(data: bytes) -> Tensor:
    return Tensor("T", DataType.UINT8, (len(data),), data)


@pytest.mark.parametrize("size", [0, 1, IN_FRAME, IN_FRAME + 1, 1 << 20])
def test_a_tensor_arrives(ends: tuple[Sender, Receiver], size: int) -> None:
    sender, receiver = ends
    data = os.urandom(size)
    sent = sender.put_all([tensor(data)], keep=False)
    (received,) = receiver.tensors(sent, [])
    assert (received.name, received.datatype, received.shape) == ("T", DataType.UINT8, (size,))
    assert bytes(received.data) == data
    assert memoryview(received.data).readonly
    assert isinstance(sent[0].data, Stored) == (size > IN_FRAME)


def test_a_place_is_free_when_the_last_view_of_it_has_gone(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    sent = sender.put(bytes(100_000))
    assert isinstance(sent, Stored)
    assert sender.outstanding == 100_000
    view = receiver.get(sent, [])
    part = memoryview(view)[10:20]
    del view
    assert receiver.take_freed() == []
    del part
    freed = receiver.take_freed()
    assert freed == [sent.place]
    assert receiver.take_freed() == []
    sender.freed(freed)
    assert sender.outstanding == 0
    assert sender.put(bytes(100_000)) == sent


def test_what_finds_no_room_travels_in_files_of_its_own(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    filling = sender.put(bytes(ARENA_BYTE_SIZE))
    assert isinstance(filling, Stored)
    sent = sender.put_all([tensor(b"a" * 20_000), tensor(b"small"), tensor(b"b" * 30_000)], keep=False)
    fds = [os.dup(fd) for fd in sender.fds]
    sender.sent()
    assert sender.fds == []
    received = receiver.tensors(sent, fds)
    assert fds == [], "the descriptors are taken"
    assert [bytes(each.data) for each in received] == [b"a" * 20_000, b"small", b"b" * 30_000]
    del received
    freed = receiver.take_freed()
    assert len(freed) == 2
    sender.freed(freed)
    assert sender.outstanding == ARENA_BYTE_SIZE


def test_what_changes_later_is_kept_as_it_was(ends: tuple[Sender, Receiver]) -> None:
    sender, _ = ends
    data = bytearray(b"before")
    (kept,) = sender.put_all([Tensor("T", DataType.UINT8, (6,), memoryview(data))], keep=True)
    data[:] = b"after!"
    assert kept.data == b"before"


def test_a_request_that_cannot_be_sent_whole_leaves_nothing(
    ends: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = ends
    create = arena.create
    created: list[int] = []

    def exhausted(name: str, byte_size: int) -> int:
        if created:
            raise ResourceExhausted("no memory")
        created.append(create(name, byte_size))
        return created[0]

    monkeypatch.setattr(tensors.arena, "create", exhausted)
    filling = ARENA_BYTE_SIZE - 2 * PAGE
    sender.put(bytes(filling))
    with pytest.raises(ResourceExhausted):
        sender.put_all([tensor(bytes(size)) for size in (PAGE * 2 + 1, PAGE + IN_FRAME, PAGE + IN_FRAME)], keep=False)
    assert sender.fds == []
    assert sender.outstanding == filling
