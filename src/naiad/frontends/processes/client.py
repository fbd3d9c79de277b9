"""The engine as a front-end process sees it: over a connection, with the facts about models and regions at hand.

What the codecs need to know (configurations, labels, regions) the engine's process tells at every change, so that
look-ups are as quick as in it; inference goes to it request by request, all of one turn of the loop in one frame; all
else is asked of it. Lives on the front end's event loop.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import time
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config.model_config import ModelConfig
from naiad.datatypes import Buffer
from naiad.errors import Internal, NaiadError, Unavailable
from naiad.frontends.grpc.servicer import Metadata, Method
from naiad.frontends.http.connection import Exchange
from naiad.frontends.http.management import Management
from naiad.frontends.processes import frames
from naiad.frontends.processes.frames import (
    Answer,
    Answers,
    Ask,
    Asks,
    Followed,
    GrpcManagement,
    HttpManagement,
    Known,
    Managed,
    ModelChange,
    Report,
    ToEngine,
    ToFrontend,
    failure_of,
)
from naiad.frontends.processes.regions import CopiedRegions
from naiad.frontends.processes.tensors import Receiver, Sender
from naiad.instances.channel import LoopChannel
from naiad.messages import InferRequest, InferResponse, RequestTrace, ResponseSink, Result
from naiad.models.table import missing
from naiad.protocol.served import ServedModel
from naiad.telemetry.log import Level, Log
from naiad.telemetry.trace import Header, TraceSettings, Values

_LOGGER: Final = logging.getLogger(__name__)
_decoder: Final[msgspec.msgpack.Decoder[ToFrontend]] = msgspec.msgpack.Decoder(ToFrontend)
#: What a client may say of a trace that its request is a part of (W3C).
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


_LOST: Final = "the server has ended"


class _KnownVersions:
    """What is known of a model."""

    def __init__(self, change: ModelChange) -> None:
        self.known = change.known
        self.stated = frozenset(change.stated)
        self.models = {
            version.version: ServedModel(ModelConfig(Proto.FromString(version.config)), version.version, version.labels)
            for version in change.versions
        }
        self.latest = self.models[max(self.models)] if self.models else None


class EngineConnection:
    """The connection to the engine's process. `start`, `refuse` and `stop` are what it says; `stop` is its end, too."""

    def __init__(self, sock: socket.socket, requests_fd: int, responses_fd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(requests_fd)
        self._receiver = Receiver(responses_fd)
        self.start: asyncio.Future[frames.Start] = self._loop.create_future()
        self.refuse = asyncio.Event()
        self.stop = asyncio.Event()
        self.is_lost = False
        self.regions = CopiedRegions(self.tell)
        self.traces = _FollowingTraces()
        self._models: dict[str, _KnownVersions] = {}
        self._asks: list[Ask] = []
        self._cancelled: list[int] = []
        self._is_flushing = False
        self._calls: dict[int, ResponseSink] = {}
        self._last_call = 0
        self._managed: dict[int, asyncio.Future[Managed]] = {}
        self._last_number = 0
        self._channel = LoopChannel(self._loop, sock, _decoder, self._on_frame, self._on_end)
        self.tell(frames.Hello())

    def tell(self, frame: ToEngine) -> None:
        frames.send(self._channel, frame, ())

    # ---------------------------------------------------------------- what there is

    def model(self, name: str, version: int) -> ServedModel:
        """As `ModelTable.lookup`."""
        versions = self._models.get(name)
        if versions is None:
            raise missing(name, version, False, ())
        model = versions.latest if version < 0 else versions.models.get(version)
        if model is None:
            raise missing(name, version, versions.known, versions.stated)
        return model

    def _on_model(self, change: ModelChange) -> None:
        if change.known or change.versions:
            self._models[change.name] = _KnownVersions(change)
        else:
            self._models.pop(change.name, None)

    def _on_region(self, frame: frames.RegionAdded, fds: list[int]) -> None:
        try:
            opening = self.regions.add(frame, fds)
        except NaiadError as error:
            self.tell(Known(frame.change, failure_of(error)))
        else:
            self._tell_known(frame.change, opening)

    def _tell_known(self, change: int, after: "asyncio.Future[None] | None") -> None:
        """That all is done for a change, when `after` is."""
        if after is None:
            self.tell(Known(change, None))
        else:
            after.add_done_callback(lambda done: self._tell_done(change, done))

    def _tell_done(self, change: int, done: "asyncio.Future[None]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, NaiadError):
            error = Internal(f"unexpected error: {error}")
        self.tell(Known(change, None if error is None else failure_of(error)))

    # ---------------------------------------------------------------- frames

    def _on_frame(self, frame: ToFrontend, fds: list[int]) -> None:
        try:
            if type(frame) is Answers:
                self._on_answers(frame, fds)
            else:
                self._on_other(frame, fds)
        finally:
            while fds:
                os.close(fds.pop())

    def _on_other(self, frame: ToFrontend, fds: list[int]) -> None:
        match frame:
            case frames.Transcoded():
                self._on_frame(frames.restored(frame, ToFrontend), fds)
            case Managed():
                waiting = self._managed.pop(frame.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
            case ModelChange():
                self._on_model(frame)
                self.tell(Known(frame.change, None))
            case frames.RegionAdded():
                self._on_region(frame, fds)
            case frames.RegionsRemoved():
                self._tell_known(frame.change, self.regions.drop(frame.names))
            case frames.Tracing():
                self.traces.active = frame.active
                self.tell(Known(frame.change, None))
            case frames.Start():
                self.regions.allow = frame.options.allow_client_shm
                self.start.set_result(frame)
            case frames.Refuse():
                self.refuse.set()
            case frames.Stop():
                self.stop.set()

    def _on_end(self, reason: str | None) -> None:
        """The engine is no more: all that waits for it fails."""
        self.is_lost = True
        error = Unavailable(_LOST)
        for waiting in self._managed.values():
            if not waiting.done():
                waiting.set_exception(error)
        calls, self._calls = self._calls, {}
        for sink in calls.values():
            self._deliver(sink, error, True)
        if not self.start.done():
            self.start.set_exception(error)
            self.start.exception()  # nobody may be waiting for it
        self.stop.set()

    # ---------------------------------------------------------------- inference

    def infer(self, request: InferRequest, sink: ResponseSink, model: ServedModel, over_http: bool) -> "_Call":
        if self.is_lost:
            raise Unavailable(_LOST)
        sequence = request.sequence
        followed = request.trace
        number = self._last_call = self._last_call + 1
        ask = Ask(
            number,
            over_http,
            model.decoupled,
            request.model_name,
            request.model_version,
            self._sender.put_all(request.inputs, keep=False),
            request.id,
            request.outputs,
            request.parameters,
            None if sequence is None else (sequence.correlation_id, sequence.start, sequence.end),
            request.priority,
            request.timeout_us,
            None if followed is None else cast(Any, followed).times,
        )
        self._asks.append(ask)
        self._calls[number] = sink
        if not self._is_flushing:
            self._flush_soon()
        return _Call(self, number)

    def cancel(self, number: int) -> None:
        """The client of a request has left. Its last result will come all the same."""
        if number in self._calls:
            self._cancelled.append(number)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if not (self._asks or self._cancelled or self._receiver.freed):
            return
        frame = Asks(self._asks, self._cancelled, self._receiver.take_freed())
        self._asks = []
        self._cancelled = []
        sender = self._sender
        frames.send(self._channel, frame, sender.fds)
        if sender.fds:
            sender.sent()

    def _on_answers(self, frame: Answers, fds: list[int]) -> None:
        if frame.freed:
            self._sender.freed(frame.freed)
        calls = self._calls
        for answer in frame.answers:
            sink = calls.pop(answer.call) if answer.final else calls[answer.call]
            self._on_answer(answer, sink, fds)
        if self._receiver.freed:
            self._flush_soon()

    def _on_answer(self, answer: Answer, sink: ResponseSink, fds: list[int]) -> None:
        result: Result | None = None
        if answer.outputs is not None:
            outputs = self._receiver.tensors(answer.outputs, fds)
            result = InferResponse(answer.model_name, answer.model_version, answer.id, outputs, answer.parameters)
        elif answer.failure is not None:
            result = answer.failure.error()
            result.refused = answer.refused
        if answer.traced:
            start_ns = time.monotonic_ns()
            self._deliver(sink, result, answer.final)
            self.tell(frames.Sent(answer.call, start_ns, time.monotonic_ns()))
        else:
            self._deliver(sink, result, answer.final)

    def _deliver(self, sink: ResponseSink, result: Result | None, final: bool) -> None:
        try:
            sink.send(result, final)
        except Exception:
            _LOGGER.exception("a response cannot be sent")

    # ---------------------------------------------------------------- everything else

    async def manage_http(self, exchange: Exchange, name: str, arguments: list[str | int]) -> None:
        """Has the engine's process answer an exchange: by the handler `name` of its `Management`."""
        frame = HttpManagement(0, name, arguments, exchange.method, b"", exchange.client)
        answer = await self._manage(frame, exchange.body)
        exchange.response_bytes(answer.status, answer.headers, answer.body)

    async def manage_grpc(self, path: str, data: bytes, metadata: Metadata, peer: str) -> bytes:
        """Has the engine's process answer an RPC."""
        pairs = [(key, value if isinstance(value, bytes) else value.encode()) for key, value in metadata]
        frame = GrpcManagement(0, path, b"", pairs, peer)
        return (await self._manage(frame, data)).body

    async def _manage(self, frame: HttpManagement | GrpcManagement, body: Buffer) -> Managed:
        """Raises the error that is the answer."""
        if self.is_lost:
            raise Unavailable(_LOST)
        sender = self._sender
        if sender.fds:
            # Descriptors go with the frame that they are for.
            self._flush()
        frame.body = sender.put(body)
        self._last_number += 1
        frame.number = self._last_number
        waiting = self._managed[frame.number] = self._loop.create_future()
        frames.send(self._channel, frame, sender.fds)
        sender.sent()
        try:
            answer: Managed = await waiting
        except asyncio.CancelledError:
            self.tell(frames.Withdraw(frame.number))
            raise
        finally:
            self._managed.pop(frame.number, None)
        if answer.failure is not None:
            raise answer.failure.error()
        return answer


class _Call:
    """A request under way."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: EngineConnection, number: int) -> None:
        self._connection = connection
        self._number = number

    def cancel(self) -> None:
        self._connection.cancel(self._number)


class EngineClient:
    """The engine, for the front end of one protocol: what it needs for inference."""

    def __init__(self, connection: EngineConnection, over_http: bool) -> None:
        self._connection = connection
        self._over_http = over_http

    def model(self, name: str, version: int = -1) -> ServedModel:
        return self._connection.model(name, version)

    def infer(self, request: InferRequest, sink: ResponseSink, model: ServedModel | None = None) -> _Call:
        if model is None:
            model = self.model(request.model_name, request.model_version)
        return self._connection.infer(request, sink, model, self._over_http)


class _Times:
    """In place of a trace, on a request that the engine's process may trace."""

    def __init__(self, times: Followed) -> None:
        self.times = times


class _FollowingTraces(TraceSettings):
    """What front ends ask of trace settings: takes down times, for the engine's process to sample and to keep."""

    def __init__(self) -> None:
        super().__init__(Values(), "", Log())

    def follow(
        self, request: InferRequest, protocol: str, start_ns: int, header: Header, end_ns: int = 0
    ) -> InferRequest:
        headers = {name: value for name in _TRACE_HEADERS if (value := header(name)) is not None}
        times = _Times(Followed(start_ns, time.monotonic_ns(), headers))
        return request.followed(cast(RequestTrace, times))


class ReportingLog(Log):
    """A log whose lines the engine's process writes. Called from any thread."""

    def __init__(self, connection: EngineConnection) -> None:
        super().__init__()
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    def write(self, level: Level, message: str, file: str, line: int) -> None:
        report = Report(level, message, file, line)
        with contextlib.suppress(RuntimeError):  # at the very end there is no loop any more
            self._loop.call_soon_threadsafe(self._connection.tell, report)

    def info(self, message: str) -> None:
        """What every front end has to say the engine's process says once."""


def management(connection: EngineConnection) -> Management:
    """The handlers of all that is not inference, answered by those of the engine's process."""
    handlers: dict[str, Any] = {
        name: _handler(connection, name)
        for name, handler in vars(Management).items()
        if inspect.iscoroutinefunction(handler)
    }
    return cast(Management, SimpleNamespace(**handlers))


def _handler(connection: EngineConnection, name: str) -> Any:
    async def handle(exchange: Exchange, *arguments: str | int) -> None:
        await connection.manage_http(exchange, name, list(arguments))

    handle.__name__ = name
    return handle


class ForwardedMethod(Method):
    """An RPC that is not inference, answered by the engine's process, which also knows who may call it."""

    __slots__ = ("_connection", "_path")

    def __init__(self, connection: EngineConnection, path: str) -> None:
        self._connection = connection
        self._path = path

    async def __call__(self, data: bytes, metadata: Metadata, peer: str) -> bytes:
        return await self._connection.manage_grpc(self._path, data, metadata, peer)
