"""`pb_utils.Tensor`: a named array, or a tensor of another framework, on the CPU or a GPU."""

from typing import Any, Final

import ml_dtypes
import numpy as np
from mypy_extensions import mypyc_attr

from naiad import datatypes
from naiad.backends.api import Array
from naiad.backends.python import dlpack
from naiad.backends.python.failures import TritonModelException
from naiad.backends.python.texts import text
from naiad.datatypes import DataType

_BF16: Final = np.dtype(ml_dtypes.bfloat16)
_EMPTY_NAME: Final = "Tensor name cannot be an empty string."
#: The dtypes an array is taken with as it is.
_TAKEN: Final = frozenset(datatype.numpy for datatype in DataType)
_NOTHING: Final[Array] = np.empty(0)


@mypyc_attr(allow_interpreted_subclasses=True)
class Tensor:
    """A named tensor. `numpy_array` is kept, not copied, unless it is not in C order."""

    # `_array` is None for a tensor on a device, which `_device` holds; others have no `_device`.
    __slots__ = ("_array", "_device", "_name")

    _name: str
    _array: Array | None
    _device: dlpack.DeviceTensor

    def __init__(self, name: object, numpy_array: Array) -> None:
        if type(name) is not str:
            name = text(name, "Tensor needs a str as its name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}' needs a numpy.ndarray, got {type(numpy_array)}")
        if not name:
            raise TritonModelException(_EMPTY_NAME)
        dtype = numpy_array.dtype
        if dtype not in _TAKEN:
            if datatypes.from_numpy(dtype) is None:
                raise TritonModelException("NumPy dtype is not supported.")
            if not dtype.isnative:
                numpy_array = numpy_array.astype(dtype.newbyteorder("="))
        self._name = name
        self._array = numpy_array if numpy_array.flags.c_contiguous else np.ascontiguousarray(numpy_array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The array itself. Raises TritonModelException for BF16 and for tensors on a GPU."""
        array = self._array
        if array is None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if array.dtype == _BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return array

    def shape(self) -> list[int]:
        return list(self._array.shape if self._array is not None else self._device.shape)

    def triton_dtype(self) -> int:
        """The number of the data type, as in model_config.proto."""
        datatype = datatypes.from_numpy(self._array.dtype if self._array is not None else self._device.dtype)
        assert datatype is not None
        return datatype.number

    def is_cpu(self) -> bool:
        return self._array is not None

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the same memory."""
        if self._array is None:
            return self._device.capsule()
        if self._array.dtype.kind in "SUO":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.from_array(self._array, self)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self.to_dlpack() if self._array is not None else self._device.capsule(stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if self._array is not None else self._device.device

    @staticmethod
    def from_dlpack(name: object, tensor: Any) -> "Tensor":
        """A tensor of the memory of `tensor`: a DLPack capsule, or an object that makes one."""
        self = Tensor(name, _NOTHING)
        taken = dlpack.take(tensor)
        if isinstance(taken, dlpack.DeviceTensor):
            self._array = None
            self._device = taken
        else:
            self._array = taken
        return self

    def __repr__(self) -> str:
        return f"<Tensor {self._name} {self.shape()}>"


def host_array(tensor: Tensor) -> Array:
    """The values of a tensor as an array, copied from the GPU where they are there."""
    array = tensor._array
    return array if array is not None else tensor._device.to_host()
