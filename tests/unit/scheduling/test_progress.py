"""What calls note of their progress for those who want to know."""

import asyncio
import time

from scheduling_fakes import TIMES, FakeInstance, Lease, Sink
from test_cache import Bench, request
from test_sequence import Lab, config

from naiad.instances.instance import ComputeTimes
from naiad.messages import InferRequest
from naiad.scheduling.dynamic import DynamicScheduler
from naiad.scheduling.queue import RequestQueue
from naiad.scheduling.scheduler import Call, Progress
from naiad.statistics import ModelStatistics


async def test_of_a_batch_those_are_noted_that_ask_for_it():
    instance, statistics = FakeInstance(), ModelStatistics("m", "1")
    scheduler = DynamicScheduler("m", RequestQueue(8), [instance], statistics, report=lambda text, error: None)
    asked = [None, Progress(0), None, Progress(0)]
    before_ns = time.monotonic_ns()
    for progress in asked:
        scheduler.submit(Call(InferRequest("m", ()), 1, None, Sink(), Lease(statistics), scheduler, progress))
    await asyncio.wait_for(instance.executed.wait(), 10)
    noted = [progress for progress in asked if progress is not None]
    assert all(before_ns <= progress.executing_ns <= time.monotonic_ns() for progress in noted)
    assert [(progress.start_ns, progress.end_ns) for progress in noted] == [(0, 0), (0, 0)]
    instance.answer()
    assert [(progress.start_ns, progress.end_ns) for progress in noted] == [(TIMES.start_ns, TIMES.end_ns)] * 2


async def test_what_is_run_again_begins_with_its_first_execution_and_ends_with_its_last():
    lab = Lab(config("iterative_sequence: true"))
    call = await lab.send(1, "s")
    call.progress = progress = Progress(0)
    batch, lab.instance.batch = lab.instance.batch, None
    batch.reschedule(0)
    batch.complete(ComputeTimes(10, 11, 12, 13))
    await lab.settle()
    executing_ns = progress.executing_ns
    assert executing_ns
    batch, lab.instance.batch = lab.instance.batch, None
    batch.deliver(0, None, True)
    batch.complete(ComputeTimes(20, 21, 22, 23))
    assert (progress.start_ns, progress.end_ns, progress.executing_ns) == (10, 23, executing_ns)


def test_an_execution_that_calls_share_is_noted_for_the_first_one():
    bench = Bench()
    progress = Progress(0)
    bench.lease.lease()
    first = Call(request(), 1, None, Sink(), bench.lease, bench.cache, progress)
    bench.cache.submit(first)
    assert bench.inner.calls[0].progress is progress
