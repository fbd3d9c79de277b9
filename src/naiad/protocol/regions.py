"""Shared memory that clients register: system regions (POSIX objects in /dev/shm) and CUDA regions.

Owns the registry, the policy of who may use it and every check of a name, offset or size. Lives on the event loop.

A system region is read and written through its file descriptor, not through a mapping: a client that shrinks or
recreates the object while it is registered would end the whole server with SIGBUS at the next touch of a mapped page.
It also means that the bytes a request was checked with are the bytes that are computed with.
"""

import ctypes
import errno
import ipaddress
import mmap
import os
import socket
import stat
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from naiad.datatypes import Buffer
from naiad.errors import AlreadyExists, Internal, InvalidArgument, NaiadError, NotFound, ResourceExhausted, Unsupported
from naiad.messages import InferRequest, ResponseSink, Result

_Call = TypeVar("_Call")

#: Called with True when the use of a region begins, with False when it has ended.
OnUse = Callable[[bool], None]
RegionPolicy = Literal["true", "false", "local"]

#: Keys of the Python backend's own memory in a Triton server that shares /dev/shm with this one.
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Memory(Protocol):
    """The bytes behind a region, from its first one on. Freed with the last reference to it."""

    def read(self, offset: int, byte_size: int) -> Buffer: ...

    def write(self, offset: int, data: Buffer) -> None: ...


class OutputRegion:
    """A checked part of a region that an output goes to; the memory stays open as long as this is held."""

    __slots__ = ("_memory", "_offset", "byte_size")

    def __init__(self, memory: Memory, offset: int, byte_size: int) -> None:
        self._memory = memory
        self._offset = offset
        self.byte_size = byte_size

    def write(self, output: str, data: Buffer) -> None:
        """Stores the bytes of `output` at the start of the part. Raises Internal where they do not fit."""
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if size > self.byte_size:
            raise Internal(
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) "
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
                    raise self._shrunk()
                parts.append(part)
                size += len(part)
            data = b"".join(parts)
        return data

    def write(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        at = self._start + offset
        if os.fstat(self.fd).st_size < at + len(view):
            # Writing beyond the end would make the client's object grow again.
            raise self._shrunk()
        while view:
            written = os.pwrite(self.fd, view, at)
            at += written
            view = view[written:]

    def _shrunk(self) -> NaiadError:
        return InvalidArgument(
            f"shared memory object '{self._key}' has become smaller since it was registered; register it again"
        )

    def __del__(self) -> None:
        os.close(self.fd)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class CudaRuntime:
    """The few calls of the CUDA runtime that regions need. Raises OSError where the library is missing."""

    _HOST_TO_DEVICE = 1
    _DEVICE_TO_HOST = 2
    _LAZY_PEER_ACCESS = 1

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _IpcHandle, ctypes.c_uint)
        library.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
        library.cudaMemcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        library.cudaSetDevice.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def open(self, device_id: int, raw_handle: bytes) -> int:
        """The device address of the memory a client exported. Raises OSError."""
        self._check(self._library.cudaSetDevice(device_id))
        address = ctypes.c_void_p()
        handle = _IpcHandle.from_buffer_copy(raw_handle)
        self._check(self._library.cudaIpcOpenMemHandle(ctypes.byref(address), handle, self._LAZY_PEER_ACCESS))
        return address.value or 0

    def close(self, device_id: int, address: int) -> None:
        self._library.cudaSetDevice(device_id)
        self._library.cudaIpcCloseMemHandle(address)

    def read(self, device_id: int, address: int, byte_size: int) -> bytearray:
        data = bytearray(byte_size)
        target = (ctypes.c_char * byte_size).from_buffer(data)
        self._check(self._library.cudaSetDevice(device_id))
        self._check(self._library.cudaMemcpy(ctypes.addressof(target), address, byte_size, self._DEVICE_TO_HOST))
        return data

    def write(self, device_id: int, address: int, data: Buffer) -> None:
        raw = bytes(data)
        self._check(self._library.cudaSetDevice(device_id))
        self._check(self._library.cudaMemcpy(address, raw, len(raw), self._HOST_TO_DEVICE))

    def _check(self, code: int) -> None:
        if code:
            raise OSError(code, self._library.cudaGetErrorString(code).decode())


@lru_cache(maxsize=1)
def cuda_runtime() -> CudaRuntime | None:
    """The CUDA runtime of this machine, or None. Loaded when the first client wants to register CUDA memory."""
    names = [f"libcudart.so{suffix}" for suffix in ("", ".13", ".12", ".11.0")]
    # Frameworks from PyPI bring the runtime along in the package `nvidia`, outside of the loader's path.
    packages = Path(sysconfig.get_path("purelib"))
    names += [str(path) for path in sorted(packages.glob("nvidia/*/lib/libcudart.so.*"))]
    for name in names:
        try:
            return CudaRuntime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None


class _CudaMemory:
    """An allocation of a client on a device."""

    def __init__(self, runtime: CudaRuntime, device_id: int, raw_handle: bytes) -> None:
        self._runtime = runtime
        self._device_id = device_id
        self._address = 0
        self._address = runtime.open(device_id, raw_handle)

    def read(self, offset: int, byte_size: int) -> Buffer:
        try:
            return self._runtime.read(self._device_id, self._address + offset, byte_size)
        except OSError as error:
            raise Internal(f"failed to copy data from CUDA shared memory: {error.strerror}") from error

    def write(self, offset: int, data: Buffer) -> None:
        try:
            self._runtime.write(self._device_id, self._address + offset, data)
        except OSError as error:
            raise Internal(f"failed to copy data to CUDA shared memory: {error.strerror}") from error

    def __del__(self) -> None:
        if self._address:
            self._runtime.close(self._device_id, self._address)


def _open_cuda(raw_handle: bytes, device_id: int) -> Memory:
    runtime = cuda_runtime()
    if runtime is None or device_id < 0 or len(raw_handle) != ctypes.sizeof(_IpcHandle):
        raise InvalidArgument("failed to register shared memory region: invalid args")
    try:
        return _CudaMemory(runtime, device_id, raw_handle)
    except OSError as error:
        raise InvalidArgument("failed to register shared memory region: invalid args") from error


class _Region:
    """A registered region: `key` and `offset` of a system one, `device_id` of a CUDA one; `uses` counts inferences."""

    __slots__ = ("byte_size", "device_id", "key", "memory", "offset", "uses")

    def __init__(self, memory: Memory, byte_size: int, key: str = "", offset: int = 0, device_id: int = -1) -> None:
        self.memory = memory
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.device_id = device_id
        self.uses = 0

    @property
    def is_cuda(self) -> bool:
        return self.device_id >= 0


class _AdoptedRegion(_Region):
    """A region that another process keeps, which is told when its use here begins and when it ends."""

    __slots__ = ("_on_use", "_uses")

    def __init__(self, on_use: OnUse, memory: Memory, byte_size: int, **place: Any) -> None:
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

    def __len__(self) -> int:
        return len(self._regions)

    def register_system(self, name: str, key: str, offset: int, byte_size: int, local: bool = True) -> None:
        """Registers `byte_size` bytes from `offset` on of the POSIX shared memory object `key`."""
        self._admit(name, local)
        memory = self._open(name, key, offset, byte_size)
        self._regions[name] = _Region(memory, byte_size, key=key, offset=offset)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int, local: bool = True) -> None:
        """Registers the device memory behind a 64-byte CUDA IPC handle."""
        self._admit(name, local)
        self._regions[name] = _Region(_open_cuda(raw_handle, device_id), byte_size, device_id=device_id)

    def adopt_system(self, name: str, fd: int, key: str, offset: int, byte_size: int, on_use: OnUse) -> None:
        """A system region that another process has registered. Takes the descriptor over."""
        self._regions[name] = _AdoptedRegion(on_use, _SystemMemory(fd, offset, key), byte_size, key=key, offset=offset)

    def adopt_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int, on_use: OnUse) -> None:
        """A CUDA region that another process has registered. Raises InvalidArgument where it cannot be opened here."""
        memory = _open_cuda(raw_handle, device_id)
        self._regions[name] = _AdoptedRegion(on_use, memory, byte_size, device_id=device_id)

    def drop(self, names: Iterable[str]) -> None:
        """Forgets regions, whoever uses them."""
        for name in names:
            self._regions.pop(name, None)

    def unregister_system(self, name: str = "") -> None:
        """Forgets one system region, or all; a name that is not there, or is CUDA memory, is no error.

        Raises Internal for a region in use; of all regions those that are not in use are forgotten all the same.
        """
        self._forget(name, cuda=False)

    def unregister_cuda(self, name: str = "") -> None:
        self._forget(name, cuda=True)

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

    def _open(self, name: str, key: str, offset: int, byte_size: int) -> Memory:
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
                del self._regions[name]
            return
        kept = ""
        for found, region in self._status("", cuda):
            if region.uses:
                kept += f"{found} ,"
            else:
                del self._regions[found]
        if kept:
            kind = "cuda" if cuda else "system"
            raise Internal(f"Failed to unregister the following {kind} shared memory regions: {kept}")


class RegionUse:
    """The way of one request to the regions, which remembers those that it uses."""

    __slots__ = ("_local", "_regions", "_used")

    def __init__(self, regions: Regions, local: bool) -> None:
        self._regions = regions
        self._local = local
        self._used: list[_Region] = []

    def input(self, name: str, offset: int, byte_size: int) -> Buffer:
        """A copy of part of a region. Raises what `Regions.part` does."""
        region = self._regions.part(name, offset, byte_size, self._local)
        self._used.append(region)
        return region.memory.read(offset, byte_size)

    def output(self, name: str, offset: int, byte_size: int) -> OutputRegion:
        """Part of a region for an output to be written to. Raises what `Regions.part` does."""
        region = self._regions.part(name, offset, byte_size, self._local)
        self._used.append(region)
        return OutputRegion(region.memory, offset, byte_size)

    def during(
        self, infer: Callable[..., _Call], request: InferRequest, sink: ResponseSink, model: object = None
    ) -> _Call:
        """Begins an inference; the regions cannot be unregistered until its last result has been sent."""
        if not self._used:
            return infer(request, sink, model)
        holding = _HoldingSink(sink, self._used)
        try:
            return infer(request, holding, model)
        except BaseException:
            holding.release()
            raise


class _HoldingSink:
    """Passes results on, and counts as a use of regions until the last one."""

    __slots__ = ("_sink", "_used")

    def __init__(self, sink: ResponseSink, used: list[_Region]) -> None:
        self._sink = sink
        self._used = used
        for region in used:
            region.uses += 1

    def send(self, result: Result | None, final: bool) -> None:
        try:
            self._sink.send(result, final)
        finally:
            if final:
                self.release()

    def release(self) -> None:
        for region in self._used:
            region.uses -= 1
        self._used = []


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
