"""Metrics that models make: families of counters, gauges and histograms, created and changed at run time.

Lives on the event loop. Many instances announce the same family and the same metric and share it: it is there as long
as one of its owners is. An owner is whatever can end (a host); all it announced goes with it.
"""

import bisect
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from naiad.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from naiad.telemetry.exposition import Family, Kind, Sample, number

CustomKind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]
#: The most series, and the most families, that models may make, so that labels and names without bound cannot fill the
#: memory.
MOST_SERIES = 100_000

#: Names that begin with two underscores are Prometheus' own.
_FAMILY_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Histogram:
    """Counts of values by upper bounds, which ascend; +Inf comes by itself."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bound for bound in bounds if not math.isinf(bound))
        if list(self.bounds) != sorted(set(self.bounds)) or any(map(math.isnan, self.bounds)):
            raise InvalidArgument(f"Bucket Boundaries must be strictly sorted, got {list(self.bounds)}")
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self, labels: Labels) -> list[Sample]:
        """The cumulative buckets, count and sum."""
        result = []
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            result.append(Sample({**labels, "le": number(bound)}, total, "_bucket"))
        result += [Sample(labels, total, "_count"), Sample(labels, self.sum, "_sum")]
        return result


class _Metric:
    __slots__ = ("histogram", "labels", "owners", "value")

    def __init__(self, labels: Labels, histogram: Histogram | None) -> None:
        self.labels = dict(labels)
        self.histogram = histogram
        self.value = 0.0
        self.owners: Counter[str] = Counter()


class _Family:
    __slots__ = ("description", "kind", "metrics", "name", "owners")

    def __init__(self, name: str, description: str, kind: CustomKind) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: dict[tuple[tuple[str, str], ...], _Metric] = {}
        self.owners: Counter[str] = Counter()


class CustomMetrics:
    """The metrics of all models. The methods are what a model asks for; all raise NaiadError with Triton's texts.

    `reserved` are names that are taken by the server itself.
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._families: dict[str, _Family] = {}
        self._reserved = frozenset(reserved)
        self._series = 0

    def __repr__(self) -> str:
        return f"<CustomMetrics families={sorted(self._families)} series={self._series}>"

    def new_family(self, owner: str, family: str, description: str, kind: CustomKind) -> None:
        """Announces a family. Once more is fine; only another kind is an error."""
        if not _FAMILY_NAME.fullmatch(family):
            raise InvalidArgument(f"Invalid metric name '{family}'")
        if family in self._reserved:
            raise AlreadyExists(f"metric family '{family}' is one of the server's own")
        if kind not in ("counter", "gauge", "histogram"):
            raise Unsupported("Unsupported kind passed to MetricFamily constructor.")
        known = self._families.get(family)
        if known is None:
            if len(self._families) >= MOST_SERIES:
                raise Unsupported(f"models have made {MOST_SERIES} metric families already, the most that are allowed")
            known = self._families[family] = _Family(family, description, kind)
        elif known.kind != kind:
            raise AlreadyExists(f"Family name already exists with different type: '{family}' is a {known.kind}")
        known.owners[owner] += 1

    def drop_family(self, owner: str, family: str) -> None:
        """Takes one announcement back. Does nothing if there is none."""
        known = self._families.get(family)
        if known is not None:
            _release(known.owners, owner)
            self._sweep(known)

    def new_metric(self, owner: str, family: str, labels: Labels, buckets: Iterable[float] | None = None) -> None:
        """Adds a member to a family, or shares the one with these labels. Only histograms have `buckets`, which may
        be empty."""
        known = self._family(family)
        for label in labels:
            if not _LABEL_NAME.fullmatch(label) or (known.kind == "histogram" and label == "le"):
                raise InvalidArgument(f"Invalid label name '{label}' of a metric of family '{family}'")
        key = _key(labels)
        metric = known.metrics.get(key)
        if metric is None:
            if known.kind == "histogram" and buckets is None:
                raise InvalidArgument("Failed to create metric. Missing required buckets.")
            if known.kind != "histogram" and buckets is not None:
                raise InvalidArgument(f"Unexpected args found in {known.kind} Metric constructor.")
            if self._series >= MOST_SERIES:
                raise Unsupported(f"models have made {MOST_SERIES} metrics already, the most that are allowed")
            metric = _Metric(labels, None if buckets is None else Histogram(buckets))
            known.metrics[key] = metric
            self._series += 1
        metric.owners[owner] += 1

    def drop_metric(self, owner: str, family: str, labels: Labels) -> None:
        """Takes one `new_metric` back. Does nothing if there is none."""
        known = self._families.get(family)
        metric = known.metrics.get(_key(labels)) if known is not None else None
        if known is not None and metric is not None:
            _release(metric.owners, owner)
            self._sweep(known)

    def increment(self, owner: str, family: str, labels: Labels, value: float) -> None:
        kind, metric = self._metric(family, labels)
        if kind == "histogram":
            raise Unsupported("TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment")
        if kind == "counter" and value < 0:
            raise InvalidArgument(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        metric.value += value

    def set(self, owner: str, family: str, labels: Labels, value: float) -> None:
        kind, metric = self._metric(family, labels)
        if kind != "gauge":
            raise Unsupported(f"TRITONSERVER_METRIC_KIND_{kind.upper()} does not support Set")
        metric.value = value

    def observe(self, owner: str, family: str, labels: Labels, values: Iterable[float]) -> None:
        kind, metric = self._metric(family, labels)
        if metric.histogram is None:
            raise Unsupported(f"TRITONSERVER_METRIC_KIND_{kind.upper()} does not support Observe")
        for value in values:
            metric.histogram.observe(value)

    def value(self, owner: str, family: str, labels: Labels) -> float:
        kind, metric = self._metric(family, labels)
        if kind == "histogram":
            raise Unsupported("TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value")
        return metric.value

    def drop_owner(self, owner: str) -> None:
        """Takes back all that an owner announced."""
        for family in list(self._families.values()):
            del family.owners[owner]
            for metric in family.metrics.values():
                del metric.owners[owner]
            self._sweep(family)

    def families(self) -> list[Family]:
        """What there is now, to be shown."""
        return [_shown(family) for _, family in sorted(self._families.items())]

    def _family(self, name: str) -> _Family:
        family = self._families.get(name)
        if family is None:
            raise NotFound(f"metric family '{name}' does not exist")
        return family

    def _metric(self, name: str, labels: Labels) -> tuple[CustomKind, _Metric]:
        family = self._family(name)
        metric = family.metrics.get(_key(labels))
        if metric is None:
            raise NotFound(f"metric family '{name}' has no metric with the labels {dict(labels)}")
        return family.kind, metric

    def _sweep(self, family: _Family) -> None:
        """Removes what nobody owns any more. A family stays while one of its metrics is owned."""
        for key in [key for key, metric in family.metrics.items() if not metric.owners]:
            del family.metrics[key]
            self._series -= 1
        if not family.owners and not family.metrics:
            del self._families[family.name]


def _key(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _release(owners: Counter[str], owner: str) -> None:
    if owners[owner] > 1:
        owners[owner] -= 1
    else:
        del owners[owner]


def _shown(family: _Family) -> Family:
    kind: Kind = family.kind
    shown = Family(family.name, kind, family.description)
    for metric in family.metrics.values():
        if metric.histogram is not None:
            shown.samples += metric.histogram.samples(metric.labels)
        else:
            shown.samples.append(Sample(metric.labels, metric.value))
    return shown
