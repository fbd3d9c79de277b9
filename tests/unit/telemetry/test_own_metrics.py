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
    OwnMetrics,
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


def parsed(text: bytes) -> tuple[dict[str, str], dict[str, float]]:
    """What TYPE says of each family, and the value of each line."""
    kinds: dict[str, str] = {}
    values: dict[str, float] = {}
    for line in text.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            values[series] = float(value)
    return kinds, values


async def test_a_scrape_shows_what_is_there_at_that_moment() -> None:
    """All families, with the values that were put in, and the memory of a process that is: this one."""
    statistics = ModelStatistics('a "b"', "3")
    statistics.latencies.add_batch([0, 200_000], 300_000, 1_300_000)
    statistics.infer.success.add(2_400_000, 2)
    statistics.infer.queue.add(400_000, 2)
    statistics.infer.compute_infer.add(2_000_000, 2)
    statistics.batches[2] = BatchStatistics(compute_infer=Duration(1, 1_000_000))
    statistics.batch_reasons["full"] = 1
    statistics.refused = 5
    models: list[ModelFacts] = []
    hosts: list[HostFacts] = []
    metrics = OwnMetrics(lambda: models, lambda: hosts)
    assert await metrics.scrape() == b""
    models.append(ModelFacts(statistics, 7))
    hosts.append(HostFacts('a "b"', 3, 2, (os.getpid(),), 4096))
    kinds, values = parsed(await metrics.scrape())
    assert kinds == {
        "naiad_latency_seconds": "histogram",
        "naiad_batch_size": "histogram",
        "naiad_batches_total": "counter",
        "naiad_requests_refused_total": "counter",
        "naiad_requests_in_flight": "gauge",
        "naiad_host_restarts_total": "counter",
        "naiad_host_memory_bytes": "gauge",
        "naiad_arena_bytes": "gauge",
        "naiad_arena_used_bytes": "gauge",
    }
    name, version = r'model="a \"b\""', 'version="3"'
    for phase, fast, total in (("request", 0, 0.0024), ("queue", 1, 0.0004), ("compute", 0, 0.002)):
        labels = f'{name},phase="{phase}",{version}'
        assert values[f'naiad_latency_seconds_bucket{{{labels},le="0.0001"}}'] == fast
        assert values[f'naiad_latency_seconds_bucket{{{labels},le="0.0025"}}'] == 2
        assert values[f"naiad_latency_seconds_sum{{{labels}}}"] == pytest.approx(total)
        assert values[f"naiad_latency_seconds_count{{{labels}}}"] == 2
    labels = f"{name},{version}"
    assert values[f'naiad_batch_size_bucket{{{labels},le="1"}}'] == 0
    assert values[f'naiad_batch_size_bucket{{{labels},le="2"}}'] == 1
    assert values[f"naiad_batch_size_sum{{{labels}}}"] == 2
    assert values[f'naiad_batches_total{{{name},reason="full",{version}}}'] == 1
    assert values[f"naiad_requests_refused_total{{{labels}}}"] == 5
    assert values[f"naiad_requests_in_flight{{{labels}}}"] == 7
    assert values[f"naiad_host_restarts_total{{{labels}}}"] == 2
    assert values[f"naiad_host_memory_bytes{{{labels}}}"] > 1 << 20
    assert values[f"naiad_arena_bytes{{{labels}}}"] == 4096
    assert f"naiad_arena_used_bytes{{{labels}}}" in values


def test_names_are_its_own() -> None:
    assert len(NAMES) == 9
    assert all(name.startswith("naiad_") for name in NAMES)
