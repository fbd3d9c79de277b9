"""A host whose process is played by the test: what comes at the wrong moment."""

import asyncio
import socket
from types import SimpleNamespace

import msgspec
import pytest

from naiad.instances import channel
from naiad.instances.channel import encode
from naiad.instances.frames import Call, ToHost, VersionSpec
from naiad.instances.process import Host, Limits, Tenant
from naiad.instances.restart import RestartPolicy


class Environment:
    """Forks a process that is one end of a socket, once `may_fork` is set."""

    def __init__(self):
        control, self.process = socket.socketpair()
        self.process.setblocking(False)
        self.child = SimpleNamespace(pid=1, control=control, on_end=None, is_alive=True)
        self.is_asked = asyncio.Event()
        self.may_fork = asyncio.Event()

    async def fork(self, name, exclusive):
        self.is_asked.set()
        await self.may_fork.wait()
        return self.child


@pytest.fixture
async def environment():
    environment = Environment()
    yield environment
    environment.process.close()
    environment.child.control.close()


def host_in(environment, on_call=None, on_gone=None):
    host = Host("m", environment, True, Limits(), RestartPolicy(0.0), lambda *line: None, on_call, on_gone)
    tenant = Tenant(host, VersionSpec("m", 1, "", "", "", {}), takes_requests=False, timeout_s=0.0)
    return host, tenant


async def test_a_process_that_comes_when_its_model_has_left_is_let_go(environment):
    host, tenant = host_in(environment)
    starting = asyncio.create_task(host.start())
    await environment.is_asked.wait()
    starting.cancel()
    await host.leave(tenant, 0.0)
    environment.may_fork.set()
    received = asyncio.get_running_loop().sock_recv(environment.process, 1)
    assert await asyncio.wait_for(received, 20) == b""
    assert host.pid is None


async def test_what_a_process_asked_for_just_before_its_end_is_not_begun(environment):
    asked, gone = [], []

    async def on_call(caller, method, arguments):
        asked.append(caller)

    host, tenant = host_in(environment, on_call, gone.append)
    environment.may_fork.set()
    await host.start()
    environment.process.send(encode(Call(1, tenant.number, "infer", None)))
    environment.child.on_end("exited with code 1")
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert set(asked) <= set(gone)


async def test_an_answer_that_is_too_large_for_a_frame_is_an_error(environment, monkeypatch):
    monkeypatch.setattr(channel, "_MESSAGE_LIMIT", 1000)

    async def on_call(caller, method, arguments):
        return bytes(arguments)

    host, tenant = host_in(environment, on_call, lambda caller: None)
    environment.may_fork.set()
    await host.start()
    answers = []
    for size in 2000, 5:
        environment.process.send(encode(Call(size, tenant.number, "infer", size)))
        frame = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(environment.process, 5000), 20)
        answers.append(msgspec.msgpack.decode(frame[8:], type=ToHost))
    assert "'infer': a message of 20" in answers[0].failure.message
    assert answers[1].value == bytes(5)
