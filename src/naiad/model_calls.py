"""What model code in a host may ask of the server: other models, their loading, metrics. On the event loop.

The messages are in `backends/python/calls.py`. A call from inside a model is an ordinary request: it goes through the
engine, is batched with others, counted in the called model's statistics, and ends when its caller's host does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from naiad.backends.python.calls import (
    DropFamily,
    DropMetric,
    ErrorValue,
    Increment,
    InferAnswer,
    InferCall,
    LoadCall,
    MetricCall,
    MetricChange,
    MetricValue,
    NewFamily,
    NewMetric,
    Observe,
    ReadyCall,
    SetValue,
    StreamAnswer,
    StreamCall,
    TensorValue,
    UnloadCall,
    needs_decoupled,
    not_ready,
    read,
)
from naiad.datatypes import BY_NUMBER
from naiad.engine import Engine
from naiad.errors import InvalidArgument, NaiadError, NotFound
from naiad.messages import InferRequest, Result, SequenceControl, Tensor
from naiad.scheduling.scheduler import Call
from naiad.telemetry.custom_metrics import CustomMetrics
from naiad.telemetry.trace import Trace, TraceSettings

_FIRST, _LAST = 1, 2


class ModelCalls:
    """Answers `Services.call` of all hosts. `caller` tells hosts apart, so that what one holds goes with it."""

    def __init__(self, engine: Engine, metrics: CustomMetrics, traces: TraceSettings | None = None) -> None:
        self._engine = engine
        self._metrics = metrics
        self._traces = traces
        self._calls: dict[Hashable, set[Call]] = {}
        self._streams: dict[tuple[Hashable, int], _Stream] = {}
        self._last_stream = 0
        self._methods: dict[str, Callable[[Any, Hashable], Awaitable[Any]]] = {
            "infer": self._infer,
            "next_response": self._next_response,
            "cancel": self._cancel,
            "load_model": self._load_model,
            "unload_model": self._unload_model,
            "is_model_ready": self._is_model_ready,
            "metric": self._metric,
        }

    async def __call__(self, method: str, arguments: Any, caller: Hashable) -> Any:
        """The answer of a method; raises NaiadError."""
        act = self._methods.get(method)
        if act is None:
            raise NotFound(f"model code asked the server for '{method}', which it does not offer")
        return await act(arguments, caller)

    def gone(self, caller: Hashable) -> None:
        """A host has ended: nobody waits for what it asked."""
        for call in list(self._calls.pop(caller, ())):
            call.cancel()
        for key in [key for key in self._streams if key[0] == caller]:
            del self._streams[key]
        self._metrics.drop_owner(str(caller))

    async def _infer(self, arguments: Any, caller: Hashable) -> InferAnswer | StreamAnswer:
        asked = read(arguments, InferCall)
        try:
            model = self._engine.model(asked.model_name, asked.model_version)
        except NaiadError as error:
            raise NotFound(not_ready(asked.model_name)) from error
        if model.config.decoupled and not asked.decoupled:
            raise InvalidArgument(needs_decoupled(asked.model_name))
        stream = _Stream()
        trace = self._traces.live(asked.trace) if asked.trace and self._traces is not None else None
        call = self._engine.infer(_request(asked, None if trace is None else trace.child()), stream)
        held = self._calls.setdefault(caller, set())
        stream.begin(call, held)
        if asked.decoupled:
            self._last_stream += 1
            self._streams[caller, self._last_stream] = stream
            return StreamAnswer(self._last_stream)
        return await stream.answers.get()

    async def _next_response(self, arguments: Any, caller: Hashable) -> InferAnswer:
        number = read(arguments, StreamCall).stream
        stream = self._streams.get((caller, number))
        if stream is None:
            raise NotFound(f"there is no stream {number} of responses, or its last response has been fetched")
        answer = await stream.answers.get()
        if answer.final:
            self._streams.pop((caller, number), None)
        return answer

    async def _cancel(self, arguments: Any, caller: Hashable) -> None:
        stream = self._streams.get((caller, read(arguments, StreamCall).stream))
        if stream is not None:
            stream.cancel()

    async def _load_model(self, arguments: Any, caller: Hashable) -> None:
        asked = read(arguments, LoadCall)
        parameters: dict[str, str | bytes] = {**asked.files}
        if asked.config:
            parameters["config"] = asked.config
        await self._engine.load(asked.name, parameters)

    async def _unload_model(self, arguments: Any, caller: Hashable) -> None:
        asked = read(arguments, UnloadCall)
        await self._engine.unload(asked.name, asked.unload_dependents)

    async def _is_model_ready(self, arguments: Any, caller: Hashable) -> bool:
        asked = read(arguments, ReadyCall)
        return await self._engine.model_ready(asked.name, asked.version)

    async def _metric(self, arguments: Any, caller: Hashable) -> float | None:
        value: float | None = None
        owner = str(caller)
        for change in read(arguments, MetricCall).changes:
            value = self._change_metric(change, owner)
        return value

    def _change_metric(self, change: MetricChange, owner: str) -> float | None:
        metrics = self._metrics
        match change:
            case NewFamily():
                metrics.new_family(owner, change.family, change.description, change.kind)
            case DropFamily():
                metrics.drop_family(owner, change.family)
            case NewMetric():
                metrics.new_metric(owner, change.family, change.labels, change.buckets)
            case DropMetric():
                metrics.drop_metric(owner, change.family, change.labels)
            case Increment():
                metrics.increment(owner, change.family, change.labels, change.value)
            case SetValue():
                metrics.set(owner, change.family, change.labels, change.value)
            case Observe():
                metrics.observe(owner, change.family, change.labels, change.values)
            case MetricValue():
                return metrics.value(owner, change.family, change.labels)
        return None


class _Stream:
    """The responses of one call, until they are fetched."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[InferAnswer] = asyncio.Queue()
        self._call: Call | None = None
        self._held: set[Call] | None = None

    def begin(self, call: Call, held: set[Call]) -> None:
        if not call.ended:
            self._call = call
            self._held = held
            held.add(call)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def send(self, result: Result | None, final: bool) -> None:
        if final and self._call is not None and self._held is not None:
            self._held.discard(self._call)
        self.answers.put_nowait(_answer(result, final))


def _request(asked: InferCall, trace: Trace | None) -> InferRequest:
    inputs = tuple([Tensor(t.name, BY_NUMBER[t.datatype], t.shape, t.data) for t in asked.inputs])
    sequence = None
    if asked.correlation_id not in (0, ""):
        sequence = SequenceControl(asked.correlation_id, bool(asked.flags & _FIRST), bool(asked.flags & _LAST))
    return InferRequest(
        asked.model_name,
        inputs,
        asked.model_version,
        asked.request_id,
        asked.outputs,
        asked.parameters,
        sequence,
        0,
        asked.timeout_us,
        trace,
    )


def _answer(result: Result | None, final: bool) -> InferAnswer:
    if isinstance(result, NaiadError):
        return InferAnswer(error=ErrorValue(result.triton_code, result.message), final=final)
    if result is None:
        return InferAnswer(final=final)
    outputs = tuple(
        [TensorValue(t.name, t.datatype.number, t.shape, memoryview(bytes(t.data))) for t in result.outputs]
    )
    return InferAnswer(outputs, result.parameters, None, final)
