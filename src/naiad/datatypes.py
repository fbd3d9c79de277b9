"""The one table of data types: Triton's name, its number in the protocol, numpy's dtype, the element size.

Imported by the server and by hosts, so it needs numpy only.
"""

import enum
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview

#: What has to be read or converted element by element is given to a thread from this many bytes on, so that
#: the event loop goes on.
LARGE: Final = 1 << 20
#: So many elements are looked through or converted in about 5 ms. Compiled, a thread lets others run only where it says
#: so: by `sleep(0)`, after so many.
AT_ONCE: Final = 1 << 15


class TakesLong(Exception):
    """What was asked for is LARGE, and has not been asked for in a thread. No error: ask again, there."""


class DataType(enum.Enum):
    """A tensor element type; total over Triton's types.

    `number` is the value in model_config.proto, `byte_size` the size of an element (0 for BYTES), `protocol_name` the
    same as `name`, which Python looks up with code of its own.
    """

    BOOL = (1, np.bool_, 1)
    UINT8 = (2, np.uint8, 1)
    UINT16 = (3, np.uint16, 2)
    UINT32 = (4, np.uint32, 4)
    UINT64 = (5, np.uint64, 8)
    INT8 = (6, np.int8, 1)
    INT16 = (7, np.int16, 2)
    INT32 = (8, np.int32, 4)
    INT64 = (9, np.int64, 8)
    FP16 = (10, np.float16, 2)
    FP32 = (11, np.float32, 4)
    FP64 = (12, np.float64, 8)
    BYTES = (13, np.object_, 0)
    BF16 = (14, ml_dtypes.bfloat16, 2)

    number: int
    numpy: np.dtype[Any]
    byte_size: int
    protocol_name: str

    # The members are all there are; that of enumerations is Python code.
    __hash__ = object.__hash__

    def __init__(self, number: int, numpy: Any, byte_size: int) -> None:
        self.number = number
        self.numpy = np.dtype(numpy)
        self.byte_size = byte_size
        self.protocol_name = self._name_

    @property
    def config_name(self) -> str:
        """The name in config.pbtxt, for example TYPE_FP32; BYTES is TYPE_STRING."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.name}"


BY_NAME: dict[str, DataType] = {datatype.name: datatype for datatype in DataType}
BY_NUMBER: dict[int, DataType] = {datatype.number: datatype for datatype in DataType}
BY_CONFIG_NAME: dict[str, DataType] = {datatype.config_name: datatype for datatype in DataType}
_BY_NUMPY: dict[np.dtype[Any], DataType] = {datatype.numpy: datatype for datatype in DataType}


def from_numpy(dtype: npt.DTypeLike) -> DataType | None:
    """The data type of a numpy dtype; text and bytes dtypes are BYTES; None where Triton has no such type."""
    dtype = np.dtype(dtype)
    if (datatype := _BY_NUMPY.get(dtype)) is not None:
        return datatype
    if dtype.kind in "SU":
        return DataType.BYTES
    return _BY_NUMPY.get(dtype.newbyteorder("="))
