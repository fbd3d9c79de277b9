"""Waiting awake for what comes within microseconds. Runs in the server and in hosts.

Who sleeps is woken late: a core that has gone idle takes some 5 us to come back, 25 to 50 on a virtual machine, and a
batch needs two such wake-ups. So whoever expects something soon, as it came soon last time, looks for it again and
again instead, lets others have the core between two looks, and leaves it to them for a while if they want much of it.
"""

import asyncio
import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

#: A look that takes longer has had to wait for others, who are at more than a message.
_TAKEN_NS: Final = 300_000
#: Of what others take, one part in so many of the time is no matter, nor are short bursts: a client reads many answers.
_SPARED_PART: Final = 10
_SPARED_NS: Final = 2_000_000
_FIRST_PAUSE_NS: Final = 50_000_000
_LAST_PAUSE_NS: Final = 2_000_000_000
_NEVER_NS: Final = 1 << 62
#: What takes up to so many windows may come within one where nobody sleeps on its way, which is tried this often, and
#: once more so often when it has not. Else a chain of processes that has once fallen asleep would stay so.
_LATE_WINDOWS: Final = 4
_TRIES: Final = 8
_TRIES_EVERY: Final = 64


class BusyPoll:
    """Whether this process may wait awake. `window_ns` is how long at most, 0 for never.

    Its threads use it without a lock: what gets lost is a look too many or too few. Only threads that execute batches wait
    awake, and of several the one that began to wait last, as long as all others wait too: from one that executes, the
    interpreter would be taken.
    """

    __slots__ = (
        "_awake",
        "_clock",
        "_pause_ns",
        "_resume_ns",
        "_taken_at_ns",
        "_taken_ns",
        "_waiting",
        "_yield",
        "executing",
        "window_ns",
    )

    def __init__(
        self,
        window_ns: int,
        yield_core: Callable[[], None] = os.sched_yield,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.window_ns = window_ns
        #: The threads that execute batches, by their `get_ident`; empty as long as they are not known.
        self.executing: set[int] = set()
        #: Those that wait now, and which of them may be awake.
        self._waiting: set[int] = set()
        self._awake = 0
        self._yield = yield_core
        self._clock = clock
        #: What others have taken and when that was, less what they are spared.
        self._taken_ns = 0
        self._taken_at_ns = 0
        self._pause_ns = 0
        #: When it may next; pauses are doubled as long as others are found there.
        self._resume_ns = 0 if window_ns else _NEVER_NS

    def allows(self, now: int) -> bool:
        return now >= self._resume_ns

    def give_way(self, now: int) -> int:
        """Lets others have the core; the time afterwards, in ns."""
        self._yield()
        then = self._clock()
        if then - now > _TAKEN_NS:
            spared = (then - self._taken_at_ns) // _SPARED_PART
            self._taken_ns = max(0, self._taken_ns - spared) + then - now
            self._taken_at_ns = then
            if self._taken_ns > _SPARED_NS:
                self._taken_ns = 0
                self._pause_ns = min(max(2 * self._pause_ns, _FIRST_PAUSE_NS), _LAST_PAUSE_NS)
                self._resume_ns = then + self._pause_ns
        elif self._pause_ns and then > self._resume_ns + self._pause_ns:
            self._pause_ns = 0
        return then

    def wait(self, awaited: "Awaited", poll: Callable[..., Any]) -> None:
        """Returns when there is something to read. `poll(ms)` says whether there is within that time, `poll()` waits."""
        now = self._clock()
        awaited.begin(now)
        me = get_ident()
        executing, waiting = self.executing, self._waiting
        waiting.add(me)
        try:
            if awaited.is_soon and (me in executing or not executing):
                self._awake = me
                end = now + self.window_ns
                while now < end and self.allows(now) and self._awake == me and waiting.issuperset(executing):
                    if poll(0):
                        awaited.came(now, self.window_ns)
                        return
                    now = self.give_way(now)
            poll()
        finally:
            waiting.discard(me)
        awaited.came(self._clock(), self.window_ns)


class Awaited:
    """What comes again and again, and whether to expect it soon. Times are of `monotonic_ns`."""

    __slots__ = ("_late", "_since", "is_soon")

    def __init__(self) -> None:
        #: Long ago, as long as nobody has begun to wait.
        self._since = -_NEVER_NS
        #: How often in a row it has come after its window.
        self._late = 0
        self.is_soon = False

    def begin(self, now: int) -> None:
        self._since = now

    def came(self, now: int, window_ns: int) -> None:
        waited = now - self._since
        if waited < window_ns or waited >= _LATE_WINDOWS * window_ns:
            self._late = 0
            self.is_soon = waited < window_ns
        else:
            self.is_soon = self._late % _TRIES_EVERY < _TRIES
            self._late += 1


class AwakeLoop:
    """Keeps the event loop of the server from sleeping, and knows how many hosts may wait awake beside it: `places`, None
    for any number."""

    __slots__ = ("_busy_poll", "_clock", "_is_turning", "_loop", "_places", "_until", "window_ns")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        busy_poll: BusyPoll,
        places: int | None = None,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._places = places
        self.window_ns = busy_poll.window_ns
        self._loop = loop
        self._busy_poll = busy_poll
        self._clock = clock
        self._until = 0
        self._is_turning = False

    def take_place(self) -> int:
        """For a host that begins: the window of its `BusyPoll`, in ns, to be given to `leave_place` when it has ended."""
        if self._places is None:
            return self.window_ns
        if self._places == 0:
            return 0
        self._places -= 1
        return self.window_ns

    def leave_place(self, window_ns: int) -> None:
        if self._places is not None and window_ns:
            self._places += 1

    def stay_awake(self, now: int) -> None:
        """For the window from now on."""
        if self._busy_poll.allows(now):
            self._until = now + self.window_ns
            if not self._is_turning:
                self._is_turning = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = self._clock()
        if now < self._until and self._busy_poll.allows(now):
            self._busy_poll.give_way(now)
            self._loop.call_soon(self._turn)
        else:
            self._is_turning = False
