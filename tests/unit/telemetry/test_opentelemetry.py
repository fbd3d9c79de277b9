"""Spans of journeys, without a collector: what goes into which span is also seen by one in tests/api/test_tracing.py."""

import json
from typing import Any

import pytest

from naiad.errors import InvalidArgument
from naiad.messages import InferRequest, Result
from naiad.telemetry.trace import TraceSettings, Values

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from naiad.telemetry.opentelemetry import OtlpExport

BATCHING = {"bsp_max_queue_size": 64, "bsp_schedule_delay": 60_000, "bsp_max_export_batch_size": 64}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Nowhere:
    def send(self, result: Result | None, final: bool) -> None:
        pass


class FailingLog:
    def exception(self, message: str, error: BaseException) -> None:
        raise AssertionError(message) from error


def spans_of(values: Values, headers: list[dict[str, str]]) -> list[Any]:
    """The spans after a request to `m` with each of the headers."""
    exporter = InMemorySpanExporter()
    traces = TraceSettings(values, "", FailingLog(), OtlpExport(exporter, {"a": "b"}, BATCHING))
    for header in headers:
        request = traces.follow(InferRequest("m", ()), "HTTP", 1, header.get)
        if request.trace is not None:
            sink = request.trace.begin(request, 1, Nowhere())
            request.trace.executing()
            request.trace.computed(5, 6, 7, 8)
            sink.send(None, True)
    traces.close()
    return list(exporter.get_finished_spans())


def test_a_request_with_a_context_is_followed_whatever_rate_and_count_are() -> None:
    headers = [{}, {"traceparent": TRACEPARENT, "tracestate": "k=v"}, {"traceparent": "nonsense"}]
    for values in (Values(("TIMESTAMPS",), 0), Values(("TIMESTAMPS",), 1000), Values(("TIMESTAMPS",), 1, 0)):
        spans = spans_of(values, headers)
        assert [span.name for span in spans] == ["compute", "m", "InferRequest"]
        assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACEPARENT.split("-")[1]}
        assert f"{spans[-1].parent.span_id:016x}" == TRACEPARENT.split("-")[2]


def test_nothing_is_followed_while_the_level_is_off() -> None:
    assert spans_of(Values((), 1), [{"traceparent": TRACEPARENT}]) == []


def test_with_tensors_alone_there_is_the_clients_request_and_no_more() -> None:
    (root,) = spans_of(Values(("TENSORS",), 1), [{"traceparent": TRACEPARENT}])
    assert (root.name, root.events) == ("InferRequest", ())
    assert f"{root.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert root.start_time <= root.end_time


def test_times_are_those_of_the_clock() -> None:
    compute, model, root = spans_of(Values(("TIMESTAMPS",), 1), [{}])
    epoch = model.events[0].timestamp - compute.start_time
    assert compute.end_time - compute.start_time == 3
    assert [event.timestamp - compute.start_time for event in compute.events] == [0, 1, 2, 3]
    assert epoch > 0
    assert root.start_time == model.start_time == model.events[0].timestamp
    assert model.end_time <= root.end_time
    assert root.resource.attributes["service.name"] == "triton-inference-server"
    assert root.resource.attributes["a"] == "b"


def test_the_context_for_model_code_is_that_of_the_models_span() -> None:
    exporter = InMemorySpanExporter()
    traces = TraceSettings(Values(("TIMESTAMPS",), 1), "", FailingLog(), OtlpExport(exporter, {}, BATCHING))
    request = traces.follow(InferRequest("m", ()), "GRPC", 1, {}.get)
    assert request.trace is not None
    sink = request.trace.begin(request, 1, Nowhere())
    context = json.loads(request.trace.context or "")
    sink.send(None, True)
    traces.close()
    model = next(span for span in exporter.get_finished_spans() if span.name == "m")
    assert context["traceparent"].split("-")[1:3] == [
        f"{model.context.trace_id:032x}",
        f"{model.context.span_id:016x}",
    ]


def test_options_and_what_is_shown_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "77")
    export = OtlpExport.of([("url", "u:1/x"), ("resource", "a=b"), ("bsp_max_queue_size", "600")])
    assert export.shown == {
        "url": "u:1/x",
        "resource": "a=b",
        "bsp_max_queue_size": "600",
        "bsp_schedule_delay": "77",
        "bsp_max_export_batch_size": "512",
    }
    shown = TraceSettings(Values(), "", FailingLog(), export).get()
    assert shown == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        **export.shown,
    }
    export.close()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (("colour", "red"), 'Bad option: "--trace-config opentelemetry,colour"'),
        (
            ("bsp_schedule_delay", "soon"),
            "Bad option: \"--trace-config opentelemetry,bsp_schedule_delay\".\nit must be a number of 0 or more, got 'soon'",
        ),
        (("bsp_max_queue_size", "0"), "it must be a number of 1 or more, got '0'"),
    ],
)
def test_wrong_options(option: tuple[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        OtlpExport.of([option])


def test_a_wrong_number_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    with pytest.raises(InvalidArgument, match='Bad option: "OTEL_BSP_MAX_QUEUE_SIZE"'):
        OtlpExport.of([])


def test_a_queue_that_is_smaller_than_a_batch_and_no_delay() -> None:
    export = OtlpExport.of([("bsp_max_queue_size", "1"), ("bsp_schedule_delay", "0")])
    assert (export.shown["bsp_max_export_batch_size"], export.shown["bsp_schedule_delay"]) == ("512", "0")
    export.close()
