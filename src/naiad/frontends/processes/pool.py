"""The front-end processes of a server, from the engine's process: their start, what they are told, their end.

On the engine's event loop. The processes share the ports (SO_REUSEPORT: the kernel spreads connections over them); a
socket here, which does not listen, keeps each port for the server. A process that dies is started again: what came
through it is cancelled, and the others go on.

What front ends need to know (models, regions, whether anything is traced) they are told when it changes. Changes are
numbered; a request that is not inference is answered when all front ends know of all changes made by then.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Self

from naiad.errors import NaiadError, Unavailable
from naiad.frontends.addresses import bound, cannot_listen
from naiad.frontends.processes.frames import Known, ModelChange, Refuse, Start, Stop, ToFrontend, Tracing, Version
from naiad.frontends.processes.link import Behind, Link
from naiad.instances.environment import exit_text
from naiad.instances.frames import Failure
from naiad.instances.restart import RestartPolicy
from naiad.models.table import Record
from naiad.options import ServerOptions

#: A process that has not said anything after so long will not.
_START_S = 120.0
#: Beyond the time that requests get.
_STOP_S = 2.0
#: A process that has not taken note of a change after so long is ended.
_KNOW_S = 30.0
#: Where a process keeps dying, how long it is until the next one.
_LONGEST_PAUSE_S = 10.0


#: What there is to know of a model that there is not.
_UNKNOWN = (False, (), ())


class FrontEndProcesses:
    """`options.frontends` processes; entered = all of them listen, left = none is there."""

    def __init__(self, options: ServerOptions, behind: Behind) -> None:
        self._options = options
        self.behind = behind
        self._loop = asyncio.get_running_loop()
        self._reserved: list[socket.socket] = []
        self._processes: list[_Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        #: What they know of each model.
        self._models: dict[str, object] = {}
        self._seen_changes = -1
        self._is_tracing = False
        self.change = 0
        #: Those a front end could not follow, and why.
        self._refused: deque[tuple[int, NaiadError]] = deque(maxlen=64)
        self._news = asyncio.Event()
        behind.regions.next_change = self._next_change
        behind.regions.tell = self._tell

    def __repr__(self) -> str:
        return f"<FrontEndProcesses {[process.pid for process in self._processes]}>"

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        try:
            self.options = self._with_ports()
            starts = [self._loop.create_task(self._start(index)) for index in range(self._options.frontends)]
            try:
                processes = await asyncio.gather(*starts)
            except BaseException:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)
                raise
        except BaseException:
            await self._end()
            raise
        self._tasks = [self._loop.create_task(self._keep(index, process)) for index, process in enumerate(processes)]
        self._tasks.append(self._loop.create_task(self._follow()))
        options, log = self.options, self.behind.log
        for name, allowed, address, port in (
            ("GRPCInferenceService", options.allow_grpc, options.grpc_address, options.grpc_port),
            ("HTTPService", options.allow_http, options.http_address, options.http_port),
        ):
            if allowed:
                log.info(f"Started {name} at {address}:{port} in {options.frontends} processes")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            process.link.tell(Stop())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.exit_timeout_secs + _STOP_S):
                    await asyncio.gather(*(process.ended.wait() for process in self._processes))
        finally:
            await self._end()

    @property
    def connection_count(self) -> int:
        """Open HTTP connections, after `refuse`."""
        return sum(process.http_connections or 0 for process in self._processes)

    async def refuse(self) -> None:
        """Takes no new HTTP connections; those that there are go on."""
        for process in self._processes:
            process.link.tell(Refuse())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while any(process.http_connections is None for process in self._processes):
                    self._news.clear()
                    await self._news.wait()

    async def _end(self) -> None:
        """By force, where it must be."""
        for process in list(self._processes):
            process.kill()
            await process.ended.wait()
        for reserved in self._reserved:
            reserved.close()

    # ---------------------------------------------------------------- ports

    def _with_ports(self) -> ServerOptions:
        """The options for the processes: with ports that they can share, and that nobody else has."""
        options = self._options
        http_port, grpc_port = options.http_port, options.grpc_port
        if options.allow_grpc:
            address = options.grpc_address
            grpc_port = self._reserve("GRPC service", address, grpc_port, options.reuse_grpc_port)
        if options.allow_http:
            http_port = self._reserve("HTTP service", options.http_address, http_port, options.reuse_http_port)
        return dataclasses.replace(
            options, http_port=http_port, grpc_port=grpc_port, reuse_http_port=True, reuse_grpc_port=True
        )

    def _reserve(self, what: str, address: str, port: int, is_shared: bool) -> int:
        """The port, kept for this server: whoever shares it without being asked to is seen here."""
        try:
            if not is_shared:
                with bound(address, port) as probe:
                    port = probe.getsockname()[1]
            reserved = bound(address, port, shared=True)
            self._reserved.append(reserved)
        except OSError as error:
            raise cannot_listen(what, address, port, error) from error
        return int(reserved.getsockname()[1])

    # ---------------------------------------------------------------- processes

    async def _start(self, index: int) -> "_Process":
        """Starts process `index` and returns when it listens. Raises NaiadError."""
        process = _Process(self, index)
        process.launch()
        self._processes.append(process)
        try:
            async with asyncio.timeout(_START_S):
                await process.hello
                self._introduce(process)
                await process.started
        except TimeoutError:
            process.kill()
            raise Unavailable(f"front-end process {index} has not started within {_START_S:g} s") from None
        except BaseException:
            process.kill()
            raise
        return process

    async def _keep(self, index: int, process: "_Process | None") -> None:
        """Starts process `index` again whenever it has ended."""
        log = self.behind.log
        policy = RestartPolicy(self._loop.time())
        reason = ""
        while True:
            if process is not None:
                await process.ended.wait()
                reason = f"front-end process {index} {process.how}"
            pause_s = policy.failed(self._loop.time())
            log.error(f"{reason}; it is being started again")
            await asyncio.sleep(_LONGEST_PAUSE_S if pause_s is None else pause_s)
            try:
                process = await self._start(index)
            except (NaiadError, OSError) as error:
                process, reason = None, f"front-end process {index} cannot be started: {error}"
            else:
                policy.started(self._loop.time())
                log.info(f"front-end process {index} is running again, pid {process.pid}")

    def gone(self, process: "_Process") -> None:
        self._processes.remove(process)
        self._news.set()

    # ---------------------------------------------------------------- what they know

    def _next_change(self) -> int:
        self.change += 1
        return self.change

    def _tell(self, frame: ToFrontend, fds: Sequence[int] = ()) -> None:
        for process in self._processes:
            if process.is_introduced:
                process.link.tell(frame, fds)

    def _introduce(self, process: "_Process") -> None:
        """Tells a new process all there is, and then to listen."""
        tell = process.link.tell
        self._tell_changes()
        for record in self._records():
            tell(_model_change(record, self.change))
        for region, fds in self.behind.regions.all():
            tell(region, fds)
        tell(Tracing(self.change, self._is_tracing))
        process.known = self.change
        process.is_introduced = True
        tell(Start(self.options))

    async def _follow(self) -> None:
        """Tells of models whenever something about them has changed."""
        while True:
            await self.behind.manager.next_change()
            self._tell_changes()

    def _tell_changes(self) -> None:
        manager = self.behind.manager
        if manager.changes != self._seen_changes:
            self._seen_changes = manager.changes
            for record in self._records():
                self._tell_model(record)
        active = self.behind.traces.active
        if active != self._is_tracing:
            self._is_tracing = active
            self._tell(Tracing(self._next_change(), active))

    def _records(self) -> list[Record]:
        """All models that there are, and those that they have heard of."""
        table = self.behind.manager.table
        return [
            *table.records.values(),
            *(table.past_record(name) for name in self._models if name not in table.records),
        ]

    def _tell_model(self, record: Record) -> None:
        now = (record.is_known, tuple(record.states), tuple(record.models.values()))
        if self._models.get(record.name, _UNKNOWN) == now:
            return
        if now == _UNKNOWN:
            del self._models[record.name]
        else:
            self._models[record.name] = now
        self._tell(_model_change(record, self._next_change()))

    async def settled(self, since: int) -> None:
        self._tell_changes()
        upto = self.change
        deadline = self._loop.time() + _KNOW_S
        while behind := [process for process in self._processes if process.is_introduced and process.known < upto]:
            self._news.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                for process in behind:
                    process.kill(f"has not taken note of a change within {_KNOW_S:g} s")
                deadline += _KNOW_S
        for change, refusal in self._refused:
            if since < change <= upto:
                raise refusal

    def heard(self) -> None:
        self._news.set()

    def known(self, known: Known) -> None:
        if known.failure is not None:
            self._refused.append((known.change, known.failure.error()))
            self.behind.regions.refused(known.change)
        self._news.set()


class _Process:
    """One front-end process: the overseer of its link."""

    def __init__(self, pool: FrontEndProcesses, index: int) -> None:
        self._pool = pool
        self._index = index
        self._loop = asyncio.get_running_loop()
        self.link = Link(pool.behind, self)
        self.hello: asyncio.Future[None] = self._loop.create_future()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.ended = asyncio.Event()
        #: How it ended, after "front-end process 1 "; why it was killed, if it was.
        self.how = ""
        self._why = ""
        self.pid = 0
        #: It has been told what there is, and is told all changes; the last one it knows.
        self.is_introduced = False
        self.known = 0
        #: Known when it takes no new ones.
        self.http_connections: int | None = None

    def launch(self) -> None:
        """Raises Unavailable."""
        fds: list[int] = []
        try:
            fds = self.link.connect()
            command = [sys.executable, "-P", "-m", "naiad.frontends.processes.program", str(self._index)]
            self._process = subprocess.Popen([*command, *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds)
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            # Which also ends the process, if it has been started.
            self.link.close()
            raise Unavailable(f"cannot start front-end process {self._index}: {error.strerror}") from error
        finally:
            for fd in fds:
                os.close(fd)
        self.pid = self._process.pid
        self._loop.add_reader(self._pidfd, self._on_exit)

    def kill(self, why: str = "") -> None:
        if not self.ended.is_set():
            self._why = self._why or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self.how = self._why or exit_text(abs(code), code < 0)
        self.link.close()
        self._pool.gone(self)
        self.ended.set()
        for waited in (self.hello, self.started):
            if not waited.done():
                waited.set_exception(Unavailable(f"front-end process {self._index} {self.how}"))
                waited.exception()

    # ---------------------------------------------------------------- the link's overseer

    @property
    def change(self) -> int:
        return self._pool.change

    async def settled(self, since: int) -> None:
        await self._pool.settled(since)

    def on_hello(self) -> None:
        if not self.hello.done():
            self.hello.set_result(None)

    def on_started(self, failure: Failure | None) -> None:
        if self.started.done():
            return
        if failure is None:
            self.started.set_result(None)
        else:
            self.started.set_exception(failure.error())

    def on_http_connections(self, count: int) -> None:
        self.http_connections = count
        self._pool.heard()

    def on_known(self, known: Known) -> None:
        self.known = max(self.known, known.change)
        self._pool.known(known)

    def on_end(self, reason: str | None) -> None:
        # It ends by itself when its connection does; one that cannot is of no use any more.
        self.kill()


def _model_change(record: Record, change: int) -> ModelChange:
    versions = [
        Version(number, model.config.proto.SerializeToString(), model.labels)
        for number, model in sorted(record.models.items())
    ]
    return ModelChange(change, record.name, record.is_known, list(record.states), versions)
