"""The gRPC front end: entered it listens, left it has stopped. Lives on the event loop."""

import importlib.util
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from naiad.frontends.addresses import bound
from naiad.frontends.grpc.grpcio import GrpcioServer
from naiad.frontends.grpc.options import GrpcOptions, Implementation, choose
from naiad.frontends.grpc.servicer import Engine, Method, Servicer, Settings
from naiad.protocol.regions import Regions
from naiad.telemetry.trace import TraceSettings


class _Server(Protocol):
    port: int

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class GrpcFrontend:
    """Serves the engine over gRPC between `__aenter__` and `__aexit__`.

    `method` makes what answers the RPCs that are not inference, by path, where that is not the engine here.
    Leaving refuses new calls, waits up to `options.drain_s` for those that run and cancels the rest. `port` is the
    one that is listened at. Raises InvalidArgument for options that do not go together, OSError for an address that
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
        self._options = options or GrpcOptions()
        self.implementation: Implementation = choose(
            self._options, importlib.util.find_spec("pygrpc_native") is not None
        )
        servicer = Servicer(
            engine,
            Regions() if regions is None else regions,
            trace_settings,
            log_settings,
            self._options.restrictions,
            self._options.forward,
        )
        if method is not None:
            servicer.methods = {path: method(path) for path in servicer.methods}
        self._server: _Server
        if self.implementation == "native":
            native = importlib.import_module("naiad.frontends.grpc.native")
            self._server = native.NativeServer(servicer, self._options)
        else:
            self._server = GrpcioServer(servicer, self._options, self._options.target)

    def __repr__(self) -> str:
        return f"<GrpcFrontend {self.implementation} at {self._options.address}:{self.port or self._options.port}>"

    @property
    def port(self) -> int:
        return self._server.port

    async def __aenter__(self) -> Self:
        # The libraries log lines of their own about an address that is taken, and do not always say why.
        bound(self._options.address, self._options.port, self._options.reuse_port).close()
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(self._options.drain_s)
