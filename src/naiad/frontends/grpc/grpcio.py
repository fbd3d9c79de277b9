"""The servicer behind `grpc.aio`: all of it, or what the native server leaves over. Lives on the event loop."""

import asyncio
import importlib.util
import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from naiad.datatypes import TakesLong
from naiad.errors import InvalidArgument, NaiadError
from naiad.frontends.grpc.errors import status
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.servicer import HEALTH_SERVICE, SERVICE, Method, Servicer
from naiad.frontends.grpc.stream import Stream
from naiad.messages import InferResponse, Result
from naiad.protocol.proto_codec import Reply, encode
from naiad.protocol.served import ServedModel

_LOGGER = logging.getLogger(__name__)

Context = Any


class GrpcioServer:
    """A `grpc.aio` server. `target` is where it listens: `host:port` or `unix:path`.

    With `unary` false it serves streams, reflection and unknown methods only.
    """

    def __init__(self, servicer: Servicer, options: GrpcOptions, target: str, unary: bool = True) -> None:
        self._servicer = servicer
        self._options = options
        self._target = target
        self._unary = unary
        self._server: aio.Server | None = None
        self._streams: set[Stream] = set()
        self._tasks: set[asyncio.Future[bytes]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listens. Raises OSError where the address cannot be bound, InvalidArgument for unusable TLS files."""
        # For the whole server: `set_compression` of a call has no effect on unary calls of grpc.aio.
        compression = None if self._options.compression_level == "none" else grpc.Compression.Gzip
        server = aio.server(options=_channel_arguments(self._options), compression=compression)
        handlers: dict[str, dict[str, Any]] = {SERVICE: {}, HEALTH_SERVICE: {}}
        handlers[SERVICE]["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        if self._unary:
            handlers[SERVICE]["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
            for path, method in self._servicer.methods.items():
                _, service, name = path.split("/")
                handlers[service][name] = grpc.unary_unary_rpc_method_handler(self._serving(method))
        if self._options.reflection:
            _reflect(server)
        services: list[Any] = [
            grpc.method_handlers_generic_handler(service, methods) for service, methods in handlers.items()
        ]
        unknown: Any = _UnknownMethods()
        server.add_generic_rpc_handlers((*services, unknown))
        try:
            if self._unary and self._options.is_secure:
                self.port = server.add_secure_port(self._target, _credentials(self._options))
            else:
                self.port = server.add_insecure_port(self._target)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen at {self._target}: {error}") from error
        await server.start()
        self._server = server

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` for those that run, then cancels them."""
        if self._server is not None:
            stopped = asyncio.ensure_future(self._server.stop(grace_s))
            for stream in list(self._streams):
                stream.stop()
            await stopped
            for task in list(self._tasks):
                task.cancel()

    async def _infer(self, data: bytes, context: Context) -> bytes:
        sink = _UnaryCall(asyncio.get_running_loop().create_future())
        try:
            call = self._servicer.infer(data, context.invocation_metadata() or (), context.peer(), sink)
        except NaiadError as error:
            await context.abort(*status(error))
        except Exception as error:
            await _abort_unexpected(context, error)
        try:
            answer = await sink.answer
        except asyncio.CancelledError:
            # The client left, or its deadline passed.
            call.cancel()
            raise
        try:
            if isinstance(answer, InferResponse):
                answer = await sink.encode(answer)
            elif isinstance(answer, NaiadError):
                raise answer
        except NaiadError as error:
            await context.abort(*status(error))
        except Exception as error:
            await _abort_unexpected(context, error)
        assert isinstance(answer, bytes), "unreachable: abort raises"
        return answer

    def _serving(self, method: Method) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def serve(data: bytes, context: Context) -> bytes:
            task = asyncio.ensure_future(method(data, context.invocation_metadata() or (), context.peer()))
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            try:
                # What is not inference goes on when its client leaves: half a load is of use to nobody.
                return await asyncio.shield(task)
            except NaiadError as error:
                await context.abort(*status(error))
            except Exception as error:
                await _abort_unexpected(context, error)
            raise AssertionError("unreachable: abort raises")

        return serve

    def _forget(self, task: asyncio.Future[bytes]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have left

    async def _stream(self, requests: AsyncIterable[bytes], context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        try:
            self._servicer.admit_inference(metadata)
        except NaiadError as error:
            await context.abort(*status(error))
        stream = Stream(self._servicer, metadata, context.peer())
        self._streams.add(stream)
        try:
            await stream.run(requests, context)
        finally:
            self._streams.discard(stream)


class _UnaryCall:
    """The sink of a unary inference: its one result, encoded or, if that takes long, to be encoded; or the error."""

    __slots__ = ("_model", "_reply", "answer")

    _model: ServedModel
    _reply: Reply

    def __init__(self, answer: asyncio.Future[bytes | InferResponse | NaiadError]) -> None:
        self.answer = answer

    def expect(self, model: ServedModel, reply: Reply) -> None:
        self._model = model
        self._reply = reply

    def send(self, result: Result | None, final: bool) -> None:
        if self.answer.done():
            return
        try:
            assert result is not None, "a call of an ordinary model ended without a result; this is a bug"
            answer: bytes | InferResponse | NaiadError
            if isinstance(result, InferResponse):
                answer = encode(result, self._reply, self._model.config, self._model.labels)
            else:
                answer = result
        except NaiadError as error:
            answer = error
        except TakesLong:
            assert isinstance(result, InferResponse)
            answer = result.owned()
        self.answer.set_result(answer)

    async def encode(self, response: InferResponse) -> bytes:
        """Has a thread do it. Raises like `proto_codec.encode`."""
        model = self._model
        return await asyncio.to_thread(encode, response, self._reply, model.config, model.labels, b"", True)


async def _abort_unexpected(context: Context, error: Exception) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    _LOGGER.error("a gRPC call failed unexpectedly", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"unexpected error: {error}")


class _UnknownMethods:
    """Answers calls of methods that nobody serves as Triton does: UNIMPLEMENTED without words."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(_unimplemented)


async def _unimplemented(requests: AsyncIterable[bytes], context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")


def _reflect(server: aio.Server) -> None:
    if importlib.util.find_spec("grpc_reflection") is None:
        raise InvalidArgument("gRPC reflection needs the package grpcio-reflection: pip install 'naiad[reflection]'")
    reflection = importlib.import_module("grpc_reflection.v1alpha.reflection")
    reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)


def _channel_arguments(options: GrpcOptions) -> list[tuple[str, int]]:
    arguments = {
        "grpc.max_receive_message_length": -1,
        "grpc.max_send_message_length": -1,
        "grpc.so_reuseport": int(options.reuse_port),
        "grpc.keepalive_time_ms": options.keepalive_time_ms,
        "grpc.keepalive_timeout_ms": options.keepalive_timeout_ms,
        "grpc.keepalive_permit_without_calls": int(options.keepalive_permit_without_calls),
        "grpc.http2.max_pings_without_data": options.http2_max_pings_without_data,
        "grpc.http2.min_recv_ping_interval_without_data_ms": options.http2_min_recv_ping_interval_ms,
        "grpc.http2.max_ping_strikes": options.http2_max_ping_strikes,
        "grpc.max_connection_age_ms": options.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": options.max_connection_age_grace_ms,
    }
    return [(name, value) for name, value in arguments.items() if value is not None]


def _credentials(options: GrpcOptions) -> grpc.ServerCredentials:
    try:
        key = Path(options.server_key).read_bytes()
        certificate = Path(options.server_cert).read_bytes()
        root = Path(options.root_cert).read_bytes() if options.root_cert else None
    except OSError as error:
        raise InvalidArgument(f"gRPC cannot read a file for TLS: {error}") from error
    return grpc.ssl_server_credentials([(key, certificate)], root, options.use_ssl_mutual)
