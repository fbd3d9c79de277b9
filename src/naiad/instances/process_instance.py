"""An instance that runs in a host process: the server's side, through which each batch passes. On the event loop."""

import asyncio
import os
from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

import msgspec

from naiad.backends.api import InstanceContext
from naiad.errors import NaiadError, ResourceExhausted
from naiad.instances import arena, layout
from naiad.instances.busy_poll import Awaited
from naiad.instances.channel import LoopChannel, socket_pair
from naiad.instances.delivery import Batches
from naiad.instances.frames import Cancel, Execute, Results
from naiad.instances.instance import Execution

if TYPE_CHECKING:
    from naiad.instances.process import Tenant

_decoder: Final = msgspec.msgpack.Decoder(Results)

#: Inputs above this are copied into their memory file by a thread, since that takes milliseconds.
_THREAD_COPY_BYTES: Final = 8 * 1024 * 1024


def _do_nothing() -> None:
    pass


class Limits(msgspec.Struct, frozen=True):
    """Sizes in bytes of what batches may take. Larger batches than an arena travel in memory files of their own."""

    #: Sixteen images of 6 MB fit in. To write a memory file for a batch takes three times as long, and only what has been
    #: written to takes memory.
    arena: int = 128 * 1024 * 1024
    #: The inputs, or the outputs, of one execution.
    batch: int = 8 * 1024 * 1024 * 1024


class ProcessInstance:
    """An `Instance` whose model is loaded in a host process."""

    def __init__(self, tenant: "Tenant", context: InstanceContext) -> None:
        self.name = context.name
        self.on_change: Callable[[], None] = _do_nothing
        self.failure: str | None = None
        self.losses = 0
        host = tenant.host
        self.place: Hashable = self if host.is_exclusive else (host, context.kind, context.device_id)
        self.context = context
        self._tenant = tenant
        self._loop = asyncio.get_running_loop()
        self._channel: LoopChannel[Results] | None = None
        self._inputs: memoryview | None = None
        self._outputs: memoryview | None = None
        self._batches = Batches(tenant.spec.name, tenant.spec.version, tenant.decoupled)
        self._ticks = 0
        self._copying: set[asyncio.Task[None]] = set()
        self._is_attached = False
        #: Memory of clients that the batch inside is about.
        self._files = layout.Files()
        self._awake = tenant.host.awake
        self._awaited_results = Awaited()
        self._awaited_batch = Awaited()

    def __repr__(self) -> str:
        state = self.failure or ("busy" if self._batches else "idle" if self._is_attached else "down")
        return f"<ProcessInstance {self.name}: {state}>"

    @property
    def is_available(self) -> bool:
        return self._is_attached and not self._batches.executing

    @property
    def is_busy(self) -> bool:
        """Whether any request inside has no final answer."""
        return bool(self._batches)

    # ---- the life of the connection ---------------------------------------------------------------------

    def connect(self) -> list[int]:
        """Makes socket and arenas; the descriptors for the host, which the caller closes once they are sent. Raises
        ResourceExhausted."""
        size = self._tenant.host.limits.arena
        fds: list[int] = []
        try:
            input_fd = arena.create("naiad inputs", size)
            fds.append(input_fd)
            output_fd = arena.create("naiad outputs", size)
            fds.append(output_fd)
            self._inputs = arena.map_shared(input_fd, size)
            self._outputs = arena.map_shared(output_fd, size)
            mine, theirs = socket_pair()
        except NaiadError:
            for fd in fds:
                os.close(fd)
            raise
        self._channel = LoopChannel(self._loop, mine, _decoder, self._on_results, self._on_end)
        return [theirs.detach(), *fds]

    def attach(self) -> None:
        """The host has loaded it: from now on it takes batches."""
        self._is_attached = True
        self.on_change()

    def detach(self) -> None:
        """Takes no batches any more; those inside go on."""
        self._is_attached = False

    def disconnect(self, error: NaiadError) -> None:
        """Ends the connection; what is inside fails with `error`."""
        self._is_attached = False
        self.losses += 1
        if self._channel is not None:
            self._channel.drain()
            self._channel.close()
            self._channel = None
        # Freed when the last view of a result goes.
        self._inputs = self._outputs = None
        self._forget_files()
        self._batches.fail(error)
        self._tenant.host.changed()

    def give_up(self, reason: str) -> None:
        self.failure = reason
        self.on_change()

    def tick(self, limit: int) -> bool:
        """Called at every beat of the pool's timer: whether the batch inside has seen more than `limit` of them."""
        if not self._batches.executing:
            return False
        self._ticks += 1
        return self._ticks > limit

    def _on_end(self, reason: str | None) -> None:
        self._tenant.host.connection_lost(reason or f"closed the connection of instance '{self.name}'")

    # ---- batches ----------------------------------------------------------------------------------------

    def execute(self, batch: Execution) -> None:
        assert self.is_available, "an instance executes one batch at a time"
        number = self._batches.begin(batch)
        self._ticks = 0
        requests = batch.requests
        laid_out = layout.lay_out(requests)
        asked = layout.asked_outputs(requests)
        details = layout.details(requests, asked) if self._tenant.takes_requests else None
        frame = Execute(number, laid_out.inputs, list(batch.rows), asked, details, 0)
        files = self._files
        if not self._tenant.decoupled:
            frame.targets = layout.targets(requests, files)
        now = monotonic_ns()
        self._awaited_batch.came(now, self._awake.window_ns)
        self._expect(self._awaited_results, now)
        inputs, channel = self._inputs, self._channel
        assert channel is not None
        if laid_out.byte_size > self._tenant.host.limits.arena:
            self._execute_large(frame, laid_out, files)
        elif inputs is None:
            self._execute_in_new_arena(frame, laid_out, channel, files)
        else:
            self._write(frame, laid_out, inputs, files)
            channel.send(frame, list(files.descriptors))

    def _write(self, frame: Execute, laid_out: layout.Layout, inputs: memoryview, files: layout.Files) -> None:
        """Puts the inputs into the arena, or has the host fetch them; not those of decoupled models, whose clients may go on
        with what has been answered before."""
        if self._tenant.decoupled:
            laid_out.write(inputs)
        else:
            frame.sources = laid_out.write(inputs, files) or None
        frame.file_count = len(files.descriptors)

    def _forget_files(self) -> None:
        """The memory is its clients' again, who may want it to go."""
        if self._files.descriptors:
            self._files = layout.Files()

    def _expect(self, awaited: Awaited, now: int) -> None:
        awaited.begin(now)
        if awaited.is_soon:
            self._awake.stay_awake(now)

    def _execute_in_new_arena(
        self, frame: Execute, laid_out: layout.Layout, channel: LoopChannel[Results], files: layout.Files
    ) -> None:
        """Model code keeps arrays that lie in the old one."""
        size = self._tenant.host.limits.arena
        try:
            fd = arena.create("naiad inputs", size)
        except NaiadError as error:
            self._refuse(frame.batch, error)
            return
        try:
            self._inputs = arena.map_shared(fd, size)
            self._write(frame, laid_out, self._inputs, files)
            channel.send(frame, (fd, *files.descriptors))
        except NaiadError as error:
            self._refuse(frame.batch, error)
        finally:
            os.close(fd)

    def _execute_large(self, frame: Execute, laid_out: layout.Layout, files: layout.Files) -> None:
        size = laid_out.byte_size
        limit = self._tenant.host.limits.batch
        if size > limit:
            self._refuse(frame.batch, laid_out.too_large(self._tenant.spec.name, limit))
            return
        try:
            fd = arena.create("naiad inputs", size)
        except NaiadError as error:
            self._refuse(frame.batch, error)
            return
        frame.one_shot = size
        if size <= _THREAD_COPY_BYTES:
            self._send_large(frame, laid_out, fd, files)
        else:
            task = self._loop.create_task(self._copy_large(frame, laid_out, fd, files))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)

    def _send_large(self, frame: Execute, laid_out: layout.Layout, fd: int, files: layout.Files) -> None:
        try:
            laid_out.write_file(fd)
        except OSError as error:
            self._refuse(frame.batch, ResourceExhausted(f"cannot store {frame.one_shot} bytes of inputs: {error}"))
        else:
            self._send_one_shot(frame, fd, files)
        finally:
            os.close(fd)

    async def _copy_large(self, frame: Execute, laid_out: layout.Layout, fd: int, files: layout.Files) -> None:
        try:
            await asyncio.to_thread(laid_out.write_file, fd)
        except OSError as error:
            self._refuse(frame.batch, ResourceExhausted(f"cannot store {frame.one_shot} bytes of inputs: {error}"))
        else:
            self._send_one_shot(frame, fd, files)
        finally:
            os.close(fd)

    def _send_one_shot(self, frame: Execute, fd: int, files: layout.Files) -> None:
        # The host may have died, and the instance been connected to another one, while the inputs were copied.
        if frame.batch in self._batches and self._channel is not None:
            frame.file_count = len(files.descriptors)
            self._channel.send(frame, (fd, *files.descriptors))

    def _refuse(self, number: int, error: NaiadError) -> None:
        """Answers a batch that cannot be handed over; not from within `execute`, whose caller may not expect it."""
        self._loop.call_soon(self._refuse_now, number, error)

    def _refuse_now(self, number: int, error: NaiadError) -> None:
        if number in self._batches:
            self._forget_files()
            self._batches.refuse(number, error)
            self._tenant.host.changed()
            self.on_change()

    def cancel(self, batch: Execution, index: int) -> None:
        if (number := self._batches.number(batch)) is not None:
            self._tenant.host.send(Cancel(self._tenant.number, self.name, number, index))

    def _on_results(self, results: Results, fds: list[int]) -> None:
        now = monotonic_ns()
        self._awaited_results.came(now, self._awake.window_ns)
        try:
            self._deliver(results, fds)
        except (NaiadError, ValueError, KeyError, IndexError, ZeroDivisionError, OSError) as error:
            # Memory corrupted by native code shows like this. Nothing this host says can be trusted now.
            self._tenant.host.kill(f"sent results that make no sense: {error}")
        else:
            self._expect(self._awaited_results if self._batches.executing else self._awaited_batch, now)

    def _deliver(self, results: Results, fds: list[int]) -> None:
        region = self._outputs
        assert region is not None
        if fds:
            try:
                region = arena.map_foreign(fds[0], results.one_shot)
            finally:
                for fd in fds:
                    os.close(fd)
        if results.keeps_inputs:
            self._inputs = None
        if results.lost is not None:
            for index in results.lost:
                self._files.unread[index].was_lost()
        if results.times is not None:
            self._forget_files()
        if self._batches.deliver(results, region):
            self.on_change()
        if not self._is_attached:
            self._tenant.host.changed()
