"""The slots of a sequence batcher: pure decisions, no clock, no I/O.

A sequence is bound to one slot of one instance from its first request to its last, because the model keeps what it
knows of it there. Sequences that find no slot wait in the backlog, in order. A sequence runs one request at a time.

How a round, the next batch of an instance, is formed:

    direct    slot n of the instance is row n of the batch, up to the last slot with a request; a slot without one, or
              whose request cannot share the batch, is None: its row must be there, since the position counts.
              Sent at once, or when `minimum_utilization` of the slots have a request or the oldest has waited long
              enough.
    oldest    the requests at hand, the oldest first, as the dynamic batcher would take them.

An instance that is retired gets no sequences any more and is gone when those it has have ended.

When a sequence ends: with the request that carries END, once that is answered; when it has rested for `idle_ns`; when
one of its requests is cancelled, which takes those waiting behind along; when its instance is lost with all it knew.
Sequences of the backlog that have no instance yet survive that. Every step put in comes out exactly once: in a round
and then in `finish`, or in the answer of `cancel`, `expired`, `lose` or `drain`.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from naiad.errors import InvalidArgument
from naiad.scheduling.queue import Batch, Queued, RequestQueue, WaitUntil

Key = int | str
_NEVER: Final = 1 << 63


class Sequence:
    """A sequence that has begun and not ended.

    `state` belongs to whoever runs its steps; `shapes` says how that state differs from that of other sequences,
    None for the initial shapes.
    """

    __slots__ = (
        "begun",
        "ending",
        "expires_ns",
        "instance",
        "key",
        "number",
        "offered",
        "running",
        "shapes",
        "slot",
        "state",
        "waiting",
    )

    def __init__(self, key: Key, number: int) -> None:
        self.key = key
        #: No other sequence of the model has it.
        self.number = number
        self.waiting: deque[Step] = deque()
        self.running: Step | None = None
        #: Takes no more requests: it goes when those it has are answered.
        self.ending = False
        #: Whether an instance has seen any of it.
        self.begun = False
        #: -1 in the backlog.
        self.instance = -1
        self.slot = -1
        #: Its first step lies in the queue of its instance ("oldest").
        self.offered = False
        #: When it is refused if it still is in the backlog; 0 for never.
        self.expires_ns = 0
        self.state: Any = None
        self.shapes: object = None

    def __repr__(self) -> str:
        place = f"instance {self.instance} slot {self.slot}" if self.instance >= 0 else "backlog"
        return f"<Sequence {self.key!r} in {place}, {len(self.waiting)} waiting>"


class Step(Queued):
    """One request of a sequence. `signature` tells which steps may share a batch, as those of calls do."""

    __slots__ = ("call", "end", "execution", "expires_ns", "index", "own", "sequence", "start")

    sequence: Sequence

    def __init__(self, call: Any, signature: object, queued_ns: int, start: bool, end: bool) -> None:
        super().__init__(call.request, 1, signature, queued_ns)
        self.call = call
        self.own = signature
        self.start = start
        self.end = end
        #: When it is refused, with its sequence, if that is in the backlog; 0 for never.
        self.expires_ns = 0
        self.execution: Any = None
        self.index = 0


class Round(msgspec.Struct, frozen=True):
    """Run these now; None is a row for a slot that has no request."""

    steps: list[Step | None]


class Oldest(msgspec.Struct, frozen=True):
    """How the strategy "oldest" forms batches."""

    preferred: tuple[int, ...] = ()
    max_delay_ns: int = 0


class Direct(msgspec.Struct, frozen=True):
    """How long the strategy "direct" waits for the other slots; utilization is a share of them, 0 to 1."""

    minimum_utilization: float = 0.0
    max_delay_ns: int = 0


class Slots:
    """The sequences of one model version, over `instances` instances of `width` slots each."""

    def __init__(
        self,
        model_name: str,
        instances: int,
        width: int,
        *,
        strategy: Direct | Oldest,
        max_batch_size: int = 0,
        idle_ns: int = 1_000_000_000,
    ) -> None:
        self._model_name = model_name
        self._width = width
        self._direct = strategy if isinstance(strategy, Direct) else None
        self._oldest = strategy if isinstance(strategy, Oldest) else None
        self._max_batch_size = max_batch_size
        self._idle_ns = idle_ns
        self._slots: dict[int, list[Sequence | None]] = {}
        #: Those that run something now.
        self._up: set[int] = set()
        #: Those that get no sequences any more.
        self._retired: set[int] = set()
        #: (slot, instance) without a sequence: the lowest slots of all instances first.
        self._free: list[tuple[int, int]] = []
        #: For "oldest".
        self._queues: dict[int, RequestQueue] = {}
        #: Those that take more requests, by correlation id.
        self._open: dict[Key, Sequence] = {}
        self._backlog: OrderedDict[int, Sequence] = OrderedDict()
        self._begun = 0
        #: A heap of (time, number): when a sequence of the backlog is refused, or would have been one that has left it.
        self._expiries: list[tuple[int, int]] = []
        #: Sequences that rest and when they are evicted: first in, first due.
        self._resting: dict[Sequence, int] = {}
        #: Steps waiting: of sequences with a slot, and in the backlog.
        self.waiting_in_slots = 0
        self.waiting_in_backlog = 0
        for instance in range(instances):
            self.add(instance, 0)

    def __repr__(self) -> str:
        used = sum(sequence is not None for slots in self._slots.values() for sequence in slots)
        return f"<Slots {self._model_name} used={used} backlog={len(self._backlog)}>"

    def __len__(self) -> int:
        """Steps that wait."""
        return self.waiting_in_slots + self.waiting_in_backlog

    def __contains__(self, instance: int) -> bool:
        """Whether the instance is there: not retired, or with sequences that go on."""
        return instance in self._slots

    @property
    def next_wake_ns(self) -> int | None:
        """When `expired` and `idle` should be asked next, at the latest."""
        wake_ns = self._expiries[0][0] if self._expiries else _NEVER
        for due_ns in self._resting.values():
            wake_ns = min(wake_ns, due_ns)
            break
        return None if wake_ns == _NEVER else wake_ns

    def sequences(self) -> Iterator[Sequence]:
        """All that have begun and not gone."""
        for slots in self._slots.values():
            yield from (sequence for sequence in slots if sequence is not None)
        yield from self._backlog.values()

    # ---- requests ---------------------------------------------------------------------------------------

    def put(self, step: Step, key: Key, now_ns: int, *, last: bool, timeout_us: int = 0) -> bool:
        """Takes a step of the sequence `key`; `last`: none will follow. Raises InvalidArgument, with Triton's text,
        where a sequence would have to begin and the step does not start one.

        Whether the step starts over a sequence that had not ended: what that one still has runs first, in its slot.
        """
        sequence = self._open.get(key)
        conflict = sequence is not None and step.start
        if sequence is None:
            if not step.start:
                raise InvalidArgument(
                    f"inference request for sequence {key} to model '{self._model_name}' must specify the START flag "
                    "on the first request of the sequence"
                )
            self._begun += 1
            sequence = self._open[key] = self._backlog[self._begun] = Sequence(key, self._begun)
        step.sequence = sequence
        step.expires_ns = now_ns + timeout_us * 1000 if timeout_us else 0
        sequence.waiting.append(step)
        if sequence.instance < 0:
            self.waiting_in_backlog += 1
        else:
            self.waiting_in_slots += 1
            self._resting.pop(sequence, None)
            self._offer(sequence, now_ns)
        if last:
            sequence.ending = True
            del self._open[key]
        self._fill(now_ns)
        if sequence.instance < 0:
            self._expire_at(sequence, step.expires_ns)
        return conflict

    def _expire_at(self, sequence: Sequence, expires_ns: int) -> None:
        """A sequence in the backlog is refused at that time, if it is to be refused no earlier; 0 is never."""
        if not expires_ns or 0 < sequence.expires_ns <= expires_ns:
            return
        sequence.expires_ns = expires_ns
        if len(self._expiries) > 2 * len(self._backlog) + 64:
            # Most are of sequences that have left.
            waiting = self._backlog.values()
            self._expiries = [(other.expires_ns, other.number) for other in waiting if other.expires_ns]
            heapq.heapify(self._expiries)
        else:
            heapq.heappush(self._expiries, (expires_ns, sequence.number))

    def take(self, instance: int, now_ns: int) -> Round | WaitUntil | None:
        """What the idle instance should do; None: nothing."""
        if instance not in self._up:
            return None
        if self._direct is not None:
            return self._take_direct(self._direct, self._slots[instance], now_ns)
        decision = self._queues[instance].take(now_ns)
        if isinstance(decision, Batch):
            steps: list[Step | None] = list(decision.calls)  # type: ignore[arg-type]
            for step in steps:
                assert step is not None
                step.sequence.offered = False
                self._run(step)
            return Round(steps)
        return decision if isinstance(decision, WaitUntil) else None

    def _take_direct(self, policy: Direct, slots: list[Sequence | None], now_ns: int) -> Round | WaitUntil | None:
        steps: list[Step | None] = []
        first: Step | None = None
        ready = top = 0
        earliest_ns = _NEVER
        for position, sequence in enumerate(slots):
            step = None
            if sequence is not None and sequence.running is None and sequence.waiting:
                step = sequence.waiting[0]
                step.signature = (step.own, None if step.start else sequence.shapes)
                earliest_ns = min(earliest_ns, step.queued_ns)
                ready += 1
                top = position + 1
                if first is None:
                    first = step
                elif step.signature != first.signature:
                    # Its row is empty this time: Triton cuts a batch behind the last slot that has a request.
                    step = None
            steps.append(step)
        if first is None:
            return None
        if policy.max_delay_ns and policy.minimum_utilization:
            send_at_ns = earliest_ns + policy.max_delay_ns
            if now_ns < send_at_ns and ready / self._width < policy.minimum_utilization:
                return WaitUntil(send_at_ns)
        del steps[top:]
        for step in steps:
            if step is not None:
                self._run(step)
        return Round(steps)

    def finish(self, step: Step, now_ns: int) -> None:
        """A step taken is answered."""
        sequence = step.sequence
        assert sequence.running is step, "this is a bug: a step that does not run has finished"
        sequence.running = None
        self._advance(sequence, now_ns)

    def again(self, step: Step, now_ns: int) -> bool:
        """A step taken is to run once more, as one in the middle of its sequence. False: the sequence has no place
        any more; the step comes out here."""
        sequence = step.sequence
        assert sequence.running is step, "this is a bug: a step that does not run is to run again"
        sequence.running = None
        if sequence.instance < 0:
            return False
        step.start = False
        step.queued_ns = now_ns
        sequence.waiting.appendleft(step)
        self.waiting_in_slots += 1
        self._offer(sequence, now_ns)
        return True

    def cancel(self, step: Step, now_ns: int) -> list[Step]:
        """The client of a step that waits has left: its sequence ends before it, in the backlog as a whole. Takes out
        the step and those behind it; nothing where it does not wait any more, but is refused together with others."""
        sequence = step.sequence
        if step not in sequence.waiting:
            return []
        if sequence.instance < 0:
            del self._backlog[sequence.number]
            return self._cut(sequence)
        before: list[Step] = []
        while sequence.waiting[0] is not step:
            before.append(sequence.waiting[0])
            if len(before) == 1:
                self._withhold(sequence)
            sequence.waiting.popleft()
        cancelled = self._cut(sequence)
        sequence.waiting.extend(before)
        self._advance(sequence, now_ns)
        return cancelled

    # ---- time -------------------------------------------------------------------------------------------

    def expired(self, now_ns: int) -> list[Step]:
        """Takes out the steps of sequences that have waited too long in the backlog."""
        steps: list[Step] = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            number = heapq.heappop(self._expiries)[1]
            sequence = self._backlog.get(number)
            if sequence is not None and 0 < sequence.expires_ns <= now_ns:
                del self._backlog[number]
                steps += self._cut(sequence)
        return steps

    def idle(self, now_ns: int) -> list[Sequence]:
        """Ends the sequences that have rested too long."""
        evicted: list[Sequence] = []
        while self._resting:
            sequence, due_ns = next(iter(self._resting.items()))
            if now_ns < due_ns:
                break
            self._cut(sequence)
            self._advance(sequence, now_ns)
            evicted.append(sequence)
        return evicted

    # ---- instances --------------------------------------------------------------------------------------

    def add(self, instance: int, now_ns: int) -> None:
        """A new instance, under a number that none had before."""
        self._slots[instance] = [None] * self._width
        if self._oldest is not None:
            self._queues[instance] = RequestQueue(
                self._max_batch_size, preferred=self._oldest.preferred, max_delay_ns=self._oldest.max_delay_ns
            )
        self.restore(instance, now_ns)

    def retire(self, instance: int) -> None:
        """The instance gets no sequences any more, and is gone once it has none."""
        self._retired.add(instance)
        self._block(instance)
        self._remove_if_done(instance)

    def _block(self, instance: int) -> None:
        self._free = [place for place in self._free if place[1] != instance]
        heapq.heapify(self._free)

    def _remove_if_done(self, instance: int) -> None:
        if instance in self._retired and not any(self._slots[instance]):
            self._retired.remove(instance)
            self._up.discard(instance)
            self._queues.pop(instance, None)
            del self._slots[instance]

    def lose(self, instance: int, now_ns: int) -> tuple[list[Sequence], list[Step]]:
        """An instance is gone with all it knew: (the sequences that end with it, the steps that waited in them).

        Sequences it has seen nothing of get another place. It gets none until `restore`.
        """
        ended: list[Sequence] = []
        steps: list[Step] = []
        fresh: list[Sequence] = []
        self._up.discard(instance)
        self._block(instance)
        for slot, sequence in enumerate(self._slots[instance]):
            if sequence is None:
                continue
            self._slots[instance][slot] = None
            self._resting.pop(sequence, None)
            if sequence.begun:
                steps += self._cut(sequence)
                sequence.instance = sequence.slot = -1
                ended.append(sequence)
            else:
                self._withhold(sequence)
                sequence.instance = sequence.slot = -1
                self.waiting_in_slots -= len(sequence.waiting)
                self.waiting_in_backlog += len(sequence.waiting)
                fresh.append(sequence)
        fresh.sort(key=lambda sequence: sequence.waiting[0].queued_ns)
        for sequence in reversed(fresh):
            self._backlog[sequence.number] = sequence
            self._backlog.move_to_end(sequence.number, last=False)
            # Not before it is in the backlog, from which the heap is made anew.
            for step in sequence.waiting:
                self._expire_at(sequence, step.expires_ns)
        self._remove_if_done(instance)
        self._fill(now_ns)
        return ended, steps

    def restore(self, instance: int, now_ns: int) -> None:
        """A lost instance serves again."""
        if instance not in self._up:
            self._up.add(instance)
            for slot in range(self._width):
                heapq.heappush(self._free, (slot, instance))
            self._fill(now_ns)

    def drain(self) -> list[Step]:
        """Takes out everything that waits and ends all sequences."""
        steps: list[Step] = []
        for sequence in list(self.sequences()):
            steps += self._cut(sequence)
            if sequence.instance >= 0:
                self._advance(sequence, 0, refill=False)
        self._backlog.clear()
        self._expiries.clear()
        return steps

    # ---- inside -----------------------------------------------------------------------------------------

    def _run(self, step: Step) -> None:
        sequence = step.sequence
        taken = sequence.waiting.popleft()
        assert taken is step, "this is a bug: a step overtakes another of its sequence"
        sequence.running = step
        sequence.begun = True
        self.waiting_in_slots -= 1

    def _offer(self, sequence: Sequence, now_ns: int) -> None:
        """Puts the next step of a sequence into the queue of its instance ("oldest")."""
        if self._queues and not sequence.offered and sequence.running is None and sequence.waiting:
            step = sequence.waiting[0]
            step.signature = (step.own, None if step.start else sequence.shapes)
            sequence.offered = True
            self._queues[sequence.instance].put(step, now_ns)

    def _withhold(self, sequence: Sequence) -> None:
        if sequence.offered:
            self._queues[sequence.instance].remove(sequence.waiting[0])
            sequence.offered = False

    def _cut(self, sequence: Sequence) -> list[Step]:
        """Ends a sequence but for what runs of it; the steps that waited."""
        self._withhold(sequence)
        steps = list(sequence.waiting)
        sequence.waiting.clear()
        if sequence.instance >= 0:
            self.waiting_in_slots -= len(steps)
        else:
            self.waiting_in_backlog -= len(steps)
        sequence.ending = True
        if self._open.get(sequence.key) is sequence:
            del self._open[sequence.key]
        return steps

    def _advance(self, sequence: Sequence, now_ns: int, *, refill: bool = True) -> None:
        """What comes after a step of a sequence with a slot: the next one, a rest, or the end."""
        if sequence.instance < 0 or sequence.running is not None:
            return
        if sequence.waiting:
            self._offer(sequence, now_ns)
        elif not sequence.ending:
            self._resting[sequence] = now_ns + self._idle_ns
        else:
            self._resting.pop(sequence, None)
            instance, slot = sequence.instance, sequence.slot
            self._slots[instance][slot] = None
            sequence.instance = sequence.slot = -1
            if instance in self._retired:
                self._remove_if_done(instance)
                return
            heapq.heappush(self._free, (slot, instance))
            if refill:
                self._fill(now_ns)

    def _fill(self, now_ns: int) -> None:
        """Gives free slots to the backlog."""
        while self._backlog and self._free:
            sequence = self._backlog.popitem(last=False)[1]
            slot, instance = heapq.heappop(self._free)
            self._slots[instance][slot] = sequence
            sequence.instance, sequence.slot = instance, slot
            sequence.expires_ns = 0
            self.waiting_in_backlog -= len(sequence.waiting)
            self.waiting_in_slots += len(sequence.waiting)
            self._offer(sequence, now_ns)
