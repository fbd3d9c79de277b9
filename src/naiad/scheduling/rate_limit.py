"""The rate limiter: which instances may execute at once, by the resources their configuration says they occupy.

`Resources` decides, without clock and loop. `RateLimiter` and `LimitedInstance` are the shell around it: an instance
that wears a LimitedInstance holds the batch it is given until its resources are free, so schedulers know nothing of
all this, and without `--rate-limit=execution_count` there is nothing of it on the way of a request.

Who comes next. Each instance has a pass, which grows by its priority whenever it is granted something; whose pass
would be smallest then goes first, and of equals the more important. So of two that always wait, the one of priority 1
executes N times as often as the one of priority N (reference R2-69). Who has rested starts where the others are: rest
is not saved up. An instance whose resources are not free keeps those behind it from what it waits for, so many small
ones do not starve a large one; what it does not need, others may take. (In Triton nobody at all overtakes the first in
the line.)
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from naiad.backends.api import InstanceContext
from naiad.config.model_config import InstanceGroup
from naiad.errors import InvalidArgument, NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes, Execution, Instance
from naiad.messages import InferRequest, Result
from naiad.options import RateLimitResource

#: A resource of a device, or of the whole server (None).
Key = tuple[int | None, str]


class Claim:
    """What one instance occupies while it executes, and its place among those that wait."""

    __slots__ = ("arrival", "at", "needs", "priority")

    def __init__(self, needs: Mapping[Key, int], priority: int = 1) -> None:
        self.needs = needs
        self.priority = priority
        #: The pass.
        self.at = 0
        self.arrival = 0


class Resources:
    """How much there is of each resource, who holds it and who waits for it.

    `explicit`: the amounts that are given. Without any there is as much as the most demanding instance needs; with
    some, there is nothing of what they do not name (reference R5-37).
    """

    def __init__(self, explicit: Sequence[RateLimitResource] = ()) -> None:
        self._explicit = explicit
        self._claims: set[Claim] = set()
        self._limits: dict[Key, int] = {}
        self._used: dict[Key, int] = {}
        self._waiting: list[Claim] = []
        self._now = 0
        self._arrivals = 0

    def __repr__(self) -> str:
        return f"<Resources {self._used} of {self._limits}, {len(self._waiting)} waiting>"

    def add(self, claims: Iterable[Claim]) -> None:
        """Takes in the claims of a model version. Raises InvalidArgument, and takes none, if they can never be met."""
        limits = self._limits_for(self._claims.union(claims))
        self._claims.update(claims)
        self._limits = limits

    def remove(self, claims: Iterable[Claim]) -> None:
        """Forgets claims that neither hold nor wait for anything."""
        self._claims.difference_update(claims)
        self._limits = self._limits_for(self._claims)

    def want(self, claim: Claim) -> None:
        self._arrivals += 1
        claim.arrival = self._arrivals
        claim.at = max(claim.at, self._now)
        self._waiting.append(claim)

    def withdraw(self, claim: Claim) -> None:
        """The claim waits no longer."""
        self._waiting.remove(claim)

    def release(self, claim: Claim) -> None:
        """Gives back what `grant` has given."""
        for key, count in claim.needs.items():
            self._used[key] -= count

    @property
    def waiting(self) -> list[Claim]:
        """Who waits, in the order of their turns."""
        return sorted(self._waiting, key=lambda claim: (claim.at + claim.priority, claim.priority, claim.arrival))

    def grant(self) -> list[Claim]:
        """Gives what can be given now; who has got everything."""
        granted: list[Claim] = []
        kept: set[Key] = set()
        for claim in self.waiting:
            if kept.isdisjoint(claim.needs) and all(
                self._used.get(key, 0) + count <= self._limits.get(key, 0) for key, count in claim.needs.items()
            ):
                for key, count in claim.needs.items():
                    self._used[key] = self._used.get(key, 0) + count
                self._waiting.remove(claim)
                self._now = max(self._now, claim.at)
                claim.at += claim.priority
                granted.append(claim)
            else:
                kept.update(claim.needs)
        return granted

    def _limits_for(self, claims: Iterable[Claim]) -> dict[Key, int]:
        limits: dict[Key, int] = {}
        for claim in claims:
            for key, count in claim.needs.items():
                limits[key] = max(limits.get(key, 0), count)
        if self._explicit:
            for key, needed in limits.items():
                there_is = self._given(*key)
                if there_is < needed:
                    raise InvalidArgument(
                        f'Resource count for "{key[1]}" is limited to {there_is} which will prevent scheduling of one or '
                        f"more model instances, the minimum required count is {needed}"
                    )
                limits[key] = there_is
        for device, name in limits:
            if device is not None and (None, name) in limits:
                raise InvalidArgument(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        return limits

    def _given(self, device: int | None, name: str) -> int:
        """Of a global resource there is the most that any line gives, whatever device it names."""
        return max(
            (
                resource.count
                for resource in self._explicit
                if resource.name == name and (device is None or resource.device in (None, device))
            ),
            default=0,
        )


#: An instance to be, and the group it is of.
Placed = tuple[InstanceGroup, InstanceContext]
_NO_CLAIM = Claim({})


class NoLimiter:
    """`--rate-limit=off`: instances stay as they are."""

    def admit(self, placed: Sequence[Placed]) -> list[Claim]:
        return [_NO_CLAIM] * len(placed)

    def leave(self, claims: Sequence[Claim]) -> None:
        pass

    def limited(self, instances: list[Instance], claims: Sequence[Claim]) -> list[Instance]:
        return instances

    async def handed_over(self, claim: Claim) -> None:
        pass


class RateLimiter:
    """All instances of the server with `--rate-limit=execution_count`. On the event loop."""

    def __init__(self, explicit: Sequence[RateLimitResource] = ()) -> None:
        self._resources = Resources(explicit)
        self._holders: dict[Claim, LimitedInstance] = {}
        self._grant_due = False

    def __repr__(self) -> str:
        return f"<RateLimiter {self._resources!r}>"

    def admit(self, placed: Sequence[Placed]) -> list[Claim]:
        """The claims of a version's instances. Raises InvalidArgument if they can never be met."""
        claims = [claim_of(group, context) for group, context in placed]
        self._resources.add(claims)
        return claims

    def leave(self, claims: Sequence[Claim]) -> None:
        """The instances are gone."""
        for claim in claims:
            if (holder := self._holders.pop(claim, None)) is not None:
                holder.end()
        self._resources.remove(claims)
        self.grant()

    def limited(self, instances: list[Instance], claims: Sequence[Claim]) -> list[Instance]:
        """The instances, each holding its batches back until its claim is met."""
        limited: list[Instance] = []
        for instance, claim in zip(instances, claims, strict=True):
            self._holders[claim] = holder = LimitedInstance(instance, claim, self)
            limited.append(holder)
        return limited

    async def handed_over(self, claim: Claim) -> None:
        """Returns when no batch waits in the instance for its resources; for one that gets no more of them."""
        await self._holders[claim].handed_over()

    def want(self, claim: Claim) -> None:
        self._resources.want(claim)
        if not self._grant_due:
            self.grant()

    def withdraw(self, claim: Claim) -> None:
        self._resources.withdraw(claim)
        self.grant()

    def release(self, claim: Claim) -> None:
        self._resources.release(claim)
        if not self._grant_due:
            # Not now: the scheduler that has been told of the end takes its place in the line first.
            self._grant_due = True
            asyncio.get_running_loop().call_soon(self.grant)

    def extend(self) -> None:
        """Fills the batches that wait for resources, the next ones first."""
        for claim in self._resources.waiting:
            self._holders[claim].extend()

    def grant(self) -> None:
        self._grant_due = False
        for claim in self._resources.grant():
            self._holders[claim].granted()


class LimitedInstance:
    """An `Instance` that executes a batch once the resources are there for it; until then the batch is in it, as it is
    while it executes."""

    def __init__(self, instance: Instance, claim: Claim, limiter: RateLimiter) -> None:
        self.name = instance.name
        self.place = instance.place
        self.on_change: Callable[[], None] = _nobody
        self._instance = instance
        self._claim = claim
        self._limiter = limiter
        self._losses = instance.losses
        #: The batch that waits for resources.
        self._held: Execution | None = None
        self._has_waited = False
        #: The batches in the instance below.
        self._open: dict[Execution, _Running] = {}
        #: Set when the batch that waits goes on, for who waits for that.
        self._handed_over: asyncio.Event | None = None
        instance.on_change = self._changed

    def __repr__(self) -> str:
        return f"<LimitedInstance {self._instance!r}{' waiting' if self._held is not None else ''}>"

    @property
    def losses(self) -> int:
        return self._instance.losses

    @property
    def is_available(self) -> bool:
        return self._held is None and self._instance.is_available

    @property
    def failure(self) -> str | None:
        return self._instance.failure

    def execute(self, batch: Execution) -> None:
        self._held = batch
        self._losses = self._instance.losses
        self._has_waited = False
        self._limiter.want(self._claim)
        self._has_waited = True

    def cancel(self, batch: Execution, index: int) -> None:
        """A batch that waits keeps its cancelled requests: no backend has seen them, so none can be told."""
        if (running := self._open.get(batch)) is not None:
            self._instance.cancel(running, index)

    async def handed_over(self) -> None:
        """Returns when no batch waits here any more."""
        if self._held is not None:
            self._handed_over = asyncio.Event()
            await self._handed_over.wait()

    def extend(self) -> None:
        """Calls that wait join the batch that waits here."""
        if self._held is not None and self._has_waited:
            self._held.extend()

    def granted(self) -> None:
        """The resources are there."""
        batch = self._release()
        if self._has_waited:
            batch.extend()
        self._open[batch] = running = _Running(batch, self)
        if self._instance.losses == self._losses and self._instance.is_available:
            self._instance.execute(running)
        else:
            self._fail(running)

    def ended(self, running: "_Running") -> None:
        """An execution has ended; decoupled models may still answer."""
        # What waits is for the batches that have waited longest, before this instance is offered it.
        self._limiter.extend()
        self.on_change()
        self._limiter.release(self._claim)

    def answered(self, running: "_Running") -> None:
        """Nothing more comes of a batch."""
        self._open.pop(running.batch, None)

    def end(self) -> None:
        """The instance is gone, and what waits in it."""
        if self._held is not None:
            self._drop()

    def _changed(self) -> None:
        # What executes in an instance goes with its process; so does what waits in it, which may be a sequence.
        if self._held is not None and (self._instance.losses != self._losses or self._instance.failure is not None):
            self._drop()
        self.on_change()

    def _drop(self) -> None:
        batch = self._release()
        self._limiter.withdraw(self._claim)
        self._fail(batch)

    def _release(self) -> Execution:
        batch, self._held = self._held, None
        assert batch is not None, "this is a bug: no batch waits for resources"
        if self._handed_over is not None:
            self._handed_over.set()
        return batch

    def _fail(self, batch: Execution) -> None:
        why = self._instance.failure or "its host process has ended"
        error: NaiadError = Unavailable(f"instance '{self.name}' is not available: {why}")
        for index in range(len(batch.requests)):
            batch.deliver(index, error, True)
        batch.complete(None)


class _Running:
    """A batch that has its resources: gives them back when it completes."""

    __slots__ = ("_completed", "_holder", "_unanswered", "batch", "requests", "rows")

    def __init__(self, batch: Execution, holder: LimitedInstance) -> None:
        self.batch = batch
        self.requests: Sequence[InferRequest] = batch.requests
        self.rows: Sequence[int] = batch.rows
        self._holder = holder
        self._unanswered = len(batch.requests)
        self._completed = False

    def deliver(self, index: int, result: Result | None, final: bool) -> None:
        self.batch.deliver(index, result, final)
        if final:
            self._answered()

    def complete(self, times: ComputeTimes | None, succeeded: bool = True) -> None:
        self._completed = True
        self.batch.complete(times, succeeded)
        self._holder.ended(self)
        if not self._unanswered:
            self._holder.answered(self)

    def extend(self) -> None:
        # It has waited for its resources, and been extended, before the instance below sees it.
        pass

    def reschedule(self, index: int) -> None:
        self.batch.reschedule(index)
        self._answered()

    def _answered(self) -> None:
        self._unanswered -= 1
        if self._completed and not self._unanswered:
            self._holder.answered(self)


def claim_of(group: InstanceGroup, context: InstanceContext) -> Claim:
    """What an instance of a group occupies: on its device, or wherever it runs where the resource is global."""
    needs = {
        (None if resource.is_global else context.device_id, resource.name): resource.count
        for resource in group.resources
    }
    return Claim(needs, group.priority)


def _nobody() -> None:
    pass
