"""The instances of a loaded version: in their hosts, behind the rate limiter, in the hands of the scheduler. On the
event loop.

What there should be is decided in `placement`; here it is done. New instances are loaded and warm before anybody gets
to see them, and old ones leave when what they have begun has ended.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from naiad.backends.api import InstanceContext
from naiad.config.model_config import ModelConfig
from naiad.instances.hosts import HostedModel
from naiad.instances.instance import Instance
from naiad.instances.thread import ThreadModel
from naiad.models.gpu_limits import GpuLimits
from naiad.models.placement import Exchange, exchange, placed_instances
from naiad.models.warmup import warm_up
from naiad.scheduling.rate_limit import Claim, NoLimiter, Placed, RateLimiter
from naiad.scheduling.turns import TurnScheduler
from naiad.statistics import ModelStatistics
from naiad.telemetry.log import Log


class Held(NamedTuple):
    """An instance. `below` is it in its host, `instance` as the scheduler sees it, behind the rate limiter."""

    placed: Placed
    claim: Claim
    below: Instance
    instance: Instance


class VersionInstances:
    """All instances of one version, and its hosts, which go with it."""

    def __init__(
        self,
        hosted: HostedModel | ThreadModel,
        limiter: NoLimiter | RateLimiter,
        version: int,
        statistics: ModelStatistics,
        directory: Path,
        log: Log,
        gpu_limits: GpuLimits,
    ) -> None:
        self.hosted = hosted
        self._limiter = limiter
        self._version = version
        self.statistics = statistics
        self._directory = directory
        self._log = log
        self._gpu_limits = gpu_limits
        self._scheduler: TurnScheduler | None = None
        self._there: list[Held] = []
        #: What the rate limiter knows of: of those there, of new ones and of those that leave.
        self._claims: set[Claim] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        names = [each.instance.name for each in self._there]
        return f"<VersionInstances {names}, {len(self._leaving)} leaving, {self.hosted!r}>"

    @property
    def failure(self) -> str | None:
        """Why no instance can serve any more, or None."""
        failures = [each.instance.failure for each in self._there]
        return failures[0] if failures and all(failures) else None

    async def load(self, config: ModelConfig, placed: Sequence[Placed]) -> list[Held]:
        """New instances, warm, for `begin` or `commit`. Raises the first error; then there are none of them."""
        if not placed:
            return []
        claims = self._limiter.admit(placed)
        self._claims.update(claims)
        try:
            below = await self._load_warm(config, [context for _, context in placed])
        except BaseException:
            self._forget(claims)
            raise
        limited = self._limiter.limited(below, claims)
        return [Held(*each) for each in zip(placed, claims, below, limited, strict=True)]

    async def _load_warm(self, config: ModelConfig, contexts: list[InstanceContext]) -> list[Instance]:
        instances = await self.hosted.load(config.as_dict(), contexts)
        try:
            await self._gpu_limits.check(contexts)
            await warm_up(config, self._version, self._directory, instances, self.statistics, self._log)
        except BaseException:
            await self.hosted.remove(instances, 0.0)
            raise
        return instances

    def begin(self, scheduler: TurnScheduler, loaded: list[Held]) -> None:
        """The first ones; the scheduler has them."""
        self._scheduler = scheduler
        self._there = loaded

    def exchange_for(self, config: ModelConfig) -> Exchange:
        """What it takes to follow a configuration."""
        lost = [position for position, each in enumerate(self._there) if each.instance.failure is not None]
        return exchange([each.placed for each in self._there], placed_instances(config), lost)

    def commit(self, config: ModelConfig, change: Exchange, loaded: list[Held]) -> set[asyncio.Task[None]]:
        """Puts an exchange into effect; `loaded` are its new ones. The tasks end as the old ones have left."""
        scheduler = self._scheduler
        assert scheduler is not None, "this is a bug: instances are exchanged that have not begun"
        there = self._there
        self._there = [there[position] for position in change.kept] + loaded
        self.hosted.reconfigure(config.as_dict())
        for each in loaded:
            scheduler.add(each.instance)
        tasks: set[asyncio.Task[None]] = set()
        for position in change.removed:
            held = there[position]
            leave = self._leave(held, scheduler.retire(held.instance))
            task = asyncio.get_running_loop().create_task(leave, name=f"unload {held.instance.name}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            tasks.add(task)
        return tasks

    async def drop(self, loaded: Sequence[Held]) -> None:
        """Unloads instances that nobody has seen."""
        await self.hosted.remove([each.below for each in loaded], 0.0)
        self._forget([each.claim for each in loaded])

    async def _leave(self, held: Held, retired: asyncio.Event) -> None:
        try:
            await retired.wait()
            await self._limiter.handed_over(held.claim)
            await self.hosted.remove([held.below])
            self._forget([held.claim])
        except Exception as error:
            self._log.exception(f"instance '{held.instance.name}' could not be unloaded", error)

    def _forget(self, claims: Sequence[Claim]) -> None:
        self._claims.difference_update(claims)
        self._limiter.leave(claims)

    async def close(self, timeout_s: float) -> None:
        """Closes the hosts: what is inside an instance after `timeout_s` fails."""
        for task in self._leaving:
            task.cancel()
        if self._leaving:
            await asyncio.wait(self._leaving)
        try:
            await self.hosted.close(timeout_s)
        finally:
            self._forget(list(self._claims))
