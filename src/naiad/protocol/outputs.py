"""How a client wants each output: as JSON, as binary data, as the top classes, or in a shared-memory region.

A codec reads the plan from a request; the front end follows it when the response is there. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import sleep
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from naiad.datatypes import AT_ONCE, DataType
from naiad.errors import InvalidArgument
from naiad.messages import Tensor
from naiad.packed import pack_bytes


@dataclass(init=False)
class OutputSpec:
    """The wishes for one output. `classification` 0 is none; without a `region` the offset and size mean nothing."""

    name: str
    binary: bool
    classification: int
    region: str | None
    region_offset: int
    region_byte_size: int

    def __init__(
        self,
        name: str,
        binary: bool = False,
        classification: int = 0,
        region: str | None = None,
        region_offset: int = 0,
        region_byte_size: int = 0,
    ) -> None:
        self.name = name
        self.binary = binary
        self.classification = classification
        self.region = region
        self.region_offset = region_offset
        self.region_byte_size = region_byte_size


@dataclass(init=False)
class OutputPlan:
    """The wishes for all outputs of a request; no `outputs` are all of the model's, each as `binary_default` says.

    `is_binary`: all of them are binary, and no more than that. `has_regions`: some go to shared memory.
    """

    outputs: dict[str, OutputSpec]
    binary_default: bool
    is_binary: bool
    has_regions: bool

    def __init__(
        self,
        outputs: dict[str, OutputSpec],
        binary_default: bool = False,
        is_binary: bool = False,
        has_regions: bool = False,
    ) -> None:
        self.outputs = outputs
        self.binary_default = binary_default
        self.is_binary = is_binary
        self.has_regions = has_regions


#: Everything, as JSON: what a request that says nothing about outputs gets over HTTP.
ALL_JSON: Final = OutputPlan({})
ALL_BINARY: Final = OutputPlan({}, binary_default=True, is_binary=True)


def plan_of(specs: Iterable[OutputSpec], binary_default: bool) -> OutputPlan:
    """The plan of a request that says what it wants of each of these outputs, or nothing. What it says first of one
    counts, as in Triton."""
    outputs: dict[str, OutputSpec] = {}
    for spec in specs:
        outputs.setdefault(spec.name, spec)
    if not outputs:
        return ALL_BINARY if binary_default else ALL_JSON
    has_regions = any(spec.region is not None for spec in outputs.values())
    wishes = outputs.values()
    is_binary = all(spec.binary and spec.region is None and not spec.classification for spec in wishes)
    return OutputPlan(outputs, binary_default, is_binary, has_regions)


#: Looking for so few among the values of a row is faster than sorting all of them.
_FEW: Final = 8
_CLASSIFIABLE: Final = frozenset(DataType) - {DataType.BOOL, DataType.BYTES, DataType.FP16, DataType.BF16}


def classify(tensor: Tensor, count: int, labels: list[str], batched: bool) -> Tensor:
    """The `count` largest elements of each row as a BYTES tensor of `value:index` or `value:index:label`.

    A row is what belongs to one index of the first dimension where `batched`, else the whole tensor; the result has
    the shape `[rows, min(count, elements of a row)]`, without the rows where not batched. Equal values keep their
    order. Raises InvalidArgument for data types that have no order or no number text in Triton.
    """
    datatype = tensor.datatype
    if datatype not in _CLASSIFIABLE:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype.name}'")
    rows = tensor.shape[0] if batched and tensor.shape else 1
    values = np.frombuffer(tensor.data, dtype=datatype.numpy)
    size = len(values) // rows if rows else 0
    kept = min(count, size)
    form = "%f:%d" if values.dtype.kind == "f" else "%d:%d"
    texts: list[str] = []
    for row in values.reshape(rows, size):
        order = _largest(row, kept)
        for at in range(0, kept, AT_ONCE):
            if at:
                sleep(0)
            piece = order[at : at + AT_ONCE]
            for value, index in zip(row[piece].tolist(), piece.tolist(), strict=True):
                text = form % (value, index)
                label = labels[index] if index < len(labels) else ""
                texts.append(f"{text}:{label}" if label else text)
    shape = (rows, kept) if batched and tensor.shape else (kept,)
    return Tensor(tensor.name, DataType.BYTES, shape, pack_bytes(texts))


def _largest(row: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """The indices of the `count` largest values, descending, equal ones in order; what is no number counts as largest."""
    if count * _FEW >= len(row):
        return _descending(row)[:count]
    least = np.partition(row, -count)[-count]
    among = np.flatnonzero(~(row < least))
    return among[_descending(row[among])[:count]]


def _descending(row: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    # The stable order of the reversed row, reversed, is descending and keeps equal values in order.
    order: npt.NDArray[np.intp] = len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]
    return order
