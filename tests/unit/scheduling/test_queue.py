"""The request queue as tables, and its one law: every call put in comes out exactly once."""

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.config.model_config import QueuePolicy
from naiad.errors import Unavailable
from naiad.messages import InferRequest
from naiad.scheduling.queue import Batch, Empty, RequestQueue, WaitUntil

US = 1000


@dataclass(eq=False)
class FakeCall:
    request: InferRequest = field(default_factory=lambda: InferRequest("m", ()))
    rows: int = 1
    signature: object = None
    queued_ns: int = 0
    level: int = 0
    deadline_ns: int = 0
    ended: bool = False


def filled(queue: RequestQueue, calls: list[FakeCall]) -> RequestQueue:
    for call in calls:
        queue.put(call, call.queued_ns)
    return queue


def rows_of(decision: object) -> list[int]:
    assert isinstance(decision, Batch), decision
    assert decision.rows == sum(call.rows for call in decision.calls)
    return [call.rows for call in decision.calls]


def test_an_empty_queue_says_so() -> None:
    assert RequestQueue(8).take(0) == Empty()


@pytest.mark.parametrize(
    ("waiting", "taken"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([4, 4, 4], [4, 4]),
        ([3, 3, 3, 1], [3, 3]),
        ([8, 1], [8]),
        ([1, 8, 1], [1]),
    ],
    ids=["all that fit", "to the brim", "no call is skipped for a smaller one", "a full call alone", "order is kept"],
)
def test_without_a_delay_whatever_waits_is_sent(waiting: list[int], taken: list[int]) -> None:
    queue = filled(RequestQueue(8), [FakeCall(rows=rows) for rows in waiting])
    assert rows_of(queue.take(0)) == taken
    assert len(queue) == len(waiting) - len(taken)


@pytest.mark.parametrize(
    ("waiting", "preferred", "taken"),
    [
        ([1] * 7, (4,), [1] * 4),
        ([1] * 7, (2, 4), [1] * 4),
        ([1] * 3, (4,), [1] * 3),
        ([3, 3], (4,), [3]),
        ([2, 2, 2], (2,), [2]),
        ([3, 2, 3], (4, 6), [3, 2]),
    ],
)
def test_the_largest_preferred_size_on_the_way_wins(
    waiting: list[int], preferred: tuple[int, ...], taken: list[int]
) -> None:
    queue = filled(RequestQueue(8, preferred=preferred), [FakeCall(rows=rows) for rows in waiting])
    assert rows_of(queue.take(0)) == taken


def test_an_incomplete_batch_waits_for_the_delay_of_its_oldest_call() -> None:
    queue = filled(RequestQueue(8, max_delay_ns=100), [FakeCall(queued_ns=10), FakeCall(queued_ns=50)])
    assert queue.take(60) == WaitUntil(110)
    assert rows_of(queue.take(110)) == [1, 1]


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    queue = filled(RequestQueue(8, max_delay_ns=100), [FakeCall(rows=5), FakeCall(rows=5)])
    assert rows_of(queue.take(0)) == [5]


@pytest.mark.parametrize(
    ("waiting", "taken"),
    [([7], [7]), ([6, 1], [6]), ([3, 4], [3]), ([1, 2], [1, 2]), ([1, 2, 5], [1, 2]), ([1, 6], [1])],
    ids=["larger than preferred", "preferred", "past it", "not yet", "not yet, then past it", "past it, from one"],
)
def test_what_cannot_become_a_preferred_size_does_not_wait(waiting: list[int], taken: list[int]) -> None:
    queue = filled(RequestQueue(8, preferred=(2, 6), max_delay_ns=100), [FakeCall(rows=rows) for rows in waiting])
    if sum(waiting) < 6:
        assert queue.take(99) == WaitUntil(100)
        assert rows_of(queue.take(100)) == taken
    else:
        assert rows_of(queue.take(0)) == taken


def test_after_the_delay_everything_is_sent_whatever_is_preferred() -> None:
    queue = filled(RequestQueue(8, preferred=(2, 6), max_delay_ns=100), [FakeCall() for _ in range(5)])
    assert rows_of(queue.take(100)) == [1] * 5


@pytest.mark.parametrize(
    ("rows", "preferred", "waiting", "joining"),
    [
        (1, (), [3, 3, 2], [3, 3]),
        (8, (), [1], []),
        (1, (2, 4), [1, 1, 1, 1], [1, 1, 1]),
        (3, (2, 4), [2], []),
        (2, (2, 6), [1, 1, 1], []),
        (2, (2, 6), [3, 1, 1], [3, 1]),
    ],
)
def test_what_joins_a_batch_that_has_waited(
    rows: int, preferred: tuple[int, ...], waiting: list[int], joining: list[int]
) -> None:
    queue = filled(RequestQueue(8, preferred=preferred), [FakeCall(rows=rows) for rows in waiting])
    assert [call.rows for call in queue.more(FakeCall(rows=rows), rows)] == joining
    assert len(queue) == len(waiting) - len(joining)


def test_only_equal_signatures_join_a_batch_that_has_waited() -> None:
    queue = filled(RequestQueue(8), [FakeCall(signature=(3,)), FakeCall(signature=(4,)), FakeCall(signature=(3,))])
    assert len(queue.more(FakeCall(signature=(3,)), 1)) == 1
    assert queue.more(FakeCall(signature=(3,)), 1) == []


def test_there_may_be_any_number_of_levels() -> None:
    queue = RequestQueue(1, levels=2**64 - 1, default_level=2**64 - 1)
    priorities = [0, *range(1000, 0, -1), 2**64 - 1, 5]
    for priority in priorities:
        queue.put(FakeCall(request=InferRequest("m", (), priority=priority)), 0, priority)
    taken = []
    while len(queue):
        batch = queue.take(0)
        assert isinstance(batch, Batch)
        taken += [call.request.priority for call in batch.calls]
    assert taken == [1, 2, 3, 4, 5, 5, *range(6, 1001), 0, 2**64 - 1]
    for priority in range(2000, 3000):
        queue.put(FakeCall(), 0, priority)
        assert isinstance(queue.take(0), Batch)
    assert len(queue._levels) <= 64


def test_different_signatures_do_not_share_a_batch() -> None:
    queue = filled(RequestQueue(8, max_delay_ns=100), [FakeCall(signature=(3,)), FakeCall(signature=(4,))])
    assert rows_of(queue.take(0)) == [1]
    assert len(queue) == 1


MS = 1_000_000
AFTER = (800 * MS, 1000 * MS)  # waits until 1004 ms at the latest


@pytest.mark.parametrize(
    ("queue", "waiting", "reason"),
    [
        (RequestQueue(8), [FakeCall()], None),
        (RequestQueue(8, preferred=(8,)), [FakeCall()], None),
        (RequestQueue(8, default_policy=QueuePolicy(max_queue_size=9)), [FakeCall()], None),
        (RequestQueue(8, merge=False), [FakeCall()], "single"),
        (RequestQueue(1), [FakeCall()], "single"),
        (RequestQueue(8, preferred=(4, 8)), [FakeCall()], "delay"),
        (RequestQueue(8, max_delay_ns=1), [FakeCall()], "delay"),
        (RequestQueue(8, levels=2, default_level=1), [FakeCall()], "delay"),
        (RequestQueue(8), [FakeCall(rows=8)], "full"),
        (RequestQueue(8), [FakeCall(rows=5), FakeCall(rows=4)], "full"),
        (RequestQueue(8), [FakeCall(), FakeCall(signature=(4,))], "full"),
        (RequestQueue(8), [FakeCall(signature=(4,))], "delay"),
        (RequestQueue(8, default_policy=QueuePolicy(default_timeout_us=1_003_000)), [FakeCall()], "delay"),
        (RequestQueue(8, default_policy=QueuePolicy(default_timeout_us=1_005_000)), [FakeCall()], None),
    ],
    ids=[
        "nothing configured",
        "as configurations are completed",
        "a limit says nothing of time",
        "no batcher",
        "no batches",
        "preferred sizes",
        "a delay",
        "priorities",
        "full",
        "the next call does not fit",
        "the next call cannot join",
        "nobody can join",
        "expires before",
        "expires later",
    ],
)
def test_what_waits_for_clients_that_have_just_been_answered(
    queue: RequestQueue, waiting: list[FakeCall], reason: str | None
) -> None:
    filled(queue, waiting).answered(3, None, *AFTER)
    decision = queue.take(1001 * MS)
    if reason is None:
        assert decision == WaitUntil(1004 * MS)
    else:
        assert isinstance(decision, Batch)
        assert decision.reason == reason


@pytest.mark.parametrize("back", [0, 1, 3, 7])
def test_a_batch_waits_for_clients_until_all_are_back_or_it_is_full_or_it_is_over(back: int) -> None:
    queue = filled(RequestQueue(8), [FakeCall()])
    queue.answered(3 if back < 7 else 20, None, *AFTER)
    assert queue.take(1001 * MS) == WaitUntil(1004 * MS)
    filled(queue, [FakeCall() for _ in range(back)])
    if back < 3:
        assert queue.take(1003 * MS) == WaitUntil(1004 * MS)
    decision = queue.take((1003 if back >= 3 else 1004) * MS)
    assert rows_of(decision) == [1] * (back + 1)
    assert isinstance(decision, Batch)
    assert decision.reason == ("full" if back == 7 else "returns")


def test_waiting_for_clients_can_be_ended() -> None:
    queue = filled(RequestQueue(8), [FakeCall()])
    assert not queue.hurry()
    queue.answered(3, None, *AFTER)
    assert queue.hurry()
    assert not queue.hurry()
    assert rows_of(queue.take(1001 * MS)) == [1]
    assert not RequestQueue(8, max_delay_ns=1).hurry()


def test_without_merging_each_call_is_a_batch() -> None:
    queue = filled(RequestQueue(8, merge=False), [FakeCall(rows=2), FakeCall(rows=1)])
    assert rows_of(queue.take(0)) == [2]
    assert rows_of(queue.take(0)) == [1]


def test_urgent_levels_come_first_and_unknown_priorities_are_the_default() -> None:
    queue = RequestQueue(1, levels=3, default_level=2)
    late, urgent, default = FakeCall(), FakeCall(), FakeCall()
    queue.put(late, 0, priority=3)
    queue.put(default, 0, priority=9)
    queue.put(urgent, 0, priority=1)
    order = [queue.take(0).calls[0] for _ in range(3)]  # type: ignore[union-attr]
    assert order == [urgent, default, late]


def test_a_full_level_refuses() -> None:
    queue = RequestQueue(4, default_policy=QueuePolicy(max_queue_size=1))
    queue.put(FakeCall(), 0)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        queue.put(FakeCall(), 0)


@pytest.mark.parametrize(
    ("allow", "requested", "deadline"),
    [(False, 10, 100), (True, 10, 10), (True, 0, 100), (True, 500, 100)],
    ids=["not allowed", "shorter", "none asked", "longer does not count"],
)
def test_the_timeout_of_a_request_counts_where_it_is_allowed_and_shorter(
    allow: bool, requested: int, deadline: int
) -> None:
    policy = QueuePolicy(default_timeout_us=100, allow_timeout_override=allow)
    queue = RequestQueue(4, default_policy=policy)
    queue.put(FakeCall(), 0, timeout_us=requested)
    assert queue.next_deadline_ns == deadline * US


def test_expired_calls_are_rejected() -> None:
    queue = RequestQueue(4, default_policy=QueuePolicy(default_timeout_us=1))
    old, new = FakeCall(), FakeCall()
    queue.put(old, 0)
    queue.put(new, 500)
    assert queue.expired(999) == []
    assert queue.expired(1000) == [old]
    assert queue.next_deadline_ns == 1500
    assert queue.take(1000).calls == [new]  # type: ignore[union-attr]


def test_delayed_calls_go_behind_and_are_still_served() -> None:
    queue = RequestQueue(1, default_policy=QueuePolicy("DELAY", default_timeout_us=1))
    old, new = FakeCall(), FakeCall()
    queue.put(old, 0)
    queue.put(new, 900)
    assert queue.expired(1000) == []
    assert [queue.take(1000).calls[0] for _ in range(2)] == [new, old]  # type: ignore[union-attr]
    assert len(queue) == 0


def test_a_removed_call_is_gone() -> None:
    queue = RequestQueue(4)
    gone, stays = FakeCall(), FakeCall()
    filled(queue, [gone, stays])
    queue.remove(gone)
    assert queue.take(0).calls == [stays]  # type: ignore[union-attr]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("take")),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("pass"), st.integers(0, 3000)),
    ),
    max_size=60,
)


@given(actions, st.sampled_from(["REJECT", "DELAY"]), st.booleans(), st.integers(0, 6), st.integers(0, 2000))
def test_every_call_comes_out_exactly_once(
    steps: list[tuple[object, ...]], action: str, allow: bool, timeout_us: int, delay_ns: int
) -> None:
    policy = QueuePolicy(action, default_timeout_us=timeout_us, allow_timeout_override=allow)  # type: ignore[arg-type]
    queue = RequestQueue(4, levels=3, default_level=2, max_delay_ns=delay_ns, default_policy=policy, preferred=(2,))
    now = 0
    inside: list[FakeCall] = []
    out: list[FakeCall] = []
    count = 0
    for step in steps:
        match step:
            case ("put", int(rows), int(signature), int(priority)):
                call = FakeCall(rows=rows, signature=signature, queued_ns=now)
                queue.put(call, now, priority, timeout_us=signature)
                inside.append(call)
                count += 1
            case ("take",):
                decision = queue.take(now)
                if isinstance(decision, Batch):
                    assert decision.calls
                    assert decision.rows <= 4
                    assert len({call.signature for call in decision.calls}) == 1
                    out += decision.calls  # type: ignore[arg-type]
                    inside = [call for call in inside if call not in decision.calls]
                else:
                    assert isinstance(decision, WaitUntil) == bool(inside)
            case ("remove", int(index)) if inside:
                call = inside.pop(index % len(inside))
                queue.remove(call)
                out.append(call)
            case ("pass", int(ns)):
                now += ns
                late = [call for call in inside if 0 < call.deadline_ns <= now]
                expired = queue.expired(now)
                assert sorted(map(id, expired)) == sorted(map(id, late if action == "REJECT" else []))
                deadlines = [call.deadline_ns for call in inside if call.deadline_ns > now]
                assert not deadlines or now < (queue.next_deadline_ns or 0) <= min(deadlines)
                for call in expired:
                    inside.remove(call)  # type: ignore[arg-type]
                    out.append(call)  # type: ignore[arg-type]
        assert len(queue) == len(inside)
    queue.expired(now)
    rest = queue.drain()
    # By level, and in each those whose time is over come last.
    order = [(call.level, 0 < call.deadline_ns <= now) for call in rest]
    assert order == sorted(order)
    assert len(queue) == 0
    assert sorted(map(id, [*out, *rest])) == sorted({id(call) for call in [*out, *rest]})
    assert len(out) + len(rest) == count


many_actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("take")),
        st.tuples(st.just("more")),
        st.tuples(st.just("withdraw"), st.integers(1, 90), st.integers(0, 200)),
        st.tuples(st.just("pass"), st.integers(0, 1000)),
    ),
    max_size=40,
)


@given(many_actions, st.integers(70, 200), st.sampled_from(["REJECT", "DELAY"]), st.booleans(), st.integers(0, 3))
def test_withdrawing_from_a_long_queue_is_removing(
    steps: list[tuple[object, ...]], count: int, action: str, allow: bool, timeout_us: int
) -> None:
    policy = QueuePolicy(action, default_timeout_us=timeout_us, allow_timeout_override=allow)  # type: ignore[arg-type]
    queues = [RequestQueue(8, levels=3, default_level=2, default_policy=policy, max_delay_ns=500) for _ in range(2)]
    fast, plain = queues
    now = 0
    inside: list[tuple[FakeCall, FakeCall]] = []

    def put(rows: int, signature: int, priority: int) -> None:
        pair = (
            FakeCall(rows=rows, signature=signature, queued_ns=now),
            FakeCall(rows=rows, signature=signature, queued_ns=now),
        )
        for queue, call in zip(queues, pair, strict=True):
            queue.put(call, now, priority, timeout_us=priority)
        inside.append(pair)

    def left(ones: list[FakeCall], others: list[FakeCall]) -> None:
        assert [(one, other) in inside for one, other in zip(ones, others, strict=True)] == [True] * len(ones)
        inside[:] = [pair for pair in inside if pair[0] not in ones]

    for number in range(count):
        put(1 + number % 3, number % 7 // 6, number % 5 // 2)
    for step in steps:
        match step:
            case ("put", int(rows), int(signature), int(priority)):
                put(rows, signature, priority)
            case ("take",):
                decisions = [queue.take(now) for queue in queues]
                if isinstance(decisions[0], Batch):
                    left(*(decision.calls for decision in decisions))  # type: ignore[union-attr, arg-type]
                else:
                    assert decisions[0] == decisions[1]
            case ("more",):
                left(*(queue.more(FakeCall(signature=0), 1) for queue in queues))  # type: ignore[arg-type]
            case ("withdraw", int(number), int(at)):
                for _ in range(min(number, len(inside))):
                    one, other = inside.pop(at % len(inside))
                    fast.withdraw(one)
                    plain.remove(other)
            case ("pass", int(ns)):
                now += ns
                left(*(queue.expired(now) for queue in queues))  # type: ignore[arg-type]
        assert len(fast) == len(plain) == len(inside)
        assert len(fast._gaps) <= len(fast)
    left(*(queue.drain() for queue in queues))  # type: ignore[arg-type]
    assert not inside


def test_levels_that_are_forgotten_leave_nothing_of_what_was_withdrawn_from_them() -> None:
    queue = RequestQueue(1, levels=1000)
    waiting = [FakeCall() for _ in range(100)]
    for call in waiting:
        queue.put(call, 0, priority=1000)
    calls = [FakeCall() for _ in range(100)]
    for call in calls:
        queue.put(call, 0, priority=1)
    for call in calls:
        queue.withdraw(call)
    assert queue._gaps
    for priority in range(2, 200):
        queue.put(FakeCall(), 0, priority)
        assert isinstance(queue.take(0), Batch)
    assert not queue._gaps
    assert queue.drain() == waiting


class ComparedCall(FakeCall):
    """Knows how often somebody compared it."""

    compared = 0
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        ComparedCall.compared += 1
        return self is other


def test_withdrawing_a_call_costs_the_same_however_many_wait_before_it() -> None:
    queue = RequestQueue(4)
    calls = [ComparedCall() for _ in range(2000)]
    filled(queue, calls)  # type: ignore[arg-type]
    for call in reversed(calls[500:]):
        queue.withdraw(call)
    assert ComparedCall.compared == 0
    assert len(queue) == 500
    assert [call is calls[number] for number, call in enumerate(queue.drain())] == [True] * 500


class CountingCall(FakeCall):
    """Knows how often somebody looked when its time runs out."""

    looks = 0

    @property
    def deadline_ns(self) -> int:  # type: ignore[override]
        CountingCall.looks += 1
        return self._deadline_ns

    @deadline_ns.setter
    def deadline_ns(self, value: int) -> None:
        self._deadline_ns = value


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_a_call_with_a_timeout_of_its_own_costs_the_same_however_many_wait(action: Literal["REJECT", "DELAY"]) -> None:
    policy = QueuePolicy(timeout_action=action, default_timeout_us=10_000, allow_timeout_override=True)
    queue = RequestQueue(4, default_policy=policy)
    calls = [CountingCall() for _ in range(1000)]
    for number, call in enumerate(calls):
        queue.put(call, 0, timeout_us=1000 - number)
    CountingCall.looks = 0
    expired = [call for now_us in range(1, 11) for call in queue.expired(now_us * US)]
    assert expired == ([] if action == "DELAY" else calls[:-11:-1])
    assert queue.next_deadline_ns == 11 * US
    assert CountingCall.looks < 100
    assert queue.drain() == calls[:-10] + ([] if action == "REJECT" else calls[:-11:-1])


def test_calls_that_have_left_in_time_are_forgotten() -> None:
    queue = RequestQueue(1, default_policy=QueuePolicy(default_timeout_us=10_000, allow_timeout_override=True))
    stays = FakeCall()
    for _ in range(1000):
        queue.put(FakeCall(), 0, timeout_us=5000)
        queue.take(0)
        queue.put(gone := FakeCall(), 0)
        queue.withdraw(gone)
    queue.put(stays, 0)
    assert len(queue._levels[0].deadlines) < 100
    assert queue.expired(10_000_000) == [stays]
    assert queue.next_deadline_ns is None


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_a_call_that_expires_costs_the_same_however_many_wait_behind_it(action: Literal["REJECT", "DELAY"]) -> None:
    queue = RequestQueue(4, default_policy=QueuePolicy(timeout_action=action, default_timeout_us=1))
    calls = [CountingCall(queued_ns=number) for number in range(1000)]
    filled(queue, calls)  # type: ignore[arg-type]
    CountingCall.looks = 0
    expired = [call for now in range(1000, 1010) for call in queue.expired(now)]
    assert expired == ([] if action == "DELAY" else calls[:10])
    assert queue.next_deadline_ns == 1010
    assert CountingCall.looks < 100
