"""The server: engine and front ends, started as nested blocks and stopped by leaving them.

Everything is wired here, once, by hand. `serve` runs it until SIGTERM or SIGINT: then what has begun gets
`--exit-timeout-secs` to end, models are unloaded, and front ends, which have answered all that time, are left.
"""

import asyncio
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import uvloop

from naiad import __version__
from naiad.backends.cores import awake_processes
from naiad.engine import Engine
from naiad.errors import Unavailable
from naiad.frontends.access import logged
from naiad.frontends.grpc.servicer import Servicer
from naiad.frontends.http.management import Management
from naiad.frontends.http.metrics import MetricsFrontend
from naiad.frontends.listening import Listening, listen, settle
from naiad.frontends.processes.link import Behind
from naiad.frontends.processes.pool import FrontEndProcesses
from naiad.frontends.processes.regions import SharedRegions
from naiad.instances.call_link import Caller, OnReply
from naiad.instances.hosts import Hosts
from naiad.instances.provision import Environments, default_directory
from naiad.messages import InferRequest, ResponseSink
from naiad.model_calls import ModelCalls
from naiad.models.gpu_limits import GpuLimits
from naiad.models.loader import ModelLoader
from naiad.models.manager import ModelManager
from naiad.models.model import Model
from naiad.models.placement import only_gpu
from naiad.models.sources import RepositorySources
from naiad.models.table import ModelTable
from naiad.options import ServerOptions
from naiad.protocol.regions import Regions
from naiad.repository.watcher import looks
from naiad.scheduling.cache import LocalStore, Store, families, store_of
from naiad.scheduling.rate_limit import RateLimiter
from naiad.scheduling.scheduler import Call, Progress
from naiad.telemetry.gpus import gpus
from naiad.telemetry.log import Log, bridge
from naiad.telemetry.metrics import Metrics, MetricsSettings, ModelSeries
from naiad.telemetry.own_metrics import HostFacts, ModelFacts, OwnMetrics
from naiad.telemetry.system import SystemMetrics
from naiad.telemetry.tables import show_models
from naiad.telemetry.trace import TraceSettings

#: How often orphans are looked for.
_ORPHANS_S = 2.0
#: How many descriptors the server wants to have, if it may.
_FILES = 1 << 20
#: What models without requests get in any case, to unload when the server ends.
_UNLOAD_S = 1.0
#: What clients get in any case to be told how their requests have ended.
_LAST_WORDS_S = 0.5
#: How often is looked if what has begun has ended.
_LOOK_S = 0.05


def serve(options: ServerOptions) -> int:
    """Runs a server until a signal ends it; the exit status. Raises NaiadError if it cannot be created."""
    _open_standard_streams()
    _raise_file_limit()
    _find_temporary_folder()
    return uvloop.run(_serve(options))


def _open_standard_streams() -> None:
    """Who starts a server may have closed them; the event loop would end the process that opens something in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - as long as the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _raise_file_limit() -> None:
    """A connection is a descriptor, an instance some more: the usual soft limit of 1024 is for programs that `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _find_temporary_folder() -> None:
    """A container whose file system is read-only has no other than the one of shared memory, if nobody mounts one."""
    with suppress(FileNotFoundError):
        tempfile.gettempdir()
        return
    os.environ["TMPDIR"] = "/dev/shm"
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise Unavailable(
            "no folder for temporary files can be written to: set TMPDIR, or mount one at /tmp"
        ) from error


async def _serve(options: ServerOptions) -> int:
    log = Log()
    log.configure(
        verbose=options.log_verbose,
        info=options.log_info,
        warning=options.log_warning,
        error=options.log_error,
        format=options.log_format,
        file=options.log_file,
    )
    bridge(log)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    # Models in this process have children of their own, whose exit statuses are theirs.
    adopting = loop.create_task(_reap_orphans()) if os.getpid() == 1 and options.isolation != "none" else None
    try:
        return await _run(options, log, stop, hurry)
    finally:
        if adopting is not None:
            adopting.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        log.close()


async def _run(options: ServerOptions, log: Log, stop: asyncio.Event, hurry: asyncio.Event) -> int:
    """`stop` is the first signal, `hurry` another one: whoever sends it does not want to wait for idle clients."""
    server = Server(options, log)
    loading = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("Signal received, shutting down")
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await server.close()
        return 0
    try:
        await loading
        if server.unreadable and options.exit_on_error:
            log.error("failed to read all model repositories; --exit-on-error=false serves the others")
            return 1
        if server.failed_models and options.exit_on_error:
            names = ", ".join(f"'{name}'" for name in server.failed_models)
            log.error(f"failed to load all models: {names}; --exit-on-error=false serves the others")
            return 1
        await stop.wait()
        log.info("Signal received, shutting down")
        await server.drain(hurry)
    finally:
        stopping.cancel()
        in_time = await server.close()
    if not in_time:
        log.error("Exit timeout expired. Exiting immediately.")
    return 0 if in_time else 1


async def _reap_orphans() -> None:
    """What the first process of a container owes: it is made the parent of those whose parents have died, such as what
    models have started, and they stay in the table of processes until it has asked for their end."""
    ended = 0
    while True:
        ended = _reap(ended)
        await asyncio.sleep(_ORPHANS_S)


def _reap(ended: int) -> int:
    """Asks for the end of the child `ended`, if it has; another one that has ended, 0 if there is none.

    Children of the server's own are asked for at once by who started them, so one that is found twice is no such.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        if found is None or found.si_pid != ended:
            return found.si_pid if found is not None else 0
        os.waitid(os.P_PID, ended, os.WEXITED | os.WNOHANG)


async def _second(is_over: Callable[[], bool]) -> None:
    """Returns a second later, or a moment after it is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 1
    while not is_over() and loop.time() < end:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


class Server:
    """A server in this process, on the running loop."""

    def __init__(self, options: ServerOptions, log: Log) -> None:
        self.options = options
        self.log = log
        self.failed_models: list[str] = []
        #: Whether a model repository could not be read.
        self.unreadable = False
        #: The UUIDs of those that models may use.
        self._gpus = gpus()
        self._stack = AsyncExitStack()
        self._close_by = 0.0
        self._in_time = True

    async def start(self) -> None:
        """Loads the models and listens. Raises NaiadError for a port or an option that cannot be had."""
        await self._stack.enter_async_context(self._running())

    async def drain(self, hurry: asyncio.Event) -> None:
        """Lets what has begun end, for `--exit-timeout-secs` in all, and says once a second what is left, as Triton does:
        HTTP takes no new connections until the last one is closed; then models take nothing new until the last request
        is answered and the last sequence has ended. gRPC is served all the time. Once `hurry` is set, HTTP connections
        that are idle are not waited for."""
        left = self.options.exit_timeout_secs
        self._close_by = time.monotonic() + left
        http, manager, log = self._listening.http, self._models, self.log
        if http is not None:
            await http.refuse()
            while left > 0 and not hurry.is_set() and (count := http.connection_count):
                log.info(f"Timeout {left}: Found {count} HTTP service connections")
                await _second(lambda: hurry.is_set() or not http.connection_count)
                left -= 1
        self.engine.exiting()
        log.info("Waiting for in-flight requests to complete.")
        while True:
            busy = manager.in_flight()
            log.info(f"Timeout {left}: Found {len(busy)} model versions that have in-flight inferences")
            for name, version, count in busy:
                log.info(f"Model '{name}' (version {version}) has {count} in-flight inferences")
            if not busy or left <= 0:
                break
            await _second(lambda: not manager.in_flight())
            left -= 1
        if not busy:
            log.info("All models are stopped, unloading models")

    async def close(self) -> bool:
        """Stops; whether everything in flight ended in time."""
        if not self._close_by:
            self._close_by = time.monotonic() + self.options.exit_timeout_secs
        try:
            # What hangs in this process, where no host can be killed for it.
            async with asyncio.timeout(self._left_s() + 5):
                await self._stack.aclose()
        except TimeoutError:
            return False
        return self._in_time

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        options, log = self.options, self.log
        log.info(f"naiad {__version__}")
        for flag, reason in options.unused.items():
            log.info(f"option '{flag}' has no effect: {reason}")
        regions = (SharedRegions if options.frontends > 1 else Regions)(options.allow_client_shm)
        async with (
            Hosts(
                isolation=options.isolation,
                on_log=self._log_of_model,
                on_call=self._call_of_model,
                on_gone=self._caller_gone,
                execution_timeout_s=options.execution_timeout_secs,
                busy_poll_ns=options.busy_poll_us * 1000,
                awake_processes=awake_processes(),
            ) as hosts,
            self._store() as store,
            self._traces() as traces,
        ):
            settings = MetricsSettings.of(options.metrics_config)
            manager = self._models = self._manager(hosts, settings, store)
            self.engine = engine = Engine(manager, server_id=options.id, strict_readiness=options.strict_readiness)
            metrics = self._metrics(manager, settings, store)
            own = self._own_metrics(manager, hosts)
            self._calls = ModelCalls(engine, metrics.custom, traces)
            async with self._frontends(engine, manager, regions, metrics, own, traces):
                try:
                    await manager.start()
                    self.failed_models = manager.table.failures()
                    self.unreadable = bool(manager.first_snapshot.failures)
                    show_models(log, await engine.index(), manager.table.reasons())
                    settle()
                    if not self.unreadable:
                        # Otherwise the server is neither live nor ready, whatever it serves, as in Triton.
                        engine.started()
                    async with self._watching(manager):
                        yield
                finally:
                    engine.exiting()
                    await self._unload(manager, hosts)
                    await self._calls.close()
                    self._listening.grace_s = max(_LAST_WORDS_S, self._left_s())

    def _left_s(self) -> float:
        """What is left of the time that the end may take."""
        return max(0.0, self._close_by - time.monotonic())

    async def _unload(self, manager: ModelManager, hosts: Hosts) -> None:
        left_s = self._left_s()
        loop = asyncio.get_running_loop()
        killing = loop.call_later(left_s + _UNLOAD_S, hosts.kill)
        try:
            self._in_time = await manager.close(left_s) and loop.time() < killing.when()
        finally:
            killing.cancel()

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[Store | None]:
        store = store_of(self.options.cache_settings, self.log.exception, self.log.error)
        try:
            if store is not None:
                await store.check()
            yield store
        finally:
            if store is not None:
                await store.close()

    @asynccontextmanager
    async def _traces(self) -> AsyncIterator[TraceSettings]:
        traces = TraceSettings.of(self.options.trace_settings, self.log)
        try:
            yield traces
        finally:
            await asyncio.to_thread(traces.close)

    def _manager(self, hosts: Hosts, settings: MetricsSettings, store: Store | None) -> ModelManager:
        options = self.options
        sources = RepositorySources(
            options.model_repository,
            config_name=options.model_config_name or "",
            auto_complete=options.auto_complete_config,
            gpus=tuple(range(len(self._gpus))),
        )
        self._sources = sources

        def infer(request: InferRequest, sink: ResponseSink, model: Model, admitted: bool, progress: Progress) -> Call:
            return self.engine.infer(request, sink, model, admitted=admitted, progress=progress)

        def lookup(name: str, version: int) -> Model:
            return self.engine.model(name, version)

        loader = ModelLoader(
            hosts,
            log=self.log,
            auto_complete=options.auto_complete_config,
            backend_settings=options.backend_settings,
            infer_statistics=settings.infer_statistics,
            infer=infer,
            lookup=lookup,
            store=store,
            limiter=RateLimiter(options.rate_limit_resource) if options.rate_limit == "execution_count" else None,
            environments=Environments(
                Path(options.environment_directory) if options.environment_directory else default_directory(),
                install=options.model_requirements,
                info=self.log.info,
            ),
            backend_directory=Path(options.backend_directory),
            gpu_limits=GpuLimits(dict(options.model_load_gpu_limit), self._gpus),
        )
        return ModelManager(
            ModelTable(),
            sources=sources,
            loader=loader,
            log=self.log,
            mode=options.model_control_mode,
            startup_models=options.load_model,
            load_thread_count=options.model_load_thread_count,
            load_retry_count=options.model_load_retry_count,
        )

    def _metrics(self, manager: ModelManager, settings: MetricsSettings, store: Store | None) -> Metrics:
        options = self.options

        def series() -> Iterator[ModelSeries]:
            for model in manager.table.models():
                config = model.config
                gpu = only_gpu(config)
                gpu_uuid = self._gpus[gpu] if gpu is not None else ""
                yield ModelSeries(model.statistics, config.metric_tags, config.response_cache, gpu_uuid)

        system = SystemMetrics(cpu=options.allow_cpu_metrics, gpus=self._gpus if options.allow_gpu_metrics else ())
        metrics = Metrics(series, settings, system=system, interval_s=options.metrics_interval_ms / 1000)
        if isinstance(store, LocalStore):
            metrics.add_source(lambda: families(store))
        return metrics

    def _own_metrics(self, manager: ModelManager, hosts: Hosts) -> OwnMetrics:
        def models() -> Iterator[ModelFacts]:
            for model in manager.table.models():
                yield ModelFacts(model.statistics, model.leases)

        def of_hosts() -> Iterator[HostFacts]:
            for hosted in hosts.models:
                spec = hosted.spec
                yield HostFacts(spec.name, spec.version, hosted.restarts, hosted.pids, hosted.arena_bytes)

        return OwnMetrics(models, of_hosts)

    @asynccontextmanager
    async def _frontends(
        self,
        engine: Engine,
        manager: ModelManager,
        regions: Regions,
        metrics: Metrics,
        own: OwnMetrics,
        traces: TraceSettings,
    ) -> AsyncIterator[None]:
        options, log = self.options, self.log
        http_engine = logged(engine, "HTTP", log) if options.access_log else engine
        grpc_engine = logged(engine, "GRPC", log) if options.access_log else engine
        async with Listening() as listening:
            self._listening = listening
            if isinstance(regions, SharedRegions):
                behind = Behind(
                    http_engine,
                    grpc_engine,
                    Management(engine, regions, traces, log),
                    Servicer(engine, regions, traces, log, options.grpc_restricted_protocol),
                    manager,
                    regions,
                    traces,
                    log,
                )
                await listening.enter(processes := FrontEndProcesses(options, behind))
                if options.allow_http:
                    listening.http = processes
            else:
                await listen(
                    listening,
                    options,
                    http_engine=http_engine,
                    grpc_engine=grpc_engine,
                    regions=regions,
                    traces=traces,
                    log=log,
                )
            if options.allow_metrics:
                address = options.metrics_bind_address

                async def scrape_all() -> bytes:
                    return await metrics.scrape() + await own.scrape()

                await listening.enter(MetricsFrontend(metrics.scrape, scrape_all, address, options.metrics_port))
                log.info(f"Started Metrics Service at {address}:{options.metrics_port}")
            yield

    @asynccontextmanager
    async def _watching(self, manager: ModelManager) -> AsyncIterator[None]:
        if self.options.model_control_mode != "poll":
            yield
            return
        task = asyncio.ensure_future(self._watch(manager))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, manager: ModelManager) -> None:
        # From the picture the models were loaded from: what has changed meanwhile is a change.
        start = manager.first_snapshot
        async for snapshot in looks(self._sources.repositories, self.options.repository_poll_secs, start):
            try:
                if snapshot is not None:
                    await manager.follow(snapshot)
                await manager.retry()
            except Exception as error:
                self.log.exception("following the model repositories failed; trying again at the next change", error)

    def _log_of_model(self, model: str, version: int, level: str, message: str, file: str, line: int) -> None:
        self.log.write(level, message, file, line)  # type: ignore[arg-type]

    def _call_of_model(self, caller: Caller, method: str, arguments: msgspec.Raw, reply: OnReply) -> None:
        self._calls(caller, method, arguments, reply)

    def _caller_gone(self, caller: Caller) -> None:
        self._calls.gone(caller)
