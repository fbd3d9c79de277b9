"""The metrics that Triton does not have, `naiad_*`: made at the moment they are asked for, from what is kept anyway.

They are served beside Triton's, not among them: who reads all of Triton's families finds those and no others.

Lives on the event loop, but for `read_memory`, which reads files and runs in a thread.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from naiad.statistics import LATENCY_BOUNDS_NS, BatchStatistics, ModelStatistics
from naiad.telemetry.exposition import Family, Sample, exposition

#: Batches up to these sizes are counted together.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BOUNDS = tuple(f"{bound / 1e9:g}" for bound in LATENCY_BOUNDS_NS)
#: Phase -> the parts of InferStatistics whose sum it is.
_PHASES = {
    "request": ("success",),
    "queue": ("queue",),
    "compute": ("compute_input", "compute_infer", "compute_output"),
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model version that serves, or an old one that drains."""

    statistics: ModelStatistics
    leases: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The processes of a model version; `arena_bytes` is how much its instances have set aside for tensors."""

    name: str
    version: int
    restarts: int
    pids: Sequence[int]
    arena_bytes: int


class Memory(NamedTuple):
    """What of a process lies in memory, in bytes: all of it, and what it shares with the server, which are tensors."""

    resident: int = 0
    shared: int = 0


class OwnMetrics:
    """The collector; `models` and `hosts` are asked at each scrape."""

    def __init__(self, models: Callable[[], Iterable[ModelFacts]], hosts: Callable[[], Iterable[HostFacts]]) -> None:
        self._models = models
        self._hosts = hosts

    async def scrape(self) -> bytes:
        """The text of all of them. The memory of processes is read in a thread."""
        hosts = list(self._hosts())
        memory = await asyncio.to_thread(read_memory, [pid for facts in hosts for pid in facts.pids])
        return exposition(families(self._models(), hosts, memory))


def read_memory(pids: Iterable[int], root: Path = Path("/proc")) -> dict[int, Memory]:
    """The memory of the processes that still are."""
    found: dict[int, Memory] = {}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            status = (root / str(pid) / "status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("VmRSS", "RssShmem")))
            found[pid] = Memory(
                *(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem") if name in fields)
            )
    return found


def families(models: Iterable[ModelFacts], hosts: Iterable[HostFacts], memory: Mapping[int, Memory]) -> list[Family]:
    """All of them. Versions with the same name and number (an old one that drains) are added up."""
    groups: dict[tuple[str, str], list[ModelFacts]] = {}
    for model in models:
        groups.setdefault((model.statistics.name, model.statistics.version), []).append(model)
    latency = Family(
        "naiad_latency_seconds",
        "histogram",
        "Time of successful requests by phase: request (all of it), queue (waiting), compute (in the model's instance)",
    )
    sizes = Family("naiad_batch_size", "histogram", "Rows of the executed batches")
    closed = Family(
        "naiad_batches_total",
        "counter",
        "Batches by why no more requests were waited for: full, preferred size, delay (it was over), returns (a "
        "moment's wait for clients just answered was over), single (the model takes requests one by one)",
    )
    refused = Family(
        "naiad_requests_refused_total",
        "counter",
        "Requests refused at once, as by a full queue or for a sequence that has not begun; they are in no nv_ metric",
    )
    leases = Family("naiad_requests_in_flight", "gauge", "Requests and ensembles that hold the model version")
    for (name, version), group in groups.items():
        labels = {"model": name, "version": version}
        for phase in _PHASES:
            latency.samples += _latency({**labels, "phase": phase}, phase, [facts.statistics for facts in group])
        sizes.samples += _sizes(labels, [facts.statistics.batches for facts in group])
        reasons = dict.fromkeys(reason for facts in group for reason in facts.statistics.batch_reasons)
        closed.samples += [
            Sample({**labels, "reason": reason}, sum(facts.statistics.batch_reasons.get(reason, 0) for facts in group))
            for reason in reasons
        ]
        refused.samples.append(Sample(labels, sum(facts.statistics.refused for facts in group)))
        leases.samples.append(Sample(labels, sum(facts.leases for facts in group)))
    return [latency, sizes, closed, refused, leases, *_of_hosts(hosts, memory)]


def _latency(labels: dict[str, str], phase: str, group: list[ModelStatistics]) -> list[Sample]:
    columns = [getattr(statistics.latencies, phase) for statistics in group]
    counts = [sum(column) for column in zip(*columns, strict=True)]
    ns = sum(getattr(statistics.infer, part).ns for statistics in group for part in _PHASES[phase])
    return _histogram(labels, zip(_BOUNDS, counts, strict=False), sum(counts), ns / 1e9)


def _sizes(labels: dict[str, str], parts: list[dict[int, BatchStatistics]]) -> list[Sample]:
    counts = dict.fromkeys(_SIZES, 0)
    total = rows = 0
    for part in parts:
        for size, batch in part.items():
            count = batch.compute_infer.count
            total += count
            rows += count * size
            bound = next((bound for bound in _SIZES if size <= bound), None)
            if bound is not None:
                counts[bound] += count
    return _histogram(labels, ((str(bound), count) for bound, count in counts.items()), total, rows)


def _histogram(
    labels: dict[str, str], buckets: Iterable[tuple[str, int]], total: int, sum_of_values: float
) -> list[Sample]:
    samples: list[Sample] = []
    below = 0
    for bound, count in buckets:
        below += count
        samples.append(Sample({**labels, "le": bound}, below, "_bucket"))
    samples.append(Sample({**labels, "le": "+Inf"}, total, "_bucket"))
    samples.append(Sample(labels, sum_of_values, "_sum"))
    samples.append(Sample(labels, total, "_count"))
    return samples


def _of_hosts(hosts: Iterable[HostFacts], memory: Mapping[int, Memory]) -> list[Family]:
    restarts = Family("naiad_host_restarts_total", "counter", "How often processes of the model were started again")
    resident = Family(
        "naiad_host_memory_bytes",
        "gauge",
        "Memory of the model's processes, tensors included; one that models share is counted for each of them",
    )
    reserved = Family("naiad_arena_bytes", "gauge", "Shared memory set aside for tensors of the model's instances")
    used = Family("naiad_arena_used_bytes", "gauge", "How much shared memory of the model's processes was ever touched")
    groups: dict[tuple[str, int], list[HostFacts]] = {}
    for facts in hosts:
        groups.setdefault((facts.name, facts.version), []).append(facts)
    for (name, version), group in groups.items():
        labels = {"model": name, "version": str(version)}
        processes = [memory.get(pid, Memory()) for facts in group for pid in facts.pids]
        restarts.samples.append(Sample(labels, sum(facts.restarts for facts in group)))
        resident.samples.append(Sample(labels, sum(process.resident for process in processes)))
        reserved.samples.append(Sample(labels, sum(facts.arena_bytes for facts in group)))
        used.samples.append(Sample(labels, sum(process.shared for process in processes)))
    return [restarts, resident, reserved, used]


#: Models cannot have metrics of these names.
NAMES = tuple(family.name for family in families((), (), {}))
