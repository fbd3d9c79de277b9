"""What /metrics/all adds: histograms, reasons, and what is read of processes."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from naiad.statistics import BatchStatistics, Duration, Latencies, ModelStatistics
from naiad.telemetry.exposition import exposition
from naiad.telemetry.own_metrics import (
    NAMES,
    HostFacts,
    Memory,
    ModelFacts,
    families,
    read_memory,
)


def lines(models: list[ModelFacts], hosts: list[HostFacts], memory: dict[int, Memory], start: str) -> list[str]:
    text = exposition(families(models, hosts, memory)).decode()
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize(
    ("ns", "bucket"), [(0, 0), (100_000, 0), (100_001, 1), (60_000_000_000, 17), (60_000_000_001, 18)]
)
def test_a_bound_is_part_of_its_bucket(ns: int, bucket: int) -> None:
    latencies = Latencies()
    latencies.add_batch([1000], 1000, 1000 + ns)
    for counts, at in ((latencies.request, bucket), (latencies.queue, 0), (latencies.compute, bucket)):
        assert counts[at] == 1 == sum(counts)


@given(st.lists(st.integers(0, 100_000_000), min_size=1, max_size=8))
@example([0, 1, 2])
@example([10, 90_000_000, 400_000, 99_999_999])
@example([0, 99_000_000, 99_000_001, 99_900_000, 100_000_000])
def test_a_batch_is_counted_as_its_requests_are(queued: list[int]) -> None:
    together, alone = Latencies(), Latencies()
    together.add_batch(queued, 100_000_000, 130_000_000)
    for at_ns in queued:
        alone.add_batch([at_ns], 100_000_000, 130_000_000)
    assert together == alone


def test_latencies_of_a_version_and_of_one_that_drains_are_one_histogram() -> None:
    old, new = ModelStatistics("m", "1"), ModelStatistics("m", "1")
    old.latencies.add_cached(50_000)
    old.infer.queue.add(50_000)
    new.latencies.add_batch([0, 1, 70_000_000_000 - 300_000], 70_000_000_000, 70_000_000_000)
    new.infer.queue.add(140_000_300_000, 3)
    found = lines([ModelFacts(old, 1), ModelFacts(new, 2)], [], {}, "naiad_latency_seconds")
    queue = [line.replace('model="m",phase="queue",version="1"', "") for line in found if 'phase="queue"' in line]
    assert queue[:4] == [
        'naiad_latency_seconds_bucket{,le="0.0001"} 1',
        'naiad_latency_seconds_bucket{,le="0.00025"} 1',
        'naiad_latency_seconds_bucket{,le="0.0005"} 2',
        'naiad_latency_seconds_bucket{,le="0.001"} 2',
    ]
    assert queue[-4:] == [
        'naiad_latency_seconds_bucket{,le="60"} 2',
        'naiad_latency_seconds_bucket{,le="+Inf"} 4',
        "naiad_latency_seconds_sum{} 140.00035",
        "naiad_latency_seconds_count{} 4",
    ]
    assert lines([ModelFacts(old, 1), ModelFacts(new, 2)], [], {}, "naiad_requests_in_flight") == [
        'naiad_requests_in_flight{model="m",version="1"} 3'
    ]
    old.refused, new.refused = 4, 1
    assert lines([ModelFacts(old, 1), ModelFacts(new, 2)], [], {}, "naiad_requests_refused_total") == [
        'naiad_requests_refused_total{model="m",version="1"} 5'
    ]


def test_batches_are_counted_by_size_and_reason() -> None:
    statistics = ModelStatistics("m", "2")
    for size, count in ((1, 5), (3, 2), (2000, 1)):
        statistics.batches[size] = BatchStatistics(compute_infer=Duration(count, 9))
    statistics.batch_reasons.update({"full": 6, "preferred size": 2})
    found = lines([ModelFacts(statistics, 0)], [], {}, "naiad_batch")
    assert 'naiad_batch_size_bucket{model="m",version="2",le="1"} 5' in found
    assert 'naiad_batch_size_bucket{model="m",version="2",le="2"} 5' in found
    assert 'naiad_batch_size_bucket{model="m",version="2",le="4"} 7' in found
    assert 'naiad_batch_size_bucket{model="m",version="2",le="1024"} 7' in found
    assert 'naiad_batch_size_bucket{model="m",version="2",le="+Inf"} 8' in found
    assert 'naiad_batch_size_sum{model="m",version="2"} 2011' in found
    assert 'naiad_batch_size_count{model="m",version="2"} 8' in found
    assert 'naiad_batches_total{model="m",reason="preferred size",version="2"} 2' in found


def test_processes_of_a_version_are_added_up() -> None:
    hosts = [HostFacts("m", 1, 2, (10, 11), 64), HostFacts("m", 1, 1, (12,), 64)]
    memory = {10: Memory(100, 5), 12: Memory(50, 1)}
    found = lines([], hosts, memory, "naiad_")
    labels = '{model="m",version="1"}'
    assert found == [
        f"naiad_host_restarts_total{labels} 3",
        f"naiad_host_memory_bytes{labels} 150",
        f"naiad_arena_bytes{labels} 128",
        f"naiad_arena_used_bytes{labels} 6",
    ]


def test_memory_is_read_of_processes_that_are(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nVmRSS:\t  12 kB\nRssAnon:\t 1 kB\nRssShmem:\t  4 kB\n")
    assert read_memory([7, 8], tmp_path) == {7: Memory(12288, 4096)}
    assert read_memory([os.getpid()])[os.getpid()].resident > 1 << 20


def test_names_are_its_own() -> None:
    assert len(NAMES) == 9
    assert all(name.startswith("naiad_") for name in NAMES)
