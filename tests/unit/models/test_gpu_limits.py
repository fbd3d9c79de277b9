"""How full GPUs may be."""

from pathlib import Path
from typing import Any

import pytest

from naiad.backends.api import InstanceContext
from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.errors import Unavailable
from naiad.models.gpu_limits import GpuLimits
from naiad.models.instances import VersionInstances
from naiad.models.placement import placed_instances
from naiad.scheduling.rate_limit import NoLimiter
from naiad.statistics import ModelStatistics
from naiad.telemetry.log import Log

SHARES = {"GPU-a": 0.5, "GPU-b": 0.75}


def limits(*given: tuple[int, float]) -> GpuLimits:
    return GpuLimits(dict(given), list(SHARES), SHARES.__getitem__)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ([], None),
        ([(0, 0.5), (1, 0.75)], None),
        ([(0, 0.4)], "m_0"),
        ([(0, 1.0), (1, 0.7)], "m_1"),
        ([(7, 0.0)], None),
    ],
)
async def test_a_gpu_may_be_as_full_as_it_is_said(given: list[tuple[int, float]], full: str | None) -> None:
    instances = [InstanceContext(f"m_{device}", "KIND_GPU", device) for device in (0, 1)]
    instances.append(InstanceContext("m_cpu", "KIND_CPU", 0))
    checking = limits(*given).check(instances)
    if full is None:
        await checking
        return
    with pytest.raises(Unavailable) as caught:
        await checking
    assert caught.value.message == (
        f"can not create model '{full}': memory limit set for GPU {full[-1]} has exceeded, model loading is rejected."
    )


async def test_instances_that_are_too_much_are_unloaded() -> None:
    class Hosted:
        loaded: list[Any] = []  # noqa: RUF012

        async def load(self, config: Any, contexts: Any) -> list[Any]:
            self.loaded = list(contexts)
            return self.loaded

        async def remove(self, instances: list[Any], timeout_s: float) -> None:
            assert instances == self.loaded
            self.loaded = []

    config = ModelConfig(parse_text('name: "m" backend: "b" instance_group { kind: KIND_GPU count: 2 gpus: [1] }'))
    hosted: Any = Hosted()
    instances = VersionInstances(hosted, NoLimiter(), 1, ModelStatistics("m", "1"), Path(), Log(), limits((1, 0.7)))
    with pytest.raises(Unavailable, match="memory limit set for GPU 1"):
        await instances.load(config, placed_instances(config))
    assert hosted.loaded == []
