"""A host: the process in which models run. Forked from a zygote; `main` is all it ever does.

Threads: one listens to the control socket and lives as long as the process; its end-of-file is the end of the
process. The main thread loads models. Each instance has a thread that waits on the instance's own socket, so that a
batch changes hands nowhere; a host of a single instance runs it in the main thread, as model code may expect.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypeVar

import msgspec

from naiad.backends.api import InstanceContext, ModelContext, Shared
from naiad.errors import NaiadError, Unavailable, text_of
from naiad.instances import arena, heap
from naiad.instances.busy_poll import BusyPoll
from naiad.instances.channel import BlockingChannel
from naiad.instances.client_memory import client_memory
from naiad.instances.cuda_driver import lasting_error
from naiad.instances.execution import ArrayExecution, OneShot, RequestExecution, Signature, execution
from naiad.instances.frames import (
    Answer,
    Call,
    Cancel,
    Complete,
    Ending,
    Execute,
    InstanceSpec,
    IsReady,
    Load,
    Log,
    OpenCalls,
    Reply,
    Response,
    Results,
    ToHost,
    Unload,
    VersionSpec,
    failure,
)

T = TypeVar("T")

_control_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
_execute_decoder = msgspec.msgpack.Decoder(Execute)
_answer_decoder: msgspec.msgpack.Decoder[Answer[msgspec.Raw]] = msgspec.msgpack.Decoder(Answer[msgspec.Raw])

#: So much memory of freed tensors is kept for those of the next batch.
_KEPT_MEMORY = 256 << 20
_heap = heap.Heap(_KEPT_MEMORY)


def _give_back() -> bool:
    """Gives back what has not been used for a while; whether there is something left to give back later."""
    has_objects = client_memory.drop_unused()
    return _heap.trim_unused() or has_objects


class SocketLink:
    """An instance's socket and arenas, as the host sees them. `end` ends the process, which has met an error that lasts."""

    def __init__(
        self, sock: socket.socket, input_fd: int, output_fd: int, busy_poll: BusyPoll, end: Callable[[str], None]
    ) -> None:
        self.inputs = arena.map_shared(input_fd, os.fstat(input_fd).st_size)
        self.outputs = arena.map_shared(output_fd, os.fstat(output_fd).st_size)
        self._channel = BlockingChannel(sock, _execute_decoder, busy_poll, _give_back)
        self._end = end
        #: A batch with targets or sources, the descriptors of these, and which sources were lost.
        self._targeted: Execute | None = None
        self._files: list[int] = []
        self._lost: list[int] | None = None

    def receive(self) -> tuple[Execute, memoryview] | None:
        """The next batch and the memory of its inputs; None when the server has ended the instance. Nobody writes to the
        targets of the last one any more."""
        self._close_files()
        received = self._channel.receive()
        if received is None:
            return None
        frame, fds = received
        if frame.file_count:
            fds, self._files = fds[: -frame.file_count], fds[-frame.file_count :]
            self._targeted = frame
            for place in (*(frame.targets or ()), *(frame.sources or ())):
                place.file = self._files[place.file]
        if not fds:
            return frame, self.inputs
        try:
            if frame.one_shot:
                return frame, arena.map_shared(fds[0], frame.one_shot)
            # Model code keeps arrays of the one before.
            self.inputs = arena.map_shared(fds[0], os.fstat(fds[0]).st_size)
            return frame, self.inputs
        except NaiadError as error:
            problem = failure(error)
        finally:
            os.close(fds[0])
        now = monotonic_ns()
        self._channel.send(Results(frame.batch, None, None, problem, (now, now, now, now), 0))
        return self.receive()

    def read_sources(self, frame: Execute, inputs: memoryview) -> None:
        """Copies what still lies in memory of clients to where the batch has it; zeros for what is not there any more."""
        self._lost = None
        for index, source in enumerate(frame.sources or ()):
            target = inputs[source.offset : source.offset + source.byte_size]
            try:
                is_read = client_memory.read(source.file, source.position, target)
            except OSError:
                is_read = False
            if not is_read:
                target[:] = bytes(len(target))
                self._lost = [*(self._lost or ()), index]

    def send(self, results: Results, one_shot: OneShot | None) -> None:
        results.lost = self._lost
        if results.times is not None:
            _heap.used(results.times[0], results.times[3])
        lasting = None
        if results.failure is not None or (results.responses and _has_failure(results.responses)):
            lasting = lasting_error()
            if lasting is not None:
                # The next batch is one for the next process.
                results.times = None
        try:
            if one_shot is None or one_shot.fd is None:
                self._channel.send(results)
            else:
                self._channel.send(results, (one_shot.fd,))
        except OSError:
            # The server has closed the instance; nobody waits for this any more.
            pass
        finally:
            if one_shot is not None and one_shot.fd is not None:
                os.close(one_shot.fd)
        if lasting is not None:
            self._end(lasting)

    def one_shot(self, byte_size: int) -> OneShot:
        fd = arena.create("naiad outputs", byte_size)
        try:
            return OneShot(arena.map_shared(fd, byte_size), fd)
        except NaiadError:
            os.close(fd)
            raise

    def _close_files(self) -> None:
        if self._targeted is not None:
            # These numbers may soon be those of other files.
            self._targeted.targets = None
            self._targeted = None
        while self._files:
            os.close(self._files.pop())

    def close(self) -> None:
        self._close_files()
        self._channel.close()

    def forked(self) -> None:
        """This is a child that model code has forked: what it does with results is to have no effect."""
        self.close()
        self.outputs = arena.private(len(self.outputs))


def _has_failure(responses: Sequence[Response]) -> bool:
    return any(response.failure is not None for response in responses)


class HostServices:
    """`Services` of one model: by way of the control socket."""

    def __init__(self, host: "Host", model: int) -> None:
        self._host = host
        self._model = model

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self._host.send(Log(self._model, level, message, file, line))

    def call(self, method: str, arguments: Any, kind: type[T]) -> T:
        return msgspec.msgpack.decode(self._host.call(self._model, method, arguments), type=kind)


def model_context(
    spec: VersionSpec, config: dict[str, Any], services: Any, shared: Shared, is_alone: bool
) -> ModelContext:
    """What a backend gets to see of a version. `shared` is what its instances share, `is_alone` whether they are the only
    ones in the process."""
    return ModelContext(
        name=spec.name,
        version=spec.version,
        directory=Path(spec.directory),
        version_directory=Path(spec.version_directory),
        path=Path(spec.path),
        config=config,
        settings=spec.settings,
        services=services,
        is_alone=is_alone,
        _shared=shared,
    )


class Host:
    """The models of this process."""

    def __init__(self, control: socket.socket, backend: type[Any], exclusive: bool, busy_poll: BusyPoll) -> None:
        self._control = BlockingChannel(control, _control_decoder)
        self._zygote = os.getppid()
        self._backend = backend
        self._exclusive = exclusive
        self._busy_poll = busy_poll
        self._jobs: queue.SimpleQueue[tuple[ToHost, list[int]]] = queue.SimpleQueue()
        self._executions: dict[tuple[int, str], ArrayExecution | RequestExecution] = {}
        self._threads: dict[int, list[threading.Thread]] = {}
        #: By `Load.sharing`, as long as there are instances: each has its context.
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self._links: set[SocketLink | BlockingChannel[Answer[msgspec.Raw]]] = set()
        #: The sockets for calls that no thread uses.
        self._free_calls: list[BlockingChannel[Answer[msgspec.Raw]]] = []
        self._is_fork = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Model code has forked: the child has this host's sockets and arenas, but is not this host and must answer
        nothing."""
        self._is_fork = True
        client_memory.clear()
        for link in self._links:
            if isinstance(link, SocketLink):
                link.forked()
            else:
                link.close()

    def _end_if_forked(self) -> None:
        """Where model code has come back to us, in a child that did not end by itself."""
        if self._is_fork:
            os._exit(0)

    def send(self, frame: Reply | Log | Ending) -> None:
        self._control.send(frame)

    def reply(self, frame: Reply) -> None:
        self._end_if_forked()
        self.send(frame)
        if frame.failure is not None and (error := lasting_error()) is not None:
            self._end(error)

    def _end(self, error: str) -> None:
        """Ends the process, in which CUDA does nothing any more but fail with `error`; the server starts another one."""
        if self._is_fork:
            return
        with contextlib.suppress(OSError):
            self.send(Ending(f"ended itself, since CUDA fails for good in a process that has met {error}"))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(1)

    def call(self, model: int, method: str, arguments: Any) -> msgspec.Raw:
        """Asks the server and waits. Raises NaiadError; Unavailable if the server is gone."""
        if self._is_fork:
            # Nobody would hear the answer.
            raise Unavailable("a process that model code has forked cannot ask the server for anything")
        try:
            link = self._free_calls.pop()
        except IndexError:
            link = self._open_calls()
        try:
            link.send(Call(model, method, arguments))
            received = link.receive()
        except BaseException as error:
            # Its answer would be taken for that of the next call.
            self._close(link)
            if isinstance(error, OSError):
                raise Unavailable("the server has ended") from error
            raise
        if received is None:
            self._close(link)
            raise Unavailable("the server has ended")
        answer = received[0]
        # The next answer is read into the same buffer.
        value = answer.value.copy()
        self._free_calls.append(link)
        if answer.failure is not None:
            raise answer.failure.error()
        return value

    def _open_calls(self) -> BlockingChannel[Answer[msgspec.Raw]]:
        mine, theirs = socket.socketpair()
        link = BlockingChannel(mine, _answer_decoder, self._busy_poll)
        self._links.add(link)
        with theirs:
            try:
                self._control.send(OpenCalls(), (theirs.fileno(),))
            except OSError as error:
                self._close(link)
                raise Unavailable("the server has ended") from error
        return link

    def listen(self) -> None:
        """The control thread."""
        while (received := self._control.receive()) is not None:
            frame, fds = received
            if isinstance(frame, Cancel):
                if (target := self._executions.get((frame.model, frame.instance))) is not None:
                    target.cancel(frame.batch, frame.index)
            elif isinstance(frame, IsReady):
                # The main thread may be busy executing, and this one must go on listening.
                threading.Thread(target=self._is_ready, args=(frame,), name="readiness", daemon=True).start()
            else:
                self._jobs.put((frame, fds))
        if os.getppid() != self._zygote:
            # Nobody else will end what models have started; this process is one of the group.
            os.killpg(0, signal.SIGKILL)
        # Model code may hold any lock or thread: nothing but leaving at once is sure to end.
        os._exit(0)

    def run(self) -> None:
        """The main thread."""
        while True:
            frame, fds = self._jobs.get()
            if isinstance(frame, Complete):
                self._complete(frame)
            elif isinstance(frame, Load):
                self._load(frame, fds)
            elif isinstance(frame, Unload):
                for thread in self._threads.pop(frame.model, []):
                    thread.join()
                self.send(Reply(frame.reply, None, None))

    def _complete(self, frame: Complete) -> None:
        try:
            context = model_context(
                frame.spec, frame.config, HostServices(self, frame.model), Shared(), self._exclusive
            )
            # In the try, as what a backend has made of a configuration need not be fit to travel.
            self.reply(Reply(frame.reply, self._backend.autocomplete(context), None))
        except BaseException as error:
            self.reply(Reply(frame.reply, None, failure(error)))

    def _is_ready(self, frame: IsReady) -> None:
        try:
            targets = [target for (model, _), target in list(self._executions.items()) if model == frame.model]
            reply = Reply(frame.reply, all(target.backend.is_ready() for target in targets), None)
        except BaseException as error:
            reply = Reply(frame.reply, None, failure(error))
        self.reply(reply)

    def _checks_readiness(self, model: int) -> bool:
        targets = list(self._executions.items())
        return any(target.backend.checks_readiness for (number, _), target in targets if number == model)

    def _load(self, frame: Load, fds: list[int]) -> None:
        links = [
            SocketLink(socket.socket(fileno=fds[at]), fds[at + 1], fds[at + 2], self._busy_poll, self._end)
            for at in range(0, len(fds), 3)
        ]
        for at in range(0, len(fds), 3):
            os.close(fds[at + 1])
            os.close(fds[at + 2])
        shared = self._shared.setdefault(frame.sharing, Shared())
        context = model_context(frame.spec, frame.config, HostServices(self, frame.model), shared, self._exclusive)
        threads = self._threads[frame.model] = []
        problem: BaseException | None = None
        for spec, link in zip(frame.instances, links, strict=True):
            if problem is not None:
                link.close()
                continue
            outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            if self._exclusive:

                def loaded(error: BaseException | None) -> None:
                    problem = None if error is None else failure(error)
                    self.reply(Reply(frame.reply, self._checks_readiness(frame.model), problem))

                self._serve(frame, context, spec, link, loaded)
                return
            thread = threading.Thread(
                target=self._serve, args=(frame, context, spec, link, outcome.put), name=spec.name, daemon=True
            )
            thread.start()
            threads.append(thread)
            problem = outcome.get()
        checks_readiness = self._checks_readiness(frame.model)
        self.reply(Reply(frame.reply, checks_readiness, None if problem is None else failure(problem)))

    def _serve(
        self,
        frame: Load,
        context: ModelContext,
        spec: InstanceSpec,
        link: SocketLink,
        loaded: Callable[[BaseException | None], None],
    ) -> None:
        """The life of an instance: construct, execute batch by batch, close."""
        self._links.add(link)
        try:
            instance = InstanceContext(spec.name, spec.kind, spec.device_id)  # type: ignore[arg-type]
            signature = Signature(context.name, spec.name, context.config)
            target = execution(self._backend(context, instance), signature, link, frame.batch_byte_limit)
        except BaseException as error:
            self._close(link)
            loaded(error)
            return
        self._executions[frame.model, spec.name] = target
        self._busy_poll.executing.add(threading.get_ident())
        loaded(None)
        try:
            while (received := link.receive()) is not None:
                received_ns = monotonic_ns()
                link.read_sources(*received)
                target.execute(*received, received_ns)
                self._end_if_forked()
                del received
        finally:
            del self._executions[frame.model, spec.name]
            self._busy_poll.executing.discard(threading.get_ident())
            self._close(link)
            try:
                target.close()
            except BaseException as error:
                text = f"closing instance '{spec.name}' failed: {text_of(error)}"
                self.send(Log(frame.model, "ERROR", text, __file__, 0))
            # Model code may have closed it, or put what it likes in its place.
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            del target
            _heap.leave()

    def _close(self, link: SocketLink | BlockingChannel[Answer[msgspec.Raw]]) -> None:
        self._links.discard(link)
        link.close()


def ignore_signals() -> None:
    """Makes SIGINT and SIGTERM, which a terminal or a service manager sends to all processes, wait for the server:
    it drains and then ends its hosts. Handlers, not SIG_IGN: programs that models start shall not inherit it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)


def _ignore(number: int, frame: object) -> None:
    pass


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


def main(control: socket.socket, backend: type[Any], exclusive: bool, busy_poll: BusyPoll) -> None:
    """Serves the control socket until it ends; does not return."""
    os.register_at_fork(after_in_child=_default_signals)
    os.register_at_fork(after_in_child=_heap.forked)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    host = Host(control, backend, exclusive, busy_poll)
    threading.Thread(target=host.listen, name="control", daemon=True).start()
    host.run()
