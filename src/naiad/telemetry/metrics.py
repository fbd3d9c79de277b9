"""`/metrics`: what is shown, made at the moment it is asked for from statistics that are kept anyway.

Lives on the event loop. Nothing is counted here; the one thing measured for it are quantiles, if
`--metrics-config=summary_latencies=true` asks for them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from naiad.options import parse_bool, parse_quantiles
from naiad.statistics import Duration, InferStatistics, ModelStatistics
from naiad.telemetry import own_metrics
from naiad.telemetry.custom_metrics import CustomMetrics
from naiad.telemetry.exposition import Family, Sample, exposition
from naiad.telemetry.quantiles import ObservedDuration
from naiad.telemetry.system import NAMES as SYSTEM_NAMES
from naiad.telemetry.system import SystemMetrics

_DEFAULT_QUANTILES = "0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """`--metrics-config`. The allowed errors of quantiles play no part: all are off by less than 1 %."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    quantiles: tuple[float, ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> "MetricsSettings":
        """The settings of the option's values, which have been checked."""
        given = dict(pairs)
        return cls(
            counter_latencies=parse_bool(given.get("counter_latencies", "true")),
            summary_latencies=parse_bool(given.get("summary_latencies", "false")),
            quantiles=tuple(q for q, _ in parse_quantiles(given.get("summary_quantiles", _DEFAULT_QUANTILES))),
        )

    def infer_statistics(self) -> InferStatistics:
        """The statistics a new model version should be given: able to tell quantiles where they are wanted."""
        if not self.summary_latencies:
            return InferStatistics()
        observed = {name: ObservedDuration() for name in ("success", "queue", "cache_hit", "cache_miss")}
        compute = {name: ObservedDuration() for name in ("compute_input", "compute_infer", "compute_output")}
        return InferStatistics(**observed, **compute)


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """One model version to show: its live statistics, its `metric_tags`, whether it asks for the response cache, and the GPU
    where all of its instances are, if that is so."""

    statistics: ModelStatistics
    tags: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    gpu_uuid: str = ""

    def labels(self) -> dict[str, str]:
        tags = {f"_{key}": value for key, value in self.tags.items()}
        return {"model": self.statistics.name, "version": self.statistics.version, **tags}


_REQUEST = "inference request duration in microseconds (includes cached requests)"
_QUEUE = "inference queuing duration in microseconds (includes cached requests)"
_COMPUTE_INPUT = "Cumulative compute input duration in microseconds (does not include cached requests)"
_COMPUTE_INFER = "Cumulative compute inference duration in microseconds (does not include cached requests)"
_COMPUTE_OUTPUT = "Cumulative inference compute output duration in microseconds (does not include cached requests)"

#: Families of plain numbers: name, type, help, attribute of ModelStatistics. Counters are those of instances.
_COUNTS = (
    (
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        "infer.success.count",
    ),
    (
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        "inference_count",
    ),
    (
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        "execution_count",
    ),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "pending",
    ),
)
_FAILURES = ("nv_inference_request_failure", "Number of failed inference requests, all batch sizes")
#: Durations of requests: part of InferStatistics, counter in µs and its help, summary and its help.
_DURATIONS = (
    (
        "success",
        "nv_inference_request_duration_us",
        f"Cumulative {_REQUEST}",
        "nv_inference_request_summary_us",
        f"Summary of {_REQUEST}",
    ),
    (
        "queue",
        "nv_inference_queue_duration_us",
        f"Cumulative {_QUEUE}",
        "nv_inference_queue_summary_us",
        f"Summary of {_QUEUE}",
    ),
    (
        "compute_input",
        "nv_inference_compute_input_duration_us",
        _COMPUTE_INPUT,
        "nv_inference_compute_input_summary_us",
        _COMPUTE_INPUT,
    ),
    (
        "compute_infer",
        "nv_inference_compute_infer_duration_us",
        _COMPUTE_INFER,
        "nv_inference_compute_infer_summary_us",
        _COMPUTE_INFER,
    ),
    (
        "compute_output",
        "nv_inference_compute_output_duration_us",
        _COMPUTE_OUTPUT,
        "nv_inference_compute_output_summary_us",
        _COMPUTE_OUTPUT,
    ),
)
#: Of models with the response cache: part of InferStatistics, then name and help of count, duration, summary.
_CACHE = (
    (
        "cache_hit",
        ("nv_cache_num_hits_per_model", "Number of cache hits per model"),
        ("nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds"),
        ("nv_cache_hit_summary_per_model", "Summary of cache hit counts/durations per model, in microseconds."),
    ),
    (
        "cache_miss",
        ("nv_cache_num_misses_per_model", "Number of cache misses per model"),
        ("nv_cache_miss_duration_per_model", "Total cache miss (insert+lookup) duration per model, in microseconds"),
        ("nv_cache_miss_summary_per_model", "Summary of cache miss counts/durations per model, in microseconds."),
    ),
)
_PINNED = (
    ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes"),
    ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes"),
)
_RESERVED = (
    *(row[0] for row in _COUNTS),
    _FAILURES[0],
    *(name for row in _DURATIONS for name in (row[1], row[3])),
    *(name for row in _CACHE for name, _ in row[1:]),
    *(name for name, _ in _PINNED),
    *SYSTEM_NAMES,
    *own_metrics.NAMES,
)


class Metrics:
    """The collector. `models` is asked at each scrape; versions with the same labels are shown as one.

    `custom` are the metrics that models make. `add_source` is for parts with families of their own.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ModelSeries]],
        settings: MetricsSettings | None = None,
        *,
        system: SystemMetrics | None = None,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._settings = settings if settings is not None else MetricsSettings.of(())
        self._system = system
        self._interval_s = interval_s
        self._clock = clock
        self._sampled_at = clock()
        self._sampling: asyncio.Future[None] | None = None
        self._sources: list[Callable[[], Iterable[Family]]] = []
        self.custom = CustomMetrics(_RESERVED)

    def add_source(self, source: Callable[[], Iterable[Family]]) -> None:
        """Adds families, asked for at each scrape, behind those of the models."""
        self._sources.append(source)

    async def scrape(self) -> bytes:
        """The text of all metrics. Measures the machine first, in a thread, if the last time was an interval ago.

        One measurement at a time: a GPU that does not answer must not take a thread at each scrape.
        """
        now = self._clock()
        under_way = self._sampling is not None and not self._sampling.done()
        if self._system is not None and not under_way and now - self._sampled_at >= self._interval_s:
            self._sampled_at = now
            self._sampling = asyncio.ensure_future(asyncio.to_thread(self._system.sample))
            await asyncio.shield(self._sampling)
        return self.render()

    def render(self) -> bytes:
        """The text of all metrics, with what was measured of the machine last."""
        families = model_families(self._models(), self._settings)
        families += [Family(name, "gauge", help, [Sample({}, 0)]) for name, help in _PINNED]
        if self._system is not None:
            families += self._system.families()
        for source in self._sources:
            families += source()
        return exposition(families + self.custom.families())


def model_families(models: Iterable[ModelSeries], settings: MetricsSettings) -> list[Family]:
    """The families over model versions. Versions with equal labels (an old one that drains) are added up."""
    groups: dict[tuple[tuple[str, str], ...], list[ModelSeries]] = {}
    for series in models:
        groups.setdefault(tuple(series.labels().items()), []).append(series)
    rows = [(dict(key), group) for key, group in groups.items()]
    # Triton labels with the GPU what an instance on one counts, and nothing else.
    of_instances = [({**_gpu_label(group), **labels}, group) for labels, group in rows]
    families: list[Family] = []
    for name, kind, help, path in _COUNTS:
        read = attrgetter(path)
        counted = rows if kind == "gauge" else of_instances
        samples = [Sample(labels, sum(read(s.statistics) for s in group)) for labels, group in counted]
        families.append(Family(name, "gauge" if kind == "gauge" else "counter", help, samples))
    families.insert(1, _failures(rows))
    for part, counter, counter_help, summary, summary_help in _DURATIONS:
        read = attrgetter(part)
        durations = [(labels, [read(s.statistics.infer) for s in group]) for labels, group in of_instances]
        if settings.counter_latencies:
            families.append(Family(counter, "counter", counter_help, [_microseconds(*row) for row in durations]))
        if settings.summary_latencies:
            if part == "success":  # Triton has no summary of requests where some come from the cache
                durations = [row for row, (_, group) in zip(durations, rows, strict=True) if not group[0].cached]
            families.append(_summary(summary, summary_help, durations, settings.quantiles))
    cached = [(labels, group) for labels, group in rows if group[0].cached]
    for part, count, duration, cache_summary in _CACHE:
        read = attrgetter(part)
        durations = [(labels, [read(s.statistics.infer) for s in group]) for labels, group in cached]
        counts = [Sample(labels, sum(d.count for d in parts)) for labels, parts in durations]
        families.append(Family(count[0], "counter", count[1], counts))
        if settings.counter_latencies:
            families.append(Family(duration[0], "counter", duration[1], [_microseconds(*row) for row in durations]))
        if settings.summary_latencies:
            families.append(_summary(*cache_summary, durations, settings.quantiles))
    return families


_Rows = list[tuple[dict[str, str], list[ModelSeries]]]
_Durations = list[tuple[dict[str, str], list[Duration]]]


def _gpu_label(group: list[ModelSeries]) -> dict[str, str]:
    gpu_uuid = group[-1].gpu_uuid
    return {"gpu_uuid": gpu_uuid} if gpu_uuid else {}


def _failures(rows: _Rows) -> Family:
    family = Family(_FAILURES[0], "counter", _FAILURES[1])
    for labels, group in rows:
        for reason in group[0].statistics.failures:
            count = sum(s.statistics.failures.get(reason, 0) for s in group)
            of_instance = _gpu_label(group) if reason == "BACKEND" else {}
            family.samples.append(Sample({**of_instance, **labels, "reason": reason}, count))
    return family


def _microseconds(labels: dict[str, str], durations: list[Duration]) -> Sample:
    return Sample(labels, sum(duration.ns for duration in durations) // 1000)


def _summary(name: str, help: str, rows: _Durations, quantiles: tuple[float, ...]) -> Family:
    family = Family(name, "summary", help)
    for labels, durations in rows:
        newest = durations[-1]
        if isinstance(newest, ObservedDuration):
            family.samples += [
                Sample({**labels, "quantile": f"{share:g}"}, newest.quantile_us(share)) for share in quantiles
            ]
        family.samples.append(Sample(labels, sum(duration.ns for duration in durations) / 1000, "_sum"))
        family.samples.append(Sample(labels, sum(duration.count for duration in durations), "_count"))
    return family
