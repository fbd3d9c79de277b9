"""When a host that has died is started again. Pure: the clock is the caller's."""


class RestartPolicy:
    """Pauses that grow with each failure in a row; a healthy run of `healthy_s` forgets the earlier ones.

    >>> policy = RestartPolicy(now=0.0)
    >>> policy.failed(now=1.0), policy.failed(now=2.0), policy.failed(now=3.0)
    (0.0, 0.5, 1.0)
    """

    def __init__(
        self,
        now: float,
        pauses_s: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0),
        healthy_s: float = 60.0,
    ) -> None:
        self._pauses_s = pauses_s
        self._healthy_s = healthy_s
        self._started_at = now
        self._failures = 0

    def started(self, now: float) -> None:
        """The host serves."""
        self._started_at = now

    def failed(self, now: float) -> float | None:
        """The host has died or did not start: the pause in seconds until the next start, None to give up."""
        if now - self._started_at >= self._healthy_s:
            self._failures = 0
        self._failures += 1
        # A host that never gets to `started` again is not healthy, however long its pauses were.
        self._started_at = now
        if self._failures > len(self._pauses_s):
            return None
        return self._pauses_s[self._failures - 1]
