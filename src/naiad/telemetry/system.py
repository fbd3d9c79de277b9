"""Utilization and memory of CPUs (Linux) and GPUs (NVML), as families of metrics.

`sample` blocks and belongs into a thread: NVML takes milliseconds for each GPU. `families` shows the last sample.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from naiad.telemetry.exposition import Family, Sample

#: Of all families, whether this machine has them or not.
NAMES = (
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
)


class SystemMetrics:
    """What is measured of the machine, and of its GPUs with these UUIDs. What cannot be read is left out."""

    def __init__(self, *, cpu: bool = True, gpus: Sequence[str] = (), proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cpu = cpu
        self._gpus: _Gpus | None = _Gpus.open(gpus) if gpus else None
        self._times = self._cpu_times() if cpu else None
        self._families: list[Family] = []
        self.sample()

    def families(self) -> list[Family]:
        """The families of the last sample."""
        return self._families

    def sample(self) -> None:
        """Measures. CPU utilization is that of the time since the last call."""
        families = self._cpu_families() if self._cpu else []
        if self._gpus is not None:
            families += self._gpus.families()
        self._families = families

    def _cpu_families(self) -> list[Family]:
        families: list[Family] = []
        times = self._cpu_times()
        if times is not None:
            share = utilization(self._times or (0, 0), times)
            self._times = times
            families.append(_gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", share))
        memory = self._memory()
        if memory is not None:
            total, used = memory
            families.append(_gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total))
            families.append(_gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used))
        return families

    def _cpu_times(self) -> tuple[int, int] | None:
        """Idle time and all time of all CPUs since boot, in ticks."""
        try:
            line = (self._proc / "stat").read_text().split("\n", 1)[0].split()
            # Guest time, which follows, is part of user time already.
            ticks = [int(field) for field in line[1:9]]
            return ticks[3] + ticks[4], sum(ticks)
        except (OSError, ValueError, IndexError):
            return None

    def _memory(self) -> tuple[int, int] | None:
        """Total and used memory in bytes; used is what is not available to a new program."""
        try:
            rows = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            kib = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
            return kib["MemTotal"] * 1024, (kib["MemTotal"] - kib["MemAvailable"]) * 1024
        except (OSError, ValueError, KeyError):
            return None


def utilization(before: tuple[int, int], now: tuple[int, int]) -> float:
    """The share of time, 0 to 1, that CPUs were not idle between two (idle, all) readings."""
    total = now[1] - before[1]
    if total <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 - (now[0] - before[0]) / total))


def _gauge(name: str, help: str, value: float) -> Family:
    return Family(name, "gauge", help, [Sample({}, value)])


class _Gpus:
    """Those of these GPUs that NVML knows. `nvml` is the module pynvml."""

    def __init__(self, nvml: Any, gpus: Sequence[str]) -> None:
        self._nvml = nvml
        handles: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            handles[uuid.decode() if isinstance(uuid, bytes) else uuid] = handle
        # Of parts of GPUs NVML does not tell here whose they are.
        seen = gpus if all(uuid in handles for uuid in gpus) else list(handles)
        self._devices: list[tuple[dict[str, str], Any]] = [({"gpu_uuid": uuid}, handles[uuid]) for uuid in seen]
        energy = nvml.nvmlDeviceGetTotalEnergyConsumption
        self._energy_at_start = [self._read(energy, handle) or 0 for _, handle in self._devices]

    @classmethod
    def open(cls, gpus: Sequence[str]) -> "_Gpus | None":
        """None where there is no NVML, no driver or no GPU."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # no module, no library, no driver: NVML has an exception class for each
            return None
        try:
            opened = cls(nvml, gpus)
            if opened._devices:
                return opened
        except nvml.NVMLError:  # a GPU that does not answer: no metrics of any rather than wrong ones
            pass
        nvml.nvmlShutdown()
        return None

    def families(self) -> list[Family]:
        nvml = self._nvml
        readings: list[tuple[str, str, Callable[[Any], float]]] = [
            (
                "nv_gpu_utilization",
                "GPU utilization rate [0.0 - 1.0)",
                lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            ),
            (
                "nv_gpu_memory_total_bytes",
                "GPU total memory, in bytes",
                lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            ),
            (
                "nv_gpu_memory_used_bytes",
                "GPU used memory, in bytes",
                lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            ),
            (
                "nv_gpu_power_usage",
                "GPU power usage in watts",
                lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            ),
            (
                "nv_gpu_power_limit",
                "GPU power management limit in watts",
                lambda handle: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
            ),
        ]
        families = [
            Family(name, "gauge", help, self._samples([self._read(read, handle) for _, handle in self._devices]))
            for name, help, read in readings
        ]
        energy = [self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, handle) for _, handle in self._devices]
        joules = [
            None if now is None else (now - start) / 1000
            for now, start in zip(energy, self._energy_at_start, strict=True)
        ]
        text = "GPU energy consumption in joules since the Triton Server started"
        families.append(Family("nv_energy_consumption", "counter", text, self._samples(joules)))
        return families

    def _samples(self, values: list[float | None]) -> list[Sample]:
        pairs = zip(self._devices, values, strict=True)
        return [Sample(labels, value) for (labels, _), value in pairs if value is not None]

    def _read(self, read: Callable[[Any], float], handle: Any) -> float | None:
        try:
            return read(handle)
        except self._nvml.NVMLError:  # not every GPU measures everything
            return None
