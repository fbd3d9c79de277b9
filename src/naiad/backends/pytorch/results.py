"""From what a model returned to the arrays of the configured outputs. Runs in hosts.

The structure is looked at in each run, since a model may leave parts out; which leaf is which output is worked out
once for each structure there is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from naiad.backends.api import Array, ConfigDict
from naiad.backends.arrays import from_text
from naiad.backends.configured import framework_dims
from naiad.backends.pytorch.structures import Path, describe, has_order, is_text, leaves, places
from naiad.backends.pytorch.tensors import DATATYPES, Device, check_datatype, number_type
from naiad.datatypes import BY_CONFIG_NAME, DataType
from naiad.errors import Internal, InvalidArgument


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the configuration. `dims` are without the batch."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]


def configured_outputs(config: ConfigDict) -> list[Output]:
    """Outputs, then output states that are none of them."""
    found = {
        tensor["name"]: Output(tensor["name"], BY_CONFIG_NAME[tensor["data_type"]], framework_dims(tensor))
        for tensor in config.get("output", ())
    }
    for state in config.get("sequence_batching", {}).get("state", ()):
        name = state["output_name"]
        dims = tuple(int(dim) for dim in state.get("dims", ()))
        found.setdefault(name, Output(name, BY_CONFIG_NAME[state["data_type"]], dims))
    return list(found.values())


class Results:
    """The outputs of one model."""

    def __init__(self, model: str, config: ConfigDict, device: Device) -> None:
        """Raises InvalidArgument where no output is configured."""
        self._model = model
        self._device = device
        self._batching = int(config.get("max_batch_size", 0)) > 0
        outputs = configured_outputs(config)
        if not config.get("output"):
            raise InvalidArgument("model configuration must contain at least one output, none were specified.")
        self.outputs = {output.name: output for output in outputs}
        self._names = list(self.outputs)
        self._places: dict[tuple[bool, tuple[Path, ...]], dict[str, int]] = {}

    def find(self, value: Any, names: Sequence[str]) -> tuple[list[tuple[Path, Any]], dict[str, int]]:
        """The leaves of what the model returned, and which of them each output is. Raises if one of `names` is none."""
        found = leaves(value)
        paths = tuple([path for path, _ in found])
        key = (has_order(value), paths)
        chosen = self._places.get(key)
        if chosen is None or not chosen.keys() >= set(names):
            chosen = self._places[key] = places(self._model, value, paths, self._names, names)
        return found, chosen

    def arrays(self, value: Any, names: Sequence[str]) -> dict[str, Array]:
        """The outputs `names`. Raises where the model did not return what is configured."""
        found, chosen = self.find(value, names)
        arrays: dict[str, Array] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            leaf = found[chosen[name]][1]
            if isinstance(leaf, torch.Tensor):
                output = self.outputs[name]
                check_datatype(name, output.datatype, DATATYPES.get(leaf.dtype), str(leaf.dtype))
                tensors[name] = leaf
            else:
                arrays[name] = self._other(self.outputs[name], leaf, value)
        for name, array in zip(tensors, self._device.arrays(list(tensors.values())), strict=True):
            arrays[name] = self._shaped(self.outputs[name], array) if array.ndim == 0 else array
        return arrays

    def _other(self, output: Output, leaf: Any, value: Any) -> Array:
        if isinstance(leaf, str) or (is_text(leaf) and (leaf or output.datatype is DataType.BYTES)):
            check_datatype(output.name, output.datatype, DataType.BYTES, "")
            array = np.array(leaf, np.object_)
            if array.size and isinstance(array.flat[0], list):
                raise InvalidArgument(
                    f"output '{output.name}' of model '{self._model}' has lists of different lengths: {describe(value)}"
                )
            array = from_text(array)
            # One string for each row of a batch is a list, where the configuration has dims [1].
            if self._batching and array.ndim == 1 and output.dims == (1,):
                return array.reshape(-1, 1)
            return self._shaped(output, array) if array.ndim == 0 else array
        if isinstance(leaf, (bool, int, float)):
            kind = number_type(leaf)
            fits = output.datatype.numpy.kind in {"b": "b", "i": "iuf", "f": "f"}[kind.numpy.kind]
            if not (fits or (kind is not DataType.BOOL and output.datatype is DataType.BF16)):
                check_datatype(output.name, output.datatype, kind, "")
            try:
                return self._shaped(output, np.array(leaf, output.datatype.numpy))
            except OverflowError as error:
                raise InvalidArgument(
                    f"output '{output.name}' is {leaf}, and {output.datatype.name}: {error}"
                ) from error
        raise Internal(
            f"output '{output.name}' of model '{self._model}' must be of type Tensor, List[str] or a number, received"
            f" {type(leaf).__name__}: the model returned {describe(value)}"
        )

    def _shaped(self, output: Output, array: Array) -> Array:
        """A single number as the configuration has it."""
        if self._batching or any(dim not in (1, -1) for dim in output.dims):
            raise InvalidArgument(f"output '{output.name}' is a scalar which is not supported.")
        return array.reshape((1,) * len(output.dims))
