"""All hosts of a server: which model versions share one, and how they are opened and closed.

    async with Hosts(isolation="model", on_log=..., on_call=...) as hosts:
        model = await hosts.open(ModelSpec(name="add_sub", version=1, backend="onnxruntime", ...))
        completed = await model.complete(config)
        instances = await model.load(config, [InstanceContext("add_sub_0_0", "KIND_CPU")])
        ...
        await model.close(timeout_s=30)

Lives on the event loop.
"""

import asyncio
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from naiad.backends.api import ConfigDict, InstanceContext
from naiad.errors import InvalidArgument, NaiadError, Unavailable, text_of
from naiad.instances.busy_poll import AwakeLoop, BusyPoll
from naiad.instances.call_link import OnCall
from naiad.instances.environment import BackendEnvironment
from naiad.instances.frames import VersionSpec
from naiad.instances.instance import Instance
from naiad.instances.process import Host, OnGone, OnLog, Tenant
from naiad.instances.process_instance import Limits, ProcessInstance
from naiad.instances.restart import RestartPolicy
from naiad.instances.thread import ThreadModel

#: How long a model's own is_ready() may take; Triton's number.
READINESS_TIMEOUT_S = 5.0
#: How long instances that are unloaded may take to finish.
UNLOAD_S = 30.0

#: Triton's environment variable: anything but 1 has instances loaded one after the other.
PARALLEL_VARIABLE = "TRITON_PARALLEL_INSTANCE_LOADING"

Isolation = Literal["model", "backend", "none"]

#: Model parameters, in the `parameters` of config.pbtxt.
HOST_PARAMETER = "NAIAD_HOST"
TIMEOUT_PARAMETER = "NAIAD_EXECUTION_TIMEOUT_SECS"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is needed to open a model version.

    `reference` is "module:Class", or the name of an entry point of the group `naiad.backends`; empty means
    `backend`. `path` may not exist. `parameters` are those of the configuration, as strings.
    """

    name: str
    version: int
    backend: str
    directory: Path
    version_directory: Path
    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    interpreter: str = sys.executable


class HostedModel:
    """A model version in its host or hosts."""

    def __init__(self, spec: ModelSpec, pool: "Hosts", environment: BackendEnvironment, hello_as: str, takes: bool):
        self.spec = spec
        #: Whether the backend wants the machine's GPUs for instances of KIND_AUTO.
        self.uses_gpus = False
        self._pool = pool
        self._environment = environment
        self._in_processes = hello_as == "processes"
        self._takes_requests = takes
        self._timeout_s = pool.timeout_s(spec)
        self._tenants: list[Tenant] = []
        self._leaving: set[asyncio.Future[Any]] = set()
        #: Of hosts that are gone.
        self._restarts = 0
        self._asking: asyncio.Future[bool] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<HostedModel {self.spec.name} {self.spec.version}: {self.state}>"

    @property
    def instances(self) -> list[Instance]:
        return [instance for tenant in self._tenants for instance in tenant.instances]

    @property
    def pids(self) -> list[int]:
        """The process ids of its hosts that are alive."""
        return [pid for host in self._hosts() if (pid := host.pid) is not None]

    @property
    def restarts(self) -> int:
        """How often its hosts have been started again."""
        return self._restarts + sum(host.restarts for host in self._hosts())

    @property
    def arena_bytes(self) -> int:
        """The shared memory set aside for the tensors of its instances: inputs and outputs of each."""
        return sum(2 * tenant.host.limits.arena * len(tenant.instances) for tenant in self._tenants)

    @property
    def state(self) -> str:
        """Its hosts' states in words."""
        return ", ".join(dict.fromkeys(host.state for host in self._hosts())) or "stopped"

    async def complete(self, config: ConfigDict) -> ConfigDict | None:
        """The configuration as the backend completes it, None to leave it. Raises the backend's error."""
        tenant = self._unused_tenant()
        return await tenant.host.complete(tenant, config)

    async def load(self, config: ConfigDict, instances: Sequence[InstanceContext]) -> list[Instance]:
        """Loads instances, ready to execute, beside those that there are: those of one process one after the other, so
        that what an instance downloads, compiles or caches is there for the next, and processes beside each other, as
        Triton does. Raises what is wrong with them; then there are none of these; `close` is due in any case."""
        decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        groups = [[instance] for instance in instances] if self._in_processes else [list(instances)]
        loads = []
        for group in groups:
            tenant = self._unused_tenant()
            tenant.config = config
            tenant.decoupled = decoupled
            tenant.instances = [ProcessInstance(tenant, context) for context in group]
            loads.append(tenant)
        at_once = len(loads) if os.environ.get(PARALLEL_VARIABLE, "1") == "1" else 1
        try:
            for start in range(0, len(loads), at_once):
                await _load_all(loads[start : start + at_once])
        except BaseException:
            await self._leave(loads, 0.0)
            raise
        return [instance for tenant in loads for instance in tenant.instances]

    async def remove(self, instances: Sequence[Instance], timeout_s: float | None = None) -> None:
        """Unloads some of the instances. They take no more batches; what is inside them after `timeout_s` fails, and
        all of it when the version is closed."""
        tenants = [tenant for tenant in self._tenants if any(instance in instances for instance in tenant.instances)]
        leaving = {tenant: [each for each in tenant.instances if each in instances] for tenant in tenants}
        for each in leaving.values():
            for instance in each:
                instance.detach()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        await asyncio.gather(*(tenant.host.emptied(each, deadline) for tenant, each in leaving.items()))
        if self._is_closed:
            return
        empty = []
        for tenant, each in leaving.items():
            if len(each) == len(tenant.instances):
                empty.append(tenant)
            else:
                for instance in each:
                    tenant.host.drop(tenant, instance)
        await self._leave(empty, UNLOAD_S if timeout_s is None else timeout_s)

    def reconfigure(self, config: ConfigDict) -> None:
        """What hosts that are started again load their instances with."""
        for tenant in self._tenants:
            tenant.config = config

    @property
    def checks_readiness(self) -> bool:
        """Whether `is_ready` is worth asking."""
        return any(tenant.checks_readiness for tenant in self._tenants)

    async def is_ready(self) -> bool:
        """What the model's own code says. Raises its error, and Unavailable where it does not answer in time."""
        asking = self._asking
        if asking is None or asking.done():
            # One question at a time, however many ask: code that hangs gets no more of them.
            asking = self._asking = asyncio.ensure_future(self._ask_if_ready())
        try:
            async with asyncio.timeout(READINESS_TIMEOUT_S):
                return await asyncio.shield(asking)
        except TimeoutError:
            raise Unavailable("Timed out waiting for user-defined is_ready() response") from None
        except asyncio.CancelledError:
            # Who asks has been cancelled; or the question has, by `close`.
            if not asking.cancelled():
                raise
            raise Unavailable(f"model '{self.spec.name}' version {self.spec.version} was unloaded") from None

    async def _ask_if_ready(self) -> bool:
        asked = [tenant for tenant in self._tenants if tenant.checks_readiness]
        return all(await asyncio.gather(*(self._ask_tenant(tenant) for tenant in asked)))

    async def _ask_tenant(self, tenant: Tenant) -> bool:
        try:
            return await tenant.host.is_ready(tenant)
        except NaiadError:
            if tenant.is_leaving:
                return True
            raise

    async def close(self, timeout_s: float = UNLOAD_S) -> None:
        """Unloads: waits up to `timeout_s` for requests inside, then they fail. Its memory is free afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()
        self._pool.forget(self)
        try:
            await self._leave(self._tenants, timeout_s)
            await asyncio.gather(*self._leaving)
        finally:
            self._pool.closed_in(self._environment)

    def tick(self, beat_s: float) -> None:
        """One beat of the pool's timer: ends hosts whose batch takes too long."""
        if not self._timeout_s:
            return
        limit = math.ceil(self._timeout_s / beat_s)
        for tenant in self._tenants:
            for instance in tenant.instances:
                if instance.tick(limit):
                    tenant.host.kill(
                        f"was killed since an execution of instance '{instance.name}' took longer than "
                        f"{self._timeout_s:g} s (model parameter {TIMEOUT_PARAMETER})"
                    )

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    async def _leave(self, tenants: Sequence[Tenant], timeout_s: float) -> None:
        """Takes tenants out. A leave that has begun goes on to its end, whoever waits for it."""
        tenants = [tenant for tenant in tenants if tenant in self._tenants]
        if not tenants:
            return
        before = self._hosts()
        self._tenants = [tenant for tenant in self._tenants if tenant not in tenants]
        self._restarts += sum(host.restarts for host in set(before) - set(self._hosts()))
        leaving = asyncio.gather(*(self._pool.leave(tenant, timeout_s) for tenant in tenants))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        await asyncio.shield(leaving)

    def _hosts(self) -> list[Host]:
        return list(dict.fromkeys(tenant.host for tenant in self._tenants))

    def _unused_tenant(self) -> Tenant:
        """A tenant without instances."""
        for tenant in self._tenants:
            if not tenant.instances:
                return tenant
        spec = self.spec
        first = None
        if self._tenants and not self._in_processes and not self._tenants[0].host.is_closing:
            first = self._tenants[0]
            host = first.host
        else:
            host = self._pool.host(spec, self._environment, self._in_processes)
        version = VersionSpec(
            spec.name,
            spec.version,
            str(spec.directory),
            str(spec.version_directory),
            str(spec.path),
            dict(spec.settings),
        )
        tenant = Tenant(host, version, self._takes_requests, self._timeout_s, first)
        self._tenants.append(tenant)
        return tenant


async def _load_all(tenants: Sequence[Tenant]) -> None:
    """Loads them beside each other. Raises when all have ended: the error that they have in common, or all errors with
    the instances' names, as the kind of the last one, which is what Triton says."""
    outcomes = await asyncio.gather(*(tenant.host.load(tenant) for tenant in tenants), return_exceptions=True)
    failed = [(tenant, error) for tenant, error in zip(tenants, outcomes, strict=True) if error is not None]
    if not failed:
        return
    last = failed[-1][1]
    texts = [text_of(error) for _, error in failed]
    if len(set(texts)) == 1 or not isinstance(last, NaiadError):
        raise last
    names = ["', '".join(instance.name for instance in tenant.instances) for tenant, _ in failed]
    raise type(last)(
        "; ".join(f"instance '{name}': {text.rstrip()}" for name, text in zip(names, texts, strict=True))
    ) from last


class Hosts:
    """The pool. `on_log` gets lines of model code, `on_call` answers `Services.call`, `on_gone` hears
    of the end of whoever called.

    `execution_timeout_s` 0 is never. `beat_s` is how exactly executions are timed. `idle_zygote_s` is how long the
    zygote of another interpreter than the server's is kept for a next model, when there is none in it. `busy_poll_ns` is
    how long server and hosts wait awake for each other at most, `awake_processes` how many of them may, None for all.
    """

    def __init__(
        self,
        *,
        isolation: Isolation = "model",
        on_log: OnLog,
        on_call: OnCall,
        on_gone: OnGone = lambda caller: None,
        execution_timeout_s: float = 600.0,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        restart_policy: Callable[[float], RestartPolicy] = RestartPolicy,
        beat_s: float = 1.0,
        idle_zygote_s: float = 60.0,
        busy_poll_ns: int = 0,
        awake_processes: int | None = None,
    ) -> None:
        self._isolation = isolation
        self._on_log = on_log
        self._on_call = on_call
        self._on_gone = on_gone
        self._execution_timeout_s = execution_timeout_s
        self._limits = limits
        self._restart_policy = restart_policy
        self._beat_s = beat_s
        self._idle_zygote_s = idle_zygote_s
        self._awake = AwakeLoop(
            asyncio.get_running_loop(),
            BusyPoll(0 if awake_processes == 0 else busy_poll_ns),
            None if awake_processes is None else max(0, awake_processes - 1),
        )
        self._environments: dict[tuple[str, str], BackendEnvironment] = {}
        self._shared: dict[tuple[BackendEnvironment, str], Host] = {}
        self._models: dict[HostedModel | ThreadModel, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._beat()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await asyncio.gather(*(model.close(0.0) for model in list(self._models)))
        await asyncio.gather(*self._ending, *(environment.close() for environment in self._environments.values()))
        self._environments.clear()

    async def open(self, spec: ModelSpec) -> "HostedModel | ThreadModel":
        """Makes a version ready to be completed and loaded. Raises NaiadError: unknown backend, missing import."""
        self.timeout_s(spec)
        if self._isolation == "none":
            if spec.interpreter != sys.executable:
                raise InvalidArgument(
                    f"model '{spec.name}' is to run in the Python environment of {spec.interpreter}, which needs a process"
                    " of its own: start the server without --isolation=none"
                )
            local = ThreadModel(spec, self._limits, self._on_log, self._on_call, self._on_gone, self.forget)
            await local.start()
            self._models[local] = None
            return local
        reference = spec.reference or spec.backend
        key = (reference, spec.interpreter)
        environment = self._environments.get(key)
        if environment is None:
            environment = self._environments[key] = BackendEnvironment(
                spec.backend, reference, spec.interpreter, self._warn
            )
        environment.models += 1
        environment.opened += 1
        try:
            hello = await environment.start()
        except BaseException:
            self.closed_in(environment)
            raise
        model = HostedModel(spec, self, environment, hello.instances_as, hello.takes_requests)
        model.uses_gpus = hello.uses_gpus
        self._models[model] = None
        return model

    def kill(self) -> None:
        """Ends all hosts by force: what is still being done in them fails, and what waits for their end has it."""
        for environment in self._environments.values():
            environment.kill()

    @property
    def models(self) -> "list[HostedModel | ThreadModel]":
        """The versions that are open."""
        return list(self._models)

    # ---- for HostedModel --------------------------------------------------------------------------------

    def timeout_s(self, spec: ModelSpec) -> float:
        """The execution timeout of a model. Raises InvalidArgument."""
        text = spec.parameters.get(TIMEOUT_PARAMETER)
        if text is None:
            return self._execution_timeout_s
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s < math.inf:
            raise InvalidArgument(
                f"model '{spec.name}': parameter {TIMEOUT_PARAMETER} is '{text}', expected seconds, 0 for no limit"
            )
        return timeout_s

    def host(self, spec: ModelSpec, environment: BackendEnvironment, exclusive: bool) -> Host:
        """The host for a model's instances: a shared one or one of its own. An exclusive one is never shared, since
        a backend that wants a process per instance keeps things of the instance in globals."""
        group = None
        if not exclusive:
            group = spec.parameters.get(HOST_PARAMETER)
            if group is None and self._isolation == "backend":
                group = environment.backend
        if group is None:
            return self._make_host(spec.name, environment, exclusive)
        host = self._shared.get((environment, group))
        if host is None or host.is_closing:
            host = self._shared[environment, group] = self._make_host(group, environment, False)
        return host

    async def leave(self, tenant: Tenant, timeout_s: float) -> None:
        host = tenant.host
        await host.leave(tenant, timeout_s)
        if host.is_closing:
            for key, shared in list(self._shared.items()):
                if shared is host:
                    del self._shared[key]

    def forget(self, model: "HostedModel | ThreadModel") -> None:
        self._models.pop(model, None)

    def closed_in(self, environment: BackendEnvironment) -> None:
        """One model less in an environment. Without any, the zygote of another interpreter ends after a while."""
        environment.models -= 1
        if not environment.models and environment.interpreter != sys.executable:
            loop = asyncio.get_running_loop()
            loop.call_later(self._idle_zygote_s, self._end_if_idle, environment, environment.opened)

    def _end_if_idle(self, environment: BackendEnvironment, opened: int) -> None:
        key = (environment.reference, environment.interpreter)
        if environment.opened == opened and self._environments.get(key) is environment:
            del self._environments[key]
            task = asyncio.get_running_loop().create_task(environment.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _make_host(self, name: str, environment: BackendEnvironment, exclusive: bool) -> Host:
        now = asyncio.get_running_loop().time()
        policy = self._restart_policy(now)
        return Host(
            name, environment, exclusive, self._limits, policy, self._awake, self._on_log, self._on_call, self._on_gone
        )

    def _warn(self, message: str) -> None:
        self._on_log("", 0, "WARNING", message, __file__, 0)

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._beat)
        for model in self._models:
            model.tick(self._beat_s)


__all__ = ["HostedModel", "Hosts", "Isolation", "Limits", "ModelSpec"]
