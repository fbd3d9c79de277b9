"""What listens for clients in a process: the HTTP and the gRPC service, as the options ask for them. On the loop."""

import asyncio
import gc
import ssl
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol, Self

from naiad.backends.cores import available_cores
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.server import GrpcFrontend
from naiad.frontends.grpc.servicer import Method
from naiad.frontends.http.app import HttpFrontend
from naiad.frontends.http.management import Management
from naiad.frontends.tls import server_context
from naiad.instances import heap
from naiad.options import ServerOptions
from naiad.protocol.regions import Regions
from naiad.telemetry.log import Log
from naiad.telemetry.trace import TraceSettings

#: So many objects more than before make the garbage collector look at the youngest.
_GC_THRESHOLD = 20_000
#: Unless more are asked for.
_MOST_TEXT_PROCESSES = 4


def settle() -> None:
    """For a process that stands: what is there now stays, and the collector need not look at it again, which would take
    tens of ms. Nor need it look at some hundred requests in flight, which end without its help. And memory is kept."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    heap.keep()


class HttpService(Protocol):
    @property
    def connection_count(self) -> int:
        """Its open connections."""

    async def refuse(self) -> None:
        """Takes no new connections; those that there are go on."""


class Listening:
    """What has been entered is left all at once: none may accept while another waits for its last requests. One that
    fails does not keep the others from stopping; what failed is raised when all have. What has not been left after
    `grace_s`, which may be set until then, is cancelled."""

    def __init__(self) -> None:
        self.grace_s: float | None = None
        self._entered: list[AbstractAsyncContextManager[Any]] = []
        #: Where inference is served over HTTP.
        self.http: HttpService | None = None

    async def enter(self, frontend: AbstractAsyncContextManager[Any]) -> None:
        await frontend.__aenter__()
        self._entered.append(frontend)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        leaving = [frontend.__aexit__(None, None, None) for frontend in self._entered]
        ends: Sequence[object] = ()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                ends = await asyncio.gather(*leaving, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        if errors:
            raise BaseExceptionGroup("front ends failed to stop", errors)


async def listen(
    listening: Listening,
    options: ServerOptions,
    *,
    http_engine: Any,
    grpc_engine: Any,
    regions: Regions,
    traces: TraceSettings,
    log: Log,
    management: Management | None = None,
    method: Callable[[str], Method] | None = None,
) -> None:
    """Enters the services. `management` and `method`, by path, are what answers all that is not inference, if not the
    engines here. Raises NaiadError for a port or an option that cannot be had."""
    if options.allow_grpc:
        grpc = GrpcFrontend(grpc_engine, GrpcOptions.of(options), regions, traces, log, method)
        await listening.enter(grpc)
        log.info(f"Started GRPCInferenceService at {options.grpc_address}:{grpc.port}")
    if options.allow_http:
        http = HttpFrontend(
            http_engine,
            address=options.http_address,
            port=options.http_port,
            reuse_port=options.reuse_http_port,
            thread_count=options.http_thread_count,
            max_input_size=options.http_max_input_size,
            header_forward_pattern=options.http_header_forward_pattern,
            restricted_apis=options.http_restricted_api,
            regions=regions,
            trace_settings=traces,
            log_settings=log,
            grace_s=options.exit_timeout_secs,
            tls=_http_tls(options),
            management=management,
            text_processes=_text_processes(options),
        )
        await listening.enter(http)
        listening.http = http
        log.info(f"Started HTTPService at {options.http_address}:{http.bound_port}")


def _text_processes(options: ServerOptions) -> int:
    if options.json_processes >= 0:
        return options.json_processes
    # A front end with a process of its own holds up nobody's batches; and on one core nothing is won.
    cores = available_cores()
    return 0 if options.frontends > 1 or cores == 1 else min(cores, _MOST_TEXT_PROCESSES)


def _http_tls(options: ServerOptions) -> ssl.SSLContext | None:
    if not (options.http_use_ssl or options.http_use_ssl_mutual):
        return None
    root = options.http_root_cert if options.http_use_ssl_mutual else ""
    return server_context("http", "http/1.1", options.http_server_cert, options.http_server_key, root)
