"""Tensors as the arrays of JSON, both ways: the elements nested or flat, as Triton reads and writes them. Pure."""

import array
import struct
from itertools import chain
from typing import Any, Final

import numpy as np

from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument
from naiad.messages import Tensor
from naiad.packed import pack_texts, unpack_texts
from naiad.protocol.json_text import IS_BOOLEAN, IS_NUMBER, IS_SIGNED, IS_UNSIGNED, too_deep

DEFAULT_MAX_INPUT_SIZE: Final = 67108864

_DEEPEST: Final = 100
#: Codes of the modules `array` and `struct`; FP16, BF16 and BYTES have none.
CODES: Final[dict[DataType, str]] = {
    DataType.BOOL: "?",
    DataType.UINT8: "B",
    DataType.UINT16: "H",
    DataType.UINT32: "I",
    DataType.UINT64: "Q",
    DataType.INT8: "b",
    DataType.INT16: "h",
    DataType.INT32: "i",
    DataType.INT64: "q",
    DataType.FP32: "f",
    DataType.FP64: "d",
}
_FLOATS: Final = frozenset((DataType.FP32, DataType.FP64))
_UNSIGNED: Final = frozenset((DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64))
_BINARY_ONLY: Final = frozenset((DataType.FP16, DataType.BF16))
_ONLY_INT: Final = frozenset((int,))
_ONLY_BOOL: Final = frozenset((bool,))
_ONLY_STR: Final = frozenset((str,))
_NUMBERS: Final = frozenset((int, float))
_WRONG_COUNT: Final = "Unable to parse 'data': Shape does not match true shape of 'data' field"
#: From this many elements on numpy writes faster than a list of Python numbers does.
_MANY: Final = 256


def tensor_data(
    name: str, datatype: DataType, count: int, data: Any, max_input_size: int = DEFAULT_MAX_INPUT_SIZE
) -> bytes:
    """The bytes of a JSON array, nested or flat, of `count` elements; or of the array that `parse_request` made of it.

    Integers wrap around to the width of the data type; numbers beyond FP32 become infinite. Without elements the array
    is not looked at. The number of BYTES elements is left to the engine, as Triton leaves it to its core.
    """
    if count == 0:
        return b""
    if datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype.name} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    is_array = isinstance(data, np.ndarray)
    if not is_array and type(data) is not list:
        raise Internal("Unable to parse 'data': attempt to access JSON non-array as array")
    byte_size = count * datatype.byte_size
    if byte_size > max_input_size:
        raise InvalidArgument(
            f"JSON input '{name}' has a byte_size ({byte_size} bytes) that exceeds the maximum allowed value of "
            f"{max_input_size} bytes. Use --http-max-input-size to increase the limit."
        )
    if is_array:
        if len(data) != count:
            raise Internal(_WRONG_COUNT)
        with np.errstate(over="ignore"):
            numbers: bytes = data.astype(datatype.numpy, copy=False).tobytes()
        return numbers
    if datatype is DataType.BYTES:
        try:
            return pack_texts(data)
        except (TypeError, AttributeError):
            # Something else than a text is among them.
            data = _flat(data)
        if not set(map(type, data)) <= _ONLY_STR:
            raise Internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
        return pack_texts(data)
    kinds = set(map(type, data))
    if list in kinds:
        data = _flat(data)
        kinds = set(map(type, data))
    if len(data) != count:
        # Triton reads one element after the other, so one of a wrong type comes first.
        tensor_data(name, datatype, min(len(data), count), data[:count], max_input_size)
        raise Internal(_WRONG_COUNT)
    if datatype in _FLOATS:
        if not kinds <= _NUMBERS:
            raise Internal(f"Unable to parse 'data': {IS_NUMBER}")
        return array.array(CODES[datatype], data).tobytes()
    if datatype is DataType.BOOL:
        if not kinds <= _ONLY_BOOL:
            raise Internal(f"Unable to parse 'data': {IS_BOOLEAN}")
        return bytes(data)
    unsigned = datatype in _UNSIGNED
    if not kinds <= _ONLY_INT:
        raise Internal(f"Unable to parse 'data': {IS_UNSIGNED if unsigned else IS_SIGNED}")
    try:
        return array.array(CODES[datatype], data).tobytes()
    except OverflowError:
        pass
    try:
        wide = array.array("Q" if unsigned else "q", data)
    except OverflowError:
        raise Internal(f"Unable to parse 'data': {IS_UNSIGNED if unsigned else IS_SIGNED}") from None
    return np.frombuffer(wide, dtype=np.uint64 if unsigned else np.int64).astype(datatype.numpy).tobytes()


def _flat(data: list[Any]) -> list[Any]:
    """The elements of nested lists in order."""
    for _ in range(_DEEPEST):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) == 1:
            data = list(chain.from_iterable(data))
        else:
            data = list(chain.from_iterable(item if type(item) is list else (item,) for item in data))
    raise too_deep()


def json_data(tensor: Tensor) -> Any:
    """The elements as `dump` takes them: a sequence, or for many numbers an array. FP32 is widened to double."""
    datatype = tensor.datatype
    if datatype is DataType.BYTES:
        texts = unpack_texts(tensor.data)
        if texts is None:
            raise Internal("malformed BYTES output: a string is longer than the data that is left")
        return texts
    code = CODES.get(datatype)
    if code is None:
        raise InvalidArgument(
            f"sending {datatype.name} data via JSON is not supported. Please use the binary data format for output"
        )
    data = tensor.data
    size = len(data) if type(data) is bytes else memoryview(data).nbytes
    count = size // datatype.byte_size
    if count < _MANY:
        return struct.unpack(f"={count}{code}", data)
    values = np.frombuffer(data, dtype=datatype.numpy)
    return values.astype(np.float64) if datatype is DataType.FP32 else values
