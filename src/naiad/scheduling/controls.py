"""What the sequence batcher adds to a request: control inputs, and the rows of slots that have no request. Pure."""

import struct
from collections.abc import Mapping

from naiad.config.model_config import ModelConfig, SequenceControl
from naiad.datatypes import DataType
from naiad.messages import InferRequest, Tensor
from naiad.packed import pack_bytes

_PACKING: Mapping[DataType, struct.Struct] = {
    DataType.BOOL: struct.Struct("<?"),
    DataType.INT32: struct.Struct("<i"),
    DataType.FP32: struct.Struct("<f"),
}
_NO_TENSORS: tuple[Tensor, ...] = ()


class Controls:
    """The control inputs of a model: one element each, of shape [1], or [1, 1] where the model batches."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.sequence_batching
        assert batching is not None, "this is a bug: controls of a model without the sequence batcher"
        self._shape = (1, 1) if config.batching else (1,)
        self._by_flags = {
            (start, end): self._tensors(batching.controls, start, end, True)
            for start in (False, True)
            for end in (False, True)
        }
        self._not_ready = self._tensors(batching.controls, False, False, False)
        self._correlation_ids = tuple(control for control in batching.controls if control.kind == "CORRID")
        #: Triton cannot run such models (the recorded text): clients see it as an error of every request.
        self.broken: str | None = None
        for control in self._correlation_ids:
            if control.datatype is DataType.BYTES and config.batching:
                self.broken = (
                    f"unexpected number of string elements 2 for inference input '{control.name}', expecting 1"
                )

    def ready(self, key: int | str, start: bool, end: bool) -> tuple[Tensor, ...]:
        """For a request of the sequence `key`."""
        return self._by_flags[start, end] + self._of_correlation_id(key)

    def not_ready(self) -> tuple[Tensor, ...]:
        """For a row without a request; its correlation id is 0."""
        return self._not_ready + self._of_correlation_id(0)

    def _of_correlation_id(self, key: int | str) -> tuple[Tensor, ...]:
        if not self._correlation_ids:
            return _NO_TENSORS
        return tuple(
            [
                Tensor(control.name, control.datatype, self._shape, pack_correlation_id(key, control.datatype))
                for control in self._correlation_ids
            ]
        )

    def _tensors(
        self, controls: tuple[SequenceControl, ...], start: bool, end: bool, ready: bool
    ) -> tuple[Tensor, ...]:
        values = {"START": start, "END": end, "READY": ready}
        tensors = []
        for control in controls:
            if control.kind != "CORRID":
                value = control.true_value if values[control.kind] else control.false_value
                data = _PACKING[control.datatype].pack(value)
                tensors.append(Tensor(control.name, control.datatype, self._shape, data))
        return tuple(tensors)


def pack_correlation_id(key: int | str, datatype: DataType) -> bytes:
    """A correlation id as an element of `datatype`, cut to its size.

    Text for a model that wants a number is its packed form read as a number, as in Triton: the same text gives the
    same number, but long texts may share one.
    """
    if datatype is DataType.BYTES:
        text = key if isinstance(key, str) else str(key) if key else ""
        return pack_bytes([text.encode(errors="surrogateescape")])
    size = datatype.byte_size
    if isinstance(key, str):
        return pack_bytes([key.encode(errors="surrogateescape")])[:size].ljust(size, b"\0")
    return (key % (1 << 64)).to_bytes(8, "little")[:size]


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros, or empty strings, in the shape of `tensor`."""
    # An empty string is a length of four zero bytes.
    size = 4 * elements(tensor.shape) if tensor.datatype is DataType.BYTES else len(tensor.data)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(size))


def null_request(like: InferRequest, extra: tuple[Tensor, ...], outputs: tuple[str, ...]) -> InferRequest:
    """The row of a slot without a request, in a batch with `like`: zeros, and `extra` inputs."""
    inputs = tuple([zeros_like(tensor) for tensor in like.inputs]) + extra
    return InferRequest(like.model_name, inputs, like.model_version, outputs=outputs)


def elements(shape: tuple[int, ...]) -> int:
    """How many elements a tensor of this shape has."""
    count = 1
    for extent in shape:
        count *= extent
    return count
