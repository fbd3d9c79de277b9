"""What a model version counts of itself: how much of what has happened, and how long it took.

The live objects: they are changed on the event loop, for each execution, and may be read there.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final


@dataclass
class Duration:
    """How often something happened and how many ns it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass
class InferStatistics:
    """Durations per request."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)


#: Upper bounds of the buckets in which latencies are counted: 100 us to 60 s.
LATENCY_BOUNDS_NS: Final = tuple(
    round(seconds * 1e9)
    for seconds in (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
)


def _no_counts() -> list[int]:
    return [0] * (len(LATENCY_BOUNDS_NS) + 1)


@dataclass
class Latencies:
    """How many successful requests took how long: a count for each of LATENCY_BOUNDS_NS and one for what is above them.

    `request` is all of their time, `queue` the waiting, `compute` the time in the instance, which requests that a cache
    answers do not have. The sums are those of InferStatistics.
    """

    request: list[int] = field(default_factory=_no_counts)
    queue: list[int] = field(default_factory=_no_counts)
    compute: list[int] = field(default_factory=_no_counts)

    def add_batch(self, queued_ns: list[int], start_ns: int, end_ns: int) -> None:
        """Counts the requests of a batch: those queued at these times, which all began and ended together."""
        bounds = LATENCY_BOUNDS_NS
        count = len(queued_ns)
        self.compute[bisect_left(bounds, end_ns - start_ns)] += count
        if count == 1:
            self.request[bisect_left(bounds, end_ns - queued_ns[0])] += 1
            self.queue[bisect_left(bounds, start_ns - queued_ns[0])] += 1
            return
        ordered = sorted(queued_ns)
        for counts, time_ns in ((self.request, end_ns), (self.queue, start_ns)):
            slowest = bisect_left(bounds, time_ns - ordered[0])
            fastest = bisect_left(bounds, time_ns - ordered[-1])
            counted = 0
            for bucket in range(slowest, fastest, -1):
                # Those queued earlier took longer than the bucket below reaches.
                before = bisect_left(ordered, time_ns - bounds[bucket - 1])
                counts[bucket] += before - counted
                counted = before
            counts[fastest] += count - counted

    def add_cached(self, ns: int) -> None:
        """Counts a request that was answered without an execution; all of it was waiting (reference R14-6)."""
        bucket = bisect_left(LATENCY_BOUNDS_NS, ns)
        self.request[bucket] += 1
        self.queue[bucket] += 1


@dataclass
class BatchStatistics:
    """Durations per execution of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass
class ResponseStatistics:
    """Durations per response of one index (the first, second... response of a request)."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass
class ModelStatistics:
    """What a model version has done since it was loaded. `last_inference_ms` is ms since the epoch, 0 for never.

    The live object: it is changed on the event loop and may be read there.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    infer: InferStatistics = field(default_factory=InferStatistics)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    responses: dict[str, ResponseStatistics] = field(default_factory=dict)
    #: Requests that failed, by Triton's reasons: REJECTED, CANCELED, BACKEND, OTHER.
    failures: dict[str, int] = field(default_factory=lambda: {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0})
    #: Requests that were refused at once, as by a queue that is full: Triton does not count them among the failures.
    refused: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    #: Batches by why they were closed: full, preferred size, delay, single.
    batch_reasons: dict[str, int] = field(default_factory=dict)
    #: Requests accepted and not yet handed to an instance.
    pending: int = 0
