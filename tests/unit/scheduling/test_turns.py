"""What an execution counts as."""

import pytest

from naiad.instances.instance import ComputeTimes
from naiad.scheduling.queue import Queued
from naiad.scheduling.turns import count_execution
from naiad.statistics import Duration, ModelStatistics


@pytest.mark.parametrize("succeeded", [True, False])
def test_an_execution_counts_whether_it_succeeds_or_not(succeeded: bool) -> None:
    statistics = ModelStatistics("m", "1")
    calls = [Queued(None, 1, None, queued_ns) for queued_ns in (10, 20)]  # type: ignore[arg-type]
    count_execution(statistics, calls, 3, ComputeTimes(100, 101, 111, 211), succeeded, null_rows=1)
    assert statistics.execution_count == 1
    assert statistics.last_inference_ms > 0
    batch = statistics.batches[3]
    assert (batch.compute_input, batch.compute_infer, batch.compute_output) == (
        Duration(1, 1),
        Duration(1, 10),
        Duration(1, 100),
    )
    infer = statistics.infer
    requests, none = Duration(2, 201 + 191), Duration()
    assert (infer.success, infer.fail) == ((requests, none) if succeeded else (none, requests))
    assert infer.queue == (Duration(2, 90 + 80) if succeeded else none)
    assert infer.compute_infer == (Duration(2, 20) if succeeded else none)
    assert statistics.inference_count == (2 if succeeded else 0)
    assert statistics.failures["BACKEND"] == (0 if succeeded else 2)
    assert sum(statistics.latencies.request) == (2 if succeeded else 0)
