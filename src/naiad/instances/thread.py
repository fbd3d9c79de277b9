"""Models in threads of the server process (`--isolation=none`): for debugging, and for the smallest latency.

The same execution code as in a host; batches go to the instance's thread through a queue, and results come back
through `loop.call_soon_threadsafe`. A crash of the model is a crash of the server, and frameworks are imported here.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from naiad.backends.api import ArrayBackend, ConfigDict, InstanceContext, ModelContext, RequestBackend, Shared
from naiad.errors import Internal, NaiadError, Unavailable
from naiad.instances import arena, layout
from naiad.instances.call_link import Caller, OnCall, new_caller
from naiad.instances.delivery import Batches
from naiad.instances.execution import ArrayExecution, OneShot, RequestExecution, Signature, execution
from naiad.instances.frames import Execute, Results, VersionSpec, failure
from naiad.instances.host import model_context
from naiad.instances.instance import Execution, Instance
from naiad.instances.process import OnGone, OnLog
from naiad.instances.process_instance import Limits
from naiad.instances.references import load_backend

if TYPE_CHECKING:
    from naiad.instances.hosts import ModelSpec

T = TypeVar("T")


def _do_nothing() -> None:
    pass


def _settle(loaded: "asyncio.Future[None]", error: NaiadError | None) -> None:
    if loaded.done():
        # Who waited for it has been cancelled.
        return
    if error is None:
        loaded.set_result(None)
    else:
        loaded.set_exception(error)


class _ThreadLink:
    """Results from an instance's thread to the loop."""

    def __init__(self, instance: "ThreadInstance", loop: asyncio.AbstractEventLoop, arena_size: int) -> None:
        self.outputs = arena.private(arena_size)
        self._instance = instance
        self._loop = loop

    def send(self, results: Results, one_shot: OneShot | None) -> None:
        region = self.outputs if one_shot is None else one_shot.view
        # RuntimeError: the loop has been closed, nobody waits for this any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._instance.on_results, results, region)

    def one_shot(self, byte_size: int) -> OneShot:
        return OneShot(arena.private(byte_size), None)


class ThreadInstance:
    """An `Instance` whose model is loaded in this process."""

    def __init__(self, context: InstanceContext, model: "ThreadModel", decoupled: bool) -> None:
        self.name = context.name
        self.on_change: Callable[[], None] = _do_nothing
        self.failure: str | None = None
        #: A thread goes with the server only.
        self.losses = 0
        # Of the server's threads none waits awake.
        self.place: Hashable = self
        self.idle = asyncio.Event()
        self.idle.set()
        self._context = context
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._limits = model.limits
        self._batches = Batches(model.spec.name, model.spec.version, decoupled)
        self._queue: queue.SimpleQueue[tuple[Execute, memoryview] | None] = queue.SimpleQueue()
        self._execution: ArrayExecution | RequestExecution | None = None
        self._inputs = arena.private(self._limits.arena)
        self._thread: threading.Thread | None = None
        self._is_attached = False
        self._hangs = False

    @property
    def is_available(self) -> bool:
        return self._is_attached and not self._batches.executing

    @property
    def is_busy(self) -> bool:
        """Whether any request inside has no final answer."""
        return bool(self._batches)

    @property
    def backend(self) -> ArrayBackend | RequestBackend | None:
        """None until it is loaded."""
        return None if self._execution is None else self._execution.backend

    async def load(self, backend: type[Any], context: ModelContext, signature: Signature) -> None:
        """Starts the thread and constructs the backend in it. Raises what the constructor raises."""
        loaded: asyncio.Future[None] = self._loop.create_future()
        link = _ThreadLink(self, self._loop, self._limits.arena)
        self._thread = threading.Thread(
            target=self._serve, args=(backend, context, signature, link, loaded), name=self.name, daemon=True
        )
        self._thread.start()
        await loaded
        self._is_attached = True
        self.on_change()

    def _serve(
        self,
        backend: type[Any],
        context: ModelContext,
        signature: Signature,
        link: _ThreadLink,
        loaded: "asyncio.Future[None]",
    ) -> None:
        """The thread."""
        tell = self._loop.call_soon_threadsafe
        try:
            self._execution = target = execution(backend(context, self._context), signature, link, self._limits.batch)
        except BaseException as error:
            tell(_settle, loaded, failure(error).error())
            return
        tell(_settle, loaded, None)
        try:
            while (received := self._queue.get()) is not None:
                target.execute(*received, monotonic_ns())
                del received
        finally:
            try:
                target.close()
            except BaseException as error:
                context.services.log("ERROR", f"closing instance '{self.name}' failed: {error}", __file__, 0)

    def execute(self, batch: Execution) -> None:
        assert self.is_available, "an instance executes one batch at a time"
        number = self._batches.begin(batch)
        self.idle.clear()
        requests = batch.requests
        laid_out = layout.lay_out(requests)
        asked = layout.asked_outputs(requests)
        details = layout.details(requests, asked)
        frame = Execute(number, laid_out.inputs, list(batch.rows), asked, details, 0)
        size = laid_out.byte_size
        data = self._inputs
        if size > len(data):
            try:
                if size > self._limits.batch:
                    raise laid_out.too_large(self._model.spec.name, self._limits.batch)
                data = arena.private(size)
            except NaiadError as error:
                self._loop.call_soon(self._refuse, number, error)
                return
            frame.one_shot = size
        laid_out.write(data)
        self._queue.put((frame, data))

    def _refuse(self, number: int, error: NaiadError) -> None:
        self._batches.refuse(number, error)
        self._changed()

    def cancel(self, batch: Execution, index: int) -> None:
        number = self._batches.number(batch)
        if number is not None and self._execution is not None:
            self._execution.cancel(number, index)

    def on_results(self, results: Results, region: memoryview) -> None:
        """On the loop, from the instance's thread."""
        if results.keeps_inputs:
            self._inputs = arena.private(self._limits.arena)
        self._batches.deliver(results, region)
        self._changed()

    def _changed(self) -> None:
        if not self._batches:
            self.idle.set()
        self.on_change()

    async def close(self, timeout_s: float | None) -> None:
        """Waits for requests inside, then they fail. A thread that hangs is left behind."""
        self._is_attached = False
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle.wait()
        except TimeoutError:
            self._hangs = True
            self._batches.fail(
                Unavailable(
                    f"model '{self._model.spec.name}' was unloaded while instance '{self.name}' executed this request"
                )
            )
            self.idle.set()
        self._queue.put(None)
        if self._thread is not None and not self._hangs:
            await asyncio.to_thread(self._thread.join, 5.0)


class _ThreadServices:
    """`Services` within this process. What is said goes as messages here too: neither side changes the other's memory."""

    def __init__(
        self, spec: "ModelSpec", caller: Caller, on_log: OnLog, on_call: OnCall, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._caller = caller
        self._spec = spec
        self._on_log = on_log
        self._on_call = on_call
        self._loop = loop

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self._loop.call_soon_threadsafe(self._on_log, self._spec.name, self._spec.version, level, message, file, line)

    def call(self, method: str, arguments: Any, kind: type[T]) -> T:
        answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def reply(value: Any, error: BaseException | None) -> None:
            if error is None:
                try:
                    answer.set_result(msgspec.msgpack.encode(value))
                except TypeError as problem:
                    error = Internal(f"'{method}': {problem}")
            if error is not None:
                answer.set_exception(failure(error).error())

        asked = msgspec.Raw(msgspec.msgpack.encode(arguments))
        self._loop.call_soon_threadsafe(self._on_call, self._caller, method, asked, reply)
        return msgspec.msgpack.decode(answer.result(), type=kind)


class ThreadModel:
    """A model version in this process; the face of `HostedModel`."""

    pids: Sequence[int] = ()
    restarts = 0
    arena_bytes = 0

    def __init__(
        self,
        spec: "ModelSpec",
        limits: Limits,
        on_log: OnLog,
        on_call: OnCall,
        on_gone: OnGone,
        forget: Callable[["ThreadModel"], None],
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.takes_requests = False
        self.uses_gpus = False
        self.state = "stopped"
        self._threads: list[ThreadInstance] = []
        self._shared = Shared()
        self._forget = forget
        self._caller = new_caller(self._version())
        self._on_gone = on_gone
        self._services = _ThreadServices(spec, self._caller, on_log, on_call, asyncio.get_running_loop())
        self._backend: type[Any] = object
        self._is_closed = False

    @property
    def instances(self) -> list[Instance]:
        return list(self._threads)

    async def start(self) -> None:
        """Imports the backend. Raises NaiadError: unknown backend, missing import."""
        reference = self.spec.reference or self.spec.backend
        self._backend = await asyncio.to_thread(load_backend, self.spec.backend, reference)
        self.takes_requests = issubclass(self._backend, RequestBackend)
        self.uses_gpus = self._backend.uses_gpus()

    async def complete(self, config: ConfigDict) -> ConfigDict | None:
        """The configuration as the backend completes it, None to leave it. Raises the backend's error."""
        try:
            completed: ConfigDict | None = await asyncio.to_thread(
                self._backend.autocomplete, self._context(config, Shared())
            )
        except Exception as error:
            raise failure(error).error() from error
        return completed

    async def load(self, config: ConfigDict, instances: Sequence[InstanceContext]) -> list[Instance]:
        """Loads instances, ready to execute, beside those that there are. Raises the first error; then there are none
        of these; `close` is due in any case."""
        context = self._context(config, self._shared)
        loaded: list[ThreadInstance] = []
        try:
            for instance_context in instances:
                signature = Signature(self.spec.name, instance_context.name, config)
                instance = ThreadInstance(instance_context, self, signature.decoupled)
                self._threads.append(instance)
                loaded.append(instance)
                await instance.load(self._backend, context, signature)
        except BaseException:
            await self.remove(loaded)
            raise
        self.state = "running"
        return list(loaded)

    async def remove(self, instances: Sequence[Instance], timeout_s: float | None = None) -> None:
        """Unloads some of the instances. They take no more batches; what is inside them after `timeout_s` fails, and
        all of it when the version is closed."""
        leaving = [thread for thread in self._threads if thread in instances]
        await asyncio.gather(*(thread.close(timeout_s) for thread in leaving))
        self._threads = [thread for thread in self._threads if thread not in leaving]

    def reconfigure(self, config: ConfigDict) -> None:
        """Nothing is ever loaded again here."""

    @property
    def checks_readiness(self) -> bool:
        """Whether `is_ready` is worth asking."""
        return any(thread.backend is not None and thread.backend.checks_readiness for thread in self._threads)

    async def is_ready(self) -> bool:
        """What the model's own code says. Raises its error. Code in this process cannot be left behind: no timeout."""
        backends = [thread.backend for thread in self._threads if thread.backend is not None]
        try:
            return await asyncio.to_thread(lambda: all(backend.is_ready() for backend in backends))
        except Exception as error:
            raise failure(error).error() from error

    async def close(self, timeout_s: float = 30.0) -> None:
        """Unloads: waits up to `timeout_s` for requests inside, then they fail."""
        if not self._is_closed:
            self._is_closed = True
            self._forget(self)
            self.state = "stopped"
            await asyncio.gather(*(instance.close(timeout_s) for instance in self._threads))
            self._on_gone(self._caller)

    def tick(self, beat_s: float) -> None:
        """A thread cannot be killed: executions are not timed here."""

    def _context(self, config: ConfigDict, shared: Shared) -> ModelContext:
        return model_context(self._version(), config, self._services, shared, is_alone=False)

    def _version(self) -> VersionSpec:
        spec = self.spec
        return VersionSpec(
            spec.name,
            spec.version,
            str(spec.directory),
            str(spec.version_directory),
            str(spec.path),
            dict(spec.settings),
        )
