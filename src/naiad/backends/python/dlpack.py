"""DLPack capsules: from arrays, to arrays, and tensors that stay on a GPU.

numpy does the work for what it knows. This module adds bfloat16, which numpy has no DLPack type for, the checks
Triton makes, and the way from a GPU to the host. The C structures are those of dlpack.h, unversioned form.
"""

import ctypes
import functools
import math
import sys
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from naiad.backends.python.failures import TritonModelException

Array = npt.NDArray[Any]

CPU = 1
CUDA = 2
CUDA_HOST = 3
#: The number of the legacy default stream. What wrote a tensor is done before what is started there.
_LEGACY_STREAM = 1

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_LETTERS = {_INT: "i", _UINT: "u", _FLOAT: "f"}
_BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _inside(capsule: Any) -> _Tensor:
    """The structure a capsule points to; valid while the capsule is and nobody has taken it over."""
    return _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))


def from_array(array: Array, owner: object) -> Any:
    """A capsule that shares the memory of `array` and keeps it, and `owner`, alive."""
    array = np.asarray(_Memory(array, owner)).view(array.dtype)
    if array.dtype != _BF16:
        return array.__dlpack__()
    capsule = array.view(np.uint16).__dlpack__()
    _inside(capsule).code = _BFLOAT
    return capsule


class _Memory:
    """The memory of an array, as memory that may be written to.

    numpy refuses to share read-only memory in the older form of capsule; a model that writes there is told by the same
    rule as without DLPack: it must not.
    """

    def __init__(self, array: Array, owner: object) -> None:
        self.array = array
        self.owner = owner
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


class DeviceTensor:
    """A tensor in GPU memory. `exported` is a capsule that nobody takes over: it keeps the memory. `source` can make
    others; None for a tensor that came as a capsule."""

    __slots__ = ("device", "dtype", "exported", "shape", "source")

    def __init__(self, source: Any, exported: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.source = source
        self.exported = exported
        self.device = (CUDA, _inside(exported).device_id)
        self.dtype = dtype
        self.shape = shape

    def capsule(self, stream: Any = None) -> Any:
        """For who goes on in `stream` of CUDA; None is the legacy default stream."""
        if self.source is not None:
            return _export(self.source, self.device[1], _LEGACY_STREAM if stream is None else stream)
        memory = (ctypes.c_char * (math.prod(self.shape) * self.dtype.itemsize)).from_address(self._address)
        # numpy does not look at the memory, which it could not.
        capsule = from_array(np.ndarray(self.shape, self.dtype, memoryview(memory)), self.exported)
        tensor = _inside(capsule)
        tensor.device_type, tensor.device_id = self.device
        return capsule

    def to_host(self) -> Array:
        """A copy in host memory."""
        array: Array = np.empty(self.shape, self.dtype)
        if array.size:
            _copy_from_gpu(array, self._address, self.device[1])
        return array

    @property
    def _address(self) -> int:
        tensor = _inside(self.exported)
        return int(tensor.data or 0) + int(tensor.byte_offset)


def _export(source: Any, device_id: int, stream: int) -> Any:
    """A capsule of a tensor on a GPU. PyTorch makes one only while that GPU is the current one of the thread, and its
    stream there is the one that is waited for."""
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(source, torch.Tensor)
    with torch.cuda.device(device_id) if is_torch else nullcontext():  # type: ignore[union-attr]
        return source.__dlpack__(stream=stream)


def take(source: Any) -> Array | DeviceTensor:
    """The array or GPU tensor of a capsule or of an object with `__dlpack__`. Raises TritonModelException."""
    if type(source).__name__ == "PyCapsule":
        return _take_capsule(source, None)
    if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
            "`__dlpack_device__` attributes"
        )
    kind, device_id = source.__dlpack_device__()
    _check_device(int(kind))
    if kind == CUDA:
        return _take_capsule(_export(source, device_id, _LEGACY_STREAM), source)
    return _take_capsule(source.__dlpack__(stream=None), None)


def _check_device(kind: int) -> None:
    if kind not in (CPU, CUDA, CUDA_HOST):
        raise TritonModelException(f"DLDevice type {kind} is not support by Python backend.")


def _take_capsule(capsule: Any, source: Any) -> Array | DeviceTensor:
    tensor = _inside(capsule)
    _check_device(tensor.device_type)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides and not _is_c_order(shape, tensor.strides):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    dtype = _dtype(tensor)
    if tensor.device_type == CUDA:
        return DeviceTensor(source, capsule, dtype, shape)
    if dtype == _BF16:
        tensor.code = _UINT
    array: Array = np.from_dlpack(_Once(capsule, (tensor.device_type, tensor.device_id)))
    return array.view(dtype)


class _Once:
    """A capsule where an object that makes one is wanted."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self.taken = capsule
        self.device = device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self.taken

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def _is_c_order(shape: tuple[int, ...], strides: Any) -> bool:
    expected = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] != 1 and strides[axis] != expected:
            return math.prod(shape) == 0
        expected *= shape[axis]
    return True


def _dtype(tensor: _Tensor) -> np.dtype[Any]:
    if tensor.lanes == 1:
        if tensor.code == _BFLOAT and tensor.bits == 16:
            return _BF16
        if tensor.code == _BOOL and tensor.bits == 8:
            return np.dtype(np.bool_)
        letter = _LETTERS.get(tensor.code)
        if letter is not None and tensor.bits in (16, 32, 64) + (() if letter == "f" else (8,)):
            return np.dtype(f"{letter}{tensor.bits // 8}")
    raise TritonModelException(
        f"DLPack data type with code {tensor.code}, {tensor.bits} bits and {tensor.lanes} lanes is not supported."
    )


@functools.cache
def _cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TritonModelException(f"The tensor is on a GPU, but the CUDA driver cannot be used: {error}") from error
    _check(library.cuInit(0), "cuInit")
    return library


def _check(code: int, call: str) -> None:
    if code:
        raise TritonModelException(f"{call} of the CUDA driver failed with error {code}")


def _copy_from_gpu(array: Array, address: int, device_id: int) -> None:
    """Copies into `array`, in the primary context of the device, which is the one frameworks use."""
    cuda = _cuda()
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(device), device_id), "cuDeviceGet")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        _check(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            code = cuda.cuMemcpyDtoH_v2(
                ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes)
            )
            _check(code, "cuMemcpyDtoH")
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
