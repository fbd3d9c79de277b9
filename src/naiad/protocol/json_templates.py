"""Requests all in JSON that come again with other data: the text around the arrays is looked up, only these are read. Pure.

What stands around the arrays of a text, with other values in their place, is the same document with other data: a value
ends where it ends, whatever follows. So a text is one that is known when its pieces are the same and what lies between
them is JSON by itself. All else, wrong data too, is left to whoever reads whole texts, and has the words for it.
"""

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from naiad.datatypes import DataType
from naiad.errors import NaiadError
from naiad.messages import InferRequest, Tensor
from naiad.protocol.json_arrays import CODES, tensor_data
from naiad.protocol.json_numbers import parse_array
from naiad.protocol.outputs import OutputPlan
from naiad.protocol.templates import LARGEST, MOST

#: In longer texts reading the arrays is all that counts.
LONGEST: Final = 32 * 1024

#: Who has changed what stands behind the data is not to wait for ever.
_MOST_MISSES: Final = 100
#: The text of an array from which on numbers are read without a Python object for each.
_MANY: Final = 2048
_DATA: Final = b'"data"'
_Key = tuple[bytes, str, int, int]


class _Array:
    """The data of an input, and the text behind them up to the next array or the end."""

    __slots__ = ("behind", "count", "datatype", "is_last", "name", "pack", "shape")

    def __init__(self, tensor: Tensor, count: int, behind: bytes, is_last: bool) -> None:
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.shape = tensor.shape
        self.count = count
        self.behind = behind
        self.is_last = is_last
        #: Makes bytes of `count` numbers, or raises; it would take booleans too, also as what they are not.
        self.pack: Callable[..., bytes] | None = None
        code = CODES.get(tensor.datatype)
        if code is not None and tensor.datatype is not DataType.BOOL:
            self.pack = struct.Struct(f"={count}{code}").pack


class _Template:
    __slots__ = ("arrays", "misses", "plan", "request")

    def __init__(self, request: InferRequest, plan: OutputPlan, arrays: list[_Array]) -> None:
        #: Without its data.
        self.request = request
        self.plan = plan
        self.arrays = arrays
        #: How many texts that begin like it have been others since the last that was not.
        self.misses = 0


#: By the text before the first array, the model's name, the version asked for and how large data may be. None
#: is a text that is no such request.
_templates: Final[dict[_Key, _Template | None]] = {}
#: What has come once. Who comes with another id each time is not worth more.
_seen: Final[set[_Key]] = set()
_values: Final = json.JSONDecoder(strict=False)


def recall(
    text: bytes, model_name: str, model_version: int, max_input_size: int
) -> tuple[InferRequest, OutputPlan] | None:
    """The request in a text like one that is known; None for any other."""
    start = text.find(b"[", text.find(_DATA))
    known = _templates.get((text[:start], model_name, model_version, max_input_size))
    if known is None:
        return None
    inputs: list[Tensor] = []
    for item in known.arrays:
        if item.is_last:
            if not text.endswith(item.behind):
                return None
            end = len(text) - len(item.behind)
        else:
            end = text.find(item.behind, start)
            if end < 0:
                return None
        data = _read(item, text[start:end], max_input_size)
        if data is None:
            return None
        inputs.append(Tensor(item.name, item.datatype, item.shape, data))
        start = end + len(item.behind)
    known.misses = 0
    return known.request.of(tuple(inputs)), known.plan


def _read(item: _Array, text: bytes, max_input_size: int) -> bytes | None:
    values = parse_array(text, item.datatype) if len(text) >= _MANY and item.pack is not None else None
    if values is not None:
        return _data(item, values, max_input_size)
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if type(values) is not list:
        return None
    # There is a letter of `true` or `false`, which a number does not have.
    if item.pack is not None and not text.startswith(b"[[") and text.find(b"r") < 0 and text.find(b"l") < 0:
        try:
            return item.pack(*values)
        except (struct.error, OverflowError):
            pass  # too large, or no numbers
    return _data(item, values, max_input_size)


def _data(item: _Array, values: Any, max_input_size: int) -> bytes | None:
    try:
        return tensor_data(item.name, item.datatype, item.count, values, max_input_size)
    except NaiadError:
        return None


def remember(text: bytes, request: InferRequest, plan: OutputPlan, counts: Sequence[int], max_input_size: int) -> None:
    """Takes note of a text, which has been read: `request` has all its data in JSON, in arrays of `counts` elements."""
    start = text.find(b"[", text.find(_DATA))
    key = (text[:start], request.model_name, request.model_version, max_input_size)
    if start > LARGEST:
        return
    if key in _templates:
        known = _templates[key]
        if known is not None:
            known.misses += 1
            if known.misses > _MOST_MISSES:
                del _templates[key]
        return
    if key not in _seen:
        if len(_seen) >= MOST:
            _seen.clear()
        _seen.add(key)
        return
    if len(_templates) >= MOST:
        _templates.clear()
    _templates[key] = _template(text, start, request, plan, counts)


def _template(
    text: bytes, start: int, request: InferRequest, plan: OutputPlan, counts: Sequence[int]
) -> _Template | None:
    # Each input has a member of that name; where the text has no more of these, and none in other letters, they are it.
    if text.count(_DATA) != len(counts) or b"\\" in text:
        return None
    characters = text.decode("latin-1")
    arrays: list[_Array] = []
    size = at = start
    for position, (tensor, count) in enumerate(zip(request.inputs, counts, strict=True), 1):
        try:
            _, end = _values.raw_decode(characters, at)
        except (ValueError, RecursionError):
            return None
        is_last = position == len(counts)
        at = len(text) if is_last else text.find(b"[", text.find(_DATA, end))
        arrays.append(_Array(tensor, count, text[end:at], is_last))
        size += at - end
    return _Template(request.of(()), plan, arrays) if size <= LARGEST else None
