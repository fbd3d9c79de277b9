"""Who may execute under --rate-limit=execution_count, as tables; and that held batches lose nothing."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.backends.api import InstanceContext
from naiad.config.model_config import InstanceGroup, Resource
from naiad.errors import InvalidArgument, Unavailable
from naiad.options import RateLimitResource
from naiad.scheduling.rate_limit import Claim, LimitedInstance, NoLimiter, RateLimiter, Resources, claim_of

R = (None, "R")


def given_some(*claims: Claim, explicit: tuple[RateLimitResource, ...] = ()) -> Resources:
    resources = Resources(explicit)
    resources.add(claims)
    return resources


# ---------------------------------------------------------------- how much there is


@pytest.mark.parametrize(
    ("needs", "explicit", "refusal"),
    [
        ([{R: 3}, {R: 2}], [], None),
        ([{R: 3}], [("R", 3, None)], None),
        ([{R: 3}], [("R", 3, 5)], None),  # of a global resource, any line counts
        ([{(0, "R"): 3}], [("R", 1, 0), ("R", 3, None)], None),
        ([{(0, "R"): 3}], [("R", 3, 1)], 'Resource count for "R" is limited to 0 .* minimum required count is 3'),
        ([{R: 3}], [("R", 2, None)], 'Resource count for "R" is limited to 2 .* minimum required count is 3'),
        ([{R: 1}], [("S", 2, None)], 'Resource count for "R" is limited to 0 .* minimum required count is 1'),
        ([{R: 1}, {(0, "R"): 1}], [], 'Resource "R" is present as both global and device-specific resource in the'),
        ([{}], [("R", 1, None)], None),
    ],
)
def test_claims_that_can_never_be_met_are_refused(needs, explicit, refusal) -> None:
    resources = Resources([RateLimitResource(*line) for line in explicit])
    claims = [Claim(each) for each in needs]
    if refusal is None:
        resources.add(claims)
    else:
        with pytest.raises(InvalidArgument, match=refusal):
            resources.add(claims)
        resources.want(other := Claim({}))
        assert resources.grant() == [other]


def test_what_a_refused_model_asked_for_changes_nothing() -> None:
    one, other = Claim({R: 1}), Claim({R: 1})
    resources = given_some(one, other)
    with pytest.raises(InvalidArgument):
        resources.add([Claim({R: 5, (0, "R"): 1})])
    resources.want(one)
    resources.want(other)
    assert resources.grant() == [one]


def test_the_most_demanding_instance_says_how_much_there_is_until_it_goes() -> None:
    small, other, big = Claim({R: 1}), Claim({R: 1}), Claim({R: 2})
    resources = given_some(small, other, big)
    resources.want(small)
    resources.want(other)
    assert resources.grant() == [small, other]
    resources.release(small)
    resources.release(other)
    resources.remove([big])
    resources.want(small)
    resources.want(other)
    assert resources.grant() == [small]


# ---------------------------------------------------------------- who is next


def test_resources_of_devices_are_not_shared() -> None:
    group = InstanceGroup("g", "KIND_GPU", 1, resources=(Resource("R", 1),))
    one, other = (claim_of(group, InstanceContext("g", "KIND_GPU", device)) for device in (0, 1))
    resources = given_some(one, other)
    resources.want(one)
    resources.want(other)
    assert resources.grant() == [one, other]
    everywhere = InstanceGroup("g", "KIND_GPU", 1, resources=(Resource("S", 1, is_global=True),), priority=3)
    assert claim_of(everywhere, InstanceContext("g", "KIND_GPU", 1)).needs == {(None, "S"): 1}
    assert claim_of(everywhere, InstanceContext("g", "KIND_GPU", 1)).priority == 3


def test_nobody_overtakes_one_that_waits_for_the_same() -> None:
    small, other, big, free = Claim({R: 1}), Claim({R: 1}), Claim({R: 2}), Claim({(0, "S"): 1})
    resources = given_some(small, other, big, free)
    resources.want(small)
    assert resources.grant() == [small]
    for claim in (big, other, free):
        resources.want(claim)
    assert resources.grant() == [free]
    resources.release(small)
    assert resources.grant() == [big]
    resources.release(big)
    assert resources.grant() == [other]


@pytest.mark.parametrize("priorities", [(1, 2), (1, 1), (1, 3), (2, 2, 4)])
def test_priorities_are_shares(priorities) -> None:
    claims = [Claim({R: 1}, priority) for priority in priorities]
    resources = given_some(*claims)
    for claim in claims:
        resources.want(claim)
    turns: Counter[Claim] = Counter()
    for _ in range(240):
        (claim,) = resources.grant()
        turns[claim] += 1
        resources.release(claim)
        resources.want(claim)
    shares = [turns[claim] * claim.priority for claim in claims]
    assert max(shares) - min(shares) <= 2 * max(priorities)


def test_the_more_important_comes_first() -> None:
    important, other = Claim({R: 1}, 1), Claim({R: 1}, 2)
    resources = given_some(important, other)
    order = []
    for claim in (other, important):
        resources.want(claim)
    for _ in range(9):
        (claim,) = resources.grant()
        order.append("other" if claim is other else "important")
        resources.release(claim)
        resources.want(claim)
    assert order == ["important", "important", "other"] * 3


def test_rest_is_not_saved_up() -> None:
    busy, late = Claim({R: 1}), Claim({R: 1})
    resources = given_some(busy, late)
    for _ in range(100):
        resources.want(busy)
        assert resources.grant() == [busy]
        resources.release(busy)
    turns = []
    resources.want(late)
    resources.want(busy)
    for _ in range(6):
        (claim,) = resources.grant()
        turns.append(claim)
        resources.release(claim)
        resources.want(claim)
    assert turns.count(late) == 3


def test_who_withdraws_makes_way() -> None:
    holder, big, small = Claim({R: 1}), Claim({R: 2}), Claim({R: 1})
    resources = given_some(holder, big, small)
    resources.want(holder)
    resources.grant()
    resources.want(big)
    resources.want(small)
    assert resources.grant() == []
    resources.withdraw(big)
    assert resources.grant() == [small]


@given(
    needs=st.lists(st.dictionaries(st.sampled_from("RST"), st.integers(1, 4)), min_size=1, max_size=6),
    steps=st.lists(st.integers(0, 5), max_size=60),
)
def test_never_too_much_is_given_and_everybody_comes_to_their_turn(needs, steps) -> None:
    claims = [Claim({(None, name): count for name, count in each.items()}) for each in needs]
    limits = {name: max(each.get(name, 0) for each in needs) for name in "RST"}
    resources = given_some(*claims)
    idle, waiting, running = list(claims), [], []

    def grant() -> None:
        for claim in resources.grant():
            waiting.remove(claim)
            running.append(claim)
        for name, limit in limits.items():
            assert sum(claim.needs.get((None, name), 0) for claim in running) <= limit

    for step in steps:
        if step % 2 and running:
            claim = running.pop(step % len(running))
            idle.append(claim)
            resources.release(claim)
        elif idle:
            claim = idle.pop(step % len(idle))
            waiting.append(claim)
            resources.want(claim)
        grant()
    while running or waiting:
        assert running, "somebody waits for ever"
        resources.release(running.pop())
        grant()


# ---------------------------------------------------------------- instances


@dataclass(eq=False)
class FakeInstance:
    name: str = "i"
    losses: int = 0
    place: str = ""
    is_available: bool = True
    failure: str | None = None
    batches: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)

    def execute(self, batch) -> None:
        assert self.is_available
        self.is_available = False
        self.batches.append(batch)

    def cancel(self, batch, index) -> None:
        self.cancelled.append((batch, index))

    def finish(self) -> None:
        self.is_available = True
        batch = self.batches.pop(0)
        for index in range(len(batch.requests)):
            batch.deliver(index, "answer", True)
        batch.complete("times")


class FakeBatch:
    def __init__(self, size: int = 1) -> None:
        self.requests = [SimpleNamespace()] * size
        self.rows = [1] * size
        #: Requests that wait to join it.
        self.coming = 1
        self.results: list = []
        self.completions: list = []
        self.again: list = []

    def deliver(self, index, result, final) -> None:
        self.results.append((index, result, final))

    def complete(self, times, succeeded=True) -> None:
        self.completions.append((times, succeeded))

    def extend(self) -> None:
        self.requests = [*self.requests, *[SimpleNamespace()] * self.coming]
        self.rows = [1] * len(self.requests)
        self.coming = 0

    def reschedule(self, index) -> None:
        self.again.append(index)


def limited(*needs, explicit=(), priorities=()):
    limiter = RateLimiter(explicit)
    below = [FakeInstance(f"i{number}") for number in range(len(needs))]
    groups = [
        InstanceGroup("g", "KIND_CPU", 1, resources=(Resource("R", each),), priority=priority)
        for each, priority in itertools.zip_longest(needs, priorities, fillvalue=1)
    ]
    claims = limiter.admit([(group, InstanceContext("g", "KIND_CPU")) for group in groups])
    above = limiter.limited(below, claims)
    changes = []
    for instance in above:
        instance.on_change = lambda instance=instance: changes.append(instance.name)
    return SimpleNamespace(limiter=limiter, claims=claims, below=below, above=above, changes=changes)


async def test_an_instance_holds_its_batch_until_the_other_has_finished() -> None:
    it = limited(1, 1)
    first, second = FakeBatch(), FakeBatch(2)
    it.above[0].execute(first)
    it.above[1].execute(second)
    assert not it.above[0].is_available
    assert not it.above[1].is_available
    assert len(it.below[0].batches) == 1
    assert it.below[1].batches == []
    it.below[0].finish()
    await asyncio.sleep(0)
    assert first.results == [(0, "answer", True)]
    assert first.completions == [("times", True)]
    assert it.above[0].is_available
    assert "i0" in it.changes
    assert len(it.below[1].batches[0].rows) == 3  # with what has come since
    it.below[1].finish()
    assert [index for index, _, _ in second.results] == [0, 1, 2]


async def test_who_has_finished_takes_its_place_before_the_next_is_chosen() -> None:
    # Otherwise two that always want more take turns, whatever their priorities.
    it = limited(1, 1, priorities=(1, 2))
    executed = [0, 0]

    def begin(number: int) -> None:
        if it.above[number].is_available:
            it.above[number].execute(FakeBatch())

    for number, instance in enumerate(it.above):
        instance.on_change = lambda number=number: asyncio.get_running_loop().call_soon(begin, number)
        instance.on_change()
    for _ in range(60):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (running,) = [number for number, below in enumerate(it.below) if below.batches]
        executed[running] += 1
        it.below[running].finish()
    assert executed == [40, 20]


async def test_a_batch_that_has_waited_is_extended() -> None:
    it = limited(1, 1)
    first, second = FakeBatch(), FakeBatch()
    it.above[0].execute(first)
    it.above[1].execute(second)
    it.below[0].finish()
    await asyncio.sleep(0)
    assert [len(batch.requests) for batch in (first, second)] == [1, 2]
    assert len(it.below[1].batches[0].requests) == 2


async def test_a_batch_that_waits_is_extended_before_who_has_finished_takes_more() -> None:
    it = limited(1, 1)
    first, second = FakeBatch(), FakeBatch()
    it.above[0].execute(first)
    it.above[1].execute(second)
    sizes = []
    it.above[0].on_change = lambda: sizes.append(len(second.requests))
    it.below[0].finish()
    assert sizes == [2]
    second.coming = 1
    await asyncio.sleep(0)
    assert len(it.below[1].batches[0].requests) == 3


async def test_cancelling_reaches_what_executes_and_what_still_answers() -> None:
    it = limited(1, 1)
    first, second = FakeBatch(), FakeBatch()
    it.above[0].execute(first)
    it.above[1].execute(second)
    it.above[0].cancel(first, 0)
    it.above[1].cancel(second, 0)
    (running,) = it.below[0].batches
    assert it.below[0].cancelled == [(running, 0)]
    assert it.below[1].cancelled == []
    # A decoupled model ends its execution first.
    it.below[0].is_available = True
    running.complete("times")
    it.above[0].cancel(first, 0)
    assert len(it.below[0].cancelled) == 2
    running.deliver(0, None, True)
    it.above[0].cancel(first, 0)
    assert len(it.below[0].cancelled) == 2


async def test_a_request_given_back_is_passed_on() -> None:
    it = limited(1)
    it.above[0].execute(batch := FakeBatch())
    (running,) = it.below[0].batches
    running.reschedule(0)
    running.complete("times", False)
    assert batch.again == [0]
    assert batch.completions == [("times", False)]


@pytest.mark.parametrize("given_up", [True, False])
async def test_what_waits_in_an_instance_goes_with_its_process(given_up) -> None:
    it = limited(1, 1, 1)
    batches = [FakeBatch(), FakeBatch(2), FakeBatch()]
    for instance, batch in zip(it.above, batches, strict=True):
        instance.execute(batch)
    lost = it.below[1]
    lost.losses += 1
    lost.failure = "it crashes" if given_up else None
    lost.on_change()
    assert it.above[1].losses == 1
    assert it.above[1].failure == lost.failure
    errors = [error for _, error, _ in batches[1].results]
    assert [type(error) for error in errors] == [Unavailable] * 2
    why = "it crashes" if given_up else "its host process has ended"
    assert errors[0].message == f"instance 'i1' is not available: {why}"
    assert batches[1].completions == [(None, True)]
    it.below[0].finish()
    await asyncio.sleep(0)
    assert len(it.below[2].batches) == 1


async def test_a_process_lost_unnoticed_gives_its_resources_to_the_next() -> None:
    it = limited(1, 1, 1)
    batches = [FakeBatch(), FakeBatch(), FakeBatch()]
    for instance, batch in zip(it.above, batches, strict=True):
        instance.execute(batch)
    it.below[1].losses += 1
    it.below[0].finish()
    await asyncio.sleep(0)
    assert isinstance(batches[1].results[0][1], Unavailable)
    await asyncio.sleep(0)
    assert len(it.below[2].batches) == 1


async def test_a_version_that_leaves_takes_what_waits_in_it_along() -> None:
    it = limited(1, 1)
    first, second = FakeBatch(), FakeBatch()
    it.above[0].execute(first)
    it.above[1].execute(second)
    it.limiter.leave(it.claims[1:])
    assert isinstance(second.results[0][1], Unavailable)
    it.below[0].finish()
    await asyncio.sleep(0)
    assert it.below[1].batches == []


def test_what_an_instance_that_has_left_claimed_is_forgotten() -> None:
    limiter = RateLimiter()
    placed = [(InstanceGroup("g", "KIND_CPU", 1, resources=(Resource("R", 2),)), InstanceContext("g", "KIND_CPU"))]
    limiter.leave(limiter.admit(placed))
    as_global = [(InstanceGroup("g", "KIND_CPU", 1, resources=(Resource("R", 1, is_global=True),)), placed[0][1])]
    limiter.admit(as_global)  # No device-specific one is left.
    with pytest.raises(InvalidArgument):
        limiter.admit(placed)


async def test_an_instance_that_leaves_hands_over_what_waits_in_it() -> None:
    it = limited(1, 1)
    for instance in it.above:
        instance.execute(FakeBatch())
    await it.limiter.handed_over(it.claims[0])
    handed_over = asyncio.create_task(it.limiter.handed_over(it.claims[1]))
    await asyncio.sleep(0)
    assert not handed_over.done()
    it.below[0].finish()
    await asyncio.wait_for(handed_over, 10)
    assert len(it.below[1].batches) == 1


def test_without_the_option_nothing_is_wrapped() -> None:
    off = NoLimiter()
    instances = [FakeInstance()]
    claims = off.admit([(InstanceGroup("g", "KIND_CPU", 1), InstanceContext("g", "KIND_CPU"))])
    assert len(claims) == 1
    assert off.limited(instances, claims) is instances
    off.leave(claims)
    assert isinstance(limited(1).above[0], LimitedInstance)
