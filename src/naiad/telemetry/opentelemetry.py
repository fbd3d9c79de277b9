"""Traces as OpenTelemetry's spans, sent with OTLP over HTTP. Needs the extra `otel`.

InferRequest is the client's request, under it a span for each request to a model, under that one for each execution.
Spans are made on the event loop; the SDK's own thread sends them.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from naiad import __version__
from naiad.options import bad_option
from naiad.telemetry.trace import TIMESTAMPS, Header, Journey, Trace, compute_events, request_events

_URL = "http://localhost:4318/v1/traces"
_DELAY = "bsp_schedule_delay"
#: Options of the batch processor, the environment's names for them, the defaults.
_BATCHING = {
    "bsp_max_queue_size": ("OTEL_BSP_MAX_QUEUE_SIZE", 2048),
    _DELAY: ("OTEL_BSP_SCHEDULE_DELAY", 5000),
    "bsp_max_export_batch_size": ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
}
#: How long a server that ends waits for a collector that does not answer.
_CLOSE_S = 5.0


class OtlpExport:
    """Implements `telemetry.trace.SpanExport`. `shown` are the options as clients see them."""

    def __init__(self, exporter: SpanExporter, attributes: Mapping[str, str], batching: Mapping[str, int]) -> None:
        self.shown: dict[str, str] = {}
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "triton-inference-server", **attributes})
        # Which requests are followed has been decided: also those of a client that does not keep its own spans.
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=batching["bsp_max_queue_size"],
                schedule_delay_millis=max(batching[_DELAY], 1),  # the SDK knows no 0
                # The SDK refuses larger ones, Triton has them.
                max_export_batch_size=min(batching["bsp_max_export_batch_size"], batching["bsp_max_queue_size"]),
            )
        )
        self._tracer = self._provider.get_tracer("triton-server", __version__)

    @classmethod
    def of(cls, options: Sequence[tuple[str, str]]) -> "OtlpExport":
        """The one that `--trace-config=opentelemetry,...` describes. Raises InvalidArgument."""
        url = _URL
        attributes: dict[str, str] = {}
        batching = {
            key: _number(key, name, os.environ.get(name, str(default))) for key, (name, default) in _BATCHING.items()
        }
        for key, value in options:
            if key == "url":
                url = value if "://" in value else f"http://{value}"
            elif key == "resource":
                name, _, text = value.partition("=")
                attributes[name] = text
            elif key in _BATCHING:
                batching[key] = _number(key, f"--trace-config opentelemetry,{key}", value)
            else:
                names = ", ".join(("url", "resource", *_BATCHING))
                raise bad_option(f"--trace-config opentelemetry,{key}", f"Available settings are {names}")
        export = cls(OTLPSpanExporter(endpoint=url), attributes, batching)
        export.shown = {**dict(options), **{key: str(value) for key, value in batching.items()}}
        return export

    def parent(self, header: Header) -> Any:
        text = header("traceparent")
        if text is None:
            return None
        carrier = {"traceparent": text}
        state = header("tracestate")
        if state is not None:
            carrier["tracestate"] = state
        context = self._propagator.extract(carrier)
        return context if get_current_span(context).get_span_context().is_valid else None

    def began(self, trace: Trace, parent: Any) -> None:
        journey = trace.journey
        start = trace.started_ns + journey.epoch_ns
        if trace.parent is None:
            journey.span = self._start("InferRequest", parent, start)
        if TIMESTAMPS not in journey.levels:
            return
        attributes: dict[str, str | int] = {
            "triton.model_name": trace.model_name,
            "triton.model_version": trace.model_version,
            "triton.trace_id": trace.id,
            "triton.trace_parent_id": 0 if trace.parent is None else trace.parent.id,
        }
        if trace.request_id:
            attributes["triton.request_id"] = trace.request_id
        above = journey.span if trace.parent is None else trace.parent.span
        trace.span = self._start(trace.model_name, set_span_in_context(above), start, attributes)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(trace.span))
        trace.context = json.dumps(carrier)

    def ended(self, journey: Journey) -> None:
        epoch = journey.epoch_ns
        if TIMESTAMPS not in journey.levels:
            journey.span.end()
            return
        for trace in reversed(journey.followed):
            for times in trace.executions:
                span = self._start("compute", set_span_in_context(trace.span), times[0] + epoch)
                _end(span, compute_events(times), epoch)
            _end(trace.span, request_events(trace), epoch)
            if trace.parent is None:
                _end(journey.span, trace.events, epoch)

    def close(self) -> None:
        # With a collector that hangs the SDK waits longer than a server may that is asked to end.
        thread = threading.Thread(target=self._provider.shutdown, name="naiad-otel-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _start(self, name: str, context: Any, start_ns: int, attributes: Mapping[str, str | int] | None = None) -> Span:
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=start_ns)


def _end(span: Span, events: Sequence[tuple[str, int]], epoch_ns: int) -> None:
    for name, ns in events:
        span.add_event(name, timestamp=ns + epoch_ns)
    span.end(max(ns for _, ns in events) + epoch_ns)


def _number(option: str, name: str, text: str) -> int:
    least = 0 if option == _DELAY else 1
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < least:
        raise bad_option(name, f"it must be a number of {least} or more, got '{text}'")
    return number
