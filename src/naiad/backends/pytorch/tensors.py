"""Tensors and arrays: data types, the way in, the way out, and the device in between. Runs in hosts.

All handling of devices is in `Device`. On a CPU nothing is copied on the way in, and out only what is not contiguous.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import torch

from naiad.backends.api import Array, InstanceContext
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument, Unavailable

TORCH_TYPES = {
    DataType.BOOL: torch.bool,
    DataType.UINT8: torch.uint8,
    DataType.UINT16: torch.uint16,
    DataType.UINT32: torch.uint32,
    DataType.UINT64: torch.uint64,
    DataType.INT8: torch.int8,
    DataType.INT16: torch.int16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.FP16: torch.float16,
    DataType.FP32: torch.float32,
    DataType.FP64: torch.float64,
    DataType.BF16: torch.bfloat16,
}
DATATYPES = {torch_type: datatype for datatype, torch_type in TORCH_TYPES.items()}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Device:
    """Where an instance computes. `device` is None for KIND_MODEL: the model decides, and gets tensors of the CPU."""

    def __init__(self, model: str, instance: InstanceContext) -> None:
        """Raises Unavailable where there is no such GPU."""
        self.device: torch.device | None = None
        self._stream: Any = None
        if instance.kind == "KIND_CPU":
            self.device = torch.device("cpu")
        elif instance.kind == "KIND_GPU":
            count = torch.cuda.device_count()
            if instance.device_id >= count:
                raise Unavailable(
                    f"unable to load model '{model}': instance '{instance.name}' is to run on GPU {instance.device_id}, and"
                    f" PyTorch {torch.__version__} sees {count} GPUs"
                )
            self.device = torch.device("cuda", instance.device_id)
            # Instances share the process's context of the device; each has its own stream, so that they overlap.
            self._stream = torch.cuda.Stream(self.device)

    @property
    def is_cuda(self) -> bool:
        return self._stream is not None

    def entered(self) -> AbstractContextManager[Any]:
        """The device and stream of the instance, for loading and running."""
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def wait(self) -> None:
        """Until all is done that the instance has asked its GPU for. Raises RuntimeError for what failed there."""
        if self._stream is not None:
            self._stream.synchronize()

    def tensor(self, array: Array) -> torch.Tensor:
        """A view of `array` on a CPU, a copy on a GPU."""
        if not (array.flags.writeable and array.flags.aligned):
            array = array.copy()
        if array.dtype == _BFLOAT16:
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor if self._stream is None else tensor.to(self.device, non_blocking=True)

    def arrays(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """What is on a GPU comes over at once, with one wait for all. Inputs are not looked at any more when it returns,
        also where no output comes from the GPU."""
        here = [tensor.detach() for tensor in tensors]
        streams = [torch.cuda.current_stream(device) for device in {tensor.device for tensor in here if tensor.is_cuda}]
        if streams:
            here = [tensor.to("cpu", non_blocking=True) for tensor in here]
        if self._stream is not None and self._stream not in streams:
            streams.append(self._stream)
        for stream in streams:
            stream.synchronize()
        return [_array(tensor) for tensor in here]

    def clean_cache(self) -> None:
        """Gives memory that PyTorch keeps for later back to the GPUs, if it has used any."""
        torch.cuda.empty_cache()


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy().view(_BFLOAT16)
    else:
        array = tensor.numpy(force=True)
    return array


def check_datatype(name: str, configured: DataType, provided: DataType | None, what: str) -> None:
    """Raises InvalidArgument, with Triton's text, where an output is not of the configured type."""
    if provided is not configured:
        # Triton's name of the type is that of its protocol, so a TYPE_STRING is TYPE_BYTES here.
        raise InvalidArgument(
            f"configuration expects datatype TYPE_{configured.name} for output '{name}', model provides"
            f" {f'TYPE_{provided.name}' if provided else what}"
        )


def number_type(value: bool | int | float) -> DataType:
    """What a number of Python is without a configuration that says something else."""
    if isinstance(value, bool):
        return DataType.BOOL
    return DataType.INT64 if isinstance(value, int) else DataType.FP64
