"""The request queue of a dynamic batcher: pure decisions, no clock, no I/O.

How a batch is formed. Calls wait in levels (priority 1 first), each first in, first out; behind them the calls of
that level whose time ran out under a DELAY policy. A batch is the longest run from the front whose rows fit
`max_batch_size` and whose signatures are equal: a call that does not fit closes the batch, it is never skipped,
because skipping would let small requests starve a large one. Whether the run is sent now:

    the oldest call has waited `max_delay_ns`                  send everything
    a preferred size was passed on the way                     send the largest one passed
    the next call would lead past the largest preferred size   send what comes before it
    the run is closed (full, or the next call cannot join),
    or has the largest preferred size and more                 send it
    otherwise                                                  wait until the oldest call has waited

Where the configuration asks for no delay, sizes or priorities, a batch that is not full may wait a moment for clients
that have just been answered: `Returns` says whether.

Cancelled calls leave through `withdraw`; expired ones are found when `take` is asked and their time has come.
Every call put in comes out exactly once: in a batch, as rejected, or removed.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final

from naiad.config.model_config import QueuePolicy
from naiad.errors import Unavailable
from naiad.messages import InferRequest
from naiad.scheduling.returns import Returns


class Queued:
    """What the queue must know of a call; it writes `level` and `deadline_ns`.

    `rows` is its batch dimension (1 where the model does not batch). `signature` tells which calls may share a batch:
    equal ones, None being equal to None. Times are `time.monotonic_ns`.
    """

    __slots__ = ("deadline_ns", "ended", "level", "queued_ns", "request", "rows", "signature")

    def __init__(self, request: InferRequest, rows: int, signature: object, queued_ns: int) -> None:
        self.request = request
        self.rows = rows
        self.signature = signature
        self.queued_ns = queued_ns
        self.level = 0
        self.deadline_ns = 0
        self.ended = False


def timeout_of(policy: QueuePolicy, requested_us: int) -> int:
    """The timeout (us) of a call that asked for `requested_us`: its own where that is allowed and shorter. 0: none."""
    if policy.allow_timeout_override and 0 < requested_us < policy.default_timeout_us:
        return requested_us
    return policy.default_timeout_us


@dataclass(init=False)
class Batch:
    """Take these calls now."""

    calls: list[Queued]
    rows: int
    reason: str

    def __init__(self, calls: list[Queued], rows: int, reason: str) -> None:
        self.calls = calls
        self.rows = rows
        self.reason = reason


@dataclass
class WaitUntil:
    """Ask again at this time at the latest."""

    time_ns: int


@dataclass
class Empty:
    """Nothing waits."""


Decision = Batch | WaitUntil | Empty
_EMPTY: Final = Empty()
_NEVER: Final = 1 << 63
#: Levels in which nothing waits are forgotten from this number on.
_KEPT_LEVELS: Final = 64
#: In a longer level a call that is withdrawn leaves a gap.
_SHORT: Final = 64


class _Level:
    __slots__ = ("behind", "calls", "deadlines", "policy", "size", "timed")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.calls: deque[Queued] = deque()
        #: Calls whose timeout passed under a DELAY policy.
        self.behind: deque[Queued] = deque()
        self.size = 0
        #: Where requests have timeouts of their own: those of `calls` by identity, and a heap of (deadline, number,
        #: call) of them and of some that have left. Elsewhere the first call is the first to run out of time.
        self.timed: dict[int, int] = {}
        self.deadlines: list[tuple[int, int, Queued]] = []


class RequestQueue:
    """Calls that wait for an instance. `max_batch_size` 0 or 1, or `merge` off: every call is a batch of its own."""

    def __init__(
        self,
        max_batch_size: int,
        *,
        merge: bool = True,
        preferred: tuple[int, ...] = (),
        max_delay_ns: int = 0,
        levels: int = 0,
        default_level: int = 0,
        default_policy: QueuePolicy | None = None,
        policies: Mapping[int, QueuePolicy] | None = None,
    ) -> None:
        self._max_rows = max_batch_size if merge else 0
        self._preferred = frozenset(preferred)
        self._largest_preferred = max(preferred, default=self._max_rows)
        self._max_delay_ns = max_delay_ns
        self._returns: Returns | None = None
        # Where a configuration prefers nothing, it is completed with the largest size.
        if self._max_rows > 1 and self._preferred <= {max_batch_size} and not max_delay_ns and not levels:
            self._returns = Returns()
        self._last_level = levels
        self._default_level = default_level
        self._policy = default_policy or QueuePolicy()
        self._policies = policies or {}
        #: Those in use: a configuration may speak of 2**64.
        self._levels: dict[int, _Level] = {}
        self._in_order: list[_Level] = []
        self._size = 0
        #: Calls (by identity) that were withdrawn and still lie in their level: finding one there takes longer the more
        #: wait, and many may be withdrawn at once. Never more than there are others.
        self._gaps: set[int] = set()
        #: Calls that have been delayed and still lie where they were as well.
        self._moved: set[int] = set()
        self._put_count = 0
        #: No call expires before this.
        self._next_deadline_ns = _NEVER

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"<RequestQueue {self._size} waiting, max rows {self._max_rows}>"

    def put(self, call: Queued, now_ns: int, priority: int = 0, timeout_us: int = 0) -> None:
        """Takes a call; raises Unavailable, with Triton's text, when its level is full."""
        number = priority if 0 < priority <= self._last_level else self._default_level
        level = self._levels.get(number) or self._begin(number)
        policy = level.policy
        if policy.max_queue_size and level.size >= policy.max_queue_size:
            raise Unavailable(call.request.label + "Exceeds maximum queue size")
        call.level = number
        limit_us = timeout_of(policy, timeout_us)
        if limit_us:
            call.deadline_ns = now_ns + limit_us * 1000
            self._next_deadline_ns = min(self._next_deadline_ns, call.deadline_ns)
            if policy.allow_timeout_override:
                self._time(level, call)
        level.calls.append(call)
        level.size += 1
        self._size += 1

    def _time(self, level: _Level, call: Queued) -> None:
        self._put_count += 1
        level.timed[id(call)] = self._put_count
        if len(level.deadlines) > 2 * len(level.timed) + _SHORT:
            # Most are of calls that have left.
            level.deadlines = [entry for entry in level.deadlines if level.timed.get(id(entry[2])) == entry[1]]
            heapq.heapify(level.deadlines)
        heapq.heappush(level.deadlines, (call.deadline_ns, self._put_count, call))

    def _begin(self, number: int) -> _Level:
        if len(self._levels) >= _KEPT_LEVELS:
            self._close_gaps()
            self._levels = {known: level for known, level in self._levels.items() if level.size}
        level = self._levels[number] = _Level(self._policies.get(number, self._policy))
        self._in_order = [self._levels[known] for known in sorted(self._levels)]
        return level

    def remove(self, call: Queued) -> None:
        """Takes out a call that waits here; it may be put in again."""
        level = self._levels[call.level]
        try:
            (level.behind if id(call) in self._moved else level.calls).remove(call)
        except ValueError:
            level.behind.remove(call)
        level.timed.pop(id(call), None)
        level.size -= 1
        self._size -= 1

    def withdraw(self, call: Queued) -> None:
        """Takes out a call that waits here for good (its client has left)."""
        level = self._levels[call.level]
        if level.size <= _SHORT:
            self.remove(call)
        else:
            self._gaps.add(id(call))
            level.timed.pop(id(call), None)
            level.size -= 1
            self._size -= 1
        self._limit_gaps()

    def expired(self, now_ns: int) -> list[Queued]:
        """Takes out the calls that are to be refused because they waited too long; delays those to be delayed."""
        if now_ns < self._next_deadline_ns:
            return []
        rejected: list[Queued] = []
        next_deadline_ns = _NEVER
        for level in self._in_order:
            policy = level.policy
            if not policy.default_timeout_us:
                continue
            if policy.allow_timeout_override:
                late, due_ns = self._late_of_any(level, now_ns)
            else:
                late, due_ns = self._late_of_first(level, now_ns)
            next_deadline_ns = min(next_deadline_ns, due_ns)
            if policy.timeout_action == "DELAY":
                level.behind += late
            else:
                rejected += late
                level.size -= len(late)
                self._size -= len(late)
        self._next_deadline_ns = next_deadline_ns
        self._limit_gaps()
        return rejected

    def _late_of_first(self, level: _Level, now_ns: int) -> tuple[list[Queued], int]:
        """Takes the calls out of a level whose time is over, where all have the same; when the next one's is."""
        late: list[Queued] = []
        calls = level.calls
        while calls:
            if self._gaps and self._is_gap(calls[0]):
                calls.popleft()
            elif calls[0].deadline_ns <= now_ns:
                late.append(calls.popleft())
            else:
                return late, calls[0].deadline_ns
        return late, _NEVER

    def _late_of_any(self, level: _Level, now_ns: int) -> tuple[list[Queued], int]:
        """The same where each has a time of its own."""
        late: list[Queued] = []
        calls, deadlines = level.calls, level.deadlines
        gaps = self._moved if level.policy.timeout_action == "DELAY" else self._gaps
        while deadlines:
            deadline_ns, number, call = deadlines[0]
            if level.timed.get(id(call)) != number:
                heapq.heappop(deadlines)
            elif deadline_ns <= now_ns:
                heapq.heappop(deadlines)
                del level.timed[id(call)]
                late.append(call)
                if calls[0] is call:
                    calls.popleft()
                else:
                    gaps.add(id(call))
            else:
                return late, deadline_ns
        return late, _NEVER

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expired` should be asked next, at the latest."""
        return None if self._next_deadline_ns == _NEVER else self._next_deadline_ns

    def drain(self) -> list[Queued]:
        """Takes out everything, in order."""
        calls = list(self._waiting())
        for level in self._in_order:
            level.calls.clear()
            level.behind.clear()
            level.timed.clear()
            level.deadlines.clear()
            level.size = 0
        self._size = 0
        self._gaps.clear()
        self._moved.clear()
        return calls

    def take(self, now_ns: int) -> Decision:
        """What to do at `now_ns`, given that an instance is idle."""
        if not self._size:
            return _EMPTY
        waiting = self._waiting()
        first = next(waiting)
        if self._max_rows <= 1:
            return self._pop(1, first.rows, "single")
        rows = first.rows
        count = 1
        oldest_ns = first.queued_ns
        preferred_count, preferred_rows = (1, rows) if rows in self._preferred else (0, 0)
        closed = rows >= self._max_rows
        if not closed:
            for call in waiting:
                if self._preferred and rows + call.rows > self._largest_preferred and not preferred_count:
                    preferred_count, preferred_rows = count, rows
                if rows + call.rows > self._max_rows or call.signature != first.signature:
                    closed = True
                    break
                rows += call.rows
                count += 1
                oldest_ns = min(oldest_ns, call.queued_ns)
                if rows in self._preferred:
                    preferred_count, preferred_rows = count, rows
                if rows >= self._max_rows:
                    break
        send_at_ns = oldest_ns + self._max_delay_ns
        if preferred_count and not (self._max_delay_ns and now_ns >= send_at_ns):
            return self._pop(preferred_count, preferred_rows, "preferred size")
        if closed or rows >= self._largest_preferred:
            return self._pop(count, rows, "full")
        if now_ns < send_at_ns:
            return WaitUntil(send_at_ns)
        returns = self._returns
        if returns is None or not returns.until_ns:
            return self._pop(count, rows, "delay")
        if until_ns := returns.wait_until(now_ns, count, first.signature, self._next_deadline_ns):
            return WaitUntil(until_ns)
        return self._pop(count, rows, "returns" if returns.gone(count) else "delay")

    def answered(self, count: int, signature: object, start_ns: int, end_ns: int) -> None:
        """An execution of so many calls of that signature has ended, after at least `WORTH_WAITING_NS`."""
        if self._returns is not None:
            self._returns.answered(count, self._size, signature, start_ns, end_ns)

    def hurry(self) -> bool:
        """Stops waiting for clients; whether any were expected."""
        returns = self._returns
        if returns is None or not returns.until_ns:
            return False
        returns.forget()
        return True

    def more(self, first: Queued, rows: int) -> list[Queued]:
        """Takes out what may join a batch that begins with `first`, has `rows` and has had to wait. A batch of a
        preferred size grows to another one only."""
        count = 0
        grown = rows
        for number, call in enumerate(self._waiting(), 1):
            if grown + call.rows > self._largest_preferred or call.signature != first.signature:
                break
            grown += call.rows
            if grown in self._preferred or rows not in self._preferred:
                count = number
        return self._pop(count, grown - rows, "waited").calls

    def _waiting(self) -> Iterator[Queued]:
        for level in self._in_order:
            if self._gaps or self._moved:
                yield from self._but_gaps(level.calls, self._moved)
                yield from self._but_gaps(level.behind)
            else:
                yield from level.calls
                yield from level.behind

    def _pop(self, count: int, rows: int, reason: str) -> Batch:
        if self._gaps or self._moved:
            return self._pop_over_gaps(count, rows, reason)
        calls: list[Queued] = []
        for level in self._in_order:
            for waiting in (level.calls, level.behind):
                while waiting and len(calls) < count:
                    call = waiting.popleft()
                    calls.append(call)
                    level.size -= 1
                    if level.timed:
                        level.timed.pop(id(call), None)
        self._size -= count
        return Batch(calls, rows, reason)

    # ---- gaps -------------------------------------------------------------------------------------------

    def _pop_over_gaps(self, count: int, rows: int, reason: str) -> Batch:
        calls: list[Queued] = []
        for level in self._in_order:
            for waiting in (level.calls, level.behind):
                while waiting and len(calls) < count:
                    call = waiting.popleft()
                    if not self._is_gap(call, waiting is level.calls):
                        calls.append(call)
                        level.size -= 1
                        level.timed.pop(id(call), None)
        self._size -= count
        self._limit_gaps()
        return Batch(calls, rows, reason)

    def _is_gap(self, call: Queued, in_calls: bool = True) -> bool:
        """Whether what is taken from `calls` or `behind` of a level is a gap, which is gone then."""
        key = id(call)
        if in_calls and key in self._moved:
            self._moved.remove(key)
            return True
        if key in self._gaps:
            self._gaps.remove(key)
            return True
        return False

    def _but_gaps(self, calls: deque[Queued], moved: Set[int] = frozenset()) -> Iterator[Queued]:
        gaps = self._gaps
        return (call for call in calls if id(call) not in gaps and id(call) not in moved)

    def _limit_gaps(self) -> None:
        if len(self._gaps) + len(self._moved) > self._size:
            self._close_gaps()

    def _close_gaps(self) -> None:
        if not self._gaps and not self._moved:
            return
        for level in self._in_order:
            level.calls = deque(self._but_gaps(level.calls, self._moved))
            level.behind = deque(self._but_gaps(level.behind))
        self._gaps.clear()
        self._moved.clear()
