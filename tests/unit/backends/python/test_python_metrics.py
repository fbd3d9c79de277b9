"""A model's own metrics: what reaches the server, and what is refused before."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from python_backend_fakes import FakeServices, load, write

from naiad.backends.python import current
from naiad.backends.python.calls import (
    DropFamily,
    DropMetric,
    Increment,
    MetricCall,
    MetricChange,
    MetricValue,
    NewFamily,
    NewMetric,
    Observe,
    SetValue,
)
from naiad.backends.python.metrics import _RATE
from naiad.backends.python.pb_utils import Metric, MetricFamily, TritonModelException
from naiad.errors import InvalidArgument, NaiadError, NotFound

SECONDS = 10


class Server:
    """Takes changes; refuses with `refusal`, calls that have changes of the kinds `refused` only."""

    def __init__(self) -> None:
        self.changes: SimpleQueue[MetricChange] = SimpleQueue()
        self.refusal: NaiadError | None = None
        self.refused: Any = MetricChange

    def __call__(self, call: MetricCall) -> Any:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=MetricCall) == call
        if self.refusal is not None and any(isinstance(change, self.refused) for change in call.changes):
            raise self.refusal
        for change in call.changes:
            self.changes.put(change)
        return 42.5 if isinstance(call.changes[-1], MetricValue) else None

    def got(self, count: int) -> list[MetricChange]:
        return [self.changes.get(timeout=SECONDS) for _ in range(count)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    instance = current.Instance("m_0_0", FakeServices(metric=server), Path("/m/1"))
    monkeypatch.setattr(current, "_instance", instance)
    yield server
    gc.collect()
    if instance.notes is not None:
        server.refusal = None
        instance.notes.close()


def made(server: Server, kind: Any, buckets: list[float] | None = None) -> tuple[MetricFamily, Metric]:
    family = MetricFamily(name="f", description="text", kind=kind)
    metric = family.Metric(labels={"a": "b"}, buckets=buckets)
    server.got(2)
    return family, metric


def test_families_and_metrics_are_announced_at_once(server: Server) -> None:
    family = MetricFamily(name=b"f", description=b"text", kind=MetricFamily.HISTOGRAM)  # type: ignore[arg-type]
    metric = family.Metric(buckets=[1, 2])
    assert server.got(2) == [NewFamily("f", "text", "histogram"), NewMetric("f", {}, (1.0, 2.0))]
    unbounded = family.Metric(labels={"a": "b"}, buckets=[])
    assert server.got(1) == [NewMetric("f", {"a": "b"}, ())]
    del unbounded, metric, family


def test_increments_add_up_on_their_way(server: Server) -> None:
    family, metric = made(server, MetricFamily.COUNTER)
    metric.increment(1)
    metric.increment(2.5)
    total = 0.0
    while total < 3.5:
        (change,) = server.got(1)
        assert isinstance(change, Increment)
        assert (change.family, change.labels) == ("f", {"a": "b"})
        total += change.value
    assert total == 3.5
    del family


def test_a_gauge_is_set_and_moved(server: Server) -> None:
    family, metric = made(server, MetricFamily.GAUGE)
    metric.increment(1)
    metric.set(5)
    metric.increment(-2)
    assert metric.value() == 42.5
    value = 0.0
    while not isinstance(change := server.got(1)[0], MetricValue):
        assert isinstance(change, SetValue | Increment)
        assert (change.family, change.labels) == ("f", {"a": "b"})
        value = change.value if isinstance(change, SetValue) else value + change.value
    assert change == MetricValue("f", {"a": "b"})
    assert value == 3.0
    del family


def test_what_the_server_refuses_of_the_notes_is_not_what_is_asked(server: Server) -> None:
    family, metric = made(server, MetricFamily.COUNTER)
    services = current.instance().services
    assert isinstance(services, FakeServices)
    server.refusal, server.refused = NotFound("gone"), Increment
    metric.increment(1)
    assert metric.value() == 42.5
    assert [line[:2] for line in services.logged] == [("WARNING", "metrics of the model are lost: gone")]
    del family


def test_what_cannot_be_asked_takes_no_notes_along(server: Server) -> None:
    family, metric = made(server, MetricFamily.COUNTER)
    metric.increment(2)
    with pytest.raises(UnicodeEncodeError):
        family.Metric(labels={"no": "\ud800 text"})
    assert server.got(1) == [Increment("f", {"a": "b"}, 2.0)]


def test_observations_are_collected(server: Server) -> None:
    family, metric = made(server, MetricFamily.HISTOGRAM, [1.0])
    metric.observe(0.5)
    metric.observe(7)
    values: list[float] = []
    while len(values) < 2:
        (change,) = server.got(1)
        assert isinstance(change, Observe)
        values += change.values
    assert values == [0.5, 7.0]
    del family


def test_a_change_is_passed_on_without_a_pause(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # A client that has its answer and then scrapes finds what the model has counted for it.
    forever = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: forever.wait())
    family, metric = made(server, MetricFamily.COUNTER)
    try:
        for _ in range(3):
            metric.increment(1)
            assert server.got(1) == [Increment("f", {"a": "b"}, 1.0)]
    finally:
        forever.set()
    del family


def test_changes_that_come_too_often_are_passed_on_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: SimpleQueue[float] = SimpleQueue()
    noted = threading.Event()

    real_sleep = time.sleep
    # Models of other tests may have such a thread too.
    others = threading.enumerate()

    def sleep(seconds: float) -> None:
        if seconds == 1 / _RATE and threading.current_thread() not in others:
            pauses.put(seconds)
            noted.wait()
        else:
            real_sleep(seconds)  # of a thread that is none of ours

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    family, metric = made(server, MetricFamily.COUNTER)
    sent = 0
    while pauses.empty():
        metric.increment(1)
        sent += 1
        if sent <= 20:
            server.got(1)
    metric.increment(1)
    noted.set()
    (change,) = server.got(1)
    assert isinstance(change, Increment)
    assert change.value == sent - 20 + 1 > 1
    del family


def test_what_the_model_lets_go_of_is_dropped(server: Server) -> None:
    family, metric = made(server, MetricFamily.COUNTER)
    del metric
    assert server.got(1) == [DropMetric("f", {"a": "b"})]
    del family
    assert server.got(1) == [DropFamily("f")]


@pytest.mark.parametrize(
    ("kind", "operation", "text"),
    [
        (
            MetricFamily.COUNTER,
            lambda metric: metric.increment(-1),
            "Failed to increment metric value: Failed to process the request for model 'm_0_0', message: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically "
            "by non-negative values.",
        ),
        (
            MetricFamily.COUNTER,
            lambda metric: metric.set(1),
            "Failed to set metric value: Failed to process the request for model 'm_0_0', message: TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
        ),
        (
            MetricFamily.GAUGE,
            lambda metric: metric.observe(1),
            "Failed to observe metric value: Failed to process the request for model 'm_0_0', message: TRITONSERVER_METRIC_KIND_GAUGE does not support Observe",
        ),
        (
            MetricFamily.HISTOGRAM,
            lambda metric: metric.increment(1),
            "Failed to increment metric value: Failed to process the request for model 'm_0_0', message: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment",
        ),
        (
            MetricFamily.HISTOGRAM,
            lambda metric: metric.value(),
            "Failed to get metric value: Failed to process the request for model 'm_0_0', message: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
        ),
    ],
)
def test_what_a_kind_cannot_do(server: Server, kind: Any, operation: Any, text: str) -> None:
    family, metric = made(server, kind, [1.0] if kind == MetricFamily.HISTOGRAM else None)
    with pytest.raises(TritonModelException) as error:
        operation(metric)
    assert str(error.value) == text
    del family


def test_metrics_that_cannot_be_made(server: Server) -> None:
    counters = MetricFamily("c", "", MetricFamily.COUNTER)
    histograms = MetricFamily("h", "", MetricFamily.HISTOGRAM)
    for make, text in (
        (lambda: counters.Metric(labels=["a"]), "Labels must be a dictionary."),  # type: ignore[arg-type]
        (lambda: counters.Metric(buckets=[1.0]), "Unexpected buckets found."),
        (lambda: histograms.Metric(), "Missing required buckets."),
        (lambda: histograms.Metric(buckets=(1.0,)), "Buckets must be a list."),
    ):
        with pytest.raises(TritonModelException) as error:
            make()
        assert str(error.value) == f"Failed to create metric. {text}"


@pytest.mark.parametrize("kind", [0, 5, None, "counter"])
def test_what_is_no_kind(server: Server, kind: Any) -> None:
    with pytest.raises(TypeError, match="MetricFamily needs a MetricKind, got <class"):
        MetricFamily("f", "", kind)


@pytest.mark.parametrize("value", ["5", b"5", None])
def test_what_is_no_number(server: Server, value: Any) -> None:
    family, metric = made(server, MetricFamily.COUNTER)
    with pytest.raises(TypeError):
        metric.increment(value)
    del family


def test_a_metric_does_not_outlive_its_family(server: Server) -> None:
    family, metric = made(server, MetricFamily.COUNTER)
    del family
    with pytest.raises(TritonModelException, match="the corresponding 'MetricFamily' has been deleted"):
        metric.increment(1)


def test_what_the_server_refuses(server: Server) -> None:
    server.refusal = InvalidArgument("no")
    with pytest.raises(
        TritonModelException,
        match=r"^Error when creating MetricFamily: Failed to process the request for model 'm_0_0', message: no$",
    ):
        MetricFamily("f", "", MetricFamily.COUNTER)
    server.refusal = None
    family = MetricFamily("f", "", MetricFamily.COUNTER)
    server.refusal = InvalidArgument("no")
    with pytest.raises(
        TritonModelException,
        match=r"^Error when creating Metric: Failed to process the request for model 'm_0_0', message: no$",
    ):
        family.Metric()


def test_a_model_that_ends_passes_on_what_it_has_noted(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.family = pb_utils.MetricFamily("f", "", pb_utils.MetricFamily.COUNTER)
                self.metric = self.family.Metric()

            def finalize(self):
                self.metric.increment(3)
        """,
    )
    server = Server()
    load(path, FakeServices(metric=server)).close()
    assert server.got(3)[-1] == Increment("f", {}, 3.0)
