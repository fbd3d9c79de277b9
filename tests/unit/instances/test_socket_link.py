"""An instance's socket and arenas, and its host."""

import os
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from naiad.backends.api import ArrayBackend, InstanceContext, ModelContext
from naiad.instances import arena
from naiad.instances import host as host_module
from naiad.instances.busy_poll import BusyPoll
from naiad.instances.channel import BlockingChannel
from naiad.instances.execution import RequestExecution, Signature
from naiad.instances.frames import Execute, InstanceSpec, Load, Reply, Results, Source, Target, VersionSpec
from naiad.instances.heap import Heap
from naiad.instances.host import Host, SocketLink
from tests.unit.instances.test_returned_results import CONFIG, Model, answer, f4

SIZE = 1 << 16


def test_what_a_forked_child_answers_changes_nothing_that_the_server_sees() -> None:
    server, host = socket.socketpair()
    fds = [arena.create("test", SIZE) for _ in range(2)]
    link = SocketLink(host, *fds, BusyPoll(0), end=print)
    seen = arena.map_shared(fds[1], SIZE)
    execution = RequestExecution(Model([answer(A=f4(1, 3, start=7))], True), Signature("m", "m_0", CONFIG), link, SIZE)
    frame = Execute(1, [], [1], (), None, 0)
    execution.execute(frame, link.inputs, 0)
    assert any(seen)
    assert server.recv(1 << 16)
    before = bytes(seen)
    execution.backend.results = [answer(A=f4(1, 3, start=8))]  # type: ignore[union-attr]
    link.forked()
    execution.execute(frame, link.inputs, 0)
    assert bytes(seen) == before
    assert server.recv(1 << 16) == b""
    for fd in fds:
        os.close(fd)
    server.close()


def test_descriptors_of_targets_are_closed_when_the_batch_is_done(tmp_path: Path) -> None:
    server, host = socket.socketpair()
    fds = [arena.create("test", SIZE) for _ in range(2)]
    link = SocketLink(host, *fds, BusyPoll(0), end=print)
    channel = BlockingChannel(server, msgspec.msgpack.Decoder(Results))
    for name in "abc":
        (tmp_path / name).write_bytes(b"")
    files = {name: os.open(tmp_path / name, os.O_RDWR) for name in "abc"}
    new_arena = arena.create("test", SIZE)

    def target(file: int) -> Target:
        return Target("A", 0, file, 0, 1)

    def received() -> tuple[Execute, list[str]]:
        batch = link.receive()
        assert batch is not None
        return batch[0], [os.readlink(f"/proc/self/fd/{t.file}")[-1] for t in batch[0].targets or ()]

    before = len(os.listdir("/proc/self/fd"))
    old = link.inputs
    channel.send(Execute(1, [], [1], (), None, 0, [target(1), target(0), target(1)], None, 2), (files["a"], files["b"]))
    channel.send(Execute(2, [], [1], (), None, 0, [target(0)], None, 1), (new_arena, files["c"]))
    channel.send(Execute(3, [], [1], (), None, 0))
    first, names = received()
    assert names == ["b", "a", "b"]
    assert link.inputs is old
    second, names = received()
    assert names == ["c"]
    assert link.inputs is not old
    assert first.targets is None
    assert received()[1] == []
    assert second.targets is None
    # But for that of the new arena's mapping.
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    channel.send(Execute(4, [], [1], (), None, 0, [target(0)], None, 1), (files["c"],))
    fourth, _ = received()
    link.forked()
    # A child of model code writes nothing to them, nor to what gets their numbers next.
    assert fourth.targets is None
    for fd in (*fds, new_arena, *files.values()):
        os.close(fd)
    server.close()


def test_inputs_that_lie_with_clients_are_fetched_and_lost_ones_are_told(tmp_path: Path) -> None:
    server, host = socket.socketpair()
    fds = [arena.create("test", SIZE) for _ in range(2)]
    link = SocketLink(host, *fds, BusyPoll(0), end=print)
    channel = BlockingChannel(server, msgspec.msgpack.Decoder(Results))
    execution = RequestExecution(Model([answer(A=f4(1, 3))], True), Signature("m", "m_0", CONFIG), link, SIZE)
    (tmp_path / "a").write_bytes(bytes(range(256)))
    file = os.open(tmp_path / "a", os.O_RDWR)
    sources = [Source(64, 0, 16, 4), Source(128, 0, 255, 2), Source(192, 0, 250, 6)]
    for lost in ([1], [1, 2], None):
        link.inputs[:] = b"-" * SIZE
        given = None if lost is None else sources
        channel.send(Execute(1, [], [1], (), None, 0, None, given, 1), (file,))
        batch = link.receive()
        assert batch is not None
        link.read_sources(*batch)
        execution.execute(*batch, 0)
        results = channel.receive()
        assert results is not None
        assert results[0].lost == lost
        if lost is not None:
            last = b"\0" * 6 if 2 in lost else bytes(range(250, 256))
            expected = [bytes(range(16, 20)), b"\0\0", last]
            for source, data in zip(sources, expected, strict=True):
                end = source.offset + source.byte_size
                assert link.inputs[source.offset - 1 : end + 1] == b"-" + data + b"-"
            os.truncate(file, 255)
    link.close()
    channel.close()
    for fd in (*fds, file):
        os.close(fd)


class Nothing(ArrayBackend):
    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        pass


def test_a_host_knows_which_of_its_threads_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(host_module._heap, "leave", lambda: left.append(threading.get_ident()))
    control, theirs = socket.socketpair()
    replies = BlockingChannel(control, msgspec.msgpack.Decoder(Reply))
    busy_poll = BusyPoll(1)
    host = Host(theirs, Nothing, False, busy_poll)
    spec = VersionSpec("m", 1, "", "", "", {})

    def load(number: int, count: int) -> list[socket.socket]:
        pairs = [socket.socketpair() for _ in range(count)]
        fds = [fd for _, end in pairs for fd in (end.detach(), *(arena.create("test", SIZE) for _ in range(2)))]
        instances = [InstanceSpec(f"m_{number}_{index}", "KIND_CPU", 0) for index in range(count)]
        host._load(Load(number, number, 7, spec, CONFIG, instances, SIZE), fds)
        assert replies.receive() == (Reply(number, False, None), [])
        return [end for end, _ in pairs]

    def unload(number: int, ends: list[socket.socket]) -> None:
        for end in ends:
            end.close()
        for thread in host._threads.pop(number):
            thread.join()

    assert len(busy_poll.executing) == 0
    two = load(1, 2)
    assert len(busy_poll.executing) == 2
    one = load(2, 1)
    assert len(busy_poll.executing) == 3
    unload(1, two)
    assert len(busy_poll.executing) == 1
    assert len(left) == 2
    # What instances share goes with the last of them.
    assert list(host._shared) == [7]
    unload(2, one)
    assert len(busy_poll.executing) == 0
    assert len(left) == 3
    assert not host._shared
    control.close()
    theirs.close()


def test_long_batches_are_what_memory_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(1)
    used: list[tuple[int, int]] = []
    trimmed: list[bool] = []
    monkeypatch.setattr(heap, "used", lambda begin_ns, end_ns: used.append((begin_ns, end_ns)))
    monkeypatch.setattr(heap, "trim_unused", lambda: trimmed.append(True))
    monkeypatch.setattr(host_module, "_heap", heap)
    server, mine = socket.socketpair()
    fds = [arena.create("test", SIZE) for _ in range(2)]
    link = SocketLink(mine, *fds, BusyPoll(0), end=print)
    link.send(Results(1, None, None, None, (1, 2, 3, 4), 0), None)
    link.send(Results(1, None, None, None, None, 0), None)
    assert used == [(1, 4)]
    server.close()
    assert link.receive() is None
    assert trimmed == [True]
    link.close()
    for fd in fds:
        os.close(fd)
