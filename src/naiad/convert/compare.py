"""Arrays to try a model with, and how far its answers are from another's. Pure, but for the file of arrays."""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from naiad.backends.api import Array
from naiad.convert.job import Difference
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument, NaiadError

#: Bits of a float -> how much wider its rounding makes a tolerance, and the least that the tolerance is a part of: small
#: values may be what is left of larger ones that cancel.
_ROUNDING = {16: (4.0, 0.1), 32: (1.0, 1e-3), 64: (1.0, 1e-3)}


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a source, the batch dimension included; -1 for dynamic extents."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]


def random_arrays(inputs: Sequence[Input], rows: int, extent: int, seed: int = 0) -> dict[str, Array]:
    """Dynamic first dimensions become `rows`, others `extent`. Whole numbers are 0 or 1: they may be places in a
    table whose size nobody knows."""
    generator = np.random.default_rng(seed)
    return {it.name: _random(generator, it.datatype, _extents(it.dims, rows, extent)) for it in inputs}


def _extents(dims: tuple[int, ...], rows: int, extent: int) -> tuple[int, ...]:
    return tuple((rows if at == 0 else extent) if dim == -1 else dim for at, dim in enumerate(dims))


def _random(generator: np.random.Generator, datatype: DataType, shape: tuple[int, ...]) -> Array:
    if datatype is DataType.BYTES:
        words = np.empty(shape, np.object_)
        words[...] = b"naiad"
        return words
    if datatype.numpy.kind in "iub":
        return generator.integers(0, 2, shape).astype(datatype.numpy)
    return generator.standard_normal(shape).astype(datatype.numpy)


def read_arrays(path: str) -> dict[str, Array]:
    """The arrays of a .npz file by name. Raises InvalidArgument where it is none."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidArgument(f"{path} is no .npz file of numbers, as numpy.savez writes it: {error}") from error


def given_arrays(arrays: Mapping[str, Array], inputs: Sequence[Input]) -> dict[str, Array]:
    """The arrays of the user's file as the inputs want them. Raises InvalidArgument where one is missing or wrong."""
    wanted = [it.name for it in inputs]
    if sorted(arrays) != sorted(wanted):
        raise InvalidArgument(f"the file of inputs has {sorted(arrays)}, the model wants {sorted(wanted)}")
    for it in inputs:
        shape = arrays[it.name].shape
        if len(shape) != len(it.dims) or any(
            dim not in (-1, extent) for dim, extent in zip(it.dims, shape, strict=True)
        ):
            raise InvalidArgument(
                f"input '{it.name}' has shape {list(shape)} in the file, the model wants {list(it.dims)}"
            )
    return {it.name: np.ascontiguousarray(arrays[it.name], it.datatype.numpy) for it in inputs}


def paired(wanted: Sequence[str], got: Sequence[str]) -> list[tuple[str, str]]:
    """Which output of the source is which of the result: by name, else by place."""
    if set(wanted) <= set(got):
        return [(name, name) for name in wanted]
    if len(wanted) != len(got):
        raise InvalidArgument(f"the source answers {list(wanted)}, the result {list(got)}: no telling which is which")
    return list(zip(wanted, got, strict=True))


def difference(output: str, inputs: str, wanted: Array, got: Array) -> Difference:
    """Raises InvalidArgument for other shapes. Infinity where what is no number differs."""
    if wanted.shape != got.shape and (wanted.size != 1 or got.size != 1):
        raise InvalidArgument(
            f"output '{output}' has shape {list(got.shape)} on {inputs}, the source's {list(wanted.shape)}"
        )
    if wanted.dtype.kind not in "biuf" or got.dtype.kind not in "biuf":
        same = [_text(it) for it in wanted.reshape(-1)] == [_text(it) for it in got.reshape(-1)]
        return Difference(output, inputs, 0.0 if same else float("inf"), 1.0, 1.0)
    a, b = wanted.reshape(-1).astype(np.float64), got.reshape(-1).astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Difference(output, inputs, float("inf"), 1.0, 1.0)
    largest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    scale = float(np.abs(a[finite]).max(initial=0.0))
    return Difference(output, inputs, largest, scale, _unit(scale, wanted.dtype, got.dtype))


def _unit(scale: float, *dtypes: np.dtype[Any]) -> float:
    """What the tolerance is a part of, for values up to `scale`, by the coarser of the types."""
    bits = [dtype.itemsize * 8 for dtype in dtypes if dtype.kind == "f"]
    wider, smallest = _ROUNDING[min(bits)] if bits else (1.0, 0.0)
    return max(wider * scale, smallest)


def _text(element: object) -> str:
    return element.decode(errors="replace") if isinstance(element, bytes) else str(element)


def check(differences: Sequence[Difference], tolerance: float) -> None:
    """Raises NaiadError where an output is further off than that part of its largest value."""
    for it in differences:
        if _too_far(it, tolerance):
            raise NaiadError(
                f"the result is not the source: output '{it.output}' differs by {it.largest:.3g} on {it.inputs}, values are"
                f" up to {it.scale:.3g}, the tolerance is {tolerance * it.unit:.3g}. Nothing was written; --tolerance allows"
                " more"
            )


def _too_far(found: Difference, tolerance: float) -> bool:
    return found.largest > tolerance * found.unit


def dependent_output(batch: Mapping[str, Array], row: int, alone: Mapping[str, Array], tolerance: float) -> str | None:
    """The first output of which a row of a batch is not what the same row gets alone."""
    for name, values in batch.items():
        among_others = values[row : row + 1] if values.ndim else values
        if (
            values.ndim == 0
            or alone[name].shape != among_others.shape
            or _too_far(difference(name, "", among_others, alone[name]), tolerance)
        ):
            return name
    return None
