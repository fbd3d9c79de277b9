"""`--model-load-gpu-limit`: how full a GPU may be with a new instance on it. On the event loop; NVML is asked in a thread."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from naiad.backends.api import InstanceContext
from naiad.errors import Unavailable
from naiad.telemetry.gpus import used_share


class GpuLimits:
    """`limits`: the share of its memory for each GPU that has one. `gpus` are the UUIDs of all."""

    def __init__(
        self,
        limits: Mapping[int, float],
        gpus: Sequence[str],
        used: Callable[[str], float] = used_share,
    ) -> None:
        self._limits = limits
        self._gpus = gpus
        self._used = used

    async def check(self, instances: Iterable[InstanceContext]) -> None:
        """Once they are loaded, as in Triton: what they take is not known before. Raises Unavailable."""
        for instance in instances:
            limit = self._limits.get(instance.device_id) if instance.kind == "KIND_GPU" else None
            if limit is not None and await asyncio.to_thread(self._used, self._gpus[instance.device_id]) > limit:
                raise Unavailable(
                    f"can not create model '{instance.name}': memory limit set for GPU {instance.device_id} has exceeded, "
                    "model loading is rejected."
                )
