"""Whether a batch that may go waits a moment for the clients just answered. Pure: no clock, no I/O.

Clients that ask again as soon as they are answered come back together, milliseconds after their batch has ended. What
has waited meanwhile would go just before that, alone, and its clients in turn would miss the next batch: batches of few
and of the rest take turns for ever, where one of all takes less time. So after an execution that took long, a batch
waits until as many are there as were answered and waited, but only for a small share of that time. Where nobody came,
some of the next chances are passed over, more each time: requests that come as they like lose next to nothing.
"""

from typing import Final

#: Shorter executions (ns) are not waited after: clients take longer than a share of them.
WORTH_WAITING_NS: Final = 20_000_000
#: Of an execution's time, and at most (ns): how long after its end clients are waited for.
_SHARE: Final = 50
_LONGEST_NS: Final = 10_000_000
#: Chances passed over at most. Even, as batches of few and of many may take turns: only after those of many is the wait
#: long enough to end that.
_MOST_PASSED_OVER: Final = 62


class Returns:
    """What the clients of one queue do. Times are `time.monotonic_ns`."""

    __slots__ = ("_expected", "_found", "_left", "_pass_over", "_signature", "until_ns")

    def __init__(self) -> None:
        #: Nobody is waited for after this; 0 where nobody is expected.
        self.until_ns = 0
        self._expected = 0
        self._signature: object = None
        #: Calls there when a batch began to wait; 0 where none waits.
        self._found = 0
        #: Chances to pass over after a wait in vain, and how many of them are left.
        self._pass_over = 0
        self._left = 0

    def answered(self, count: int, waiting: int, signature: object, start_ns: int, end_ns: int) -> None:
        """An execution of `count` calls of that signature has ended; `waiting` others are in the queue."""
        if self._found:  # what waited has become full, or could grow no more
            self._pass_over = 0
        self.forget()
        if self._left:
            self._left -= 1
            return
        self._expected = count + waiting
        self._signature = signature
        self.until_ns = end_ns + min((end_ns - start_ns) // _SHARE, _LONGEST_NS)

    def wait_until(self, now_ns: int, count: int, signature: object, deadline_ns: int) -> int:
        """Until when a batch of `count` calls, which could grow, is to wait; 0: it is to go. None of the calls expires
        before `deadline_ns`."""
        if count >= self._expected or signature != self._signature or not now_ns < self.until_ns < deadline_ns:
            return 0
        if not self._found:
            self._found = count
        return self.until_ns

    def gone(self, count: int) -> bool:
        """A batch of `count` calls, which could have grown, goes. Whether it has waited."""
        has_waited = self._found > 0
        if has_waited:
            self._pass_over = 0 if count > self._found else min(2 * self._pass_over + 2, _MOST_PASSED_OVER)
            self._left = self._pass_over
        self.forget()
        return has_waited

    def forget(self) -> None:
        """Nobody is expected any more."""
        self._found = self.until_ns = 0
