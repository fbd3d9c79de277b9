"""Shared memory that clients register: system regions (POSIX objects in /dev/shm) and CUDA regions.

Owns the registry, the policy of who may use it and every check of a name, offset or size. Lives on the event loop, which
does not wait for CUDA: a request with regions on GPUs begins when its inputs have been copied, and a result goes on when
its outputs have been, both by the thread of `cuda_memory`.

A system region is read and written through its file descriptor, not through a mapping: a client that shrinks the object
while it is registered would end the whole server with SIGBUS at the next touch of a mapped page. It also means that the
bytes a request was checked with are the bytes that are computed with. Large parts, but those of BYTES, are checked by
their size alone, which does not change, and are read when the batch is made, straight to where it lies, by the process
that computes; so may large outputs be written. That process gets the descriptor for the time of the batch.
"""

import asyncio
import errno
import ipaddress
import logging
import mmap
import os
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, Literal, Protocol, TypeVar

from naiad.datatypes import Buffer
from naiad.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NaiadError,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from naiad.messages import (
    UNREAD_FROM,
    Destination,
    InferRequest,
    InferResponse,
    ResponseSink,
    Result,
    Tensor,
    Unread,
)
from naiad.protocol.cuda_memory import CudaMemory, cuda_thread

_LOGGER = logging.getLogger(__name__)


class Cancellable(Protocol):
    def cancel(self) -> None: ...


_Call = TypeVar("_Call", bound=Cancellable)

#: Called with True when the use of a region begins, with False when it has ended.
OnUse = Callable[[bool], None]
RegionPolicy = Literal["true", "false", "local"]

#: Keys of the Python backend's own memory in a Triton server that shares /dev/shm with this one.
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class _Writable(Protocol):
    def write(self, offset: int, data: Buffer) -> None: ...


class OutputRegion:
    """A checked part of a region that an output goes to; the memory stays open as long as this is held."""

    __slots__ = ("_memory", "_offset", "byte_size")

    def __init__(self, memory: _Writable, offset: int, byte_size: int) -> None:
        self._memory = memory
        self._offset = offset
        self.byte_size = byte_size

    def write(self, tensor: Tensor) -> None:
        """Stores its elements at the start of the part, unless its model has done that. Raises Internal where they do not
        fit."""
        contents = tensor.contents
        if isinstance(contents, Unread) and contents.is_at(self._memory, self._offset):
            return
        data = tensor.data
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if size > self.byte_size:
            raise Internal(
                f"shared memory size specified with the request for output '{tensor.name}' ({self.byte_size} bytes) "
                f"should be at least {size} bytes to hold the results"
            )
        if size:
            self._memory.write(self._offset, data)


class _SystemMemory:
    """An object in /dev/shm from byte `start` on."""

    def __init__(self, fd: int, start: int, key: str) -> None:
        self.fd = fd
        self._start = start
        self._key = key

    def read(self, offset: int, byte_size: int) -> Buffer:
        data = os.pread(self.fd, byte_size, self._start + offset)
        if len(data) != byte_size:
            # A read may be cut short in the middle (2 GiB at most); at the end of the object it returns nothing.
            parts = [data]
            size = len(data)
            while size < byte_size:
                part = os.pread(self.fd, byte_size - size, self._start + offset + size)
                if not part:
                    raise self.lost()
                parts.append(part)
                size += len(part)
            data = b"".join(parts)
        return data

    def read_into(self, offset: int, target: memoryview) -> None:
        at = self._start + offset
        while target:
            size = os.preadv(self.fd, (target,), at)
            if not size:
                raise self.lost()
            at += size
            target = target[size:]

    def unread(self, offset: int, byte_size: int) -> Unread:
        """A part, to be read when a batch is made. Raises InvalidArgument where it is not there any more."""
        if os.fstat(self.fd).st_size < self._start + offset + byte_size:
            raise self.lost()
        return Unread(self, offset, byte_size, self.fd, self._start + offset)

    def destination(self, offset: int, byte_size: int) -> Destination:
        """A part for an output that its model may write."""
        return Destination(self, offset, self.fd, self._start + offset, byte_size)

    def write(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        at = self._start + offset
        if os.fstat(self.fd).st_size < at + len(view):
            # Writing beyond the end would make the client's object grow again.
            raise self.lost()
        while view:
            written = os.pwrite(self.fd, view, at)
            at += written
            view = view[written:]

    def lost(self) -> NaiadError:
        return InvalidArgument(
            f"shared memory object '{self._key}' has become smaller since it was registered; register it again"
        )

    def __del__(self) -> None:
        os.close(self.fd)


class _Region:
    """A registered region: `key` and `offset` of a system one, `device_id` of a CUDA one; `uses` counts inferences.

    The memory is freed with the last reference to it.
    """

    __slots__ = ("byte_size", "device_id", "key", "memory", "offset", "uses")

    def __init__(
        self, memory: "_SystemMemory | CudaMemory", byte_size: int, key: str = "", offset: int = 0, device_id: int = -1
    ) -> None:
        self.memory = memory
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.device_id = device_id
        self.uses = 0

    @property
    def is_cuda(self) -> bool:
        return self.device_id >= 0

    def close(self) -> None:
        """Nobody uses it any more: its owner may want to free memory on a GPU, whoever still refers to it here."""
        if isinstance(self.memory, CudaMemory):
            self.memory.close()


class _AdoptedRegion(_Region):
    """A region that another process keeps, which is told when its use here begins and when it ends."""

    __slots__ = ("_on_use", "_uses")

    def __init__(self, on_use: OnUse, memory: "_SystemMemory | CudaMemory", byte_size: int, **place: Any) -> None:
        self._on_use = on_use
        self._uses = 0
        super().__init__(memory, byte_size, **place)

    @property
    def uses(self) -> int:
        return self._uses

    @uses.setter
    def uses(self, count: int) -> None:
        if bool(count) != bool(self._uses):
            self._on_use(count > 0)
        self._uses = count


class Regions:
    """The registry. System and CUDA regions share one namespace.

    `allow` says who may register and use regions: "true" everybody, "false" nobody, "local" clients on this machine;
    front ends pass `local` (see `is_local_peer`). `key_prefixes` limits the keys to those that begin with one of
    them; empty is no limit. Requests get at regions by `RegionUse`, and a region in use cannot be unregistered.
    """

    def __init__(
        self,
        allow: RegionPolicy = "local",
        key_prefixes: Sequence[str] = (),
        directory: str = "/dev/shm",
        limit: int = 4096,
    ) -> None:
        self.allow = allow
        self._key_prefixes = tuple(prefix.lstrip("/") for prefix in key_prefixes)
        self._directory = directory
        self._limit = limit
        self._regions: dict[str, _Region] = {}
        #: What is registered now.
        self.names = self._regions.keys()

    def register_system(self, name: str, key: str, offset: int, byte_size: int, local: bool = True) -> None:
        """Registers `byte_size` bytes from `offset` on of the POSIX shared memory object `key`."""
        self._admit(name, local)
        memory = self._open(name, key, offset, byte_size)
        self._regions[name] = _Region(memory, byte_size, key=key, offset=offset)

    async def register_cuda(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, local: bool = True
    ) -> None:
        """Registers the device memory behind a 64-byte CUDA IPC handle."""
        self._admit(name, local)
        memory = CudaMemory(name, raw_handle, device_id, byte_size)
        await asyncio.wrap_future(memory.opened)
        # Another client may have been faster.
        self._admit(name, local)
        self._regions[name] = _Region(memory, byte_size, device_id=device_id)

    def adopt_system(self, name: str, fd: int, key: str, offset: int, byte_size: int, on_use: OnUse) -> None:
        """A system region that another process has registered. Takes the descriptor over."""
        self._regions[name] = _AdoptedRegion(on_use, _SystemMemory(fd, offset, key), byte_size, key=key, offset=offset)

    def adopt_cuda(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, on_use: OnUse
    ) -> "asyncio.Future[None]":
        """A CUDA region that another process has registered; done when it is open. Raises InvalidArgument, as the future
        does, where it cannot be opened here."""
        memory = CudaMemory(name, raw_handle, device_id, byte_size)
        self._regions[name] = _AdoptedRegion(on_use, memory, byte_size, device_id=device_id)
        return asyncio.wrap_future(memory.opened)

    def drop(self, names: Iterable[str]) -> "asyncio.Future[None] | None":
        """Forgets regions, whoever uses them. Memory of GPUs among them that nobody uses is closed when the future is
        done."""
        has_cuda = False
        for name in names:
            region = self._regions.pop(name, None)
            if region is not None and region.is_cuda:
                has_cuda = True
                if not region.uses:
                    region.close()
        return asyncio.ensure_future(cuda_thread.settled()) if has_cuda else None

    def unregister_system(self, name: str = "") -> None:
        """Forgets one system region, or all; a name that is not there, or is CUDA memory, is no error.

        Raises Internal for a region in use; of all regions those that are not in use are forgotten all the same.
        """
        self._forget(name, cuda=False)

    async def unregister_cuda(self, name: str = "") -> None:
        """As `unregister_system`. When it is done the memory is closed, and its owner may free it."""
        self._forget(name, cuda=True)
        await cuda_thread.settled()

    def status_system(self, name: str = "") -> list[tuple[str, str, int, int]]:
        """`(name, key, offset, byte_size)` of one system region, or of all in the order of their names."""
        return [(found, region.key, region.offset, region.byte_size) for found, region in self._status(name, False)]

    def status_cuda(self, name: str = "") -> list[tuple[str, int, int]]:
        """`(name, device_id, byte_size)` of one CUDA region, or of all in the order of their names."""
        return [(found, region.device_id, region.byte_size) for found, region in self._status(name, True)]

    def part(self, name: str, offset: int, byte_size: int, local: bool) -> _Region:
        """The region, of which that part may be used. Raises NotFound, Unsupported, InvalidArgument."""
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        self._permit(local)
        if not 0 <= offset < region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{name}'")
        # No bytes at offset 0 are refused by Triton, no bytes elsewhere are not.
        if byte_size < 0 or offset + byte_size > region.byte_size or offset + byte_size == 0:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region

    def _permit(self, local: bool) -> None:
        if self.allow == "false" or (self.allow == "local" and not local):
            raise Unsupported(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )

    def _admit(self, name: str, local: bool) -> None:
        self._permit(local)
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= self._limit:
            raise ResourceExhausted(
                f"shared memory region '{name}' is one more than the {self._limit} that can be registered; "
                "unregister some first"
            )

    def _open(self, name: str, key: str, offset: int, byte_size: int) -> _SystemMemory:
        entry = key.lstrip("/")
        if entry.startswith(_RESERVED_PREFIX):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED_PREFIX}'"
            )
        if self._key_prefixes and not entry.startswith(self._key_prefixes):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}': keys must begin with one of "
                f"{', '.join(self._key_prefixes)}"
            )
        if not entry or "/" in entry or "\0" in entry or entry in (".", ".."):
            raise Internal(f"Unable to open shared memory region: '{key}'")
        try:
            fd = os.open(f"{self._directory}/{entry}", _OPEN_FLAGS)
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceExhausted(f"Unable to open shared memory region: '{key}': {error.strerror}") from error
            raise Internal(f"Unable to open shared memory region: '{key}'") from error
        memory = _SystemMemory(fd, offset, key)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Internal(f"Unable to open shared memory region: '{key}'")
        if offset < 0 or byte_size < 0 or offset + byte_size > status.st_size:
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        if byte_size == 0 or offset % mmap.PAGESIZE:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': unable to process address space"
                f"{os.strerror(errno.EINVAL)}"
            )
        return memory

    def _status(self, name: str, cuda: bool) -> list[tuple[str, _Region]]:
        if not name:
            return [item for item in sorted(self._regions.items(), key=_by_name) if item[1].is_cuda == cuda]
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find {'cuda' if cuda else 'system'} shared memory region: '{name}'")
        if region.is_cuda != cuda:
            found, wanted = ("system", "CUDA") if cuda else ("CUDA", "system")
            raise NotFound(
                f"The region named '{name}' is registered as {found} shared memory, not {wanted} shared memory"
            )
        return [(name, region)]

    def _forget(self, name: str, cuda: bool) -> None:
        if name:
            region = self._regions.get(name)
            if region is not None and region.is_cuda == cuda:
                if region.uses:
                    raise Internal(f"Cannot unregister shared memory region '{name}', it is currently in use.")
                self._regions.pop(name).close()
            return
        kept = ""
        for found, region in self._status("", cuda):
            if region.uses:
                kept += f"{found} ,"
            else:
                self._regions.pop(found).close()
        if kept:
            kind = "cuda" if cuda else "system"
            raise Internal(f"Failed to unregister the following {kind} shared memory regions: {kept}")


class RegionUse:
    """The way of one request to the regions, which remembers those that it uses."""

    __slots__ = ("_copies", "_destinations", "_local", "_regions", "_unread", "_used")

    def __init__(self, regions: Regions, local: bool) -> None:
        self._regions = regions
        self._local = local
        self._used: list[_Region] = []
        self._unread: list[Unread] = []
        self._destinations: dict[str, Destination] = {}
        #: None without regions on GPUs.
        self._copies: _Copies | None = None

    def input(self, name: str, offset: int, byte_size: int) -> Buffer | Unread:
        """A copy of part of a region, or the part itself where that is large; of one on a GPU its place, which is filled
        when the inference begins. Raises what `Regions.part` does, and InvalidArgument where a region has shrunk."""
        region = self._regions.part(name, offset, byte_size, self._local)
        self._used.append(region)
        memory = region.memory
        if isinstance(memory, CudaMemory):
            return self._cuda_copies().input(memory, offset, byte_size)
        if byte_size < UNREAD_FROM:
            return memory.read(offset, byte_size)
        part = memory.unread(offset, byte_size)
        self._unread.append(part)
        return part

    def output(self, tensor: str, name: str, offset: int, byte_size: int, as_it_is: bool = True) -> OutputRegion:
        """Part of a region for the output `tensor` to be written to, `as_it_is` or what is made of it. Raises what
        `Regions.part` does."""
        region = self._regions.part(name, offset, byte_size, self._local)
        self._used.append(region)
        memory = region.memory
        if isinstance(memory, CudaMemory):
            return self._cuda_copies().output(tensor, memory, offset, byte_size)
        if as_it_is and byte_size >= UNREAD_FROM:
            self._destinations[tensor] = memory.destination(offset, byte_size)
        return OutputRegion(memory, offset, byte_size)

    def during(
        self, infer: Callable[..., _Call], request: InferRequest, sink: ResponseSink, model: object = None
    ) -> "_Call | CopyingCall[_Call]":
        """Begins an inference; the regions cannot be unregistered until its last result has been sent."""
        if not self._used:
            return infer(request, sink, model)
        if self._destinations:
            request.destinations = self._destinations
        holding = _HoldingSink(sink, self._used, self._unread)
        if self._copies is not None:
            return CopyingCall(infer, request, holding, self._copies)
        try:
            return infer(request, holding, model)
        except BaseException:
            holding.release()
            raise

    def _cuda_copies(self) -> "_Copies":
        if self._copies is None:
            self._copies = _Copies()
        return self._copies


class _Copies:
    """What is to be copied from and to GPUs for one request. `read` and `write` are for the thread."""

    __slots__ = ("_inputs", "outputs")

    def __init__(self) -> None:
        self._inputs: list[tuple[CudaMemory, int, memoryview]] = []
        #: Where outputs go, by their names.
        self.outputs: dict[str, OutputRegion] = {}

    def input(self, memory: CudaMemory, offset: int, byte_size: int) -> Buffer:
        if not byte_size:
            return b""
        # Pages that nobody has touched, so that filling them is the thread's work altogether.
        target = memoryview(mmap.mmap(-1, byte_size))
        self._inputs.append((memory, offset, target))
        return target

    def output(self, tensor: str, memory: CudaMemory, offset: int, byte_size: int) -> OutputRegion:
        self.outputs[tensor] = OutputRegion(memory, offset, byte_size)
        # For those who encode the response, at which time it is there already.
        return OutputRegion(_ALREADY_WRITTEN, offset, byte_size)

    def clear(self) -> None:
        self._inputs.clear()
        self.outputs.clear()

    def read(self) -> None:
        """Raises Internal."""
        for memory, offset, target in self._inputs:
            memory.read(offset, target)

    def write(self, response: InferResponse) -> None:
        """Raises Internal."""
        for tensor in response.outputs:
            output = self.outputs.get(tensor.name)
            if output is not None:
                output.write(tensor)


class _AlreadyWritten:
    def write(self, offset: int, data: Buffer) -> None:
        pass


_ALREADY_WRITTEN = _AlreadyWritten()


class CopyingCall(Generic[_Call]):
    """An inference with regions on GPUs. What it sends goes on to `sink`, in the same order.

    What `infer` refuses goes there too, as an error that is `refused`.
    """

    __slots__ = ("_call", "_copies", "_infer", "_is_answered", "_is_cancelled", "_sink", "_task", "_waiting", "begun")

    def __init__(self, infer: Callable[..., _Call], request: InferRequest, sink: ResponseSink, copies: _Copies) -> None:
        self._infer = infer
        self._sink = sink
        self._copies = copies
        self._call: _Call | None = None
        self._is_answered = False
        self._is_cancelled = False
        #: Results behind one whose outputs are being copied, which is the first.
        self._waiting: deque[tuple[Result | None, bool]] = deque()
        #: Done when the inference has begun, or has been refused.
        self.begun: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._begin(request))
        self._task: asyncio.Task[None] = self.begun

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def _begin(self, request: InferRequest) -> None:
        try:
            await cuda_thread.call(self._copies.read)
            if self._is_cancelled:
                raise Cancelled("")
            # The model may be another one by now.
            call = self._infer(request, self, None)
            if not self._is_answered:
                self._call = call
        except NaiadError as error:
            error.refused = True
            self._pass(error, True)
        except Exception as error:
            _LOGGER.exception("a request with regions on GPUs failed")
            self._pass(Internal(f"unexpected error: {error}"), True)

    def send(self, result: Result | None, final: bool) -> None:
        if self._waiting:
            self._waiting.append((_owned(result), final))
        elif isinstance(result, InferResponse) and self._copies.outputs:
            self._waiting.append((_owned(result), final))
            self._task = asyncio.get_running_loop().create_task(self._pass_on())
        else:
            self._pass(result, final)

    async def _pass_on(self) -> None:
        while self._waiting:
            result, final = self._waiting[0]
            if isinstance(result, InferResponse):
                try:
                    await cuda_thread.call(self._copies.write, result)
                except NaiadError as error:
                    result = error
                except Exception as error:
                    _LOGGER.exception("outputs could not be copied to GPUs")
                    result = Internal(f"unexpected error: {error}")
            # Not before: what comes meanwhile has to wait behind it.
            self._waiting.popleft()
            self._pass(result, final)

    def _pass(self, result: Result | None, final: bool) -> None:
        if isinstance(result, NaiadError):
            # Which knows this call, which knows the sink, which may keep the error.
            result = result.with_traceback(None)
        self._sink.send(result, final)
        if final:
            # Whoever still holds this call shall not hold memory of a GPU.
            self._is_answered = True
            self._call = None
            self._copies.clear()


def _owned(result: Result | None) -> Result | None:
    return result.owned() if isinstance(result, InferResponse) else result


class _HoldingSink:
    """Passes results on, and counts as a use of regions until the last one. What was made without an input that could
    not be read is no result."""

    __slots__ = ("_sink", "_unread", "_used")

    def __init__(self, sink: ResponseSink, used: list[_Region], unread: list[Unread]) -> None:
        self._sink = sink
        self._used = used
        self._unread = unread
        for region in used:
            region.uses += 1

    def send(self, result: Result | None, final: bool) -> None:
        for part in self._unread:
            if part.failure is not None and isinstance(result, InferResponse):
                result = part.failure
        try:
            self._sink.send(result, final)
        finally:
            if final:
                self.release()

    def release(self) -> None:
        for region in self._used:
            region.uses -= 1
        # The request's own lists: nothing of them is used any more.
        self._used.clear()
        self._unread.clear()


def _by_name(item: tuple[str, _Region]) -> str:
    return item[0]


def is_local_peer(peer: str) -> bool:
    """Whether a peer as front ends see it is on this machine.

    Understands `unix:...`, `ipv4:127.0.0.1:80`, `ipv6:[::1]:80` (also with percent signs), `127.0.0.1:80` and a bare
    address. An address of one of the machine's own network interfaces is local.
    """
    if not peer or peer.startswith("unix:"):
        return peer != ""
    host = peer.replace("%5B", "[").replace("%5D", "]")
    host = host.removeprefix("ipv4:").removeprefix("ipv6:")
    if host.startswith("["):
        host = host[1:].split("]", 1)[0]
    elif host.count(":") == 1:
        host = host.split(":", 1)[0]
    return _is_own_address(host)


@lru_cache(maxsize=256)
def _is_own_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return True
    if address.is_unspecified or address.is_multicast:
        return False
    # Only an address of this machine can be bound; no packet is sent.
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
