"""Hosts that live, die and come back; real processes, really killed."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from instance_lab import Batch, available, config, parameters, request, run, until

from naiad.backends.api import InstanceContext
from naiad.errors import Internal, InvalidArgument, Unavailable
from naiad.instances import environment
from naiad.instances.environment import Child
from naiad.instances.hosts import ModelSpec
from naiad.instances.restart import RestartPolicy

STRINGS = config("BYTES", [1])


def command(text):
    return request(np.array([text.encode()], object))


def output(result):
    return result.outputs["OUTPUT0"].item()


async def say(instance, text):
    [[result]] = await run(instance, command(text), rows=[1])
    return result


def quick_restarts(now):
    return RestartPolicy(now, pauses_s=(0.0, 0.01, 0.02))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("exit 3", "exited with code 3"),
        (f"kill {int(signal.SIGKILL)}", "was killed by signal 9 (SIGKILL; out of memory?)"),
        (f"kill {int(signal.SIGSEGV)}", "was killed by signal 11 (SIGSEGV)"),
        ("fork", "exited with code 5"),
    ],
)
async def test_a_crash_fails_only_the_requests_inside(lab, order, how):
    crashing = await lab.load("Misbehaving", STRINGS, name="crashing")
    other = await lab.load("Misbehaving", STRINGS, name="other")
    (instance,) = crashing.instances
    error = await say(instance, order)
    assert isinstance(error, Internal)
    assert error.message == (
        "Failed to process the request(s) for model instance 'crashing_0_0', message: "
        f"its host process {how}; it is being restarted"
    )
    assert not instance.is_available
    assert output(await say(other.instances[0], "hello")) == b"hello"
    await available(instance)
    assert instance.failure is None
    assert output(await say(instance, "hello")) == b"hello"
    assert (crashing.restarts, other.restarts) == (1, 0)
    assert any(line[2] == "ERROR" and how in line[3] for line in lab.logs)


async def test_all_instances_of_a_host_fail_and_come_back_together(lab):
    model = await lab.load("Misbehaving", STRINGS, instances=2)
    first, second = model.instances
    hanging = Batch(command("hang"), rows=[1])
    second.execute(hanging)
    await say(first, "exit 1")
    [[error]] = await hanging.ended()
    assert "model instance 'm_0_1'" in error.message
    assert hanging.completions == [None]
    for instance in first, second:
        await available(instance)
        assert output(await say(instance, "hello")) == b"hello"


async def test_model_code_sees_no_arguments_of_ours(lab):
    model = await lab.load("Misbehaving", STRINGS)
    assert output(await say(model.instances[0], "argv")) == b"['']"


async def test_an_idle_host_that_is_killed_comes_back(lab):
    model = await lab.load("Misbehaving", STRINGS)
    (instance,) = model.instances
    (pid,) = model.pids
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not instance.is_available)
    await available(instance)
    assert output(await say(instance, "hello")) == b"hello"
    assert model.pids != [pid]


async def test_a_host_that_only_crashes_is_given_up_with_the_reason(make_lab, tmp_path):
    async with make_lab(restart_policy=quick_restarts) as lab:
        marker = tmp_path / "crash"
        model = await lab.load("Misbehaving", {**STRINGS, **parameters(crash_on_load_if=str(marker))})
        (instance,) = model.instances
        marker.touch()
        await say(instance, "exit 1")
        await available(instance)
        assert instance.failure == (
            "host process 'm' exited with code 9; it is not restarted, since it has failed too often in a row"
        )
        assert model.restarts == 3
        assert not instance.is_available
        await model.close()


async def test_a_host_whose_model_cannot_be_loaded_again_is_given_up_with_the_reason(make_lab, tmp_path):
    async with make_lab(restart_policy=quick_restarts) as lab:
        missing = tmp_path / "model"
        missing.touch()
        model = await lab.load("NeedsFile", {**STRINGS, **parameters(file=str(missing))})
        (instance,) = model.instances
        missing.unlink()
        os.kill(*model.pids, signal.SIGKILL)
        await until(lambda: not instance.is_available)
        await available(instance)
        assert "No such file" in instance.failure


class Shortage(RestartPolicy):
    """From the end of the host until the first failed try to restart it, only `left` descriptors can be had."""

    left = 0

    def __init__(self, now):
        super().__init__(now, pauses_s=(0.0, 0.01, 0.02))
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.before = 0

    def failed(self, now):
        if self.before:
            resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)
        else:
            taken = {int(name) for name in os.listdir("/proc/self/fd")}
            self.before = len(taken)
            free = [number for number in range(max(taken) + self.left + 2) if number not in taken]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[self.left], self.limits[1]))
        return super().failed(now)


@pytest.mark.parametrize("left", range(7))
async def test_a_host_is_restarted_when_there_are_descriptors_again(make_lab, monkeypatch, left):
    monkeypatch.setattr(Shortage, "left", left)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with make_lab(restart_policy=Shortage, busy_poll_ns=1000, awake_processes=2) as lab:
        model = await lab.load("Misbehaving", STRINGS)
        (instance,) = model.instances
        descriptors = len(os.listdir("/proc/self/fd"))
        try:
            os.kill(*model.pids, signal.SIGKILL)
            await until(lambda: not instance.is_available)
            await available(instance)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert instance.failure is None
        assert output(await say(instance, "hello")) == b"hello"
        await until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)
        # The one place to wait awake is the new process's.
        assert lab.hosts._awake.take_place() == 0


async def test_a_model_that_closes_foreign_descriptors_is_restarted(lab):
    model = await lab.load("Misbehaving", STRINGS)
    (instance,) = model.instances
    error = await say(instance, "close_fds")
    assert isinstance(error, Internal)
    await available(instance)
    assert output(await say(instance, "hello")) == b"hello"


async def test_memory_that_cannot_be_had_is_an_error_of_the_request(lab):
    model = await lab.load("Misbehaving", STRINGS)
    error = await say(model.instances[0], "allocate")
    assert "Unable to allocate" in error.message
    assert model.restarts == 0


async def test_an_execution_that_takes_too_long_is_ended(make_lab):
    async with make_lab(beat_s=0.02) as lab:
        model = await lab.load("Misbehaving", STRINGS, NAIAD_EXECUTION_TIMEOUT_SECS="0.1")
        (instance,) = model.instances
        error = await say(instance, "hang")
        assert error.message == (
            "Failed to process the request(s) for model instance 'm_0_0', message: its host process was killed since "
            "an execution of instance 'm_0_0' took longer than 0.1 s (model parameter NAIAD_EXECUTION_TIMEOUT_SECS); "
            "it is being restarted"
        )
        await available(instance)
        assert output(await say(instance, "hello")) == b"hello"


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
async def test_a_wrong_timeout_parameter_is_refused(lab, text):
    with pytest.raises(InvalidArgument, match="NAIAD_EXECUTION_TIMEOUT_SECS"):
        await lab.open("Identity", NAIAD_EXECUTION_TIMEOUT_SECS=text)


async def test_unloading_ends_the_process_and_waits_for_requests(lab):
    model = await lab.load("Slow", STRINGS)
    (pid,) = model.pids
    (instance,) = model.instances
    batch = Batch(command("x"), rows=[1])
    instance.execute(batch)
    await model.close(timeout_s=20)
    assert batch.finals == [1]
    assert output(batch.results[0][0]) == b"x"
    assert not is_alive(pid)
    assert not instance.is_available


async def test_unloading_kills_what_does_not_end(lab):
    model = await lab.load("Misbehaving", STRINGS)
    (pid,) = model.pids
    batch = Batch(command("hang"), rows=[1])
    model.instances[0].execute(batch)
    await model.close(timeout_s=0.05)
    [[error]] = await batch.ended()
    assert isinstance(error, Unavailable)
    assert error.message == "model 'm' version 1 was unloaded while instance 'm_0_0' executed this request"
    assert not is_alive(pid)


async def test_a_host_that_dies_while_its_model_is_unloaded_fails_what_is_inside_at_once(lab):
    model = await lab.load("Misbehaving", STRINGS)
    (pid,) = model.pids
    batch = Batch(command("hang"), rows=[1])
    model.instances[0].execute(batch)
    unloading = asyncio.create_task(model.close(timeout_s=1000))
    await until(lambda: not model.pids)
    os.kill(pid, signal.SIGKILL)
    [[error]] = await batch.ended()
    assert error.message.endswith("its host process was killed by signal 9 (SIGKILL; out of memory?)")
    await unloading
    assert model.restarts == 0


async def test_whoever_asks_if_a_model_is_ready_hears_that_it_is_unloaded_meanwhile(lab, tmp_path):
    count = tmp_path / "count"
    model = await lab.load("Readiness", {**STRINGS, **parameters(answer="hang", count=str(count))})
    asking = asyncio.create_task(model.is_ready())
    await until(count.exists)
    await model.close(timeout_s=0.05)
    with pytest.raises(Unavailable, match=r"^model 'm' version 1 was unloaded$"):
        await asking


async def test_to_kill_a_process_that_has_been_waited_for_is_no_error():
    process = subprocess.Popen(["sleep", "100"])  # noqa: ASYNC220 - it only starts
    child = Child(asyncio.get_running_loop(), process.pid, os.pidfd_open(process.pid), None)
    process.kill()
    # Not with the loop, which shall not see the end yet.
    process.wait()
    child.kill()
    await child.wait()


async def test_backends_are_closed_when_their_model_is_unloaded(lab, tmp_path):
    trace = tmp_path / "closed"
    model = await lab.load("Closing", {**STRINGS, **parameters(trace=str(trace))}, instances=2)
    await model.close()
    assert sorted(trace.read_text().split()) == ["m_0_0", "m_0_1"]


async def test_leaving_the_pool_ends_all_processes(make_lab):
    async with make_lab() as lab:
        model = await lab.load("Misbehaving", STRINGS)
        batch = Batch(command("hang"), rows=[1])
        model.instances[0].execute(batch)
        (pid,) = model.pids
        zygotes = zygotes_of(os.getpid())
    assert not is_alive(pid)
    assert zygotes
    assert not any(map(is_alive, zygotes))
    await batch.ended()


def children_of(pid):
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def zygotes_of(pid):
    """Other children are not of interest: the tracker of `multiprocessing` lives as long as the tests."""
    named = b"naiad.instances.zygote"
    return [child for child in children_of(pid) if named in Path(f"/proc/{child}/cmdline").read_bytes()]


async def test_the_end_of_the_server_is_the_end_of_its_hosts(tmp_path):
    """Also when it is killed, and a model is busy."""
    program = tmp_path / "server.py"
    program.write_text(
        f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from instance_lab import Batch, Lab
from test_hosts import STRINGS, zygotes_of, command
from naiad.instances.hosts import Hosts

async def main():
    async with Hosts(on_log=print, on_call=None) as hosts:
        model = await Lab(hosts, []).load("Misbehaving", STRINGS)
        model.instances[0].execute(Batch(command("hang"), rows=[1]))
        print(*model.pids, *zygotes_of(os.getpid()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=asyncio.subprocess.PIPE)
    line = await process.stdout.readline()
    pids = [int(word) for word in line.split()]
    assert len(pids) == 2
    await process.wait()
    await until(lambda: not any(map(is_alive, pids)))


async def test_a_dead_zygote_is_replaced_and_its_hosts_live_on(lab):
    model = await lab.load("Misbehaving", STRINGS)
    (zygote,) = zygotes_of(os.getpid())
    os.kill(zygote, signal.SIGKILL)
    await until(lambda: not is_alive(zygote))
    assert output(await say(model.instances[0], "hello")) == b"hello"
    other = await lab.load("Misbehaving", STRINGS, name="other")
    assert output(await say(other.instances[0], "hello")) == b"hello"
    error = await say(model.instances[0], "exit 1")
    assert "its host process ended; it is being restarted" in error.message
    await available(model.instances[0])
    assert output(await say(model.instances[0], "hello")) == b"hello"


async def test_a_zygote_that_hangs_is_replaced_and_its_hosts_live_on(lab, monkeypatch):
    model = await lab.load("Misbehaving", STRINGS)
    other = await lab.load("Misbehaving", STRINGS, name="other")
    (zygote,) = zygotes_of(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_FORK_TIMEOUT_S", 0.1)
        os.kill(zygote, signal.SIGSTOP)
        error = await say(model.instances[0], "exit 1")
        await until(lambda: not is_alive(zygote))
    assert "its host process ended; it is being restarted" in error.message
    assert output(await say(other.instances[0], "hello")) == b"hello"
    await available(model.instances[0])
    assert output(await say(model.instances[0], "hello")) == b"hello"


async def test_a_zygote_that_hangs_is_ended_with_the_pool(make_lab, monkeypatch):
    monkeypatch.setattr(environment, "_END_TIMEOUT_S", 0.1)
    async with make_lab() as lab:
        model = await lab.load("Misbehaving", STRINGS)
        (zygote,) = zygotes_of(os.getpid())
        os.kill(zygote, signal.SIGSTOP)
    assert not any(map(is_alive, [zygote, *model.pids]))


async def test_the_zygote_of_another_interpreter_ends_when_no_model_is_left_in_it(make_lab, tmp_path):
    async with make_lab(idle_zygote_s=0.05) as lab:

        async def open_in(interpreter):
            with contextlib.suppress(FileExistsError):
                os.symlink(sys.executable, interpreter)
            return await lab.hosts.open(
                ModelSpec("m", 1, "python", tmp_path, tmp_path, tmp_path / "model.py", interpreter=str(interpreter))
            )

        async def idle():
            """Until a zygote has ended that has been idle for a shorter time than all others that are."""
            there = set(zygotes_of(os.getpid()))
            model = await open_in(tmp_path / f"python-{len(os.listdir(tmp_path))}")
            (last,) = set(zygotes_of(os.getpid())) - there
            await model.close()
            await until(lambda: not is_alive(last))

        own, first, second = [await open_in(path) for path in (sys.executable, tmp_path / "a", tmp_path / "a")]
        kept, other = zygotes_of(os.getpid())
        await own.close()
        await first.close()
        await idle()
        assert is_alive(other)
        await second.close()
        third = await open_in(tmp_path / "a")
        await idle()
        assert is_alive(other)
        await third.close()
        await until(lambda: not is_alive(other))
        assert is_alive(kept)
        await (await open_in(tmp_path / "a")).close()


async def test_signals_of_a_terminal_leave_zygotes_and_hosts_alone(lab):
    model = await lab.load("Misbehaving", STRINGS)
    for number in signal.SIGINT, signal.SIGTERM:
        os.kill(*model.pids, number)
        os.kill(*zygotes_of(os.getpid()), number)
    assert output(await say(model.instances[0], "hello")) == b"hello"
    other = await lab.load("Misbehaving", STRINGS, name="other")
    assert output(await say(other.instances[0], "hello")) == b"hello"
    assert model.restarts == 0


async def test_a_process_per_instance_where_the_backend_wants_it(lab):
    model = await lab.load("Processes", STRINGS, instances=2)
    answers = [output(await say(instance, "who")).split() for instance in model.instances]
    assert {int(pid) for pid, _ in answers} == set(model.pids)
    assert len(model.pids) == 2
    assert {is_main_thread for _, is_main_thread in answers} == {b"True"}
    await say(model.instances[0], "exit 1")
    assert output(await say(model.instances[1], "hello")) == b"hello"
    await available(model.instances[0])
    assert output(await say(model.instances[0], "hello")) == b"hello"
    await model.close()


async def test_models_of_a_backend_can_share_a_host(make_lab):
    async with make_lab(isolation="backend") as lab:
        a = await lab.load("Misbehaving", STRINGS, name="a")
        b = await lab.load("Misbehaving", STRINGS, name="b")
        assert a.pids == b.pids
        await a.close()
        assert output(await say(b.instances[0], "hello")) == b"hello"
        await say(b.instances[0], "exit 1")
        await available(b.instances[0])
        c = await lab.load("Misbehaving", STRINGS, name="c")
        assert c.pids == b.pids
        await b.close()
        await c.close()
        d = await lab.load("Misbehaving", STRINGS, name="d")
        assert output(await say(d.instances[0], "hello")) == b"hello"


async def test_models_of_one_host_parameter_share_a_host_and_its_fate(lab):
    a = await lab.load("Misbehaving", STRINGS, name="a", NAIAD_HOST="gpu0")
    b = await lab.load("Misbehaving", STRINGS, name="b", NAIAD_HOST="gpu0")
    c = await lab.load("Misbehaving", STRINGS, name="c")
    assert a.pids == b.pids != c.pids
    batch = Batch(command("hang"), rows=[1])
    b.instances[0].execute(batch)
    await say(a.instances[0], "exit 1")
    await batch.ended()
    for model in a, b:
        await available(model.instances[0])
        assert output(await say(model.instances[0], "hello")) == b"hello"
    assert a.pids == b.pids


async def test_a_crash_while_loading_fails_the_load_and_nothing_else(lab, tmp_path):
    model = await lab.open("Identity")
    with pytest.raises(Unavailable, match=r"^host process 'm' exited with code 9$"):
        await model.load({**STRINGS, **parameters(crash_on_load_if=str(tmp_path))}, [InstanceContext("i", "KIND_CPU")])
    await model.close()
    assert model.pids == []


async def test_an_unknown_backend_is_named(both):
    with pytest.raises(InvalidArgument) as caught:
        await both.open("", reference="no_such_backend")
    assert caught.value.message == (
        "unable to find backend library for backend 'test', try specifying runtime on the model configuration."
    )


async def test_a_missing_framework_is_named_with_what_installs_it(both):
    with pytest.raises(InvalidArgument) as caught:
        await both.open("MissingModule")
    assert caught.value.message == (
        "backend 'test' needs the Python module 'surely_not_installed': install it with pip install 'naiad[sure]'"
    )


async def test_hosts_are_named_for_ps(lab):
    model = await lab.load("Identity", config(), name="add_sub")
    with open(f"/proc/{model.pids[0]}/comm") as name:  # noqa: ASYNC230 - no disk
        assert name.read() == "naiad:add_sub\n"


async def test_hosts_draw_different_random_numbers(lab):
    models = [await lab.load("Misbehaving", STRINGS, name=name) for name in "abc"]
    assert len({output(await say(model.instances[0], "random")) for model in models}) == 3


async def test_hosts_have_the_environment_and_threads_of_the_user(make_lab, monkeypatch):
    for value in "unset", "3":
        if value == "unset":
            monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OPENBLAS_NUM_THREADS", value)
        async with make_lab() as lab:
            model = await lab.load("Misbehaving", STRINGS)
            assert output(await say(model.instances[0], "environment OPENBLAS_NUM_THREADS")) == value.encode()
            threads = int(output(await say(model.instances[0], "blas_threads")))
            assert threads == (len(os.sched_getaffinity(0)) if value == "unset" else 3)


async def test_nothing_is_left_behind_by_models_that_come_and_go(lab):
    def state():
        gc.collect()
        fds = len(os.listdir("/proc/self/fd"))
        mapped = sum("naiad" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return fds, mapped, len(asyncio.all_tasks()), len(os.listdir("/proc/self/task"))

    async def round_trip():
        model = await lab.load("Misbehaving", STRINGS)
        await say(model.instances[0], "hello")
        await model.close()

    await round_trip()
    before = state()
    for _ in range(50):
        await round_trip()
    assert state() == before
    assert children_of(zygotes_of(os.getpid())[0]) == []


async def test_the_last_models_of_a_host_may_leave_together(make_lab):
    async with make_lab(isolation="backend") as lab:
        models = [await lab.load("Misbehaving", STRINGS, name=name) for name in "abc"]
        (pid,) = models[0].pids
        await asyncio.gather(*(model.close() for model in models))
        assert not is_alive(pid)
