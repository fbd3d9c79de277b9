"""`pb_utils.InferenceResponse` and `pb_utils.TritonError`, and their way to the host."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from naiad.backends.api import BackendResponse
from naiad.backends.python.failures import TritonModelException
from naiad.backends.python.tensor import Tensor, host_array
from naiad.backends.python.texts import json_text, plain, text
from naiad.errors import NaiadError, from_triton_code
from naiad.messages import ParameterValue


class ErrorCode(enum.IntEnum):
    """Triton's error codes with Triton's numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


@mypyc_attr(allow_interpreted_subclasses=True)
class TritonError:
    """An error a model answers a request with; the client sees its code and its message."""

    UNKNOWN: ClassVar = ErrorCode.UNKNOWN
    INTERNAL: ClassVar = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar = ErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: object, code: Any = ErrorCode.INTERNAL) -> None:
        self._message = text(message, "TritonError needs a str as its message")
        self._code = ErrorCode(index(code))

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __repr__(self) -> str:
        return f"<TritonError {self._code.name}: {self._message}>"


@mypyc_attr(allow_interpreted_subclasses=True)
class InferenceResponse:
    """The answer of a model to a request: tensors and parameters, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Iterable[Any] = (),
        error: object = None,
        parameters: Mapping[Any, Any] | None = None,
    ) -> None:
        tensors = list(output_tensors)
        for tensor in tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceResponse needs a list of Tensor objects, got one of {type(tensor)}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse needs a TritonError as its error, got {type(error)}")
        self._tensors = tensors
        self._error = error
        self._parameters: Mapping[str, ParameterValue] = checked_parameters(parameters) if parameters else {}

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON."""
        return json_text(dict(self._parameters))

    def __repr__(self) -> str:
        return f"<InferenceResponse {self._error or self._tensors}>"


def get_output_tensor_by_name(inference_response: Any, name: str) -> Any:
    """The `Tensor`, or None. Takes what has the same methods too, with which models are tested."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def checked_parameters(parameters: Mapping[Any, Any]) -> dict[str, ParameterValue]:
    """A copy of parameters a model gave. Raises TritonModelException for those Triton has no form for."""
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return {plain(key): plain(value) if isinstance(value, str) else value for key, value in parameters.items()}


def result(response: InferenceResponse, wanted: Sequence[str]) -> BackendResponse | NaiadError:
    """What the host sends for a response: its error, or those of its outputs that are wanted."""
    error = response._error
    if error is not None:
        return from_triton_code(error._code.name, error._message)
    outputs = {tensor._name: host_array(tensor) for tensor in response._tensors if tensor._name in wanted}
    return BackendResponse(outputs, response._parameters)
