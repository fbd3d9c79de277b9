"""Instances that come to a loaded version and leave it, in processes of their own, in one process, in the server's."""

import asyncio
import os
import signal

import pytest
from instance_lab import Batch, available, parameters, run, until
from test_hosts import STRINGS, command, is_alive, output, quick_restarts, say

from naiad.backends.api import InstanceContext
from naiad.errors import InvalidArgument, NaiadError, Unavailable


def contexts(*names):
    return [InstanceContext(name, "KIND_CPU") for name in names]


@pytest.fixture(params=["processes", "threads", "server"])
async def place(request, make_lab):
    """A lab and the name of a backend."""
    async with make_lab(
        isolation="none" if request.param == "server" else "model", restart_policy=quick_restarts
    ) as lab:
        yield lab, "Processes" if request.param == "processes" else "Misbehaving"


async def test_instances_come_and_go(place):
    lab, backend = place
    model = await lab.load(backend, STRINGS)
    (first,) = model.instances
    second, third = await model.load(STRINGS, contexts("second", "third"))
    assert model.instances == [first, second, third]
    for instance in model.instances:
        assert output(await say(instance, "hello")) == b"hello"
    await model.remove([first, third])
    assert model.instances == [second]
    assert not first.is_available
    assert output(await say(second, "hello")) == b"hello"
    await model.remove([second])
    (last,) = await model.load(STRINGS, contexts("last"))
    assert output(await say(last, "hello")) == b"hello"
    await model.close()


async def test_those_that_come_later_share_with_those_that_are_there(place):
    lab, backend = place
    model = await lab.load(backend, STRINGS)
    (first,) = model.instances
    await model.load(STRINGS, contexts("second"))
    assert output(await say(first, "meet first")) == b"first"
    await model.remove([first])
    (third,) = await model.load(STRINGS, contexts("third"))
    assert output(await say(third, "meet third")) == (b"third" if backend == "Processes" else b"first third")


async def test_versions_in_one_host_share_nothing_with_each_other(make_lab):
    async with make_lab(isolation="backend") as lab:
        one, other = [await lab.load("Misbehaving", STRINGS) for _ in range(2)]
        assert one.pids == other.pids
        assert output(await say(one.instances[0], "meet one")) == b"one"
        assert output(await say(other.instances[0], "meet other")) == b"other"


async def test_what_is_inside_an_instance_ends_before_it_leaves(place, tmp_path):
    lab, backend = place
    model = await lab.load(backend, STRINGS, instances=2)
    first, second = model.instances
    go_on = tmp_path / "go"
    batch = Batch(command(f"wait {go_on}"), rows=[1])
    first.execute(batch)
    removing = asyncio.create_task(model.remove([first]))
    assert output(await say(second, "hello")) == b"hello"
    assert not removing.done()
    assert not first.is_available
    go_on.touch()
    [[answer]] = await batch.ended()
    assert output(answer).startswith(b"wait ")
    await asyncio.wait_for(removing, 20)
    assert model.instances == [second]


async def test_closing_all_ends_the_waiting_for_one(place):
    lab, backend = place
    model = await lab.load(backend, STRINGS, instances=2)
    batch = Batch(command("hang"), rows=[1])
    model.instances[0].execute(batch)
    removing = asyncio.create_task(model.remove([model.instances[0]]))
    await asyncio.sleep(0)
    await asyncio.wait_for(model.close(0), 20)
    [[error]] = await batch.ended()
    assert isinstance(error, Unavailable)
    await asyncio.wait_for(removing, 20)


async def test_a_new_instance_that_fails_leaves_the_others(place):
    lab, backend = place
    model = await lab.load(backend, STRINGS)
    (first,) = model.instances
    pids = model.pids
    with pytest.raises(NaiadError, match="cannot open"):
        await model.load({**STRINGS, **parameters(fail="cannot open")}, contexts("a", "b"))
    assert (model.instances, model.pids) == ([first], pids)
    assert output(await say(first, "hello")) == b"hello"


async def test_processes_load_beside_each_other(lab, tmp_path):
    model = await lab.open("Meeting")
    await model.load({**STRINGS, **parameters(place=str(tmp_path), count="3")}, contexts("a", "b", "c"))
    assert [instance.name for instance in model.instances] == ["a", "b", "c"]
    assert len(model.pids) == 3


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"fail": "b"}, "b is broken"),
        ({"fail": "c a"}, "instance 'a': a is broken; instance 'c': c is broken"),
        ({"fail": "a b c", "text": "no weights"}, "no weights"),
    ],
)
async def test_all_instances_that_cannot_be_loaded_are_named_and_none_stays(lab, tmp_path, more, text):
    model = await lab.open("Meeting")
    with pytest.raises(InvalidArgument) as raised:
        await model.load({**STRINGS, **parameters(place=str(tmp_path), count="3", **more)}, contexts("a", "b", "c"))
    assert raised.value.message == text
    assert (model.instances, model.pids) == ([], [])


async def test_processes_load_one_after_the_other_where_that_is_wanted(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_PARALLEL_INSTANCE_LOADING", "0")
    model = await lab.open("Meeting")
    configuration = {**STRINGS, **parameters(place=str(tmp_path), count="1", fail="a")}
    with pytest.raises(InvalidArgument, match="a is broken"):
        await model.load(configuration, contexts("a", "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def test_a_process_of_its_own_ends_with_its_instance(lab):
    model = await lab.load("Processes", STRINGS, instances=2)
    first, second = model.pids
    await model.remove(model.instances[:1])
    assert not is_alive(first)
    assert model.pids == [second]


async def test_new_instances_share_the_process_of_the_others(lab):
    model = await lab.load("Misbehaving", STRINGS)
    pids = model.pids
    await model.load(STRINGS, contexts("second"))
    assert model.pids == pids
    assert is_alive(*pids)


async def test_a_host_that_dies_comes_back_with_the_instances_that_are_there_now(lab):
    model = await lab.load("Misbehaving", STRINGS, instances=3)
    first, second, third = model.instances
    await model.remove([second])
    (new,) = await model.load(STRINGS, contexts("new"))
    os.kill(*model.pids, signal.SIGKILL)
    await until(lambda: not first.is_available)
    for instance in first, third, new:
        await available(instance)
        assert output(await say(instance, "hello")) == b"hello"
    assert not second.is_available
    assert output(await say(first, "meet first")) == b"first"
    assert output(await say(new, "meet new")) == b"first new"
    assert model.restarts == 1
    # Once of the version, not of each of its parts.
    assert len([line for line in lab.logs if line[2] == "INFO" and "is running again" in line[3]]) == 1


async def test_a_host_that_has_gone_is_not_forgotten_by_the_count_of_restarts(make_lab):
    async with make_lab(restart_policy=quick_restarts) as lab:
        model = await lab.load("Processes", STRINGS, instances=2)
        first = model.instances[0]
        os.kill(model.pids[0], signal.SIGKILL)
        await until(lambda: not first.is_available)
        await available(first)
        assert model.restarts == 1
        await model.remove([first])
        assert model.restarts == 1


async def test_an_instance_that_leaves_is_closed(lab, tmp_path):
    trace = tmp_path / "trace"
    trace.touch()
    configuration = {**STRINGS, **parameters(trace=str(trace))}
    model = await lab.load("Closing", configuration, instances=2)
    await model.remove(model.instances[1:])
    await until(lambda: trace.read_text() == "m_0_1\n")
    await run(model.instances[0], command("x"), rows=[1])
    await model.close()
    assert trace.read_text() == "m_0_1\nm_0_0\n"


async def test_a_load_in_the_server_that_nobody_waits_for_ends_quietly(make_lab, tmp_path):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with make_lab(isolation="none") as lab:
        model = await lab.open("Patient")
        begun, go_on = tmp_path / "begun", tmp_path / "go"
        configuration = {**STRINGS, **parameters(begun=str(begun), go_on=str(go_on))}
        loading = asyncio.create_task(model.load(configuration, contexts("slow")))
        await until(begun.exists)
        loading.cancel()
        go_on.touch()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert model.instances == []
        await model.close()
    assert problems == []
