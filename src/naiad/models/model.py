"""A loaded model version. On the event loop.

READY means: it is in the manager's table, so it can be leased. A lease is held from look-up until a call has its last
answer; a version is closed only when no lease is held. Nothing is awaited between look-up and lease.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from naiad.config.model_config import ModelConfig
from naiad.errors import Unavailable
from naiad.instances.instance import Instance
from naiad.messages import ModelMetadata, ModelStatistics, TensorMetadata
from naiad.models.check import RequestCheck
from naiad.scheduling.scheduler import Scheduler


class Closable(Protocol):
    """What a version leaves behind when it goes: its hosts."""

    async def close(self, timeout_s: float) -> None: ...


#: How long what has no requests any more may take to unload.
_UNLOAD_S = 30.0


class Model:
    """One version of a model, loaded. Everything about it that does not change is computed here, once."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        scheduler: Scheduler,
        instances: Sequence[Instance],
        statistics: ModelStatistics,
        labels: dict[str, list[str]],
        hosted: Closable | None,
        load_duration_s: float,
        members: Sequence["Model"] = (),
        readiness: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.name = config.name
        self.version = version
        self.config = config
        self.scheduler = scheduler
        self.instances = instances
        self.statistics = statistics
        self.labels = labels
        self.load_duration_s = load_duration_s
        #: Asks the model's own code whether it is ready; None for most, which have nothing to say.
        self.readiness = readiness
        self.check = RequestCheck(config)
        self.metadata = metadata_of(config, version)
        self._hosted = hosted
        #: Those an ensemble is made of. Whoever makes it has leased them for it; it gives them back when it goes.
        self._members = members
        self._leases = 0
        self._closing = False
        self._returned = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Model {self.name} version {self.version} leases={self._leases} {self.scheduler!r}>"

    @property
    def failure(self) -> str | None:
        """Why no instance can serve any more, or None."""
        failures = [instance.failure for instance in self.instances]
        return failures[0] if failures and all(failures) else None

    @property
    def is_leased(self) -> bool:
        return self._leases > 0

    @property
    def leases(self) -> int:
        return self._leases

    def lease(self) -> None:
        if self._closing and not self._leases:
            raise Unavailable(f"Request for unknown model: '{self.name}' version {self.version} is not at ready state")
        self._leases += 1

    def release(self) -> None:
        self._leases -= 1
        assert self._leases >= 0, "this is a bug: a lease was given back twice"
        if self._closing and not self._leases:
            self._returned.set()

    async def close(self) -> None:
        """Waits for every lease, however long it takes, and closes the hosts."""
        self._closing = True
        if self._leases:
            await self._returned.wait()
        if not self._leases:
            await self.scheduler.close()
        if self._hosted is not None:
            await self._hosted.close(0 if self._leases else _UNLOAD_S)
        for member in self._members:
            member.release()

    def give_up(self) -> None:
        """Ends the waiting of `close`: the hosts are closed all the same, which fails what still runs."""
        self._returned.set()


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
