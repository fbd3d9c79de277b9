"""Instances that run in host processes: the server's side. Lives on the event loop.

A `Host` is the place, a process comes and goes: when it dies, requests inside fail with the reason, and a new one
is forked and loaded with the same models after the pauses of `RestartPolicy`.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from naiad.backends.api import ConfigDict
from naiad.errors import Internal, NaiadError, Unavailable, text_of
from naiad.instances.busy_poll import AwakeLoop
from naiad.instances.call_link import Caller, CallLink, OnCall, new_caller
from naiad.instances.channel import LoopChannel
from naiad.instances.environment import BackendEnvironment, Child
from naiad.instances.frames import (
    Cancel,
    Complete,
    Ending,
    FromHost,
    InstanceSpec,
    IsReady,
    Load,
    Log,
    OpenCalls,
    Reply,
    Unload,
    VersionSpec,
)
from naiad.instances.process_instance import Limits, ProcessInstance
from naiad.instances.restart import RestartPolicy

_control_decoder: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)

#: `on_log(model, version, level, message, file, line)`
OnLog = Callable[[str, int, str, str, str, int], None]
#: `on_gone(caller)`: it asks for nothing any more, and waits for no answer.
OnGone = Callable[[Caller], None]

#: How long a host may take to end once its control socket has.
_EXIT_GRACE_S = 2.0
#: How long after the end of a socket its process may look alive.
_DEAD_AFTER_S = 0.5


class Tenant:
    """A model version in a host: what to load there, and the instances. `first` is one with instances of the same
    version that were loaded before."""

    def __init__(
        self, host: "Host", spec: VersionSpec, takes_requests: bool, timeout_s: float, first: "Tenant | None" = None
    ) -> None:
        self.host = host
        self.spec = spec
        self.takes_requests = takes_requests
        self.timeout_s = timeout_s
        self.decoupled = False
        self.config: ConfigDict = {}
        self.instances: list[ProcessInstance] = []
        self.is_loaded = False
        self.is_leaving = False
        #: Nobody waits any more for its instances to be loaded, which the process is still at.
        self.is_left_loading = False
        #: Whether its model code wants to be asked if it is ready.
        self.checks_readiness = False
        self.number = host.enter(self)
        #: Tenants with the same one share what `ModelContext.shared` makes.
        self.sharing: int = self.number if first is None else first.sharing

    @property
    def label(self) -> str:
        return f"model '{self.spec.name}' version {self.spec.version}"


class Host:
    """A host, whichever process it is at the moment, and its tenants."""

    def __init__(
        self,
        name: str,
        environment: BackendEnvironment,
        exclusive: bool,
        limits: Limits,
        policy: RestartPolicy,
        awake: AwakeLoop,
        on_log: OnLog,
        on_call: OnCall,
        on_gone: OnGone,
    ) -> None:
        self.name = name
        self.limits = limits
        self.environment = environment
        self.awake = awake
        self.restarts = 0
        self.state = "stopped"
        self.tenants: dict[int, Tenant] = {}
        self.is_exclusive = exclusive
        self._policy = policy
        self._on_log = on_log
        self._on_call = on_call
        self._on_gone = on_gone
        #: The tenants that have asked the server for something, in this life of the process.
        self._callers: dict[int, Caller] = {}
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        #: How long that process waits awake at most.
        self._window_ns = 0
        self._control: LoopChannel[FromHost] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._call_links: set[CallLink] = set()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._reply_count = 0
        self._tenant_count = 0
        self._end_reason: str | None = None
        #: The pause that the last death during a restart asks for.
        self._next_pause_s: float | None = None
        #: No tenant is left or all are leaving: nobody can enter any more.
        self.is_closing = False
        #: An instance of a tenant that has left did not end.
        self._is_stuck = False
        self._changed: asyncio.Event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Host {self.name}: {self.state}, pid {self.pid}>"

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def enter(self, tenant: Tenant) -> int:
        self._tenant_count += 1
        self.tenants[self._tenant_count] = tenant
        return self._tenant_count

    def changed(self) -> None:
        """Something that `close` may wait for."""
        self._changed.set()

    # ---- the process ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Sees to it that there is a process. Raises NaiadError."""
        if self._child is None:
            if self._starting is None:
                self._starting = self._loop.create_task(self._start())
            try:
                await asyncio.shield(self._starting)
            finally:
                if self._starting is not None and self._starting.done():
                    self._starting = None

    async def _start(self) -> None:
        self.state = "starting"
        window_ns = self.awake.take_place()
        try:
            child = await self.environment.fork(self.name, self.is_exclusive, window_ns)
        except BaseException:
            self.awake.leave_place(window_ns)
            self.state = "stopped"
            raise
        if self.is_closing:
            # Whoever wanted it has left meanwhile.
            self.awake.leave_place(window_ns)
            child.control.close()
            self.state = "stopped"
            return
        self._window_ns = window_ns
        self._child = child
        self._end_reason = None
        child.on_end = self._on_child_end
        self._control = LoopChannel(self._loop, child.control, _control_decoder, self._on_message, self._on_control_end)
        self.state = "running"

    def kill(self, reason: str) -> None:
        """Ends the process by force; `reason` continues the sentence "its host process ..."."""
        if self._child is not None and self._child.is_alive and self._end_reason is None:
            self._end_reason = reason
            self._child.kill()

    def connection_lost(self, reason: str) -> None:
        """A socket has ended. Usually the process has too, which its pidfd is about to say, with the true reason. If
        not (model code can close a descriptor that is not its own), it cannot be reached any more and must go."""
        child = self._child
        if child is not None and not self.is_closing:
            self._loop.call_later(_DEAD_AFTER_S, self._kill_unreachable, child, reason)

    def _kill_unreachable(self, child: Child, reason: str) -> None:
        if self._child is child:
            self.kill(reason)

    def _on_control_end(self, reason: str | None) -> None:
        self.connection_lost(reason or "closed its control connection")

    def _on_child_end(self, how: str) -> None:
        self._child = None
        self.awake.leave_place(self._window_ns)
        if self._control is not None:
            # Its last words may be why.
            self._control.drain()
            self._control.close()
            self._control = None
        how = self._end_reason or how
        for link in list(self._call_links):
            self._close_calls(link)
        for number in list(self._callers):
            self._caller_gone(number)
        lost = Unavailable(f"host process '{self.name}' {how}")
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(lost)
        pause_s = None
        future = ""
        loaded = [tenant for tenant in self.tenants.values() if tenant.is_loaded]
        if loaded and not self.is_closing:
            pause_s = self._policy.failed(self._loop.time())
            future = "; it is being restarted"
            if pause_s is None:
                future = "; it is not restarted, since it has failed too often in a row"
        self.state = "stopped" if self.is_closing else f"{how}{future}"
        for tenant in self.tenants.values():
            # One that leaves is not loaded any more, but waits for its requests inside.
            if not tenant.is_loaded and not any(instance.is_busy for instance in tenant.instances):
                continue
            self._log(tenant, "ERROR", f"{tenant.label}: host process '{self.name}' {how}{future}")
            for instance in tenant.instances:
                instance.disconnect(
                    Internal(
                        f"Failed to process the request(s) for model instance '{instance.name}', message: "
                        f"its host process {how}{future}"
                    )
                )
        if pause_s is not None:
            # A restart that is under way has seen its Load fail and goes on by itself.
            if self._restarting is None:
                self._restarting = self._loop.create_task(self._restart(pause_s))
            else:
                self._next_pause_s = pause_s
        elif loaded and not self.is_closing:
            self._give_up(loaded, f"host process '{self.name}' {how}{future}")
        self.changed()

    def _give_up(self, tenants: Sequence[Tenant], reason: str) -> None:
        for tenant in tenants:
            tenant.is_loaded = False
            for instance in tenant.instances:
                instance.give_up(reason)

    async def _restart(self, pause_s: float | None) -> None:
        try:
            while pause_s is not None:
                await asyncio.sleep(pause_s)
                self._next_pause_s = None
                tenants = [tenant for tenant in self.tenants.values() if tenant.is_loaded]
                if not tenants:
                    return
                problem = await self._restart_once(tenants)
                if problem is None:
                    return
                if self._child is not None:
                    # No tenant could be loaded: begin again with a fresh process.
                    self._next_pause_s = None
                    child = self._child
                    self.kill(f"could not load its models again: {text_of(problem)}")
                    await child.wait()
                    pause_s = self._next_pause_s
                elif self._next_pause_s is not None:
                    pause_s = self._next_pause_s
                elif any(tenant.is_loaded for tenant in tenants):
                    # It could not even be forked.
                    pause_s = self._policy.failed(self._loop.time())
                    if pause_s is None:
                        self._give_up(tenants, f"host process '{self.name}' cannot be started: {text_of(problem)}")
                else:
                    return
        finally:
            self._restarting = None

    async def _restart_once(self, tenants: Sequence[Tenant]) -> Exception | None:
        """One try; why it failed for all tenants. Whatever it was: without another try they would hang for ever."""
        try:
            await self.start()
        except Exception as error:
            return error
        self.restarts += 1
        problems: list[tuple[Tenant, Exception]] = []
        for tenant in tenants:
            if tenant.is_loaded:
                try:
                    await self._load(tenant)
                except Exception as error:
                    if self._child is None:
                        return error
                    problems.append((tenant, error))
        if problems and len(problems) == len(tenants):
            return problems[0][1]
        for tenant, problem in problems:
            self._give_up([tenant], f"{tenant.label} cannot be loaded again: {text_of(problem)}")
        self._policy.started(self._loop.time())
        for label, tenant in {tenant.label: tenant for tenant in tenants}.items():
            self._log(tenant, "INFO", f"{label}: host process '{self.name}' is running again, pid {self.pid}")
        return None

    # ---- tenants ----------------------------------------------------------------------------------------

    async def complete(self, tenant: Tenant, config: ConfigDict) -> ConfigDict | None:
        """What the backend's `autocomplete` says. Raises its error."""
        await self.start()
        value = await self._ask(Complete(0, tenant.number, tenant.spec, config))
        if value is not None and not isinstance(value, dict):
            raise Internal(f"{tenant.label}: the backend completed the configuration to a {type(value).__name__}")
        return value

    async def load(self, tenant: Tenant) -> None:
        """Loads the tenant's instances. Raises NaiadError; then the tenant is not loaded."""
        await self.start()
        await self._load(tenant)
        tenant.is_loaded = True
        self._policy.started(self._loop.time())

    async def _load(self, tenant: Tenant) -> None:
        instances = tenant.instances
        fds: list[int] = []
        try:
            for instance in instances:
                fds += instance.connect()
            frame = Load(
                0,
                tenant.number,
                tenant.sharing,
                tenant.spec,
                tenant.config,
                [InstanceSpec(i.name, i.context.kind, i.context.device_id) for i in instances],
                self.limits.batch,
            )
            reply = self._ask(frame, fds)
        except BaseException:
            for instance in instances:
                instance.disconnect(Internal("loading failed"))
            raise
        finally:
            for fd in fds:
                os.close(fd)
        try:
            tenant.checks_readiness = bool(await reply)
        except BaseException as error:
            tenant.is_left_loading = isinstance(error, asyncio.CancelledError)
            for instance in instances:
                instance.disconnect(Internal(f"loading failed: {error}"))
            raise
        for instance in instances:
            instance.attach()

    async def is_ready(self, tenant: Tenant) -> bool:
        """What its model code says. Raises its error, and Unavailable where there is no process to ask."""
        return bool(await self._ask(IsReady(0, tenant.number)))

    async def emptied(self, instances: Sequence[ProcessInstance], deadline: float | None = None) -> None:
        """Returns when no request is inside the instances, which take no more, or the deadline has come."""
        while any(instance.is_busy for instance in instances):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return

    def drop(self, tenant: Tenant, instance: ProcessInstance) -> None:
        """Unloads one of the tenant's instances; what is inside it fails."""
        tenant.instances.remove(instance)
        instance.disconnect(Unavailable(f"instance '{instance.name}' of {tenant.label} was unloaded"))

    async def leave(self, tenant: Tenant, timeout_s: float) -> None:
        """Closes the tenant's instances and, if it is the last one, the process. Requests inside get `timeout_s`."""
        deadline = self._loop.time() + timeout_s
        tenant.is_loaded = False
        tenant.is_leaving = True
        if all(other.is_leaving for other in self.tenants.values()):
            self.is_closing = True
            if self._restarting is not None:
                self._restarting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._restarting
        for instance in tenant.instances:
            instance.detach()
        await self.emptied(tenant.instances, deadline)
        stuck = tenant.is_left_loading or any(instance.is_busy for instance in tenant.instances)
        for instance in tenant.instances:
            instance.disconnect(
                Unavailable(f"{tenant.label} was unloaded while instance '{instance.name}' executed this request")
            )
        if self._child is not None and not stuck:
            try:
                async with asyncio.timeout(max(_EXIT_GRACE_S, deadline - self._loop.time())):
                    await self._ask(Unload(0, tenant.number))
            except (NaiadError, TimeoutError):
                stuck = True
        self._is_stuck = self._is_stuck or stuck
        self._caller_gone(tenant.number)
        self.tenants.pop(tenant.number, None)
        if self.is_closing and not self.tenants:
            await self._end()

    async def _end(self) -> None:
        child = self._child
        if child is not None:
            if self._is_stuck:
                child.kill()
            if self._control is not None:
                self._control.close()
            try:
                async with asyncio.timeout(_EXIT_GRACE_S):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
        self.state = "stopped"

    # ---- the control socket -----------------------------------------------------------------------------

    def send(self, frame: Cancel) -> None:
        if self._control is not None:
            self._control.send(frame)

    def _ask(self, frame: Complete | Load | IsReady | Unload, fds: Sequence[int] = ()) -> "asyncio.Future[Any]":
        if self._control is None:
            raise Unavailable(f"host process '{self.name}' {self.state}")
        self._reply_count += 1
        frame.reply = self._reply_count
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies[frame.reply] = reply
        self._control.send(frame, fds)
        return reply

    def _on_message(self, message: FromHost, fds: list[int]) -> None:
        if isinstance(message, OpenCalls) and len(fds) == 1:
            sock = socket.socket(fileno=fds[0])
            self._call_links.add(CallLink(self._loop, sock, self._on_call, self._caller, self._close_calls))
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Reply):
            reply = self._replies.pop(message.reply, None)
            if reply is None or reply.done():
                return
            if message.failure is None:
                reply.set_result(message.value)
            else:
                reply.set_exception(message.failure.error())
        elif isinstance(message, Log) and (tenant := self.tenants.get(message.model)) is not None:
            spec = tenant.spec
            self._on_log(spec.name, spec.version, message.level, message.message, message.file, message.line)
        elif isinstance(message, Ending):
            self._end_reason = self._end_reason or message.reason
            for tenant in self.tenants.values():
                for instance in tenant.instances:
                    instance.detach()

    def _caller(self, model: int) -> Caller | None:
        caller = self._callers.get(model)
        if caller is None and (tenant := self.tenants.get(model)) is not None:
            caller = self._callers[model] = new_caller(tenant.spec)
        return caller

    def _close_calls(self, link: CallLink) -> None:
        link.close()
        self._call_links.discard(link)

    def _caller_gone(self, number: int) -> None:
        caller = self._callers.pop(number, None)
        if caller is not None:
            self._on_gone(caller)

    def _log(self, tenant: Tenant, level: str, message: str) -> None:
        self._on_log(tenant.spec.name, tenant.spec.version, level, message, __file__, 0)
