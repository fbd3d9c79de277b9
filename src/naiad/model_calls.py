"""What model code in a host may ask of the server: other models, their loading, metrics. On the event loop.

The messages are in `backends/python/calls.py`. A call from inside a model is an ordinary request: it goes through the
engine, is batched with others, counted in the called model's statistics, and ends when its caller's host does.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

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
)
from naiad.datatypes import BY_NUMBER
from naiad.engine import Engine
from naiad.errors import InvalidArgument, NaiadError, NotFound, Unavailable
from naiad.instances.call_link import Caller, OnReply
from naiad.messages import InferRequest, Result, SequenceControl, Tensor
from naiad.scheduling.scheduler import Call
from naiad.telemetry.custom_metrics import CustomMetrics
from naiad.telemetry.trace import Trace, TraceSettings

_FIRST, _LAST = 1, 2


class ModelCalls:
    """Answers `Services.call` of all hosts; what a caller holds goes with it."""

    def __init__(self, engine: Engine, metrics: CustomMetrics, traces: TraceSettings | None = None) -> None:
        self._engine = engine
        self._metrics = metrics
        self._traces = traces
        self._calls: dict[Caller, set[Call]] = {}
        self._streams: dict[tuple[Caller, int], _Stream] = {}
        self._last_stream = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: dict[str, tuple[type[Any], Callable[[Caller, Any], Coroutine[Any, Any, Any]]]] = {
            "next_response": (StreamCall, self._next_response),
            "cancel": (StreamCall, self._cancel),
            "load_model": (LoadCall, self._load_model),
            "unload_model": (UnloadCall, self._unload_model),
            "is_model_ready": (ReadyCall, self._is_model_ready),
            "metric": (MetricCall, self._metric),
        }

    def __call__(self, caller: Caller, method: str, arguments: msgspec.Raw, reply: OnReply) -> None:
        """See `OnCall`."""
        try:
            if method == "infer":
                self._infer(caller, _infer_decoder.decode(arguments), reply)
                return
            kind, act = self._methods.get(method, (None, None))
            if kind is None or act is None:
                raise NotFound(f"model code asked the server for '{method}', which it does not offer")
            asked = msgspec.msgpack.decode(arguments, type=kind)
        except Exception as error:
            reply(None, error)
            return
        task = asyncio.create_task(self._act(act(caller, asked), reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Leaves unfinished what nobody waits for any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _act(self, action: Coroutine[Any, Any, Any], reply: OnReply) -> None:
        try:
            reply(await action, None)
        except Exception as error:
            reply(None, error)
        except asyncio.CancelledError:
            # A model in a thread of the server would wait for ever.
            reply(None, Unavailable("the server has ended"))

    def gone(self, caller: Caller) -> None:
        """A host has ended: nobody waits for what it asked."""
        for call in list(self._calls.pop(caller, ())):
            call.cancel()
        for key in [key for key in self._streams if key[0] == caller]:
            del self._streams[key]
        self._metrics.drop_owner(str(caller))

    def _infer(self, caller: Caller, asked: InferCall, reply: OnReply) -> None:
        try:
            model = self._engine.model(asked.model_name, asked.model_version)
        except NaiadError as error:
            raise NotFound(not_ready(asked.model_name)) from error
        if model.config.decoupled and not asked.decoupled:
            raise InvalidArgument(needs_decoupled(asked.model_name))
        trace = self._traces.live(asked.trace) if asked.trace and self._traces is not None else None
        sink = _Stream() if asked.decoupled else _Single(reply)
        admitted = self._engine.goes_on(caller.model, caller.version)
        call = self._engine.infer(_request(asked, None if trace is None else trace.child()), sink, admitted=admitted)
        held = self._calls.get(caller)
        if held is None:
            held = self._calls[caller] = set()
        sink.begin(call, held)
        if isinstance(sink, _Stream):
            self._last_stream += 1
            self._streams[caller, self._last_stream] = sink
            reply(StreamAnswer(self._last_stream), None)

    async def _next_response(self, caller: Caller, asked: StreamCall) -> InferAnswer:
        number = asked.stream
        stream = self._streams.get((caller, number))
        if stream is None:
            raise NotFound(f"there is no stream {number} of responses, or its last response has been fetched")
        answer = await stream.answers.get()
        if answer.final:
            self._streams.pop((caller, number), None)
        return answer

    async def _cancel(self, caller: Caller, asked: StreamCall) -> None:
        stream = self._streams.get((caller, asked.stream))
        if stream is not None:
            stream.cancel()

    async def _load_model(self, caller: Caller, asked: LoadCall) -> None:
        parameters: dict[str, str | bytes] = {**asked.files}
        if asked.config:
            parameters["config"] = asked.config
        await self._engine.load(asked.name, parameters)

    async def _unload_model(self, caller: Caller, asked: UnloadCall) -> None:
        await self._engine.unload(asked.name, asked.unload_dependents)

    async def _is_model_ready(self, caller: Caller, asked: ReadyCall) -> bool:
        return await self._engine.model_ready(asked.name, asked.version)

    async def _metric(self, caller: Caller, asked: MetricCall) -> float:
        value = 0.0
        refused: NaiadError | None = None
        owner = str(caller)
        for change in asked.changes:
            try:
                value = self._change_metric(change, owner)
            except NaiadError as error:
                # The others are of other metrics, and lost if they are not made now.
                refused = refused or error
        if refused is not None:
            raise refused
        return value

    def _change_metric(self, change: MetricChange, owner: str) -> float:
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
        return 0.0


class _Sink:
    """Where a call's responses go; the caller holds the call until the final one."""

    __slots__ = ("_call", "_held")

    def __init__(self) -> None:
        self._call: Call | None = None
        self._held: set[Call] | None = None

    def begin(self, call: Call, held: set[Call]) -> None:
        if not call.ended:
            self._call = call
            self._held = held
            held.add(call)

    def end(self) -> None:
        if self._call is not None and self._held is not None:
            self._held.discard(self._call)
            self._call = None


class _Single(_Sink):
    """For a call that waits for its only response."""

    __slots__ = ("_reply",)

    def __init__(self, reply: OnReply) -> None:
        super().__init__()
        self._reply: OnReply | None = reply

    def send(self, result: Result | None, final: bool) -> None:
        reply, self._reply = self._reply, None
        if final:
            self.end()
        if reply is not None:
            # Encoded at once, so the results need not be copied.
            reply(_answer(result, final), None)


class _Stream(_Sink):
    """The responses of a decoupled call, until they are fetched."""

    __slots__ = ("answers",)

    def __init__(self) -> None:
        super().__init__()
        self.answers: asyncio.Queue[InferAnswer] = asyncio.Queue()

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def send(self, result: Result | None, final: bool) -> None:
        if final:
            self.end()
        self.answers.put_nowait(_answer(result, final, keep=True))


_infer_decoder: Final = msgspec.msgpack.Decoder(InferCall)


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


def _answer(result: Result | None, final: bool, keep: bool = False) -> InferAnswer:
    """With `keep` the tensors are copied out of the memory that `result` only lends."""
    if isinstance(result, NaiadError):
        return InferAnswer(error=ErrorValue(result.triton_code, result.message), final=final)
    if result is None:
        return InferAnswer(final=final)
    outputs = tuple(
        [
            TensorValue(t.name, t.datatype.number, t.shape, memoryview(bytes(t.data) if keep else t.data))
            for t in result.outputs
        ]
    )
    return InferAnswer(outputs, result.parameters, None, final)
