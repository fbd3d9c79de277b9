"""The slots of the sequence batcher: what runs where and when, as tables; and properties over all histories."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from naiad.errors import InvalidArgument
from naiad.scheduling.queue import WaitUntil
from naiad.scheduling.slots import Direct, Oldest, Round, Slots, Step

IDLE = 1000


def slots_of(strategy=None, instances=1, width=4, idle_ns=IDLE):
    return Slots("m", instances, width, strategy=strategy or Direct(), max_batch_size=width, idle_ns=idle_ns)


class Named(Step):
    """A step that knows whether it started over a live sequence."""

    __slots__ = ("conflict",)


def give(slots, key, start=False, end=False, now=0, timeout_us=0, signature=None):
    new = Named(SimpleNamespace(request=None), signature, now, start, end)
    new.conflict = slots.put(new, key, now, last=end, timeout_us=timeout_us)
    return new


def taken(slots, instance=0, now=0):
    """The steps of the next round, None where there is none."""
    decision = slots.take(instance, now)
    return decision.steps if isinstance(decision, Round) else decision


BOTH = pytest.mark.parametrize("strategy", [Direct(), Oldest()], ids=["direct", "oldest"])


@BOTH
def test_a_sequence_must_start(strategy):
    slots = slots_of(strategy)
    with pytest.raises(InvalidArgument) as error:
        give(slots, "key-a")
    assert error.value.message == (
        "inference request for sequence key-a to model 'm' must specify the START flag on the first request of the "
        "sequence"
    )
    assert len(slots) == 0


@BOTH
def test_one_step_of_a_sequence_runs_at_a_time_in_order(strategy):
    slots = slots_of(strategy)
    first, second = give(slots, 1, start=True), give(slots, 1, end=True)
    assert taken(slots) == [first]
    assert taken(slots) is None
    slots.finish(first, 1)
    assert taken(slots) == [second]
    slots.finish(second, 2)
    assert list(slots.sequences()) == []


@BOTH
def test_after_its_end_a_sequence_takes_no_more(strategy):
    slots = slots_of(strategy)
    give(slots, 1, start=True, end=True)
    with pytest.raises(InvalidArgument):
        give(slots, 1)
    # Another one of that id may begin, beside the first.
    again = give(slots, 1, start=True)
    assert not again.conflict
    assert again.sequence.slot == 1


@BOTH
def test_a_start_over_a_live_sequence_follows_it_in_its_slot(strategy):
    slots = slots_of(strategy)
    first = give(slots, 1, start=True)
    over = give(slots, 1, start=True)
    assert over.conflict
    assert over.sequence is first.sequence
    assert taken(slots) == [first]
    slots.finish(first, 0)
    assert taken(slots) == [over]


def test_direct_rows_are_slots():
    slots = slots_of()
    a, b, c = give(slots, "a", start=True), give(slots, "b", start=True), give(slots, "c", start=True)
    assert taken(slots) == [a, b, c]
    for done in (a, b, c):
        slots.finish(done, 0)
    b = give(slots, "b")
    assert taken(slots) == [None, b]


def test_direct_leaves_the_row_of_another_shape_empty_until_the_next_round():
    slots = slots_of()
    a = give(slots, "a", start=True, signature=(2,))
    b = give(slots, "b", start=True, signature=(3,))
    c = give(slots, "c", start=True, signature=(2,))
    d = give(slots, "d", start=True, signature=(3,))
    assert taken(slots) == [a, None, c, None]
    assert taken(slots) == [None, b, None, d]


def test_direct_tells_states_of_other_shapes_apart():
    slots = slots_of()
    a, b = give(slots, "a", start=True), give(slots, "b", start=True)
    taken(slots)
    a.sequence.shapes = ((7,),)
    for done in (a, b):
        slots.finish(done, 0)
    a, b = give(slots, "a"), give(slots, "b")
    assert taken(slots) == [a, None]
    slots.finish(a, 0)
    assert taken(slots) == [None, b]
    # A new start begins with the initial state, whatever the sequence had.
    slots.finish(b, 0)
    a, b = give(slots, "a", start=True), give(slots, "b")
    assert taken(slots) == [a, b]


@pytest.mark.parametrize(
    ("waiting", "now", "expected"),
    [(1, 0, 100), (1, 99, 100), (1, 100, "send"), (2, 0, "send"), (3, 0, "send")],
)
def test_direct_waits_for_half_of_its_slots(waiting, now, expected):
    slots = slots_of(Direct(minimum_utilization=0.5, max_delay_ns=100))
    for key in range(1, waiting + 1):
        give(slots, key, start=True)
    decision = slots.take(0, now)
    assert decision == WaitUntil(expected) if isinstance(expected, int) else len(decision.steps) == waiting


def test_direct_without_utilization_does_not_wait():
    slots = slots_of(Direct(max_delay_ns=100))
    only = give(slots, 1, start=True)
    assert taken(slots) == [only]


def test_oldest_takes_the_oldest_without_gaps():
    slots = slots_of(Oldest(), width=2)
    a, b = give(slots, "a", start=True, now=1), give(slots, "b", start=True, now=2)
    assert taken(slots, now=3) == [a, b]
    slots.finish(b, 3)
    slots.finish(a, 3)
    b, a = give(slots, "b", now=4), give(slots, "a", now=5)
    assert taken(slots, now=6) == [b, a]


def test_oldest_waits_for_a_preferred_size():
    slots = slots_of(Oldest(preferred=(2,), max_delay_ns=100))
    a = give(slots, "a", start=True)
    assert taken(slots) == WaitUntil(100)
    b = give(slots, "b", start=True)
    assert taken(slots) == [a, b]


@BOTH
def test_sequences_spread_over_instances_and_stay(strategy):
    slots = slots_of(strategy, instances=2, width=2)
    steps = [give(slots, key, start=True) for key in "abcd"]
    assert [(s.sequence.instance, s.sequence.slot) for s in steps] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert taken(slots, 0) == [steps[0], steps[2]]
    assert taken(slots, 1) == [steps[1], steps[3]]
    slots.finish(steps[1], 0)
    later = give(slots, "b")
    assert later.sequence.instance == 1
    assert taken(slots, 0) is None


@BOTH
def test_the_backlog_is_served_in_order_of_arrival(strategy):
    slots = slots_of(strategy, width=1)
    a = give(slots, "a", start=True, end=True)
    b = give(slots, "b", start=True)
    c = give(slots, "c", start=True, end=True)
    b2 = give(slots, "b", end=True)
    assert (slots.waiting_in_slots, slots.waiting_in_backlog) == (1, 3)
    order = []
    for _ in range(4):
        (only,) = taken(slots)
        order.append(only)
        slots.finish(only, 0)
    assert order == [a, b, b2, c]


@BOTH
def test_rest_ends_a_sequence_and_frees_its_slot(strategy):
    slots = slots_of(strategy, width=1)
    a = give(slots, "a", start=True)
    b = give(slots, "b", start=True)
    assert taken(slots) == [a]
    # What runs does not rest, however long it takes.
    assert slots.next_wake_ns is None
    slots.finish(a, 5)
    assert slots.next_wake_ns == 5 + IDLE
    assert slots.idle(4 + IDLE) == []
    assert slots.idle(5 + IDLE) == [a.sequence]
    assert taken(slots) == [b]
    with pytest.raises(InvalidArgument):
        give(slots, "a")


@BOTH
def test_a_request_ends_the_rest(strategy):
    slots = slots_of(strategy)
    a = give(slots, "a", start=True)
    taken(slots)
    slots.finish(a, 0)
    give(slots, "a", now=IDLE - 1)
    assert slots.idle(2 * IDLE) == []


@BOTH
def test_a_sequence_that_waits_too_long_for_a_slot_is_refused_as_a_whole(strategy):
    slots = slots_of(strategy, width=1)
    a = give(slots, "a", start=True)
    patient = give(slots, "p", start=True)
    b = [give(slots, "b", start=True), give(slots, "b", timeout_us=1, now=10)]
    assert slots.next_wake_ns == 1010
    assert slots.expired(1009) == []
    assert slots.expired(1010) == b
    assert slots.next_wake_ns is None
    assert taken(slots) == [a]
    with pytest.raises(InvalidArgument):
        give(slots, "b")
    assert patient.sequence in list(slots.sequences())


@BOTH
def test_a_timeout_does_not_matter_once_there_is_a_slot(strategy):
    slots = slots_of(strategy, width=1)
    a = give(slots, "a", start=True, end=True, timeout_us=1)
    b = give(slots, "b", start=True, timeout_us=1)
    assert taken(slots) == [a]
    slots.finish(a, 1)
    assert slots.expired(5000) == []
    assert taken(slots) == [b]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.integers(0, 50)),
            st.tuples(st.just("again"), st.integers(0, 200), st.integers(0, 50)),
            st.tuples(st.just("cancel"), st.integers(0, 200)),
            st.tuples(st.just("pass"), st.integers(0, 20)),
        ),
        max_size=80,
    )
)
def test_whose_time_in_the_backlog_is_up_is_refused_whatever_the_others_have(actions):
    slots = slots_of(width=1)
    give(slots, "runs", start=True)
    waiting, due, now = {}, {}, 0

    def put(key, timeout_us, start):
        waiting.setdefault(key, []).append(give(slots, key, start=start, now=now, timeout_us=timeout_us))
        if timeout_us:
            due[key] = min(due.get(key, now + timeout_us * 1000), now + timeout_us * 1000)

    for number, (action, *more) in enumerate(actions):
        keys = list(waiting)
        if action == "begin":
            put(number, more[0], True)
        elif action == "again" and keys:
            put(keys[more[0] % len(keys)], more[1], False)
        elif action == "cancel" and keys:
            key = keys[more[0] % len(keys)]
            assert slots.cancel(waiting[key][0], now) == waiting.pop(key)
            due.pop(key, None)
        elif action == "pass":
            now += more[0] * 1000
            gone = [key for key, time in due.items() if time <= now]
            assert set(slots.expired(now)) == {step for key in gone for step in waiting.pop(key)}
            for key in gone:
                del due[key]
        assert slots.waiting_in_backlog == sum(map(len, waiting.values()))
        if due:
            assert slots.next_wake_ns <= min(due.values())


def test_sequences_that_have_left_the_backlog_are_not_kept_for_their_timeouts():
    slots = slots_of(width=1)
    give(slots, "runs", start=True)
    for number in range(1000):
        slots.cancel(give(slots, number, start=True, timeout_us=10**9), 0)
    assert len(slots._expiries) < 100


@BOTH
def test_cancelling_takes_what_follows_along_and_ends_the_sequence(strategy):
    slots = slots_of(strategy)
    steps = [give(slots, 1, start=True), give(slots, 1), give(slots, 1), give(slots, 1)]
    assert taken(slots) == [steps[0]]
    assert slots.cancel(steps[2], 0) == steps[2:]
    with pytest.raises(InvalidArgument):
        give(slots, 1)
    slots.finish(steps[0], 0)
    assert taken(slots) == [steps[1]]
    slots.finish(steps[1], 0)
    assert list(slots.sequences()) == []


@BOTH
def test_cancelling_in_the_backlog_takes_all(strategy):
    slots = slots_of(strategy, width=1)
    give(slots, 1, start=True)
    steps = [give(slots, 2, start=True), give(slots, 2)]
    assert slots.cancel(steps[1], 0) == steps
    assert slots.waiting_in_backlog == 0


@BOTH
def test_a_lost_instance_takes_what_it_knew_along_and_nothing_else(strategy):
    slots = slots_of(strategy, instances=2, width=1)
    a, b = give(slots, "a", start=True), give(slots, "b", start=True)
    assert taken(slots, 0) == [a]
    behind = give(slots, "a")
    ended, steps = slots.lose(0, 0)
    assert ended == [a.sequence]
    assert steps == [behind]
    slots.finish(a, 0)
    assert taken(slots, 1) == [b]
    # b's instance is lost before it has seen any of c, which waits for another one.
    c = give(slots, "c", start=True)
    slots.finish(b, 0)
    assert slots.lose(1, 0) == ([b.sequence], [])
    assert slots.waiting_in_backlog == 1
    assert taken(slots, 1) is None
    slots.restore(0, 0)
    assert taken(slots, 0) == [c]


@BOTH
def test_a_sequence_no_instance_has_seen_survives_its_instance(strategy):
    slots = slots_of(strategy, instances=2, width=1)
    a = give(slots, "a", start=True)
    assert slots.lose(0, 0) == ([], [])
    assert taken(slots, 0) is None
    assert taken(slots, 1) == [a]


@BOTH
def test_a_sequence_that_comes_back_to_the_backlog_expires_there_as_before(strategy):
    slots = slots_of(strategy, instances=1, width=2, idle_ns=50)
    a = [give(slots, "a", start=True, timeout_us=9), give(slots, "a", timeout_us=3), give(slots, "a", timeout_us=5)]
    b = give(slots, "b", start=True)
    assert slots.next_wake_ns is None
    assert slots.lose(0, 1000) == ([], [])
    assert slots.waiting_in_backlog == 4
    assert slots.next_wake_ns == 3000
    assert slots.expired(2999) == []
    assert slots.expired(3000) == a
    assert slots.expired(9000) == []
    # One that gets another slot rests there and is evicted as all do.
    slots.restore(0, 9000)
    assert taken(slots, 0, 9000) == [b]
    slots.finish(b, 9000)
    assert slots.next_wake_ns == 9050
    assert slots.idle(9050) == [b.sequence]


@BOTH
def test_a_sequence_that_finds_another_slot_in_time_does_not_expire(strategy):
    slots = slots_of(strategy, instances=2, width=1)
    a = give(slots, "a", start=True, timeout_us=1)
    assert slots.lose(a.sequence.instance, 0) == ([], [])
    assert slots.expired(10_000) == []
    assert taken(slots, 1, 10_000) == [a]


@BOTH
def test_what_runs_again_comes_before_what_waits(strategy):
    slots = slots_of(strategy)
    first = give(slots, 1, start=True)
    second = give(slots, 1)
    taken(slots)
    assert slots.again(first, 0)
    assert not first.start
    assert taken(slots) == [first]
    slots.finish(first, 0)
    assert taken(slots) == [second]


@BOTH
def test_what_has_no_place_any_more_does_not_run_again(strategy):
    slots = slots_of(strategy)
    first = give(slots, 1, start=True)
    taken(slots)
    slots.lose(0, 0)
    assert not slots.again(first, 0)
    assert len(slots) == 0


@BOTH
def test_drain_takes_out_everything(strategy):
    slots = slots_of(strategy, width=1)
    steps = [give(slots, 1, start=True), give(slots, 1), give(slots, 2, start=True)]
    assert slots.drain() == steps
    assert len(slots) == 0
    assert list(slots.sequences()) == []


@BOTH
def test_a_retired_instance_keeps_its_sequences_to_their_end(strategy):
    slots = slots_of(strategy, width=1)
    first = give(slots, 1, start=True)
    assert taken(slots) == [first]
    slots.add(1, 0)
    slots.retire(0)
    assert 0 in slots
    slots.finish(first, 1)
    other = give(slots, 2, start=True, end=True)
    assert taken(slots, 0) is None
    assert taken(slots, 1) == [other]
    last = give(slots, 1, end=True)
    assert taken(slots, 0) == [last]
    slots.finish(last, 2)
    assert 0 not in slots
    assert taken(slots, 0) is None


@pytest.mark.parametrize("end", ["idle", "cancel", "lose", "drain"])
def test_a_retired_instance_goes_however_its_last_sequence_ends(end):
    slots = slots_of(instances=2, width=1)
    first = give(slots, 1, start=True)
    slots.retire(0)
    assert 0 in slots
    if end == "idle":
        taken(slots)
        slots.finish(first, 0)
        slots.idle(IDLE)
    elif end == "cancel":
        slots.cancel(first, 0)
    elif end == "lose":
        slots.lose(0, 0)
    else:
        slots.drain()
    assert 0 not in slots


def test_an_instance_without_sequences_is_gone_when_it_is_retired():
    slots = slots_of(instances=2, width=1)
    slots.lose(0, 0)
    slots.retire(0)
    slots.retire(1)
    slots.add(2, 0)
    assert [number in slots for number in range(3)] == [False, False, True]
    assert give(slots, 1, start=True).sequence.instance == 2


class History(RuleBasedStateMachine):
    """Any events in any order. Every step comes out once; a sequence keeps its place and its order."""

    @initialize(
        oldest=st.booleans(), instances=st.integers(1, 3), width=st.integers(1, 3), delay=st.sampled_from([0, 50])
    )
    def begin(self, oldest, instances, width, delay):
        strategy = Oldest((2,), delay) if oldest else Direct(0.6, delay)
        self.slots = slots_of(strategy, instances, width, idle_ns=100)
        self.made, self.width = instances, width
        self.now = 0
        self.running = []
        self.all = []
        self.out = []
        self.ran_at = {}
        self.up = dict.fromkeys(range(instances), True)
        #: The sequences of an instance when it was retired.
        self.retired = {}

    def left(self, steps):
        self.out += steps

    @rule(key=st.integers(1, 4), start=st.booleans(), end=st.booleans(), timeout=st.sampled_from([0, 0, 1]))
    def put(self, key, start, end, timeout):
        try:
            self.all.append(give(self.slots, key, start, end, self.now, timeout))
        except InvalidArgument:
            assert not start

    @rule(data=st.data())
    def take(self, data):
        instance = data.draw(st.integers(0, self.made - 1))
        decision = self.slots.take(instance, self.now)
        if isinstance(decision, WaitUntil):
            assert decision.time_ns > self.now
        elif decision is not None:
            assert self.up.get(instance, instance in self.retired)
            assert 0 < len(decision.steps) <= self.width
            assert decision.steps[-1] is not None
            for new in decision.steps:
                if new is None:
                    continue
                assert (new.sequence.instance, new.sequence.running) == (instance, new)
                assert self.ran_at.setdefault(new.sequence, (instance, new.sequence.slot)) == (
                    instance,
                    new.sequence.slot,
                )
                self.running.append(new)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def answer(self, data, again):
        done = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if again and self.slots.again(done, self.now):
            return
        if not again:
            self.slots.finish(done, self.now)
        self.left([done])

    @rule(data=st.data())
    def cancel(self, data):
        waiting = [s for sequence in self.slots.sequences() for s in sequence.waiting]
        if waiting:
            chosen = data.draw(st.sampled_from(waiting))
            cancelled = self.slots.cancel(chosen, self.now)
            assert chosen in cancelled
            self.left(cancelled)

    @rule(ns=st.integers(1, 200))
    def pass_time(self, ns):
        self.now += ns
        self.left(self.slots.expired(self.now))
        backlog = [s for sequence in self.slots.sequences() if sequence.instance < 0 for s in sequence.waiting]
        assert not [s for s in backlog if 0 < s.expires_ns <= self.now]
        for sequence in self.slots.idle(self.now):
            assert sequence.running is None
            assert not sequence.waiting
        assert self.slots.next_wake_ns is None or self.slots.next_wake_ns > self.now

    @rule(data=st.data())
    def lose_or_restore(self, data):
        instance = data.draw(st.sampled_from(sorted(self.up)))
        if self.up[instance]:
            _, steps = self.slots.lose(instance, self.now)
            self.left(steps)
        else:
            self.slots.restore(instance, self.now)
        self.up[instance] = not self.up[instance]

    @precondition(lambda self: self.made < 8)
    @rule()
    def add(self):
        self.slots.add(self.made, self.now)
        self.up[self.made] = True
        self.made += 1

    @precondition(lambda self: len(self.up) > 1)
    @rule(data=st.data())
    def retire(self, data):
        instance = data.draw(st.sampled_from(sorted(self.up)))
        del self.up[instance]
        self.retired[instance] = {s for s in self.slots.sequences() if s.instance == instance}
        self.slots.retire(instance)

    @invariant()
    def every_step_is_somewhere_once(self):
        if not hasattr(self, "all"):
            return
        sequences = list(self.slots.sequences())
        waiting = [s for sequence in sequences for s in sequence.waiting]
        everywhere = waiting + self.running + self.out
        assert len(everywhere) == len(set(everywhere)) == len(self.all)
        assert len(waiting) == len(self.slots)
        places = [(s.instance, s.slot) for s in sequences if s.instance >= 0]
        assert len(places) == len(set(places))
        assert all(0 <= slot < self.width for _, slot in places)
        # A retired instance is there as long as it has sequences; all others always are.
        assert {number for number in range(self.made) if number in self.slots} == set(self.up) | {
            instance for instance, _ in places
        }
        assert len(sequences) == len(set(sequences))
        for sequence in sequences:
            own = [s for s in self.all if s in set(sequence.waiting)]
            assert list(sequence.waiting) == own
        assert all(s in self.retired[s.instance] for s in sequences if s.instance in self.retired)
        # Nobody waits in the backlog beside a free slot.
        if any(s.instance < 0 for s in sequences):
            assert len([place for place in places if place[0] in self.up]) == sum(self.up.values()) * self.width

    def teardown(self):
        """Left alone, with all instances up, everything runs."""
        if not hasattr(self, "all"):
            return
        for instance in self.up:
            self.slots.restore(instance, self.now)
        for _ in range(10 * len(self.all) + 10):
            for done in self.running:
                self.slots.finish(done, self.now)
                self.out.append(done)
            self.running = []
            self.now += 200
            self.slots.idle(self.now)
            self.out += self.slots.expired(self.now)
            for instance in range(self.made):
                decision = self.slots.take(instance, self.now)
                if isinstance(decision, Round):
                    self.running += [s for s in decision.steps if s is not None]
        assert sorted(map(id, self.out)) == sorted(map(id, self.all))
        assert not any(instance in self.slots for instance in self.retired)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
