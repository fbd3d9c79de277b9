"""A host whose process is played by the test: what comes at the wrong moment."""

import asyncio
import socket
from types import SimpleNamespace

import msgspec
import pytest

from naiad.instances import channel
from naiad.instances.busy_poll import AwakeLoop, BusyPoll
from naiad.instances.channel import encode
from naiad.instances.frames import Answer, Call, OpenCalls, VersionSpec
from naiad.instances.process import Host, Tenant
from naiad.instances.process_instance import Limits
from naiad.instances.restart import RestartPolicy


class Environment:
    """Forks a process that is one end of a socket, once `may_fork` is set."""

    def __init__(self):
        control, self.process = socket.socketpair()
        self.process.setblocking(False)
        self.child = SimpleNamespace(pid=1, control=control, on_end=None, is_alive=True)
        self.is_asked = asyncio.Event()
        self.may_fork = asyncio.Event()

    async def fork(self, name, exclusive, busy_poll_ns):
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
    awake = AwakeLoop(asyncio.get_running_loop(), BusyPoll(0))
    host = Host("m", environment, True, Limits(), RestartPolicy(0.0), awake, lambda *line: None, on_call, on_gone)
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


def open_calls(environment):
    """A socket for calls, as the process opens one."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with theirs:
        socket.send_fds(environment.process, [encode(OpenCalls(), (theirs.fileno(),))], [theirs.fileno()])
    return mine


async def answer_on(calls):
    frame = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(calls, 5000), 20)
    return msgspec.msgpack.decode(frame[8:], type=Answer)


async def test_what_a_process_asked_for_just_before_its_end_is_not_begun(environment):
    asked, gone = [], []

    def on_call(caller, method, arguments, reply):
        asked.append(caller)

    host, tenant = host_in(environment, on_call, gone.append)
    environment.may_fork.set()
    await host.start()
    with open_calls(environment) as calls:
        calls.send(encode(Call(tenant.number, "infer", None)))
        environment.child.on_end("exited with code 1")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(calls, 1), 20)
    assert set(asked) <= set(gone)


async def test_an_answer_that_is_too_large_for_a_frame_is_an_error(environment, monkeypatch):
    monkeypatch.setattr(channel, "_MESSAGE_LIMIT", 1000)

    def on_call(caller, method, arguments, reply):
        reply(bytes(msgspec.msgpack.decode(arguments)), None)

    host, tenant = host_in(environment, on_call, lambda caller: None)
    environment.may_fork.set()
    await host.start()
    answers = []
    with open_calls(environment) as calls:
        for size in 2000, 5:
            calls.send(encode(Call(tenant.number, "infer", size)))
            answers.append(await answer_on(calls))
    assert "'infer': a message of 20" in answers[0].failure.message
    assert answers[1].value == bytes(5)


async def test_a_model_that_has_left_is_answered_with_an_error(environment):
    host, tenant = host_in(environment, None, lambda caller: None)
    environment.may_fork.set()
    await host.start()
    with open_calls(environment) as calls:
        calls.send(encode(Call(tenant.number + 1, "infer", None)))
        assert (await answer_on(calls)).failure.error().message == "the model has been unloaded"
