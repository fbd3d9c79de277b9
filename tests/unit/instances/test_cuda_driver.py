"""Which errors of CUDA last, as the driver says it."""

import ctypes
from typing import Any

import pytest

from naiad.instances import cuda_driver
from naiad.instances.cuda_driver import CudaDriver, lasting_error

NAMES = {
    2: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    201: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"),
    700: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
    710: (b"CUDA_ERROR_ASSERT", b"device-side assert triggered"),
    719: (b"CUDA_ERROR_LAUNCH_FAILED", b"unspecified launch failure"),
}


def function(act: Any) -> Any:
    """A C function, as ctypes shows it: `argtypes` can be set."""

    def call(*arguments: Any) -> int:
        types = call.argtypes
        assert len(arguments) == len(types)
        for value, kind in zip(arguments, types, strict=True):
            kind.from_param(value)
        return act(*[getattr(value, "_obj", value) for value in arguments]) or 0

    call.argtypes = None  # type: ignore[attr-defined]
    return call


class FakeDriver:
    """libcuda. `contexts`: for each GPU None without a primary context, else what calls in it end with; `current`:
    that of the thread's own context, 201 without one."""

    def __init__(self, contexts: list[int | None], current: int = 201, count_error: int = 0) -> None:
        self.contexts = contexts
        self.stack: list[int] = []
        self.retained = 0
        self.current = current
        self.count_error = count_error
        self.cuDeviceGetCount = function(self.count)
        self.cuDeviceGet = function(self.device)
        self.cuDevicePrimaryCtxGetState = function(self.state)
        self.cuDevicePrimaryCtxRetain = function(self.retain)
        self.cuDevicePrimaryCtxRelease_v2 = function(self.release)
        self.cuCtxPushCurrent_v2 = function(lambda context: self.stack.append(context.value - 1000))
        self.cuCtxPopCurrent_v2 = function(lambda context: self.stack.pop() and 0)
        self.cuMemGetInfo_v2 = function(self.info)
        self.cuGetErrorName = function(lambda code, text: self.text(code, text, 0))
        self.cuGetErrorString = function(lambda code, text: self.text(code, text, 1))

    def count(self, count: ctypes.c_int) -> int:
        count.value = 0 if self.count_error else len(self.contexts)
        return self.count_error

    def device(self, device: ctypes.c_int, number: int) -> None:
        device.value = 100 + number

    def state(self, device: ctypes.c_int, flags: ctypes.c_uint, active: ctypes.c_int) -> None:
        active.value = self.contexts[device.value - 100] is not None

    def retain(self, context: ctypes.c_void_p, device: ctypes.c_int) -> None:
        number = device.value - 100
        assert self.contexts[number] is not None, "a context was made that nobody needs"
        self.retained += 1
        context.value = 1000 + number

    def release(self, device: ctypes.c_int) -> None:
        self.retained -= 1

    def info(self, free: ctypes.c_size_t, total: ctypes.c_size_t) -> int | None:
        return self.contexts[self.stack[-1]] if self.stack else self.current

    def text(self, code: int, text: ctypes.c_char_p, index: int) -> int:
        if code not in NAMES:
            return 1
        text.value = NAMES[code][index]
        return 0


@pytest.mark.parametrize(
    ("driver", "error"),
    [
        (FakeDriver([]), None),
        (FakeDriver([None, None]), None),
        (FakeDriver([0, None]), None),
        (FakeDriver([0, 0], current=0), None),
        (FakeDriver([2, 2]), None),  # out of memory passes
        (FakeDriver([0], count_error=3), None),  # not initialised
        (FakeDriver([700]), "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered) on GPU 0"),
        (FakeDriver([None, 0, 710]), "CUDA_ERROR_ASSERT (device-side assert triggered) on GPU 2"),
        (FakeDriver([0], current=719), "CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"),
        (FakeDriver([721]), "error 721 (unknown) on GPU 0"),  # a driver that does not know it by name
    ],
)
def test_the_driver_says_which_errors_last(driver: FakeDriver, error: str | None) -> None:
    assert CudaDriver(driver).lasting_error() == error
    assert (driver.stack, driver.retained) == ([], 0)


@pytest.mark.parametrize("code", [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999])
def test_all_errors_that_last_are_known(code: int) -> None:
    assert CudaDriver(FakeDriver([code])).lasting_error() is not None


def test_where_no_framework_has_loaded_cuda_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lasting_error() is None
    driver = FakeDriver([700])
    monkeypatch.setattr(cuda_driver, "loaded_driver", lambda: driver)
    assert lasting_error() is not None


@pytest.mark.parametrize(
    ("driver", "started"),
    [(None, False), (FakeDriver([], count_error=3), False), (FakeDriver([None]), True), (FakeDriver([]), False)],
)
def test_whether_cuda_is_started(driver: FakeDriver | None, started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if driver is not None:
        driver.cuDeviceGetCount.argtypes = (ctypes.POINTER(ctypes.c_int),)
    monkeypatch.setattr(cuda_driver, "loaded_driver", lambda: driver)
    assert cuda_driver.is_started() == started


def test_a_library_is_taken_only_if_it_is_loaded_already(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []

    def library(name: str, mode: int) -> str:
        opened.append((name, mode))
        return "loaded"

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", library)
    assert cuda_driver.loaded_driver() == "loaded"
    [(name, mode)] = opened
    assert name == "libcuda.so.1"
    assert mode & cuda_driver.os.RTLD_NOLOAD
