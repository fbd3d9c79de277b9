"""Whether CUDA is still of use to this process. Runs in hosts.

After some errors, an illegal address in a kernel for one, every call of CUDA in the process fails with the same error
until the process ends. Which framework meets it first and what that makes of it does not matter here: the driver is
asked, and says it again. The words of an error are not looked at; they may be a client's.
"""

import ctypes
import os
from typing import Any

#: What the driver's and the runtime's documentation say of: the process must be ended to use CUDA again. And what is
#: left of a GPU that has fallen off the bus.
_LASTING = frozenset(
    {
        214,  # CUDA_ERROR_ECC_UNCORRECTABLE
        220,  # CUDA_ERROR_NVLINK_UNCORRECTABLE
        226,  # CUDA_ERROR_CONTAINED
        700,  # CUDA_ERROR_ILLEGAL_ADDRESS
        702,  # CUDA_ERROR_LAUNCH_TIMEOUT
        710,  # CUDA_ERROR_ASSERT
        714,  # CUDA_ERROR_HARDWARE_STACK_ERROR
        715,  # CUDA_ERROR_ILLEGAL_INSTRUCTION
        716,  # CUDA_ERROR_MISALIGNED_ADDRESS
        717,  # CUDA_ERROR_INVALID_ADDRESS_SPACE
        718,  # CUDA_ERROR_INVALID_PC
        719,  # CUDA_ERROR_LAUNCH_FAILED
        721,  # CUDA_ERROR_TENSOR_MEMORY_LEAK
        810,  # CUDA_ERROR_MPS_CLIENT_TERMINATED
        999,  # CUDA_ERROR_UNKNOWN
    }
)


def lasting_error() -> str | None:
    """The error that every call of CUDA in this process ends with from now on, and of which GPU; None where there is
    none, or no CUDA. Takes microseconds and waits for nothing that runs on a GPU."""
    driver = loaded_driver()
    return None if driver is None else CudaDriver(driver).lasting_error()


def is_started() -> bool:
    """Whether this process has started CUDA, which none that it forks could use then."""
    driver, count = loaded_driver(), ctypes.c_int()
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def loaded_driver() -> Any | None:
    """The driver's library, if a framework has loaded it."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return None


class CudaDriver:
    """The few calls of the CUDA driver that say whether it still works."""

    def __init__(self, library: Any) -> None:
        self._library = library
        handle, number = ctypes.c_void_p, ctypes.c_int
        for name, *types in (
            ("cuDeviceGetCount", ctypes.POINTER(number)),
            ("cuDeviceGet", ctypes.POINTER(number), number),
            ("cuDevicePrimaryCtxGetState", number, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(number)),
            ("cuDevicePrimaryCtxRetain", ctypes.POINTER(handle), number),
            ("cuDevicePrimaryCtxRelease_v2", number),
            ("cuCtxPushCurrent_v2", handle),
            ("cuCtxPopCurrent_v2", ctypes.POINTER(handle)),
            ("cuMemGetInfo_v2", ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
            ("cuGetErrorName", number, ctypes.POINTER(ctypes.c_char_p)),
            ("cuGetErrorString", number, ctypes.POINTER(ctypes.c_char_p)),
        ):
            getattr(library, name).argtypes = types

    def lasting_error(self) -> str | None:
        """See the function of this name."""
        library = self._library
        count, device, active, flags = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
        library.cuDeviceGetCount(ctypes.byref(count))
        for number in range(count.value):
            library.cuDeviceGet(ctypes.byref(device), number)
            active.value = 0
            library.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            # One that is not active is not to become it: it would take hundreds of MB.
            if active.value and (code := self._touch_primary(device)) in _LASTING:
                return f"{self._text(code)} on GPU {number}"
        # The context of this thread need not be the primary one of a device.
        return self._text(code) if (code := self._touch()) in _LASTING else None

    def _touch_primary(self, device: ctypes.c_int) -> int:
        library = self._library
        context = ctypes.c_void_p()
        code: int = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if code:
            return code
        try:
            code = library.cuCtxPushCurrent_v2(context)
            if not code:
                code = self._touch()
                library.cuCtxPopCurrent_v2(ctypes.byref(context))
            return code
        finally:
            library.cuDevicePrimaryCtxRelease_v2(device)

    def _touch(self) -> int:
        """What a call ends with that uses the current context and changes nothing."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        code: int = self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return code

    def _text(self, code: int) -> str:
        name, meaning = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(meaning))
        return f"{(name.value or b'error %d' % code).decode()} ({(meaning.value or b'unknown').decode()})"
