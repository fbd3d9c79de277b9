"""What each RPC does, whatever library serves it: access, decoding, the engine's methods, the answers' messages.

Unary inference is begun here and answered by a sink; everything else is a coroutine from message to message. Errors
are `NaiadError`s. Lives on the event loop.
"""

import logging
import os
import re
import time
from asyncio import Task, ensure_future, get_running_loop, sleep, to_thread, wait
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from tritonclient.grpc import service_pb2 as pb

from naiad.config.model_config import ModelConfig
from naiad.datatypes import TakesLong
from naiad.errors import Cancelled, Internal, InvalidArgument, NaiadError, NotFound, Unavailable, Unsupported
from naiad.frontends.grpc import documents
from naiad.messages import InferRequest, ParameterValue, ResponseSink
from naiad.metadata import IndexEntry, ModelMetadata, ServerMetadata
from naiad.options import Restriction, forward_pattern
from naiad.protocol.proto_codec import Reply, decode, parse_request, parse_version, recall, remember, unreadable
from naiad.protocol.regions import CopyingCall, Regions, is_local_peer
from naiad.protocol.served import ServedModel
from naiad.statistics import ModelStatistics
from naiad.telemetry.log import FORMATS
from naiad.telemetry.trace import TraceSettings, off

_LOGGER: Final = logging.getLogger(__name__)

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"

Message = Any
#: Pairs of key and value, in the order received; values are bytes for keys ending in -bin.
Metadata = Sequence[tuple[str, str | bytes]]


class Call(Protocol):
    """A running inference."""

    def cancel(self) -> None: ...


class Engine(Protocol):
    """The part of the engine that the front end uses."""

    def is_live(self) -> bool: ...
    async def is_ready(self) -> bool: ...
    def model(self, name: str, version: int = -1) -> ServedModel: ...
    async def model_ready(self, name: str, version: int = -1) -> bool: ...
    def infer(self, request: InferRequest, sink: ResponseSink, model: Any = None) -> Call: ...
    def metadata(self) -> ServerMetadata: ...
    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata: ...
    def model_config(self, name: str, version: int = -1) -> ModelConfig: ...
    def statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]: ...
    async def index(self, ready: bool = False) -> list[IndexEntry]: ...
    async def load(self, name: str, parameters: dict[str, str | bytes]) -> None: ...
    async def unload(self, name: str, unload_dependents: bool = False) -> None: ...


class Settings(Protocol):
    """Settings that clients read and change: those of the log. `model` None or "" is all models.

    In `update` None clears a value; unknown keys are ignored. Both return all settings.
    """

    def get(self, model: str | None = None) -> Mapping[str, Any]: ...
    def update(self, model: str | None, values: Mapping[str, Any]) -> Mapping[str, Any]: ...


class InferenceSink(ResponseSink, Protocol):
    """A sink that is told how to answer before its first response comes."""

    def expect(self, model: ServedModel, reply: Reply) -> None: ...


class Servicer:
    """The RPCs of the two services. `methods` has all but the two of inference, by path.

    `forward` are the metadata keys that become request parameters, see `forward_pattern`; "" is none.
    """

    def __init__(
        self,
        engine: Engine,
        regions: Regions,
        trace_settings: TraceSettings | None = None,
        log_settings: Settings | None = None,
        restrictions: Iterable[Restriction] = (),
        forward: str = "",
    ) -> None:
        self._engine = engine
        # Each request would look them up and bind them.
        self._engine_model = engine.model
        self._engine_infer = engine.infer
        self._regions = regions
        self._trace_settings = trace_settings
        self._traces = off() if trace_settings is None else trace_settings
        self._log_settings = log_settings
        self._forward = forward_pattern(forward) if forward else None
        self._guards = {
            category: (f"triton-grpc-protocol-{restriction.key}".lower(), restriction.value)
            for restriction in restrictions
            for category in restriction.categories
        }
        self._inference_guard = self._guards.get("inference")
        delay = os.environ.get("TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC", "")
        #: A test hook of Triton, which tests of clients' timeouts set: answers that are no inference come so late.
        self._delay_s = int(delay) if delay.isdigit() else 0
        self.methods = {
            f"/{service}/{name}": Method(self, category, request_type, act)
            for service, name, category, request_type, act in self._table()
        }

    def admit_inference(self, metadata: Metadata) -> None:
        """Raises Unavailable where inference is restricted and the metadata lack the key."""
        if self._inference_guard is not None:
            _check(self._inference_guard, metadata)

    def infer(self, data: bytes | memoryview, metadata: Metadata, peer: str, sink: InferenceSink) -> Call:
        """Begins the unary inference asked for by the bytes of a ModelInferRequest. What is wrong with one that takes long
        to read goes to the sink, as an error that is `refused`."""
        if self._inference_guard is not None:
            _check(self._inference_guard, metadata)
        start_ns = time.monotonic_ns() if self._traces.active else 0
        if (known := recall(data)) is not None:
            request, reply = known
            model = self._engine_model(request.model_name, request.model_version)
            _check_unary(model)
        else:
            try:
                message, raw = parse_request(data)
            except TakesLong:
                return LargeCall(self, data, metadata, peer, sink, start_ns, self._unary_model)
            model, version = self.model(message)
            _check_unary(model)
            request, reply = decode(message, raw, model.config, self._regions, version, peer)
            remember(data, request, reply)
        if self._forward is not None:
            request = self._forwarded(request, metadata, self._forward)
        if start_ns:
            request = self._traces.follow(request, "GRPC", start_ns, partial(_header, metadata))
        sink.expect(model, reply)
        infer = self._engine_infer
        return infer(request, sink, model) if reply.use is None else reply.use.during(infer, request, sink, model)

    def model(self, message: Message) -> tuple[ServedModel, int]:
        """The model that a ModelInferRequest is for, and the version it asks for."""
        version = parse_version(message.model_version)
        return self._engine_model(message.model_name, version), version

    def _unary_model(self, message: Message) -> tuple[ServedModel, int]:
        model, version = self.model(message)
        _check_unary(model)
        return model, version

    def infer_in_stream(
        self,
        message: Message,
        raw: Sequence[Any],
        model: ServedModel,
        version: int,
        metadata: Metadata,
        peer: str,
        sink: InferenceSink,
    ) -> Call:
        """Begins one inference of a stream, whose sink knows how to answer a model of any kind."""
        start_ns = time.monotonic_ns() if self._traces.active else 0
        request, reply = decode(message, raw, model.config, self._regions, version, peer)
        return self._submit(request, reply, model, metadata, sink, start_ns)

    def infer_large_in_stream(
        self,
        data: bytes | memoryview,
        metadata: Metadata,
        peer: str,
        sink: InferenceSink,
        find_model: "FindModel",
    ) -> "LargeCall":
        """The same for a message that takes long to read."""
        start_ns = time.monotonic_ns() if self._traces.active else 0
        return LargeCall(self, data, metadata, peer, sink, start_ns, find_model)

    async def infer_large(self, large: "LargeCall", data: bytes | memoryview, peer: str, start_ns: int) -> Call:
        """Reads the message of a `large` call in a thread and begins its inference."""
        message, raw = await to_thread(parse_request, data, True)
        model, version = large.find_model(message)
        # Regions are only looked up and read in the thread, which no change on the loop can tear.
        request, reply = await to_thread(decode, message, raw, model.config, self._regions, version, peer)
        if large.is_cancelled:
            raise Cancelled("")
        decoupled = model.decoupled
        # It may be another one by now.
        model, _ = self.model(message)
        if model.decoupled != decoupled:
            raise Unavailable(f"model '{request.model_name}' has just been replaced; send the request again")
        return self._submit(request, reply, model, large.metadata, large.sink, start_ns)

    def _submit(
        self,
        request: InferRequest,
        reply: Reply,
        model: ServedModel,
        metadata: Metadata,
        sink: InferenceSink,
        start_ns: int,
    ) -> Call:
        if self._forward is not None:
            request = self._forwarded(request, metadata, self._forward)
        if start_ns:
            request = self._traces.follow(request, "GRPC", start_ns, partial(_header, metadata))
        sink.expect(model, reply)
        infer = self._engine_infer
        return infer(request, sink, model) if reply.use is None else reply.use.during(infer, request, sink, model)

    def _forwarded(self, request: InferRequest, metadata: Metadata, pattern: re.Pattern[str]) -> InferRequest:
        parameters: dict[str, ParameterValue] = {
            key: value if isinstance(value, str) else value.decode(errors="replace")
            for key, value in metadata
            if pattern.search(key)
        }
        if not parameters:
            return request
        return InferRequest(
            request.model_name,
            request.inputs,
            request.model_version,
            request.id,
            request.outputs,
            {**request.parameters, **parameters},
            request.sequence,
            request.priority,
            request.timeout_us,
        )

    def _table(self) -> list[tuple[str, str, str, Any, "Act"]]:
        return [
            (SERVICE, "ServerLive", "health", pb.ServerLiveRequest, self._server_live),
            (SERVICE, "ServerReady", "health", pb.ServerReadyRequest, self._server_ready),
            (SERVICE, "ModelReady", "health", pb.ModelReadyRequest, self._model_ready),
            (HEALTH_SERVICE, "Check", "health", _HEALTH_CHECK_REQUEST, self._health_check),
            (SERVICE, "ServerMetadata", "metadata", pb.ServerMetadataRequest, self._server_metadata),
            (SERVICE, "ModelMetadata", "metadata", pb.ModelMetadataRequest, self._model_metadata),
            (SERVICE, "ModelConfig", "model-config", pb.ModelConfigRequest, self._model_config),
            (SERVICE, "ModelStatistics", "statistics", pb.ModelStatisticsRequest, self._model_statistics),
            (SERVICE, "RepositoryIndex", "model-repository", pb.RepositoryIndexRequest, self._index),
            (SERVICE, "RepositoryModelLoad", "model-repository", pb.RepositoryModelLoadRequest, self._load),
            (SERVICE, "RepositoryModelUnload", "model-repository", pb.RepositoryModelUnloadRequest, self._unload),
            (
                SERVICE,
                "SystemSharedMemoryStatus",
                "shared-memory",
                pb.SystemSharedMemoryStatusRequest,
                self._system_status,
            ),
            (
                SERVICE,
                "SystemSharedMemoryRegister",
                "shared-memory",
                pb.SystemSharedMemoryRegisterRequest,
                self._system_register,
            ),
            (
                SERVICE,
                "SystemSharedMemoryUnregister",
                "shared-memory",
                pb.SystemSharedMemoryUnregisterRequest,
                self._system_unregister,
            ),
            (SERVICE, "CudaSharedMemoryStatus", "shared-memory", pb.CudaSharedMemoryStatusRequest, self._cuda_status),
            (
                SERVICE,
                "CudaSharedMemoryRegister",
                "shared-memory",
                pb.CudaSharedMemoryRegisterRequest,
                self._cuda_register,
            ),
            (
                SERVICE,
                "CudaSharedMemoryUnregister",
                "shared-memory",
                pb.CudaSharedMemoryUnregisterRequest,
                self._cuda_unregister,
            ),
            (SERVICE, "TraceSetting", "trace", pb.TraceSettingRequest, self._trace_setting),
            (SERVICE, "LogSettings", "logging", pb.LogSettingsRequest, self._log_setting),
        ]

    # ---------------------------------------------------------------- health and metadata

    async def _server_live(self, request: Message, peer: str) -> Message:
        return pb.ServerLiveResponse(live=self._engine.is_live())

    async def _server_ready(self, request: Message, peer: str) -> Message:
        return pb.ServerReadyResponse(ready=await self._engine.is_ready())

    async def _model_ready(self, request: Message, peer: str) -> Message:
        version = parse_version(request.version)
        try:
            ready = await self._engine.model_ready(request.name, version)
        except NotFound:
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def _health_check(self, request: Message, peer: str) -> Message:
        return _SERVING if await self._engine.is_ready() else _NOT_SERVING

    async def _server_metadata(self, request: Message, peer: str) -> Message:
        return documents.server_metadata(self._engine.metadata())

    async def _model_metadata(self, request: Message, peer: str) -> Message:
        return documents.model_metadata(self._engine.model_metadata(request.name, parse_version(request.version)))

    async def _model_config(self, request: Message, peer: str) -> Message:
        config = self._engine.model_config(request.name, parse_version(request.version))
        return pb.ModelConfigResponse(config=config.proto)

    async def _model_statistics(self, request: Message, peer: str) -> Message:
        return documents.statistics(self._engine.statistics(request.name, parse_version(request.version)))

    # ---------------------------------------------------------------- repository

    async def _index(self, request: Message, peer: str) -> Message:
        _one_repository(request)
        return documents.index(await self._engine.index(request.ready))

    async def _load(self, request: Message, peer: str) -> Message:
        _one_repository(request)
        parameters: dict[str, str | bytes] = {}
        for key, value in request.parameters.items():
            if key == "config":
                _expect(f"load parameter '{key}'", value, "string_param")
                parameters[key] = value.string_param
            elif key.startswith("file:"):
                _expect(f"load parameter '{key}'", value, "bytes_param")
                parameters[key] = value.bytes_param
            else:
                raise InvalidArgument(f"unrecognized load parameter '{key}'.")
        await self._engine.load(request.model_name, parameters)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: Message, peer: str) -> Message:
        _one_repository(request)
        unload_dependents = False
        for key, value in request.parameters.items():
            if key == "unload_dependents":
                _expect(f"'{key}' parameter", value, "bool_param")
                unload_dependents = value.bool_param
        await self._engine.unload(request.model_name, unload_dependents)
        return pb.RepositoryModelUnloadResponse()

    # ---------------------------------------------------------------- shared memory

    async def _system_status(self, request: Message, peer: str) -> Message:
        return documents.system_regions(self._regions.status_system(request.name))

    async def _system_register(self, request: Message, peer: str) -> Message:
        self._regions.register_system(
            request.name, request.key, request.offset, request.byte_size, local=is_local_peer(peer)
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def _system_unregister(self, request: Message, peer: str) -> Message:
        self._regions.unregister_system(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _cuda_status(self, request: Message, peer: str) -> Message:
        return documents.cuda_regions(self._regions.status_cuda(request.name))

    async def _cuda_register(self, request: Message, peer: str) -> Message:
        await self._regions.register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size, local=is_local_peer(peer)
        )
        return pb.CudaSharedMemoryRegisterResponse()

    async def _cuda_unregister(self, request: Message, peer: str) -> Message:
        await self._regions.unregister_cuda(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    # ---------------------------------------------------------------- trace and log

    async def _trace_setting(self, request: Message, peer: str) -> Message:
        if self._trace_settings is None:
            raise Unsupported("the server does not support trace")
        model = request.model_name
        if model:
            try:
                self._engine.model(model)
            except (NotFound, Unavailable) as error:
                raise InvalidArgument(f"Request for unknown model : {model}") from error
        values: dict[str, str | list[str] | None] = {}
        for key, setting in request.settings.items():
            given = list(setting.value)
            if not given:
                values[key] = None
            elif key == "trace_level":
                values[key] = given
            elif len(given) > 1 and key in _TRACE_NUMBERS:
                raise InvalidArgument(f"expect only 1 value for '{key}'")
            else:
                values[key] = given[0]
        try:
            settings = self._trace_settings.update(model, values) if values else self._trace_settings.get(model)
        except InvalidArgument as error:
            # Triton's text over HTTP has no space there.
            raise InvalidArgument(error.message.replace("value >= -1, got:", "value >= -1, got: ")) from None
        return documents.trace_settings(settings)

    async def _log_setting(self, request: Message, peer: str) -> Message:
        if self._log_settings is None:
            raise Unsupported("the server does not support log settings")
        values: dict[str, bool | int | str] = {}
        for key, setting in request.settings.items():
            if key == "log_file":
                raise Unsupported("log file location can not be updated through network protocol")
            expected = _LOG_SETTINGS.get(key)
            if expected is None:
                continue
            field, kind = expected
            if setting.WhichOneof("parameter_choice") != field:
                raise InvalidArgument(f"expect {kind} for '{key}'")
            if key == "log_format" and setting.string_param not in FORMATS:
                raise InvalidArgument(f"invalid argument for log_format, got: {setting.string_param}")
            values[key] = getattr(setting, field)
        settings = self._log_settings.update(None, values) if values else self._log_settings.get(None)
        return documents.log_settings(settings)


FindModel = Callable[[Message], tuple[ServedModel, int]]


class LargeCall:
    """An inference whose message takes long to read. What is refused goes to the sink, as an error that is `refused`.

    `find_model` does that, as `Servicer.model`, when the message has been read.
    """

    __slots__ = ("_call", "begun", "find_model", "is_cancelled", "metadata", "sink")

    def __init__(
        self,
        servicer: Servicer,
        data: bytes | memoryview,
        metadata: Metadata,
        peer: str,
        sink: InferenceSink,
        start_ns: int,
        find_model: "FindModel",
    ) -> None:
        self.metadata = metadata
        self.sink = sink
        self.find_model = find_model
        self.is_cancelled = False
        self._call: Call | None = None
        #: Done when the inference has begun, or has been refused.
        self.begun: Task[None] = get_running_loop().create_task(self._begin(servicer, data, peer, start_ns))

    async def _begin(self, servicer: Servicer, data: bytes | memoryview, peer: str, start_ns: int) -> None:
        try:
            self._call = call = await servicer.infer_large(self, data, peer, start_ns)
            if type(call) is CopyingCall:
                await wait((call.begun,))
        except NaiadError as error:
            error.refused = True
            self.sink.send(error, True)
        except Exception as error:
            _LOGGER.exception("a large gRPC request failed")
            self.sink.send(Internal(f"unexpected error: {error}"), True)

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._call is not None:
            self._call.cancel()


Act = Callable[[Message, str], Awaitable[Message]]


class Method:
    """One RPC from bytes to bytes."""

    __slots__ = ("_act", "_delay_s", "_guard", "_request_type")

    def __init__(self, servicer: Servicer, category: str, request_type: Any, act: Act) -> None:
        self._guard = servicer._guards.get(category)
        self._delay_s = servicer._delay_s
        self._request_type = request_type
        self._act = act

    async def __call__(self, data: bytes, metadata: Metadata, peer: str) -> bytes:
        if self._guard is not None:
            _check(self._guard, metadata)
        try:
            request = self._request_type.FromString(data)
        except Exception as error:  # protobuf's DecodeError, whose class differs between its implementations
            raise unreadable() from error
        if self._delay_s:
            # Not in a `finally`: compiled, the error of one call came out of the next.
            answered = ensure_future(self._act(request, peer))
            await wait([answered])
            await sleep(self._delay_s)
            response = await answered
        else:
            response = await self._act(request, peer)
        return response if isinstance(response, bytes) else bytes(response.SerializeToString())


#: On the wire the same as grpc.health.v1.HealthCheckRequest: a string, which is not looked at.
_HEALTH_CHECK_REQUEST: Final = pb.SystemSharedMemoryStatusRequest
#: grpc.health.v1.HealthCheckResponse with the status SERVING and NOT_SERVING.
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"

_TRACE_NUMBERS: Final = frozenset(("trace_rate", "trace_count", "log_frequency"))
#: Setting -> (the field its value must be in, the name of its type in error texts).
_LOG_SETTINGS: Final = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


def _check_unary(model: ServedModel) -> None:
    if model.decoupled:
        raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")


def _check(guard: tuple[str, str], metadata: Metadata) -> None:
    for pair in metadata:
        if pair[0] == guard[0]:
            if pair[1] == guard[1]:
                return
            break
    raise Unavailable(f"This protocol is restricted, expecting header '{guard[0]}'")


def _header(metadata: Metadata, key: str) -> str | None:
    return next((value for name, value in metadata if name == key and isinstance(value, str)), None)


def _one_repository(request: Message) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def _expect(what: str, value: Message, field: str) -> None:
    if value.WhichOneof("parameter_choice") != field:
        raise InvalidArgument(f"invalid value type for {what}, expected {field}.")
