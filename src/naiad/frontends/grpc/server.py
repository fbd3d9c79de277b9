"""The gRPC front end: entered it listens, left it has stopped. Lives on the event loop."""

import ssl
from collections.abc import Callable
from functools import partial
from random import uniform
from typing import Final, Self

from naiad.errors import NaiadError, Unavailable
from naiad.frontends.connections import OpenConnections
from naiad.frontends.grpc.calls import ManagementCall, Tasks, UnaryInference, fail
from naiad.frontends.grpc.compression import ENCODINGS, choose
from naiad.frontends.grpc.connection import Connection
from naiad.frontends.grpc.errors import SHUTTING_DOWN
from naiad.frontends.grpc.head import Head, literal, trailers
from naiad.frontends.grpc.inference_stream import InferenceStream, RefusedStream
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.reflection import PATH as REFLECTION
from naiad.frontends.grpc.reflection import Reflection, ReflectionStream
from naiad.frontends.grpc.servicer import SERVICE, Engine, Method, Servicer, Settings
from naiad.frontends.grpc.stream import Application, Stream
from naiad.frontends.listener import Listener
from naiad.frontends.tls import server_context
from naiad.protocol.regions import Regions
from naiad.telemetry.trace import TraceSettings

_UNIMPLEMENTED: Final = 12
_INTERNAL: Final = 13
_METHOD_NOT_ALLOWED: Final = 405
_UNSUPPORTED_MEDIA_TYPE: Final = 415
_GRPC: Final = "application/grpc"
#: How far the age of connections varies, so that those of a moment do not all end in one.
_AGE_JITTER: Final = 0.1

#: What begins the calls of a path.
Begin = Callable[[Stream], None]


class GrpcFrontend(Application):
    """Serves the engine over gRPC between `__aenter__` and `__aexit__`.

    `method` makes what answers the RPCs that are not inference, by path, where that is not the engine here.
    Leaving refuses new calls, waits up to `options.drain_s` for those that run and cancels the rest. `port` is the
    one that is listened at. Raises InvalidArgument for options that do not go together, Unavailable for an address that
    cannot be bound.
    """

    def __init__(
        self,
        engine: Engine,
        options: GrpcOptions | None = None,
        regions: Regions | None = None,
        trace_settings: TraceSettings | None = None,
        log_settings: Settings | None = None,
        method: Callable[[str], Method] | None = None,
    ) -> None:
        self._options = options = options or GrpcOptions()
        self._servicer = servicer = Servicer(
            engine,
            Regions() if regions is None else regions,
            trace_settings,
            log_settings,
            options.restrictions,
            options.forward,
        )
        self._routes: dict[str, Begin] = {
            path: partial(self._begin_method, each if method is None else method(path))
            for path, each in servicer.methods.items()
        }
        self._routes[f"/{SERVICE}/ModelInfer"] = self._begin_inference
        self._routes[f"/{SERVICE}/ModelStreamInfer"] = self._begin_inferences
        if options.reflection:
            self._routes[REFLECTION] = partial(_begin_reflection, Reflection(SERVICE))
        self._limits = options.limits
        self._connections = OpenConnections()
        self._streams: set[InferenceStream] = set()
        self._tasks = Tasks()
        self._is_stopping = False
        self._listener = Listener(
            self._connect,
            self._connections,
            "GRPC service",
            options.address,
            options.port,
            reuse_port=options.reuse_port,
            grace_s=options.drain_s,
            tls=_tls(options),
        )

    def __repr__(self) -> str:
        return f"<GrpcFrontend at {self._options.address}:{self.port or self._options.port}>"

    @property
    def port(self) -> int:
        return self._listener.bound_port

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_stopping = True
        for stream in list(self._streams):
            stream.stop()
        try:
            await self._listener.__aexit__(*exc_info)
        finally:
            self._tasks.cancel()

    def _connect(self) -> Connection:
        limits = self._limits
        if limits.age_s is not None:
            limits = limits.aged(uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER))
        return Connection(self, self._connections, limits)

    # ---------------------------------------------------------------- calls

    def begin(self, stream: Stream) -> None:
        head = stream.head
        if head.route is None:
            head.route = self._route(head)
        head.route(stream)

    def _route(self, head: Head) -> Begin:
        """What begins the calls with this head, of which nothing else is looked at again."""
        kind = head.content_type
        if not kind.startswith(_GRPC) or kind[len(_GRPC) :][:1] not in ("", "+", ";"):
            return partial(_refuse, _UNSUPPORTED_MEDIA_TYPE)
        if head.method != "POST":
            return partial(_refuse, _METHOD_NOT_ALLOWED)
        if head.error:
            return partial(_fail, trailers(_INTERNAL, head.error))
        begin = self._routes.get(head.path)
        if begin is None:
            # As Triton does: without words.
            return partial(_fail, trailers(_UNIMPLEMENTED, ""))
        if head.encoding not in ENCODINGS:
            text = f"Content is compressed with `{head.encoding}` which isn't supported"
            accepted = literal(b"grpc-accept-encoding", ", ".join(ENCODINGS).encode())
            return partial(_fail, trailers(_UNIMPLEMENTED, text) + accepted)
        head.answer_encoding = choose(self._options.compression_level, head.accepted)
        return begin

    def _begin_inference(self, stream: Stream) -> None:
        if self._is_stopping:
            fail(stream, Unavailable(SHUTTING_DOWN))
        else:
            stream.receiver = UnaryInference(self._tasks, stream, self._servicer)

    def _begin_inferences(self, stream: Stream) -> None:
        try:
            if self._is_stopping:
                raise Unavailable(SHUTTING_DOWN)
            self._servicer.admit_inference(stream.head.metadata)
        except NaiadError as error:
            stream.receiver = RefusedStream(stream, error)
        else:
            stream.receiver = InferenceStream(self._servicer, self._tasks, stream, self._streams)

    def _begin_method(self, method: Method, stream: Stream) -> None:
        if self._is_stopping:
            fail(stream, Unavailable(SHUTTING_DOWN))
        else:
            stream.receiver = ManagementCall(self._tasks, stream, method)


def _begin_reflection(reflection: Reflection, stream: Stream) -> None:
    stream.receiver = ReflectionStream(reflection, stream)


def _refuse(status: int, stream: Stream) -> None:
    stream.refuse(status)


def _fail(ending: bytes, stream: Stream) -> None:
    stream.finish(ending)


def _tls(options: GrpcOptions) -> ssl.SSLContext | None:
    if not options.is_secure:
        return None
    root = options.root_cert if options.use_ssl_mutual else ""
    return server_context("grpc", "h2", options.server_cert, options.server_key, root)
