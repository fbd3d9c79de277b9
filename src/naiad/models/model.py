"""A loaded model version. On the event loop.

READY means: it is in the manager's table, so it can be leased. A lease is held from look-up until a call has its last
answer; a version is closed only when no lease is held. Nothing is awaited between look-up and lease.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from naiad.config.model_config import ModelConfig
from naiad.errors import Unavailable
from naiad.instances.hosts import UNLOAD_S
from naiad.metadata import ModelMetadata, TensorMetadata
from naiad.models.check import RequestCheck
from naiad.models.instances import Held, VersionInstances
from naiad.models.placement import Exchange
from naiad.protocol.served import ServedModel
from naiad.scheduling.scheduler import Scheduler
from naiad.statistics import ModelStatistics


class Model(ServedModel):
    """One version of a model, loaded. Everything about it that does not change is computed here, once; what does is
    its instances, and `config` with them."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        scheduler: Scheduler,
        statistics: ModelStatistics,
        labels: dict[str, list[str]],
        instances: VersionInstances | None,
        members: Sequence["Model"] = (),
        readiness: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        super().__init__(config, version, labels)
        self.scheduler = scheduler
        self.instances = instances
        self.statistics = statistics
        #: Asks the model's own code whether it is ready; None for most, which have nothing to say.
        self.readiness = readiness
        self.check = RequestCheck(config)
        self.metadata = metadata_of(config, version)
        #: Those an ensemble is made of. Whoever makes it holds them for it; it lets them go when it goes.
        self._members = members
        self._leases = 0
        #: How many of the leases are not requests.
        self._held = 0
        self._closing = False
        self._returned = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Model {self.name} version {self.version} leases={self._leases} {self.scheduler!r}>"

    @property
    def failure(self) -> str | None:
        """Why no instance can serve any more, or None."""
        return None if self.instances is None else self.instances.failure

    @property
    def has_requests(self) -> bool:
        return self._leases > self._held

    @property
    def leases(self) -> int:
        return self._leases

    @property
    def in_flight(self) -> int:
        """The requests that have not ended, or the sequences, if those are more."""
        return max(self._leases - self._held, self.scheduler.sequences)

    def hold(self) -> None:
        """A lease for what is no request. Until `let_go`."""
        self.lease()
        self._held += 1

    def let_go(self) -> None:
        self._held -= 1
        self.release()

    def lease(self) -> None:
        if self._closing and not self._leases:
            raise Unavailable(f"Request for unknown model: '{self.name}' version {self.version} is not at ready state")
        self._leases += 1

    def release(self) -> None:
        self._leases -= 1
        assert self._leases >= 0, "this is a bug: a lease was given back twice"
        if self._closing and not self._leases:
            self._returned.set()

    async def update(self, config: ModelConfig) -> "InstanceUpdate":
        """Loads what `config`, which differs in its instance groups only, has of new instances. Raises NaiadError; then
        nothing has changed."""
        instances = self.instances
        assert instances is not None, "this is a bug: an ensemble has no instances"
        self.hold()
        try:
            change = instances.exchange_for(config)
            return InstanceUpdate(self, instances, config, change, await instances.load(config, change.added))
        except BaseException:
            self.let_go()
            raise

    async def close(self) -> None:
        """Waits for every lease, however long it takes, and closes the hosts."""
        self._closing = True
        if self._leases:
            await self._returned.wait()
        if not self._leases:
            await self.scheduler.close()
        if self.instances is not None:
            await self.instances.close(0 if self._leases else UNLOAD_S)
        for member in self._members:
            member.let_go()

    def give_up(self) -> None:
        """Ends the waiting of `close`: the hosts are closed all the same, which fails what still runs."""
        self._returned.set()


class InstanceUpdate:
    """A version whose new instances are ready: `commit` or `abort` it. It holds a lease until then, so that the version
    does not go."""

    def __init__(
        self, model: Model, instances: VersionInstances, config: ModelConfig, change: Exchange, loaded: list[Held]
    ) -> None:
        self.model = model
        self._instances = instances
        self._config = config
        self._change = change
        self._loaded = loaded

    def __repr__(self) -> str:
        return f"<InstanceUpdate of {self.model!r}: {self.summary}>"

    @property
    def summary(self) -> str:
        """What changes, in words."""
        kept, removed, added = self._change
        return f"{len(kept)} instances stay, {len(removed)} go, {len(added)} are new"

    def commit(self) -> set[asyncio.Task[None]]:
        """The model goes on with the new instances. The tasks end as the old ones have left."""
        self.model.config = self._config
        leaving = self._instances.commit(self._config, self._change, self._loaded)
        self.model.let_go()
        return leaving

    async def abort(self) -> None:
        """The model goes on as it was."""
        try:
            await self._instances.drop(self._loaded)
        finally:
            self.model.let_go()


def metadata_of(config: ModelConfig, version: int) -> ModelMetadata:
    """The metadata of one version (reference R3-4)."""

    def of(tensors: dict[str, "object"]) -> tuple[TensorMetadata, ...]:
        return tuple(
            TensorMetadata(tensor.name, tensor.datatype.name, tensor.shape)  # type: ignore[attr-defined]
            for tensor in tensors.values()
        )

    return ModelMetadata(
        config.name,
        (str(version),),
        config.platform or config.backend,
        of(dict(config.inputs)),
        of(dict(config.outputs)),
    )
