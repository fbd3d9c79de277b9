import asyncio
import math
import sys
import threading
import types

import pytest

from naiad.options import parse_options
from naiad.statistics import ModelStatistics
from naiad.telemetry.exposition import Family, Sample, exposition, number
from naiad.telemetry.metrics import Metrics, MetricsSettings, ModelSeries, model_families
from naiad.telemetry.quantiles import ObservedDuration, Sketch
from naiad.telemetry.system import SystemMetrics, utilization

SUMMARIES = MetricsSettings.of([("summary_latencies", "true"), ("summary_quantiles", "0.5:0.05,0.9:0.01")])


def used(name: str = "m", version: str = "1", **parts) -> ModelStatistics:
    """The statistics of a model after 3 requests of 2 rows in one batch, and one failure."""
    statistics = ModelStatistics(name, version, inference_count=6, execution_count=1, pending=2, **parts)
    infer = statistics.infer
    infer.success.add(9_000_000, 3)
    infer.queue.add(3_000, 3)
    infer.compute_input.add(6_999, 3)
    infer.compute_infer.add(60_000, 3)
    infer.compute_output.add(1_500, 3)
    statistics.failures["REJECTED"] += 1
    return statistics


def text_of(*models: ModelSeries, settings: MetricsSettings | None = None) -> str:
    return Metrics(lambda: models, settings).render().decode()


def lines_of(text: str, family: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith((f"{family}{{", f"{family}_sum", f"{family}_count"))]


def test_numbers_as_prometheus_reads_them():
    assert [number(value) for value in (3, 3.0, 0.5, math.inf, -math.inf, math.nan, 1e300)] == [
        *("3", "3", "0.5", "+Inf", "-Inf", "NaN", "1e+300")
    ]


def test_exposition():
    families = [
        Family("a", "counter", "line\nbreak \\", [Sample({}, 1), Sample({"x": 'q"\n\\', "y": "z"}, 0.5, "_sum")]),
        Family("empty", "gauge", "not shown"),
    ]
    assert exposition(families) == (
        b"# HELP a line\\nbreak \\\\\n# TYPE a counter\na 1\n" + rb'a_sum{x="q\"\n\\",y="z"} 0.5' + b"\n"
    )


def test_the_families_of_a_model():
    text = text_of(ModelSeries(used()))
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("nv_inference"))
    labels = '{model="m",version="1"}'
    assert samples == {
        f"nv_inference_request_success{labels}": "3",
        'nv_inference_request_failure{model="m",reason="REJECTED",version="1"}': "1",
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"}': "0",
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"}': "0",
        'nv_inference_request_failure{model="m",reason="OTHER",version="1"}': "0",
        f"nv_inference_count{labels}": "6",
        f"nv_inference_exec_count{labels}": "1",
        f"nv_inference_pending_request_count{labels}": "2",
        f"nv_inference_request_duration_us{labels}": "9000",
        f"nv_inference_queue_duration_us{labels}": "3",
        f"nv_inference_compute_input_duration_us{labels}": "6",
        f"nv_inference_compute_infer_duration_us{labels}": "60",
        f"nv_inference_compute_output_duration_us{labels}": "1",
    }


@pytest.mark.parametrize(
    ("name", "kind", "help"),
    [
        ("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes"),
        ("nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes"),
        ("nv_inference_count", "counter", "Number of inferences performed (does not include cached requests)"),
        (
            "nv_inference_exec_count",
            "counter",
            "Number of model executions performed (does not include cached requests)",
        ),
        (
            "nv_inference_pending_request_count",
            "gauge",
            "Instantaneous number of pending requests awaiting execution per-model.",
        ),
        (
            "nv_inference_request_duration_us",
            "counter",
            "Cumulative inference request duration in microseconds (includes cached requests)",
        ),
        (
            "nv_inference_queue_duration_us",
            "counter",
            "Cumulative inference queuing duration in microseconds (includes cached requests)",
        ),
        (
            "nv_inference_compute_input_duration_us",
            "counter",
            "Cumulative compute input duration in microseconds (does not include cached requests)",
        ),
        (
            "nv_inference_compute_infer_duration_us",
            "counter",
            "Cumulative compute inference duration in microseconds (does not include cached requests)",
        ),
        (
            "nv_inference_compute_output_duration_us",
            "counter",
            "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        ),
        ("nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool total memory size, in bytes"),
        ("nv_pinned_memory_pool_used_bytes", "gauge", "Pinned memory pool used memory size, in bytes"),
    ],
)
def test_help_and_type_are_tritons(name, kind, help):
    assert f"# HELP {name} {help}\n# TYPE {name} {kind}\n{name}" in text_of(ModelSeries(used()))


def test_metric_tags_become_labels_with_an_underscore():
    assert 'nv_inference_count{_squad="red",model="m",version="1"} 6' in text_of(ModelSeries(used(), {"squad": "red"}))


def test_an_old_version_that_drains_is_counted_with_the_new_one():
    text = text_of(ModelSeries(used()), ModelSeries(used("other")), ModelSeries(used()))
    assert lines_of(text, "nv_inference_count") == [
        'nv_inference_count{model="m",version="1"} 12',
        'nv_inference_count{model="other",version="1"} 6',
    ]
    assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 2' in text


def test_no_models_no_families():
    assert "nv_inference" not in text_of()


def test_cache_families_are_those_of_models_with_a_cache():
    cached = used("cached")
    cached.infer.cache_hit.add(5_000, 2)
    cached.infer.cache_miss.add(7_000, 1)
    text = text_of(ModelSeries(used("plain")), ModelSeries(cached, cached=True))
    assert [line for line in text.splitlines() if line.startswith("nv_cache")] == [
        'nv_cache_num_hits_per_model{model="cached",version="1"} 2',
        'nv_cache_hit_duration_per_model{model="cached",version="1"} 5',
        'nv_cache_num_misses_per_model{model="cached",version="1"} 1',
        'nv_cache_miss_duration_per_model{model="cached",version="1"} 7',
    ]
    assert "# HELP nv_cache_miss_duration_per_model Total cache miss (insert+lookup) duration per model" in text


def test_counter_latencies_can_be_off():
    families = model_families([ModelSeries(used())], MetricsSettings(counter_latencies=False))
    names = {family.name for family in families if family.samples}
    assert "nv_inference_request_success" in names
    assert not [name for name in names if "duration" in name]


def test_summaries():
    metrics = Metrics(lambda: models, SUMMARIES)
    models = [ModelSeries(used(infer=SUMMARIES.infer_statistics()))]
    text = metrics.render().decode()
    assert (
        "# HELP nv_inference_request_summary_us Summary of inference request duration in microseconds "
        "(includes cached requests)\n# TYPE nv_inference_request_summary_us summary\n"
    ) in text
    half, most, total, count = lines_of(text, "nv_inference_request_summary_us")
    labels = '{model="m",version="1"'
    assert half.startswith(f'nv_inference_request_summary_us{labels},quantile="0.5"}} ')
    assert most.startswith(f'nv_inference_request_summary_us{labels},quantile="0.9"}} ')
    assert float(half.split()[-1]) == pytest.approx(3000, rel=0.01)
    assert total == f"nv_inference_request_summary_us_sum{labels}}} 9000"
    assert count == f"nv_inference_request_summary_us_count{labels}}} 3"
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert len(lines_of(text, f"nv_inference_{part}_summary_us")) == 4


def test_summaries_of_models_with_a_cache_are_those_of_the_cache_instead_of_all_requests():
    metrics = Metrics(lambda: [ModelSeries(used(infer=SUMMARIES.infer_statistics()), cached=True)], SUMMARIES)
    text = metrics.render().decode()
    assert "nv_inference_request_summary_us" not in text
    assert 'nv_cache_hit_summary_per_model{model="m",version="1",quantile="0.5"} NaN' in text


def test_quantiles_cost_nothing_when_they_are_off():
    statistics = MetricsSettings().infer_statistics()
    assert not isinstance(statistics.success, ObservedDuration)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], MetricsSettings(quantiles=(0.5, 0.9, 0.95, 0.99, 0.999))),
        (["counter_latencies=off"], MetricsSettings(False, False, (0.5, 0.9, 0.95, 0.99, 0.999))),
        (["summary_latencies=true", "summary_quantiles=0.1:0.1"], MetricsSettings(True, True, (0.1,))),
    ],
)
def test_settings(given, expected):
    options = parse_options({"model_repository": ["/m"], "metrics_config": given})
    assert MetricsSettings.of(options.metrics_config) == expected


# ---------------------------------------------------------------- quantiles


def test_quantiles_are_off_by_less_than_one_percent():
    sketch = Sketch()
    for value in range(1, 10_001):
        sketch.add(value / 7, 1, now=0.0)
    for share in (0.01, 0.5, 0.9, 0.99, 0.999, 1.0):
        assert sketch.quantile(share, now=0.0) == pytest.approx(share * 10_000 / 7, rel=0.01)


def test_what_is_older_than_a_minute_is_forgotten():
    sketch = Sketch()
    sketch.add(1000, 5, now=0.0)
    sketch.add(1, 5, now=50.0)
    assert sketch.quantile(1.0, now=59.0) == pytest.approx(1000, rel=0.01)
    assert sketch.quantile(1.0, now=61.0) == pytest.approx(1, rel=0.01)
    assert math.isnan(sketch.quantile(0.5, now=200.0))


def test_zero_and_nothing():
    sketch = Sketch()
    assert math.isnan(sketch.quantile(0.5, now=0.0))
    sketch.add(0, 1, now=0.0)
    assert sketch.quantile(0.5, now=0.0) == 0


def test_an_observed_duration_is_a_duration():
    duration = ObservedDuration(clock=lambda: 5.0)
    duration.add(4_000_000, 2)
    duration.add(0, 0)
    assert (duration.count, duration.ns) == (2, 4_000_000)
    assert duration.quantile_us(0.5) == pytest.approx(2000, rel=0.01)


# ---------------------------------------------------------------- the machine


def write_proc(path, idle: int, busy: int, available_kib: int) -> None:
    (path / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 99 0\ncpu0 1 1 1 1\n")
    (path / "meminfo").write_text(
        f"MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\nHugePages: 0\n"
    )


def test_cpu_and_memory(tmp_path):
    write_proc(tmp_path, idle=100, busy=100, available_kib=400)
    system = SystemMetrics(proc=tmp_path)
    write_proc(tmp_path, idle=130, busy=110, available_kib=300)
    system.sample()
    assert exposition(system.families()).decode().splitlines() == [
        "# HELP nv_cpu_utilization CPU utilization rate [0.0 - 1.0]",
        "# TYPE nv_cpu_utilization gauge",
        "nv_cpu_utilization 0.25",
        "# HELP nv_cpu_memory_total_bytes CPU total memory (RAM), in bytes",
        "# TYPE nv_cpu_memory_total_bytes gauge",
        "nv_cpu_memory_total_bytes 1024000",
        "# HELP nv_cpu_memory_used_bytes CPU used memory (RAM), in bytes",
        "# TYPE nv_cpu_memory_used_bytes gauge",
        "nv_cpu_memory_used_bytes 716800",
    ]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [((0, 0), (0, 0), 0.0), ((0, 0), (0, 10), 1.0), ((5, 10), (15, 20), 0.0), ((9, 10), (8, 20), 1.0)],
)
def test_utilization(before, now, expected):
    assert utilization(before, now) == expected


def test_what_cannot_be_read_is_left_out(tmp_path):
    assert SystemMetrics(proc=tmp_path).families() == []
    write_proc(tmp_path, 1, 1, 1)
    assert SystemMetrics(cpu=False, proc=tmp_path).families() == []


class NvmlError(Exception):
    pass


def test_what_instances_count_is_labelled_with_their_gpu():
    text = text_of(ModelSeries(used(), cached=True, gpu_uuid="GPU-1"), ModelSeries(used("cpu")), settings=SUMMARIES)
    of_model = [line for line in text.splitlines() if 'model="m"' in line]
    labelled = [line.partition("{")[0] for line in of_model if 'gpu_uuid="GPU-1"' in line]
    plain = [line.partition("{")[0] for line in of_model if "gpu_uuid" not in line]
    of_instances = {
        "nv_inference_request_success",
        "nv_inference_request_failure",  # of the backend
        "nv_inference_count",
        "nv_inference_exec_count",
        *(f"nv_inference_{part}_duration_us" for part in ("request", "queue")),
        *(f"nv_inference_compute_{part}_duration_us" for part in ("input", "infer", "output")),
    }
    assert {name for name in labelled if "summary" not in name} == of_instances
    assert "nv_inference_compute_infer_summary_us_sum" in labelled
    assert {name for name in plain if "summary" not in name} == {
        "nv_inference_request_failure",
        "nv_inference_pending_request_count",
        "nv_cache_num_hits_per_model",
        "nv_cache_hit_duration_per_model",
        "nv_cache_num_misses_per_model",
        "nv_cache_miss_duration_per_model",
    }
    assert 'nv_inference_request_failure{gpu_uuid="GPU-1",model="m",reason="BACKEND",version="1"} 0' in text
    assert not [line for line in text.splitlines() if "gpu_uuid" in line and 'model="cpu"' in line]


def fake_nvml(monkeypatch, count: int = 1) -> types.ModuleType:
    """NVML with GPUs of which the second cannot tell its power."""
    nvml = types.ModuleType("pynvml")
    nvml.closed = 0
    nvml.energy = 5_000

    def power(handle):
        if handle == 1:
            raise NvmlError("not supported")
        return 70_500

    def shutdown():
        nvml.closed += 1

    nvml.NVMLError = NvmlError
    nvml.nvmlInit = lambda: None
    nvml.nvmlShutdown = shutdown
    nvml.nvmlDeviceGetCount = lambda: count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=50)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=100, used=25)
    nvml.nvmlDeviceGetPowerUsage = power
    nvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 700_000
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: nvml.energy
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_gpus(monkeypatch):
    nvml = fake_nvml(monkeypatch, count=2)
    system = SystemMetrics(cpu=False, gpus=("GPU-0", "GPU-1"))
    nvml.energy = 7_500
    system.sample()
    samples = [line for line in exposition(system.families()).decode().splitlines() if "GPU-" in line]
    assert samples == [
        'nv_gpu_utilization{gpu_uuid="GPU-0"} 0.5',
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-0"} 100',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 100',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"} 25',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 25',
        'nv_gpu_power_usage{gpu_uuid="GPU-0"} 70.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-0"} 700',
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 700',
        'nv_energy_consumption{gpu_uuid="GPU-0"} 2.5',
        'nv_energy_consumption{gpu_uuid="GPU-1"} 2.5',
    ]


@pytest.mark.parametrize(
    ("seen", "shown"),
    [(["GPU-1"], ["GPU-1"]), (["GPU-1", "GPU-0"], ["GPU-1", "GPU-0"]), (["MIG-x"], ["GPU-0", "GPU-1"]), ([], [])],
)
def test_gpus_that_cuda_does_not_see_are_not_shown(seen, shown, monkeypatch):
    fake_nvml(monkeypatch, count=2)
    families = SystemMetrics(cpu=False, gpus=seen).families()
    assert [sample.labels["gpu_uuid"] for sample in families[0].samples] == shown if shown else not families


def test_no_gpus(monkeypatch):
    nvml = fake_nvml(monkeypatch, count=0)
    assert SystemMetrics(cpu=False, gpus=["GPU-0"]).families() == []
    assert nvml.closed == 1
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert SystemMetrics(cpu=False, gpus=["GPU-0"]).families() == []


class FakeSystem:
    def __init__(self) -> None:
        self.threads: list[int] = []

    def sample(self) -> None:
        self.threads.append(threading.get_ident())

    def families(self) -> list[Family]:
        return [Family("measured", "gauge", "times", [Sample({}, len(self.threads))])]


async def test_the_machine_is_measured_at_most_once_an_interval_and_not_on_the_loop():
    now = [0.0]
    system = FakeSystem()
    metrics = Metrics(list, system=system, interval_s=2.0, clock=lambda: now[0])
    seen = []
    for moment in (1.0, 2.0, 3.9, 4.0):
        now[0] = moment
        seen.append("measured " + (await metrics.scrape()).decode().split("\nmeasured ")[1].split("\n")[0])
    assert seen == ["measured 0", "measured 1", "measured 1", "measured 2"]
    assert threading.get_ident() not in system.threads


async def test_a_machine_that_does_not_answer_is_not_asked_again_meanwhile():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FakeSystem):
        def sample(self) -> None:
            super().sample()
            begun.set()
            go_on.wait()

    now = [2.0]
    system = Slow()
    metrics = Metrics(list, system=system, interval_s=2.0, clock=lambda: now[0])
    now[0] = 4.0
    first = asyncio.ensure_future(metrics.scrape())
    await asyncio.to_thread(begun.wait)
    now[0] = 8.0
    async with asyncio.timeout(30):
        await metrics.scrape()
    assert len(system.threads) == 1
    go_on.set()
    await first
    await metrics.scrape()
    assert len(system.threads) == 2


def test_other_parts_add_families():
    metrics = Metrics(list)
    metrics.add_source(lambda: [Family("nv_cache_util", "gauge", "Cache utilization [0.0 - 1.0]", [Sample({}, 0.5)])])
    metrics.custom.new_family("host", "mine", "Mine", "gauge")
    metrics.custom.new_metric("host", "mine", {})
    text = metrics.render().decode()
    assert "nv_cache_util 0.5" in text
    assert "mine 0" in text
