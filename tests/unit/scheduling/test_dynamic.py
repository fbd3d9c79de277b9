"""The dynamic scheduler over a fake instance: endings that no request of a server brings about on purpose."""

import asyncio
import gc
import time
import weakref

import pytest
from scheduling_fakes import FakeInstance, Lease, Meddler, Sink

from naiad.config.model_config import QueuePolicy
from naiad.errors import Cancelled, Internal, Unavailable
from naiad.instances.instance import ComputeTimes
from naiad.messages import InferRequest
from naiad.scheduling.dynamic import DynamicScheduler
from naiad.scheduling.queue import RequestQueue
from naiad.scheduling.scheduler import Call
from naiad.statistics import ModelStatistics


async def test_the_last_client_leaves_while_the_scheduler_closes_and_no_instance_is_up() -> None:
    instance, statistics = FakeInstance(), ModelStatistics("m", "1")
    instance.is_up = False
    reported: list[str] = []
    scheduler = DynamicScheduler(
        "m", RequestQueue(8), [instance], statistics, report=lambda text, error: reported.append(text)
    )
    sink, lease = Sink(), Lease(statistics)
    call = Call(InferRequest("m", ()), 1, None, sink, lease, scheduler)
    scheduler.submit(call)
    closing = asyncio.create_task(scheduler.close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not closing.done()
    call.cancel()
    await asyncio.wait_for(closing, 10)
    assert isinstance(sink.only, Cancelled)
    assert (lease.released, statistics.pending, scheduler.pending, reported) == (1, 0, 0, [])


async def test_a_server_that_is_about_to_end_refuses_everything() -> None:
    scheduler = DynamicScheduler("m", RequestQueue(8), [], ModelStatistics("m", "1"), report=lambda text, error: None)
    error = scheduler.stopped(InferRequest("m", (), id="x"))
    assert isinstance(error, Unavailable)
    assert error.message == (
        "[request id: x] Server is stopping, scheduler for model has stopped accepting new inference requests"
    )
    assert scheduler.sequences == 0


async def test_what_a_request_held_is_freed_with_its_answer_not_by_the_garbage_collector() -> None:
    instance, statistics = FakeInstance(), ModelStatistics("m", "1")
    scheduler = DynamicScheduler("m", RequestQueue(8), [instance], statistics, report=lambda text, error: None)
    sink = Sink()
    freed = weakref.ref(sink)
    gc.disable()
    try:
        scheduler.submit(Call(InferRequest("m", ()), 1, None, sink, Lease(statistics), scheduler))
        await asyncio.wait_for(instance.executed.wait(), 10)
        instance.answer()
        del sink
        assert freed() is None
    finally:
        gc.enable()
    await asyncio.wait_for(scheduler.close(), 10)


async def test_an_instance_that_is_retired_ends_its_batch_and_one_that_is_added_takes_the_next() -> None:
    old, new, statistics = FakeInstance("old"), FakeInstance("new"), ModelStatistics("m", "1")
    scheduler = DynamicScheduler("m", RequestQueue(0), [old], statistics, report=lambda text, error: None)

    def send() -> Call:
        call = Call(InferRequest("m", ()), 1, None, Sink(), Lease(statistics), scheduler)
        scheduler.submit(call)
        return call

    calls = [send(), send(), send()]
    await asyncio.wait_for(old.executed.wait(), 10)
    scheduler.add(new)
    assert scheduler.retire(old).is_set()
    await asyncio.wait_for(new.executed.wait(), 10)
    old.answer()
    new.answer()
    for _ in range(3):
        await asyncio.sleep(0)
    assert old.batch is None
    new.answer()
    assert all(call.ended for call in calls)
    await asyncio.wait_for(scheduler.close(), 10)


class Failing:
    def send(self, result: object, final: bool) -> None:
        raise RuntimeError("the client's trouble")


async def test_an_answer_that_cannot_be_passed_on_holds_up_none_that_follow_it_in_order() -> None:
    instances, statistics = [FakeInstance("a"), FakeInstance("b"), FakeInstance("c")], ModelStatistics("m", "1")
    reported: list[str] = []
    scheduler = DynamicScheduler(
        "m",
        RequestQueue(0),
        instances,
        statistics,
        preserve_ordering=True,
        report=lambda text, error: reported.append(text),
    )
    sinks = [Failing(), Failing(), Sink()]
    for sink in sinks:
        scheduler.submit(Call(InferRequest("m", ()), 1, None, sink, Lease(statistics), scheduler))
    for instance in instances:
        await asyncio.wait_for(instance.executed.wait(), 10)
    for instance in reversed(instances):
        instance.answer()
    assert len(sinks[2].results) == 1
    assert len(reported) == 2
    await asyncio.wait_for(scheduler.close(), 10)


@pytest.mark.parametrize("reason", ["timeout", "no instance"])
async def test_calls_that_are_refused_together_end_once_whichever_client_leaves_then(reason: str) -> None:
    instance, statistics = FakeInstance(), ModelStatistics("m", "1")
    instance.is_up = False
    policy = QueuePolicy(default_timeout_us=1)
    reported: list[str] = []
    scheduler = DynamicScheduler(
        "m",
        RequestQueue(8, default_policy=policy if reason == "timeout" else None),
        [instance],
        statistics,
        report=lambda text, error: reported.append(text),
    )
    sinks = [Meddler(), Sink(), Sink()]
    calls = [Call(InferRequest("m", ()), 1, None, sink, Lease(statistics), scheduler) for sink in sinks]
    sinks[0].other = calls[1]
    for call in calls:
        scheduler.submit(call)
    if reason == "no instance":
        instance.failure = "it has died too often"
    await asyncio.wait_for(scheduler.close(), 10)
    assert [type(sink.only) for sink in sinks] == [Unavailable] * 3
    assert (statistics.pending, reported) == (0, [])


async def test_a_model_without_instances_refuses_its_requests() -> None:
    statistics = ModelStatistics("m", "1")
    scheduler = DynamicScheduler("m", RequestQueue(0), [], statistics, report=lambda text, error: None)
    sink = Sink()
    scheduler.submit(Call(InferRequest("m", ()), 1, None, sink, Lease(statistics), scheduler))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert isinstance(sink.only, Unavailable)
    assert sink.only.message == "model 'm' is not available: all its instance groups are passive"
    await asyncio.wait_for(scheduler.close(), 10)


async def test_what_has_come_since_joins_a_batch_that_has_waited() -> None:
    instance, statistics = FakeInstance(), ModelStatistics("m", "1")
    scheduler = DynamicScheduler("m", RequestQueue(4), [instance], statistics, report=lambda text, error: None)
    sinks = [Sink() for _ in range(6)]

    def send(sink: Sink) -> None:
        scheduler.submit(Call(InferRequest("m", ()), 1, None, sink, Lease(statistics), scheduler))

    send(sinks[0])
    await asyncio.wait_for(instance.executed.wait(), 10)
    for sink in sinks[1:]:
        send(sink)
    batch = instance.batch
    assert batch is not None
    batch.extend()
    assert list(batch.rows) == [1, 1, 1, 1]
    assert (statistics.pending, scheduler.pending) == (2, 2)
    instance.answer()
    assert [bool(sink.results) for sink in sinks] == [True] * 4 + [False] * 2
    assert statistics.batches[4].compute_infer.count == 1
    await asyncio.sleep(0)
    instance.answer()
    await asyncio.wait_for(scheduler.close(), 10)


class Clients:
    """A scheduler of instances whose executions take long, and what is sent to it. They end at `end_ns`."""

    def __init__(self, *instances: FakeInstance, end_ns: int) -> None:
        self.instances = instances
        for instance in instances:
            instance.times = ComputeTimes(end_ns - 10**9, end_ns, end_ns, end_ns)
        self.statistics = ModelStatistics("m", "1")
        self.scheduler = DynamicScheduler(
            "m", RequestQueue(8), instances, self.statistics, report=lambda text, error: None
        )

    async def send(self, count: int) -> list[int]:
        """Sends so many requests; what each instance executes after that."""
        for _ in range(count):
            self.scheduler.submit(Call(InferRequest("m", ()), 1, None, Sink(), Lease(self.statistics), self.scheduler))
        return await self.executing()

    async def answer(self, instance: FakeInstance) -> list[int]:
        instance.answer()
        return await self.executing()

    async def executing(self) -> list[int]:
        for _ in range(3):
            await asyncio.sleep(0)
        return [0 if instance.batch is None else len(instance.batch.rows) for instance in self.instances]


def distant_ns() -> int:
    """An end of executions after which the time to wait for clients does not pass during a test."""
    return time.monotonic_ns() + 3600 * 10**9


async def test_a_batch_waits_for_the_clients_just_answered() -> None:
    instance = FakeInstance()
    clients = Clients(instance, end_ns=distant_ns())
    assert await clients.send(3) == [3]
    assert await clients.send(1) == [3]
    assert await clients.answer(instance) == [0]
    assert await clients.send(2) == [0]
    assert await clients.send(1) == [4]
    assert await clients.answer(instance) == [0]
    assert await clients.send(3) == [0]
    assert await clients.send(1) == [4]
    assert clients.statistics.batch_reasons == {"delay": 1, "returns": 2}
    instance.answer()
    await asyncio.wait_for(clients.scheduler.close(), 10)


async def test_a_batch_goes_without_clients_that_do_not_come_back() -> None:
    instance = FakeInstance()
    clients = Clients(instance, end_ns=time.monotonic_ns())
    assert await clients.send(3) == [3]
    assert await clients.send(1) == [3]
    instance.times = ComputeTimes(0, 0, 0, time.monotonic_ns())
    instance.executed.clear()
    instance.answer()
    await asyncio.wait_for(instance.executed.wait(), 10)
    assert await clients.executing() == [1]
    instance.answer()
    await asyncio.wait_for(clients.scheduler.close(), 10)


async def test_where_another_instance_is_idle_no_batch_waits_for_clients() -> None:
    one, other = FakeInstance("one"), FakeInstance("other")
    clients = Clients(one, other, end_ns=distant_ns())
    assert await clients.send(3) == [3, 0]
    assert await clients.send(3) == [3, 3]
    assert await clients.send(1) == [3, 3]
    assert await clients.answer(one) == [0, 3]
    assert await clients.answer(other) == [1, 0]
    one.answer()
    await asyncio.wait_for(clients.scheduler.close(), 10)


async def test_processes_take_turns() -> None:
    one, other = FakeInstance("one"), FakeInstance("other")
    clients = Clients(one, other, end_ns=0)
    for _ in range(2):
        assert await clients.send(1) == [1, 0]
        assert await clients.answer(one) == [0, 0]
        assert await clients.send(1) == [0, 1]
        assert await clients.answer(other) == [0, 0]
    await asyncio.wait_for(clients.scheduler.close(), 10)


async def test_of_threads_of_a_host_the_one_that_executed_last_is_the_first_to_be_used() -> None:
    one, other = FakeInstance("one"), FakeInstance("other")
    one.place = other.place = "host"
    clients = Clients(one, other, end_ns=0)
    for _ in range(3):
        assert await clients.send(1) == [1, 0]
        assert await clients.answer(one) == [0, 0]
    assert await clients.send(1) == [1, 0]
    assert await clients.send(1) == [1, 1]
    for _ in range(3):
        assert await clients.answer(other) == [1, 0]
        assert await clients.send(1) == [1, 1]
    assert await clients.answer(other) == [1, 0]
    assert await clients.answer(one) == [0, 0]
    # One that fails does not get all that comes, and one that is retired gets nothing.
    for _ in range(2):
        assert await clients.send(1) == [1, 0]
        batch, one.batch = one.batch, None
        assert batch is not None
        batch.deliver(0, Internal("failed"), True)
        batch.complete(one.times, succeeded=False)
    assert await clients.send(1) == [0, 1]
    assert await clients.answer(other) == [0, 0]
    assert await clients.send(1) == [0, 1]
    clients.scheduler.retire(other)
    for _ in range(2):
        assert await clients.answer(other if other.batch else one) == [0, 0]
        assert await clients.send(1) == [1, 0]
    # One on another device, say: they take turns from now on.
    clients.scheduler.add(other)
    other.place = "elsewhere"
    clients.scheduler.add(third := FakeInstance("third"))
    assert await clients.answer(one) == [0, 0]
    seen = []
    for _ in range(3):
        await clients.send(1)
        [executing] = [instance for instance in (one, other, third) if instance.batch]
        seen.append(executing.name)
        await clients.answer(executing)
    assert sorted(seen) == ["one", "other", "third"]
    await asyncio.wait_for(clients.scheduler.close(), 10)


async def test_a_scheduler_that_closes_waits_for_no_clients() -> None:
    instance = FakeInstance()
    clients = Clients(instance, end_ns=distant_ns())
    assert await clients.send(3) == [3]
    assert await clients.send(1) == [3]
    assert await clients.answer(instance) == [0]
    closing = asyncio.create_task(clients.scheduler.close())
    assert await clients.executing() == [1]
    instance.answer()
    await asyncio.wait_for(closing, 10)


async def test_no_clients_are_waited_for_after_a_short_execution() -> None:
    instance = FakeInstance()
    end_ns = distant_ns()
    clients = Clients(instance, end_ns=end_ns)
    instance.times = ComputeTimes(end_ns - 19_999_999, end_ns, end_ns, end_ns)
    assert await clients.send(3) == [3]
    assert await clients.send(1) == [3]
    assert await clients.answer(instance) == [1]
    instance.answer()
    await asyncio.wait_for(clients.scheduler.close(), 10)
