"""Watching model repositories: which changes count, and when somebody looks.

`Settled` is pure: a model counts as changed once two scans in a row saw the same, so that a half-copied model is not
loaded. `looks` is the shell around it; it runs on the event loop and scans in a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from naiad.repository.snapshot import Snapshot, scan

#: How soon a change is looked at again, to see whether the writing has ended.
SETTLE_S = 1.0

T = TypeVar("T")


class Settled:
    """The snapshot without what is still being written.

    Each model settles by itself, so one that changes all the time does not hold up the others. What is known of a
    repository that could not be read stays as it was: its models are neither changed nor removed.
    """

    def __init__(self, start: Snapshot) -> None:
        self.current = start
        self.waiting = False  #: whether something has changed and awaits a second look
        self._seen = start

    def __repr__(self) -> str:
        return f"<Settled models={sorted(self.current.models)} waiting={self.waiting}>"

    def observe(self, seen: Snapshot) -> Snapshot | None:
        """Takes a scan. The new snapshot if something has settled, else None."""
        seen = _with_unreadable(seen, self.current)
        last, self._seen = self._seen, seen
        settled = Snapshot(
            models=_settle(self.current.models, last.models, seen.models),
            duplicates=_settle(self.current.duplicates, last.duplicates, seen.duplicates),
            failures=_settle(self.current.failures, last.failures, seen.failures),
        )
        self.waiting = settled != seen
        if settled == self.current:
            return None
        self.current = settled
        return settled


def _settle(current: Mapping[str, T], last: Mapping[str, T], seen: Mapping[str, T]) -> dict[str, T]:
    """What was seen twice, and the current state of everything else."""
    result = {}
    for name in sorted(current.keys() | seen.keys()):
        twice = seen.get(name) == last.get(name)
        value = seen.get(name) if twice else current.get(name)
        if value is not None:
            result[name] = value
    return result


def _with_unreadable(seen: Snapshot, current: Snapshot) -> Snapshot:
    """`seen`, with what is known of unreadable repositories taken over from `current`."""
    if not seen.failures:
        return seen
    duplicates = {
        name: places
        for name, places in current.duplicates.items()
        if any(str(place.parent) in seen.failures for place in places)
    }
    readable = {name: model for name, model in seen.models.items() if name not in duplicates}
    unreadable = {
        name: model
        for name, model in current.models.items()
        if model.repository in seen.failures and name not in seen.duplicates
    }
    models = dict(sorted({**readable, **unreadable}.items()))
    return Snapshot(models, {**seen.duplicates, **duplicates}, seen.failures)


async def looks(
    repositories: Iterable[str | Path],
    interval_s: float,
    start: Snapshot,
    *,
    look: Callable[[list[str | Path]], Snapshot] = scan,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Snapshot | None]:
    """One item for each look at the repositories: a complete snapshot if something has settled since the look before, or
    since `start`, else None.

    Looks every `interval_s` seconds, and again after SETTLE_S while something is being written. An interval of 0
    ends at once: nobody looks. `look` is called in a thread.
    """
    paths = list(repositories)
    settled = Settled(start)
    while interval_s > 0:
        await sleep(min(SETTLE_S, interval_s) if settled.waiting else interval_s)
        yield settled.observe(await asyncio.to_thread(look, paths))
