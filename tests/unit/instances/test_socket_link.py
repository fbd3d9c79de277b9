"""An instance's socket and arenas, in a host."""

import os
import socket

from naiad.instances import arena
from naiad.instances.busy_poll import BusyPoll
from naiad.instances.execution import RequestExecution, Signature
from naiad.instances.frames import Execute
from naiad.instances.host import SocketLink
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
