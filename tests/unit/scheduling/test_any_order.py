"""Any events in any order: whatever comes, goes, dies and is cancelled, every call ends once and nothing is left."""

import asyncio
import random
import time
from typing import Any

import pytest
from scheduling_fakes import TIMES, FakeInstance, Meddler, Sink

from naiad.backends.api import InstanceContext
from naiad.config.model_config import InstanceGroup, ModelConfig, Resource
from naiad.config.parse import parse_text
from naiad.datatypes import DataType
from naiad.errors import NaiadError
from naiad.instances.instance import ComputeTimes
from naiad.messages import InferRequest, InferResponse, SequenceControl, Tensor
from naiad.models.loader import queue_for
from naiad.scheduling.cache import CachingScheduler, LocalStore
from naiad.scheduling.dynamic import DynamicScheduler
from naiad.scheduling.rate_limit import Claim, RateLimiter
from naiad.scheduling.scheduler import Call
from naiad.scheduling.sequence import SequenceScheduler
from naiad.statistics import ModelStatistics

SCHEDULING = {
    "plain": "",
    "dynamic": "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 100 }",
    "ordered": "dynamic_batching { preserve_ordering: true }",
    "priorities": "dynamic_batching { priority_levels: 2 default_priority_level: 1 default_queue_policy { "
    "timeout_action: DELAY default_timeout_microseconds: 1 allow_timeout_override: true max_queue_size: 3 } }",
    "cached": "dynamic_batching { }",
    "returns": "dynamic_batching { }",
    "direct": "sequence_batching { direct { } }",
    "oldest": "sequence_batching { oldest { max_candidate_sequences: 2 } }",
    "iterative": "sequence_batching { iterative_sequence: true }",
}
STORIES, EVENTS_OF_A_STORY = 200, 60
EVENTS = (
    *("submit", "submit", "submit", "cancel", "answer", "answer", "reschedule", "turn"),
    *("die", "revive", "give up", "add", "retire"),
)


class Lease:
    def __init__(self) -> None:
        self.statistics = ModelStatistics("m", "1")
        self.held = 0

    def lease(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1


class Story:
    """A scheduler with instances that come and go, and the calls it has been given."""

    def __init__(self, kind: str, limited: bool) -> None:
        text = f'name: "m" backend: "b" max_batch_size: 2 {SCHEDULING[kind]} '
        tensor = "data_type: TYPE_INT8 dims: [ 1 ]"
        config = ModelConfig(parse_text(f'{text} input {{ name: "I" {tensor} }} output {{ name: "O" {tensor} }}'))
        self.is_iterative = kind == "iterative"
        self.waits_for_clients = kind == "returns"
        self.is_sequence = config.scheduling == "sequence"
        self.lease = Lease()
        self.limiter = RateLimiter() if limited else None
        #: All instances, as the scheduler sees them; those that are not retired.
        self.above: dict[FakeInstance, Any] = {}
        self.below: list[FakeInstance] = []
        self.claims: dict[FakeInstance, Claim] = {}
        self.leaving: list[asyncio.Task[None]] = []
        self.calls: list[Call] = []
        self.problems: list[str] = []
        first = [self.new_instance() for _ in range(2)]
        statistics = self.lease.statistics
        if self.is_sequence:
            self.turns: Any = SequenceScheduler(
                config, first, statistics, initial_states={}, report=self.report, warn=lambda text: None
            )
        else:
            ordered = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
            self.turns = DynamicScheduler(
                "m", queue_for(config), first, statistics, preserve_ordering=ordered, report=self.report
            )
        self.scheduler = self.turns
        if kind == "cached":
            self.scheduler = CachingScheduler(self.turns, LocalStore(2000), 1, statistics, self.report)

    def report(self, text: str, error: BaseException) -> None:
        if not isinstance(error, OSError):
            self.problems.append(f"{text}: {error!r}")

    def new_instance(self) -> Any:
        instance = FakeInstance(f"i{len(self.above)}")
        if self.waits_for_clients:
            instance.times = ComputeTimes(0, 0, 0, time.monotonic_ns() + 3600 * 10**9)
        self.below.append(instance)
        self.above[instance] = instance
        if self.limiter is not None:
            group = InstanceGroup(instance.name, "KIND_CPU", 1, resources=(Resource("R", 1),))
            (claim,) = self.limiter.admit([(group, InstanceContext(instance.name, "KIND_CPU"))])
            (self.above[instance],) = self.limiter.limited([instance], [claim])  # type: ignore[list-item]
            self.claims[instance] = claim
        return self.above[instance]

    def submit(self, number: int) -> None:
        key, start, end, value = number % 3 + 1, number & 4 == 0, number & 8 == 0, number % 2
        request = InferRequest(
            "m",
            (Tensor("I", DataType.INT8, (1, 1), bytes([value])),),
            sequence=None if self.is_iterative else SequenceControl(key, start, end),
            priority=key,
            timeout_us=number % 4,
        )
        sink = Meddler(self.calls[number % len(self.calls)], number == 31) if self.calls and number > 27 else Sink()
        call = Call(request, 1, None, sink, self.lease, self.scheduler)
        self.lease.lease()
        try:
            self.scheduler.submit(call)
        except NaiadError:
            self.lease.release()
        else:
            self.calls.append(call)

    def happen(self, event: str, number: int) -> None:
        instances = list(self.above)
        instance = instances[number % len(instances)]
        if event == "submit":
            self.submit(number)
        elif event == "cancel" and self.calls:
            self.calls[number % len(self.calls)].cancel()
        elif event == "answer" and instance.batch is not None:
            instance.answer()
        elif event == "reschedule" and instance.batch is not None and self.is_iterative:
            batch, instance.batch = instance.batch, None
            for index in range(len(batch.requests)):
                batch.reschedule(index)
            batch.complete(TIMES)
            instance.on_change()
        elif event == "die":
            instance.die()
        elif event == "revive" and not instance.is_up and instance.failure is None:
            instance.revive()
        elif event == "give up" and not instance.is_up:
            instance.failure = "it has died too often"
            instance.on_change()
        elif event == "add" and len(self.below) < 4:
            self.turns.add(self.new_instance())
        elif event == "retire" and len(self.below) > 1:
            instance = self.below.pop(0)
            gone = self.turns.retire(self.above[instance])
            self.leaving.append(asyncio.get_running_loop().create_task(self.leave(instance, gone)))

    async def leave(self, instance: FakeInstance, gone: asyncio.Event) -> None:
        await gone.wait()
        if self.limiter is not None:
            await self.limiter.handed_over(self.claims[instance])
        while instance.batch is not None:  # noqa: ASYNC110 - a turn of the story
            await asyncio.sleep(0)
        instance.failure = "it has been unloaded"
        instance.die()
        if self.limiter is not None:
            self.limiter.leave([self.claims[instance]])

    async def end(self) -> None:
        """Lets everything run out."""
        closing = asyncio.ensure_future(self.scheduler.close())
        while not closing.done():
            await asyncio.sleep(0)
            for instance in list(self.above):
                if not instance.is_up and instance.failure is None:
                    instance.revive()
                if instance.batch is not None:
                    instance.answer()
        await closing
        if not self.is_sequence:
            await asyncio.gather(*self.leaving)
        for task in self.leaving:
            # Instances keep sequences that rest.
            task.cancel()


async def tell(kind: str, limited: bool, events: list[tuple[str, int]]) -> None:
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    story = Story(kind, limited)
    for event, number in events:
        if event == "turn":
            await asyncio.sleep(0)
        else:
            story.happen(event, number)
    async with asyncio.timeout(20):
        await story.end()
    assert not failures
    assert not story.problems
    assert [len(call.sink.results) for call in story.calls] == [1] * len(story.calls)  # type: ignore[attr-defined]
    assert story.lease.held == 0
    assert (story.lease.statistics.pending, story.scheduler.pending) == (0, 0)
    for call in story.calls:
        assert isinstance(call.sink.only, InferResponse | NaiadError)  # type: ignore[attr-defined]


@pytest.mark.parametrize("limited", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("kind", SCHEDULING)
def test_every_call_ends_once(kind: str, limited: bool) -> None:
    for seed in range(STORIES):
        chance = random.Random(seed)
        events = [(chance.choice(EVENTS), chance.randrange(32)) for _ in range(EVENTS_OF_A_STORY)]
        try:
            asyncio.run(tell(kind, limited, events))
        except BaseException as error:
            error.add_note(f"in story {seed}")
            raise
