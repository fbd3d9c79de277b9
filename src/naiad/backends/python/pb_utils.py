"""The module that models import as `triton_python_backend_utils`.

Names, arguments and error texts are Triton's. Like everything models call, it runs on any thread of a host.
"""

import enum
import re
import struct
import sys
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from naiad import datatypes
from naiad.backends.api import ConfigDict
from naiad.backends.python import calls, current
from naiad.backends.python.failures import TritonModelException
from naiad.backends.python.metrics import Metric, MetricFamily
from naiad.backends.python.model_config import ModelConfig
from naiad.backends.python.request import (
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ResponseIterator,
    get_input_tensor_by_name,
)
from naiad.backends.python.response import InferenceResponse, TritonError, get_output_tensor_by_name
from naiad.backends.python.sender import InferenceResponseSender
from naiad.backends.python.tensor import Tensor
from naiad.backends.python.texts import text
from naiad.datatypes import DataType
from naiad.packed import pack_bytes, unpack_elements

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU

#: numpy's types by the names of config.pbtxt. BF16 has none, as in Triton.
TRITON_STRING_TO_NUMPY: dict[str, type] = {
    datatype.config_name: bool if datatype is DataType.BOOL else datatype.numpy.type
    for datatype in DataType
    if datatype is not DataType.BF16
}


def get_input_config_by_name(model_config: ConfigDict, name: str) -> ConfigDict | None:
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: ConfigDict, name: str) -> ConfigDict | None:
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: ConfigDict) -> bool:
    policy = model_config.get("model_transaction_policy")
    return False if policy is None else policy["decoupled"]


def triton_string_to_numpy(triton_type_string: str) -> type:
    """`numpy.float32` for "TYPE_FP32", `numpy.object_` for "TYPE_STRING". Raises KeyError for other strings."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """numpy's type for a data type number of model_config.proto, or None."""
    datatype = datatypes.BY_NUMBER.get(data_type)
    return None if datatype is None or datatype is DataType.BF16 else datatype.numpy.type


def numpy_to_triton_type(data_type: npt.DTypeLike) -> int | None:
    """The data type number for a numpy dtype, or None."""
    datatype = datatypes.from_numpy(data_type)
    return None if datatype is None else datatype.number


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes | tuple[()] | None:
    """The packed form of an array of objects or bytes; () for an empty one, None for other arrays."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return pack_bytes(
        element if isinstance(element, bytes) else str(element) for element in input_tensor.ravel().tolist()
    )


def deserialize_bytes_tensor(encoded_tensor: datatypes.Buffer) -> npt.NDArray[np.object_]:
    """The elements of a packed tensor, as a one-dimensional array of `bytes`."""
    elements, end = unpack_elements(encoded_tensor)
    if end != len(encoded_tensor):
        # What is wrong is an error of `struct`, as in Triton.
        (length,) = struct.unpack_from("<I", encoded_tensor, end)
        struct.unpack_from(f"<{length}s", encoded_tensor, end + 4)
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def get_model_dir() -> str:
    """The folder of the model's file: the version directory."""
    return str(current.instance().directory)


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Loads a model and waits until it is ready. Raises TritonModelException."""
    model_name = text(model_name, "load_model needs a str as model_name")
    config = text(config, "load_model needs a str as config")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    asked = calls.LoadCall(model_name, config, files or {})
    current.instance().ask("load_model", asked, type(None), "Failed to load model")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Raises TritonModelException."""
    model_name = text(model_name, "unload_model needs a str as model_name")
    asked = calls.UnloadCall(model_name, unload_dependents)
    current.instance().ask("unload_model", asked, type(None), "Failed to unload model")


_LEADING_INTEGER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_BEYOND_INT64 = 1 << 63


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Raises TritonModelException for a version that is no number, or a model that is unknown."""
    model_name = text(model_name, "is_model_ready needs a str as model_name")
    failed = "Failed to check model readiness"
    instance = current.instance()
    version = -1
    if model_version:
        model_version = text(model_version, "is_model_ready needs a str as model_version")
        # As the C function does: what follows the digits does not count.
        digits = _LEADING_INTEGER.match(model_version)
        version = int(digits[1]) if digits else _BEYOND_INT64
        is_read = -_BEYOND_INT64 <= version < _BEYOND_INT64
        if version < 0 or not is_read:
            raise instance.refused(
                failed,
                f"failed to get model version from specified version string '{model_version}'"
                f"{'' if is_read else ' (details: stol)'}, version should be an integral value > 0",
            )
    return instance.ask("is_model_ready", calls.ReadyCall(model_name, version), bool, failed)


class _LogLevel(enum.IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the server's log, with the place in the model's code."""

    LogLevel: ClassVar = _LogLevel
    INFO: ClassVar = _LogLevel.INFO
    WARNING: ClassVar = _LogLevel.WARNING
    ERROR: ClassVar = _LogLevel.ERROR
    VERBOSE: ClassVar = _LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: _LogLevel = _LogLevel.INFO) -> None:
        if not isinstance(level, _LogLevel):
            raise TypeError(f"Logger needs a LogLevel, got {type(level)}")
        _log(message, level.name)

    @staticmethod
    def log_info(message: str) -> None:
        _log(message, "INFO")

    @staticmethod
    def log_warn(message: str) -> None:
        _log(message, "WARNING")

    @staticmethod
    def log_error(message: str) -> None:
        _log(message, "ERROR")

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(message, "VERBOSE")


def _log(message: str, level: Literal["ERROR", "WARNING", "INFO", "VERBOSE"] | str) -> None:
    message = text(message, "Logger needs a str")
    caller = sys._getframe(2)
    current.instance().services.log(level, message, caller.f_code.co_filename, caller.f_lineno)  # type: ignore[arg-type]
