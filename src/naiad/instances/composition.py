"""Tensors that say how a batch is composed, and outputs taken apart by it: `batch_input` and `batch_output`. Pure.

Only a backend that gets whole batches needs them, so they are made where the batch runs. Shapes are those of the
requests, batch dimension included; what the kinds mean is Triton's (reference R2-40 to R2-42).
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from naiad import datatypes
from naiad.backends.api import Array, ConfigDict
from naiad.errors import Internal

Shape = tuple[int, ...]


def _element_counts(shapes: Sequence[Shape]) -> Array:
    return np.array([prod(shape) for shape in shapes])


def _accumulated(shapes: Sequence[Shape]) -> Array:
    return np.cumsum(_element_counts(shapes))


def _accumulated_with_zero(shapes: Sequence[Shape]) -> Array:
    return np.concatenate(([0], _accumulated(shapes)))


def _max_as_shape(shapes: Sequence[Shape]) -> Array:
    # Only the length says something.
    return np.zeros(max(prod(shape) for shape in shapes))


def _item_shapes(shapes: Sequence[Shape]) -> Array:
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(items).reshape(len(items), len(shapes[0]) - 1)


def _item_shapes_flat(shapes: Sequence[Shape]) -> Array:
    return _item_shapes(shapes).reshape(-1)


_KINDS: dict[str, Callable[[Sequence[Shape]], Array]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _max_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}


class BatchInput:
    """An entry of `batch_input`: one array, under each of `names`, made from the shapes of the input `source`."""

    __slots__ = ("_dtype", "_make", "names", "source")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.names: tuple[str, ...] = tuple(config["target_name"])
        (self.source,) = config["source_input"]
        self._make = _KINDS[config.get("kind", "BATCH_ELEMENT_COUNT")]
        self._dtype = datatypes.BY_CONFIG_NAME[config["data_type"]].numpy

    def array(self, shapes: Sequence[Shape]) -> Array:
        """Its value in a batch of requests whose source inputs have these shapes."""
        return self._make(shapes).astype(self._dtype)


class Composition:
    """What a model's configuration says about the composition of its batches; false where it says nothing."""

    __slots__ = ("_model", "_scattered", "inputs", "ragged")

    def __init__(self, model: str, config: ConfigDict) -> None:
        self._model = model
        #: Inputs whose elements reach the backend one request behind the other, without other dimensions.
        self.ragged = frozenset(io["name"] for io in config.get("input", ()) if io.get("allow_ragged_batch"))
        self.inputs = tuple(map(BatchInput, config.get("batch_input", ())))
        dims = {io["name"]: tuple(int(extent) for extent in io.get("dims", ())) for io in config.get("output", ())}
        head = (-1,) if int(config.get("max_batch_size", 0)) > 0 else ()
        #: The source input and the shape, -1 where it is the source's, of each output that is scattered.
        self._scattered: dict[str, tuple[str, Shape]] = {
            name: (io["source_input"][0], head + dims[name])
            for io in config.get("batch_output", ())
            for name in io["target_name"]
        }

    def __bool__(self) -> bool:
        return bool(self.ragged or self.inputs or self._scattered)

    def batch_inputs(self, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Array]:
        """The arrays of all batch inputs; `shapes` are those of each input, request by request."""
        arrays: dict[str, Array] = {}
        for made in self.inputs:
            array = made.array(self._source(shapes, made.source, f"batch input '{made.names[0]}'"))
            arrays[made.names[0]] = array
            # A model may write to what it is given.
            arrays.update({name: array.copy() for name in made.names[1:]})
        return arrays

    def output_shapes(self, name: str, shapes: Mapping[str, Sequence[Shape]]) -> list[Shape] | None:
        """The shapes that the output `name` has in the responses; None for one that splits by rows.

        Raises Internal where the input that tells them has too few dimensions.
        """
        scattered = self._scattered.get(name)
        if scattered is None:
            return None
        source, wanted = scattered
        found = []
        for shape in self._source(shapes, source, f"output '{name}'"):
            if any(extent < 0 and axis >= len(shape) for axis, extent in enumerate(wanted)):
                raise Internal(
                    f"model '{self._model}': output '{name}' takes its variable dimensions from input '{source}', which "
                    f"has {len(shape)} dimensions, not {len(wanted)}"
                )
            found.append(tuple([shape[axis] if extent < 0 else extent for axis, extent in enumerate(wanted)]))
        return found

    def _source(self, shapes: Mapping[str, Sequence[Shape]], source: str, what: str) -> Sequence[Shape]:
        if source not in shapes:
            raise Internal(
                f"model '{self._model}': {what} is made from input '{source}', which the requests do not have"
            )
        return shapes[source]
