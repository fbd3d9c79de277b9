"""What several backends do to arrays between the contract of `api.py` and a framework. Runs in hosts.

The conversions chosen here at load time are what is left to do per batch; a tensor that needs none costs nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.backends.api import Array
from naiad.errors import InvalidArgument


def framework_dims(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """The dims of a configured input or output as the framework sees them: its `reshape`, else its `dims`."""
    reshape = tensor.get("reshape")
    dims = tensor.get("dims", ()) if reshape is None else reshape.get("shape", ())
    return tuple(int(dim) for dim in dims)


@dataclass(frozen=True, slots=True)
class Reshape:
    """From one form of `dims` to another with as many elements; -1s correspond in order.

        Reshape((4, -1), (-1, 2, 2), batching=True)(array of [8, 4, 5]) -> array of [8, 5, 2, 2]

    An array that does not have the form `source` is left alone.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    batching: bool

    def __call__(self, array: Array) -> Array:
        batch, dims = (array.shape[:1], array.shape[1:]) if self.batching else ((), array.shape)
        if len(dims) != len(self.source):
            return array
        variable = []
        for extent, dim in zip(dims, self.source, strict=True):
            if dim == -1:
                variable.append(extent)
            elif dim != extent:
                return array
        extents = iter(variable)
        return array.reshape(batch + tuple(next(extents) if dim == -1 else dim for dim in self.target))


def input_reshape(tensor: Mapping[str, Any], batching: bool) -> Reshape | None:
    """What turns a configured input into what the framework sees; None where they are the same."""
    return _reshape(tensor, batching, to_framework=True)


def output_reshape(tensor: Mapping[str, Any], batching: bool) -> Reshape | None:
    """What turns a framework's output into what the configuration says; None where they are the same."""
    return _reshape(tensor, batching, to_framework=False)


def _reshape(tensor: Mapping[str, Any], batching: bool, to_framework: bool) -> Reshape | None:
    if tensor.get("reshape") is None:
        return None
    outside, inside = tuple(int(dim) for dim in tensor["dims"]), framework_dims(tensor)
    return Reshape(outside, inside, batching) if to_framework else Reshape(inside, outside, batching)


def to_text(array: npt.NDArray[np.object_], tensor: str) -> npt.NDArray[np.object_]:
    """BYTES elements as str, for frameworks that know text only. Raises InvalidArgument where they are not UTF-8."""
    text = np.empty(array.size, dtype=np.object_)
    try:
        text[:] = [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{tensor}' holds {error.object[:20]!r}, which is not UTF-8; the framework of this model takes text only"
        ) from error
    return text.reshape(array.shape)


def from_text(array: npt.NDArray[Any]) -> npt.NDArray[np.object_]:
    """Elements of str (or bytes) as BYTES elements."""
    data = np.empty(array.size, dtype=np.object_)
    data[:] = [element.encode() if isinstance(element, str) else bytes(element) for element in array.reshape(-1)]
    return data.reshape(array.shape)
