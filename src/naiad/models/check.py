"""Checks a request against the configuration of its model. Pure; built once when a version is loaded.

Order and texts are Triton's (reference R3-71 to R3-78): inputs given twice, requested outputs, number of inputs, names
and batch dimension; then for each input data type, shape and size in bytes. Where several inputs are wrong Triton
names the one given last, because it keeps inputs in a hash map that is walked newest first; so do the loops here.
"""

import struct
from time import sleep
from typing import Final

from naiad.config.model_config import ModelConfig, TensorConfig
from naiad.datatypes import AT_ONCE, LARGE, Buffer, DataType, TakesLong
from naiad.errors import InvalidArgument
from naiad.messages import InferRequest, Tensor
from naiad.packed import count_elements

_LENGTH: Final = struct.Struct("<I")
_BATCH_NOTE: Final = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


#: (the request with its inputs in configured order, rows, batching signature)
Checked = tuple[InferRequest, int, object]


class BrokenContents(InvalidArgument):
    """The elements of a BYTES tensor do not fit its bytes. In Triton it is the model's execution that finds this, so
    it is answered as an error of the model."""


class _Input:
    """What one configured input demands, with what can be computed ahead."""

    __slots__ = ("datatype", "dims", "element_size", "is_any", "name", "ragged", "rank", "row_size", "shape_size")

    def __init__(self, config: TensorConfig, batching: bool) -> None:
        self.name = config.name
        self.datatype = config.datatype
        self.dims = config.dims
        self.ragged = config.ragged
        self.rank = len(config.dims) + batching
        #: Every shape of the right rank will do.
        self.is_any = all(extent == -1 for extent in config.dims)
        self.element_size = config.datatype.byte_size
        #: Bytes of one row; 0 where shape or elements have no fixed size.
        self.row_size = 0 if -1 in config.dims else _elements(config.dims) * config.datatype.byte_size
        #: Whether the shape is part of what requests must share to share a batch.
        self.shape_size = -1 in config.dims and not config.ragged


class RequestCheck:
    """Says whether a request fits a model, how many rows it has, and what it may be batched with.

    A good request is found good in one pass; only what does not pass is looked at again, in Triton's order.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        batching = config.max_batch_size > 0
        self._inputs = {name: _Input(tensor, batching) for name, tensor in config.inputs.items()}
        self._specs = tuple(self._inputs.values())
        self._order = tuple(config.inputs)
        self._outputs = frozenset(config.outputs)
        self._required = config.required_inputs
        self._varies = any(spec.shape_size for spec in self._specs)

    def __call__(self, request: InferRequest, in_thread: bool = False) -> Checked:
        """(the request with its inputs in configured order, rows, batching signature).

        Raises InvalidArgument, and TakesLong where strings of a LARGE tensor have to be looked through and this is not
        `in_thread`.
        """
        inputs = request.inputs
        names = tuple([tensor.name for tensor in inputs])
        for name in request.outputs:
            if name not in self._outputs:
                _refuse_twice(request, names)
                raise InvalidArgument(f"unexpected inference output '{name}' for model '{self._model}'")
        specs = self._specs
        if names != self._order:
            self._check_names(request, names)
            by_name = {tensor.name: tensor for tensor in inputs}
            names = tuple([name for name in self._order if name in by_name])
            inputs = tuple([by_name[name] for name in names])
            specs = tuple([self._inputs[name] for name in names])
            request = request.of(inputs)
        rows = 1
        batching = self._max_batch_size > 0
        if batching:
            rows = inputs[0].shape[0] if inputs and inputs[0].shape else 0
            if not 0 < rows <= self._max_batch_size:
                rows = self._explain(request, in_thread)
        for index, spec in enumerate(specs):
            if not _fits(spec, inputs[index], rows, batching):
                rows = self._explain(request, in_thread)
                break
        if not self._varies and len(names) == len(self._order):
            return request, rows, None
        shapes = tuple([inputs[index].shape[1:] if spec.shape_size else None for index, spec in enumerate(specs)])
        return request, rows, shapes if len(names) == len(self._order) else (names, shapes)

    def _explain(self, request: InferRequest, in_thread: bool) -> int:
        """Raises what is wrong with a request that did not pass at once; its rows if nothing is."""
        rows = self._rows(request) if self._max_batch_size else 1
        broken: BrokenContents | None = None
        for tensor in reversed(request.inputs):
            self._check_type(request, tensor)
            try:
                self._check_size(request, tensor, in_thread)
            except BrokenContents as error:
                broken = error
        if broken is not None:
            raise broken
        return rows if request.inputs else 1

    def _check_names(self, request: InferRequest, names: tuple[str, ...]) -> None:
        _refuse_twice(request, names)
        given = set(names)
        if not len(self._required) <= len(names) <= len(self._order):
            if len(self._required) == len(self._order):
                expected = f"expected {len(self._order)} inputs"
            else:
                expected = f"expected number of inputs between {len(self._required)} and {len(self._order)}"
            got = ",".join(f"'{name}'" for name in reversed(names))
            missing = [f"'{name}'" for name in self._order if name in self._required and name not in given]
            # The bracket is only opened before the first missing name: Triton's text as recorded.
            missing_text = f"[{','.join(missing)}]" if missing else "]"
            raise InvalidArgument(
                f"{request.label}{expected} but got {len(names)} inputs for model '{self._model}'. Got input(s) [{got}], "
                f"but missing required input(s) {missing_text}. Please provide all required input(s)."
            )
        for name in reversed(names):
            if name not in self._inputs:
                raise InvalidArgument(f"unexpected inference input '{name}' for model '{self._model}'")

    def _rows(self, request: InferRequest) -> int:
        rows = 0
        for tensor in reversed(request.inputs):
            if not tensor.shape:
                # Without any dimension the shape is wrong in a way that the shape check words best.
                if self._inputs[tensor.name].dims:
                    raise InvalidArgument(
                        f"{request.label}input '{tensor.name}' has no shape but model requires batch dimension for "
                        f"'{self._model}'"
                    )
                continue
            if rows == 0:
                rows = tensor.shape[0]
            elif tensor.shape[0] != rows:
                raise InvalidArgument(
                    f"{request.label}input '{tensor.name}' batch size does not match other inputs for '{self._model}'"
                )
        if rows > self._max_batch_size:
            raise InvalidArgument(
                f"{request.label}inference request batch-size must be <= {self._max_batch_size} for '{self._model}'"
            )
        return rows

    def _check_type(self, request: InferRequest, tensor: Tensor) -> None:
        batching = self._max_batch_size > 0
        spec = self._inputs[tensor.name]
        if tensor.datatype is not spec.datatype:
            raise InvalidArgument(
                f"{request.label}inference input '{tensor.name}' data-type is '{tensor.datatype.name}', but model "
                f"'{self._model}' expects '{spec.datatype.name}'"
            )
        dims = tensor.shape[1:] if batching else tensor.shape
        matches = len(dims) == len(spec.dims)
        if matches:
            for extent, wanted in zip(dims, spec.dims, strict=True):
                if extent == -1:
                    raise self._unspecified(request, tensor)
                if wanted not in (-1, extent):
                    matches = False
                    break
        if not matches:
            expected = (-1, *spec.dims) if batching else spec.dims
            raise InvalidArgument(
                f"{request.label}unexpected shape for input '{tensor.name}' for model '{self._model}'. Expected "
                f"{_shape(expected)}, got {_shape(tensor.shape)}. {_BATCH_NOTE if batching else ''}"
            )

    def _check_size(self, request: InferRequest, tensor: Tensor, in_thread: bool) -> None:
        # A first dimension of 0 counts as no batch at all: Triton then expects the bytes of one row (gotcha 3).
        is_empty_batch = self._max_batch_size > 0 and tensor.shape[:1] == (0,)
        count = _elements(tensor.shape[1:] if is_empty_batch else tensor.shape)
        if tensor.datatype is DataType.BYTES:
            if len(tensor.contents) >= LARGE and not in_thread:
                raise TakesLong
            _check_bytes(request, tensor, count, self._model)
        else:
            expected = count * tensor.datatype.byte_size
            size = len(tensor.contents)
            if size != expected:
                raise InvalidArgument(
                    f"{request.label}input byte size mismatch for input '{tensor.name}' for model '{self._model}'. "
                    f"Expected {expected}, got {size}"
                )
        # What is left Triton passes on, and its models end, or never answer.
        if is_empty_batch:
            raise InvalidArgument(f"{request.label}inference request batch-size must be >= 1 for '{self._model}'")
        if any(extent < 0 for extent in tensor.shape):
            raise self._unspecified(request, tensor)

    def _unspecified(self, request: InferRequest, tensor: Tensor) -> InvalidArgument:
        return InvalidArgument(
            f"{request.label}All input dimensions should be specified for input '{tensor.name}' for model "
            f"'{self._model}', got {_shape(tensor.shape)}"
        )


def _refuse_twice(request: InferRequest, names: tuple[str, ...]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{request.label}input '{name}' already exists in request")
        seen.add(name)


def _fits(spec: _Input, tensor: Tensor, rows: int, batching: bool) -> bool:
    """Whether a tensor is as its input demands, as far as that can be told without a walk through its elements."""
    shape = tensor.shape
    if tensor.datatype is not spec.datatype or len(shape) != spec.rank or (batching and shape[0] != rows):
        return False
    if spec.row_size:
        return len(tensor.contents) == rows * spec.row_size and (shape[1:] if batching else shape) == spec.dims
    size = spec.element_size
    for extent in shape:
        if extent < 0:
            return False
        size *= extent
    # BYTES elements have no size; their prefixes have to be walked.
    if size != len(tensor.contents) or not spec.element_size:
        return False
    return spec.is_any or _matches(shape[1:] if batching else shape, spec.dims)


def _check_bytes(request: InferRequest, tensor: Tensor, expected: int, model: str) -> None:
    """Walks the length prefixes of a BYTES tensor, and once more to say what is wrong."""
    data: Buffer = tensor.data
    if count_elements(data) == expected:
        return
    end = len(data)
    at = count = 0
    unpack = _LENGTH.unpack_from
    while at < end:
        if end - at < 4:
            raise InvalidArgument(
                f"{request.label}incomplete string length indicator for inference input '{tensor.name}' for model "
                f"'{model}', expecting 4 bytes but only {end - at} bytes available. Please make sure the string length "
                "indicator is in one buffer."
            )
        if count >= expected:
            raise InvalidArgument(
                f"{request.label}unexpected number of string elements {count + 1} for inference input '{tensor.name}' "
                f"for model '{model}', expecting {expected}"
            )
        (length,) = unpack(data, at)
        at += 4 + length
        count += 1
        if count % AT_ONCE == 0:
            sleep(0)
    if count != expected:
        raise InvalidArgument(
            f"{request.label}expected {expected} string elements for inference input '{tensor.name}' for model '{model}', "
            f"got {count}"
        )
    if at > end:
        # The last one, or there would have been no more.
        raise BrokenContents(
            f"incomplete string data for inference input '{tensor.name}', expecting string of length {length} but "
            f"only {end - at + length} bytes available"
        )


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _matches(dims: tuple[int, ...], configured: tuple[int, ...]) -> bool:
    if len(dims) != len(configured):
        return False
    return all(extent >= 0 and wanted in (-1, extent) for extent, wanted in zip(dims, configured, strict=True))
