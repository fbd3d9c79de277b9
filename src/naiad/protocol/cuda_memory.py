"""Memory of clients on GPUs, through the CUDA runtime: opened, read, written and closed.

CUDA's calls wait for the GPU, which the event loop must not: they are made on one thread, in the order they were asked
for. Nothing of it is loaded before the first client wants to register such memory.
"""

import asyncio
import ctypes
import logging
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from naiad.datatypes import Buffer
from naiad.errors import Internal, InvalidArgument, NaiadError

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

#: Of what a client gets for its memory, to send it here.
IPC_HANDLE_BYTE_SIZE = 64


class CudaThread:
    """The thread. It ends with the process, whatever it waits for."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, act: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Calls `act` when all that was asked for before is done, unless the future is cancelled by then."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cuda", daemon=True)
            self._thread.start()
        done: Future[T] = Future()
        self._jobs.put((done, act, arguments))
        return done

    async def call(self, act: Callable[..., T], *arguments: Any) -> T:
        """What `act` returns or raises."""
        return await asyncio.wrap_future(self.do(act, *arguments))

    async def settled(self) -> None:
        """Returns when all that was asked for is done."""
        if self._thread is not None:
            await self.call(_do_nothing)

    def _work(self) -> None:
        while True:
            done, act, arguments = self._jobs.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(act(*arguments))
                except BaseException as error:
                    done.set_exception(error)
            # Memory is closed when nobody refers to it.
            del done, act, arguments


def _do_nothing() -> None:
    pass


cuda_thread = CudaThread()


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTE_SIZE),)


class CudaRuntime:
    """The few calls of CUDA that regions need, for the thread. Raises OSError where the library is missing."""

    _HOST_TO_DEVICE = 1
    _DEVICE_TO_HOST = 2
    _LAZY_PEER_ACCESS = 1

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _IpcHandle, ctypes.c_uint)
        library.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
        library.cudaMemcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        library.cudaStreamSynchronize.argtypes = (ctypes.c_void_p,)
        library.cudaSetDevice.argtypes = (ctypes.c_int,)
        for version in library.cudaRuntimeGetVersion, library.cudaDriverGetVersion:
            version.argtypes = (ctypes.POINTER(ctypes.c_int),)
        library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def majors(self) -> tuple[int, int]:
        """The major versions of CUDA of this library, and of the driver: 0 where there is none."""
        own, driver = ctypes.c_int(), ctypes.c_int()
        self._library.cudaRuntimeGetVersion(ctypes.byref(own))
        self._library.cudaDriverGetVersion(ctypes.byref(driver))
        return own.value // 1000, driver.value // 1000

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

    def read(self, device_id: int, address: int, target: memoryview) -> None:
        """Fills `target`, which can be written to. Raises OSError."""
        byte_size = len(target)
        host = (ctypes.c_char * byte_size).from_buffer(target)
        self._check(self._library.cudaSetDevice(device_id))
        self._check(self._library.cudaMemcpy(ctypes.addressof(host), address, byte_size, self._DEVICE_TO_HOST))

    def write(self, device_id: int, address: int, data: bytes) -> None:
        """Returns when the bytes are there, for whoever reads them. Raises OSError."""
        self._check(self._library.cudaSetDevice(device_id))
        self._check(self._library.cudaMemcpy(address, data, len(data), self._HOST_TO_DEVICE))
        # Of memory that is not pinned CUDA has only taken a copy by now.
        self._check(self._library.cudaStreamSynchronize(None))

    def allocated(self, address: int) -> int:
        """The size of the allocation at `address`, which only the driver says. Raises OSError."""
        size = ctypes.c_size_t()
        driver = cuda_driver()
        driver.cuMemGetAddressRange_v2.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64)
        if code := driver.cuMemGetAddressRange_v2(None, ctypes.byref(size), address):
            raise OSError(code, "no allocation of CUDA")
        return size.value

    def _check(self, code: int) -> None:
        if code:
            raise OSError(code, self._library.cudaGetErrorString(code).decode())


def cuda_driver() -> Any:
    """The driver's library, which the runtime has loaded."""
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def cuda_runtime() -> CudaRuntime | None:
    """The CUDA runtime of this machine, or None, which is logged: who registers memory is only refused."""
    names = [f"libcudart.so{suffix}" for suffix in ("", ".13", ".12", ".11.0")]
    # Frameworks from PyPI bring the runtime along in the package `nvidia`, outside of the loader's path.
    packages = Path(sysconfig.get_path("purelib"))
    names += [str(path) for path in sorted(packages.glob("nvidia/*/lib/libcudart.so.*"))]
    reason = "no libcudart is in LD_LIBRARY_PATH or came with a package (pip install nvidia-cuda-runtime-cu12)"
    for name in names:
        try:
            runtime = CudaRuntime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
        own, driver = runtime.majors()
        if own <= driver:
            return runtime
        reason = f"{name} is of CUDA {own}, and " + (f"the driver knows {driver}" if driver else "there is no driver")
    _LOGGER.warning("clients cannot register memory of GPUs: %s", reason)
    return None


class CudaMemory:
    """Memory of a client on a GPU: `byte_size` bytes from its beginning on. `read` and `write` are for the thread.

    `opened` is done when the thread has opened it: with InvalidArgument where it cannot be.
    """

    def __init__(self, region: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Raises InvalidArgument where there is no CUDA, or the handle is none."""
        self._address = 0
        runtime = cuda_runtime()
        if runtime is None or device_id < 0 or len(raw_handle) != IPC_HANDLE_BYTE_SIZE:
            raise _refusal()
        self._runtime = runtime
        self._device_id = device_id
        self.opened = cuda_thread.do(self._open, region, raw_handle, byte_size)

    def _open(self, region: str, raw_handle: bytes, byte_size: int) -> None:
        try:
            address = self._runtime.open(self._device_id, raw_handle)
        except OSError as error:
            # Who registers it is told no more, as by Triton.
            _LOGGER.debug("the memory of region '%s' on GPU %d cannot be opened: %s", region, self._device_id, error)
            raise _refusal() from error
        try:
            fits = byte_size <= self._runtime.allocated(address)
        except OSError:
            fits = False
        if fits:
            self._address = address
        else:
            self._runtime.close(self._device_id, address)
            raise InvalidArgument(f"failed to register shared memory region '{region}': invalid args")

    def read(self, offset: int, target: memoryview) -> None:
        """Raises Internal."""
        try:
            self._runtime.read(self._device_id, self._open_address() + offset, target)
        except OSError as error:
            raise Internal(f"failed to copy data from CUDA shared memory: {error.strerror}") from error

    def write(self, offset: int, data: Buffer) -> None:
        """Raises Internal."""
        try:
            self._runtime.write(self._device_id, self._open_address() + offset, bytes(data))
        except OSError as error:
            raise Internal(f"failed to copy data to CUDA shared memory: {error.strerror}") from error

    def close(self) -> None:
        """When all is done that was asked for before. What is asked for later fails."""
        cuda_thread.do(self._close)

    def _close(self) -> None:
        address, self._address = self._address, 0
        if address:
            self._runtime.close(self._device_id, address)

    def _open_address(self) -> int:
        error = self.opened.exception()
        if error is not None:
            raise Internal(f"CUDA shared memory could not be opened: {error}")
        if not self._address:
            raise Internal("CUDA shared memory has been unregistered")
        return self._address

    def __del__(self) -> None:
        if self._address:
            cuda_thread.do(self._runtime.close, self._device_id, self._address)


def _refusal() -> NaiadError:
    return InvalidArgument("failed to register shared memory region: invalid args")
