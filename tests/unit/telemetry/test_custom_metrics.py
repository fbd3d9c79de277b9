import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.errors import AlreadyExists, InvalidArgument, NaiadError, NotFound, Unsupported
from naiad.telemetry import custom_metrics
from naiad.telemetry.custom_metrics import CustomMetrics, Histogram
from naiad.telemetry.exposition import exposition

RED = {"color": "red"}


@pytest.fixture
def metrics() -> CustomMetrics:
    """A counter, a gauge and a histogram of host h, each with one metric."""
    metrics = CustomMetrics(reserved=["nv_inference_count"])
    for kind in ("counter", "gauge", "histogram"):
        metrics.new_family("h", kind, f"A {kind}", kind)
    metrics.new_metric("h", "counter", RED)
    metrics.new_metric("h", "gauge", RED)
    metrics.new_metric("h", "histogram", RED, (1, 2.5))
    return metrics


def shown(metrics: CustomMetrics) -> list[str]:
    return [line for line in exposition(metrics.families()).decode().splitlines() if not line.startswith("#")]


def test_values(metrics):
    metrics.increment("h", "counter", RED, 2)
    metrics.increment("h", "counter", RED, 0.5)
    metrics.increment("h", "gauge", RED, -1)
    metrics.observe("h", "histogram", RED, [0.5, 1, 2, 3])
    assert shown(metrics) == [
        'counter{color="red"} 2.5',
        'gauge{color="red"} -1',
        'histogram_bucket{color="red",le="1"} 2',
        'histogram_bucket{color="red",le="2.5"} 3',
        'histogram_bucket{color="red",le="+Inf"} 4',
        'histogram_count{color="red"} 4',
        'histogram_sum{color="red"} 6.5',
    ]
    metrics.set("h", "gauge", RED, 4)
    assert metrics.value("h", "gauge", RED) == 4
    assert metrics.value("h", "counter", RED) == 2.5


def test_a_counter_takes_what_is_not_a_number(metrics):
    metrics.increment("h", "counter", RED, math.nan)
    assert math.isnan(metrics.value("h", "counter", RED))


def test_help_and_type(metrics):
    assert exposition(metrics.families()).decode().startswith("# HELP counter A counter\n# TYPE counter counter\n")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: m.set("h", "counter", RED, 1), Unsupported, "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        (
            lambda m: m.set("h", "histogram", RED, 1),
            Unsupported,
            "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set",
        ),
        (
            lambda m: m.increment("h", "histogram", RED, 1),
            Unsupported,
            "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment",
        ),
        (
            lambda m: m.value("h", "histogram", RED),
            Unsupported,
            "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
        ),
        (
            lambda m: m.observe("h", "gauge", RED, [1]),
            Unsupported,
            "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe",
        ),
        (
            lambda m: m.increment("h", "counter", RED, -1),
            InvalidArgument,
            "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
        ),
        (
            lambda m: m.new_metric("h", "histogram", {}),
            InvalidArgument,
            "Failed to create metric. Missing required buckets.",
        ),
        (
            lambda m: m.new_metric("h", "gauge", {}, (1,)),
            InvalidArgument,
            "Unexpected args found in gauge Metric constructor.",
        ),
        (
            lambda m: m.new_metric("h", "histogram", {}, (2, 1)),
            InvalidArgument,
            "Bucket Boundaries must be strictly sorted, got [2, 1]",
        ),
        (
            lambda m: m.new_metric("h", "gauge", {"a-b": "c"}),
            InvalidArgument,
            "Invalid label name 'a-b' of a metric of family 'gauge'",
        ),
        (
            lambda m: m.new_metric("h", "gauge", {"__a": "b"}),
            InvalidArgument,
            "Invalid label name '__a' of a metric of family 'gauge'",
        ),
        (lambda m: m.new_family("h", "a b", "", "gauge"), InvalidArgument, "Invalid metric name 'a b'"),
        (lambda m: m.new_family("h", "__a", "", "gauge"), InvalidArgument, "Invalid metric name '__a'"),
        (
            lambda m: m.new_family("h", "gauge", "", "counter"),
            AlreadyExists,
            "Family name already exists with different type: 'gauge' is a gauge",
        ),
        (
            lambda m: m.new_family("h", "nv_inference_count", "", "counter"),
            AlreadyExists,
            "metric family 'nv_inference_count' is one of the server's own",
        ),
        (lambda m: m.new_metric("h", "nope", {}), NotFound, "metric family 'nope' does not exist"),
        (
            lambda m: m.increment("h", "gauge", {"color": "blue"}, 1),
            NotFound,
            "metric family 'gauge' has no metric with the labels {'color': 'blue'}",
        ),
    ],
)
def test_errors_change_nothing(metrics, call, kind, message):
    before = shown(metrics)
    with pytest.raises(NaiadError) as caught:
        call(metrics)
    assert (type(caught.value), caught.value.message) == (kind, message)
    assert shown(metrics) == before


def test_instances_share_what_they_both_announce(metrics):
    metrics.new_family("other", "counter", "again", "counter")
    metrics.new_metric("other", "counter", RED)
    metrics.increment("h", "counter", RED, 1)
    metrics.increment("other", "counter", RED, 1)
    assert metrics.value("h", "counter", RED) == 2
    metrics.drop_owner("h")
    assert shown(metrics) == ['counter{color="red"} 2']
    metrics.drop_metric("other", "counter", RED)
    metrics.drop_family("other", "counter")
    assert metrics.families() == []


def test_each_announcement_is_taken_back_once(metrics):
    metrics.new_metric("h", "gauge", RED)
    metrics.drop_metric("h", "gauge", RED)
    assert metrics.value("h", "gauge", RED) == 0
    metrics.drop_metric("h", "gauge", RED)
    metrics.drop_metric("h", "gauge", RED)
    with pytest.raises(NotFound):
        metrics.value("h", "gauge", RED)


def test_taking_back_what_was_never_announced_does_nothing(metrics):
    before = shown(metrics)
    metrics.drop_family("other", "gauge")
    metrics.drop_family("h", "nope")
    metrics.drop_metric("other", "gauge", RED)
    metrics.drop_metric("h", "nope", RED)
    metrics.drop_owner("other")
    assert shown(metrics) == before


def test_series_do_not_grow_without_bound(metrics, monkeypatch):
    monkeypatch.setattr(custom_metrics, "MOST_SERIES", 4)
    metrics.new_metric("h", "gauge", {"id": "1"})
    with pytest.raises(Unsupported, match="models have made 4 metrics already"):
        metrics.new_metric("h", "gauge", {"id": "2"})
    metrics.new_metric("h", "gauge", {"id": "1"})
    metrics.drop_owner("h")
    metrics.new_family("h", "gauge", "", "gauge")
    metrics.new_metric("h", "gauge", {"id": "2"})


def test_families_have_a_limit(monkeypatch):
    monkeypatch.setattr(custom_metrics, "MOST_SERIES", 2)
    metrics = CustomMetrics()
    for family in ("a", "b", "a"):
        metrics.new_family("h", family, "", "gauge")
    with pytest.raises(Unsupported, match="models have made 2 metric families already"):
        metrics.new_family("h", "c", "", "gauge")
    metrics.drop_owner("h")
    metrics.new_family("h", "c", "", "gauge")


@given(st.lists(st.floats(-1e6, 1e6)), st.lists(st.floats(-1e6, 1e6), unique=True).map(sorted))
def test_buckets_are_cumulative(values, bounds):
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    *buckets, count, total = histogram.samples({})
    assert [sample.value for sample in buckets] == [
        *(sum(value <= bound for value in values) for bound in bounds),
        len(values),
    ]
    assert count.value == len(values)
    assert total.value == pytest.approx(sum(values))


def test_a_histogram_without_bounds_only_counts(metrics):
    metrics.new_metric("h", "histogram", {}, ())
    metrics.observe("h", "histogram", {}, [0.5, 7])
    assert [line for line in shown(metrics) if "color" not in line] == [
        'histogram_bucket{le="+Inf"} 2',
        "histogram_count 2",
        "histogram_sum 7.5",
    ]
