"""`pb_utils.InferenceRequest`: requests the model gets, and those it makes for other models (BLS)."""

import asyncio
import enum
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import index
from typing import Any, Final

import numpy as np
from mypy_extensions import mypyc_attr

from naiad import datatypes
from naiad.backends.api import BackendRequest, Services
from naiad.backends.python import calls, current, dropped
from naiad.backends.python.failures import TritonModelException
from naiad.backends.python.response import ErrorCode, InferenceResponse, TritonError, checked_parameters
from naiad.backends.python.sender import InferenceResponseSender
from naiad.backends.python.tensor import Tensor, host_array
from naiad.backends.python.texts import json_text, plain, text
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument, NaiadError, NotFound
from naiad.packed import pack_bytes, unpack_bytes

REQUEST_RELEASE_ALL: Final = 1
REQUEST_RELEASE_RESCHEDULE: Final = 2

_BEYOND_UINT32: Final = 1 << 32
_BEYOND_INT64: Final = 1 << 63
_BEYOND_UINT64: Final = 1 << 64


class MemoryType(enum.IntEnum):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Where the outputs of a BLS call should be. They are always on the CPU here; frameworks copy what they need."""

    __slots__ = ("device_id", "memory_type")

    def __init__(self, preferred_memory_type: Any, preferred_device_id: Any = 0) -> None:
        self.memory_type = MemoryType(index(preferred_memory_type))
        self.device_id = index(preferred_device_id)


class InferenceTrace:
    """The trace of a request: given to a request that the model makes, that one is followed too."""

    __slots__ = ("_context", "_id")

    def __init__(self, context: str | None = None, id: int = 0) -> None:
        self._context = context
        self._id = id

    def get_context(self) -> str | None:
        """The OpenTelemetry context as JSON, or None where the request is not traced that way."""
        return self._context


@mypyc_attr(allow_interpreted_subclasses=True)
class InferenceRequest:
    """A request for another model, made by a model. Arguments are declared as more than they may be: compiled code would
    refuse the others before the checks here, in words of its own.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_outputs",
        "_parameters",
        "_release_flags",
        "_request_id",
        "_timeout",
        "_trace",
    )

    _inputs: list[Tensor] | None

    def __init__(
        self,
        request_id: object = "",
        correlation_id: object = 0,
        inputs: Iterable[Any] | None = None,
        requested_output_names: Iterable[object] | None = None,
        model_name: object = None,
        model_version: Any = -1,
        flags: Any = 0,
        timeout: Any = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[Any, Any] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        request_id = text(request_id, "InferenceRequest needs a str as request_id")
        model_name = text(model_name, "InferenceRequest needs a str as model_name")
        where = f"for request with id '{request_id}' and model name '{model_name}' should not be empty."
        tensors = list(inputs)
        for tensor in tensors:
            if tensor is None:
                raise TritonModelException(f"Input tensor {where}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceRequest needs a list of Tensor objects, got one of {type(tensor)}")
        if isinstance(requested_output_names, str):
            raise TypeError("InferenceRequest needs a list of requested_output_names, got <class 'str'>")
        needs = "InferenceRequest needs a str for each of requested_output_names"
        outputs = tuple(dict.fromkeys([text(name, needs) for name in requested_output_names]))
        if not all(outputs):
            raise TritonModelException(f"Requested output name {where}")
        if correlation_id is None:
            raise TypeError("InferenceRequest takes no None as correlation_id")
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        self._request_id = request_id
        if isinstance(correlation_id, str):
            self._correlation_id: int | str = plain(correlation_id)
        else:
            self._correlation_id = _integer(correlation_id, "correlation_id", 0, _BEYOND_UINT64)
        self._inputs = tensors
        self._outputs = outputs
        self._model_name = model_name
        self._model_version = _integer(model_version, "model_version", -_BEYOND_INT64, _BEYOND_INT64)
        self._flags = _integer(flags, "flags", 0, _BEYOND_UINT32)
        self._timeout = _integer(timeout, "timeout", 0, _BEYOND_UINT64)
        self._trace = trace
        self._parameters = checked_parameters(parameters) if parameters else {}
        self._release_flags = REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        assert self._inputs is not None
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: Any) -> None:
        self._flags = _integer(flags, "flags", 0, _BEYOND_UINT32)

    def timeout(self) -> int:
        """In us; 0 is none."""
        return self._timeout

    def parameters(self) -> str:
        """The parameters as JSON."""
        return json.dumps(self._parameters)  # Python's form, as in Triton

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        raise TritonModelException(
            "Unable to send response. Response sender has no reference to the decoupled state of the model."
        )

    def set_release_flags(self, flags: Any) -> None:
        """Says whether the request is done when `execute` returns, or goes through it once more (RESCHEDULE)."""
        if flags not in (REQUEST_RELEASE_ALL, REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unsupported release flags {flags} for request with id '{self.request_id()}'.")
        self._release_flags = index(flags)

    def exec(self, decoupled: object = False) -> "InferenceResponse | ResponseIterator":
        """Runs the request and blocks for its response, or with `decoupled` for the first and answers an iterator.

        Errors of the called model come as responses. Raises TritonModelException outside of `execute`.
        """
        instance = current.instance()
        if not instance.is_serving:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        services = instance.services
        call = calls.InferCall(
            model_name=self._model_name,
            model_version=self._model_version,
            inputs=tuple([_value(tensor) for tensor in self.inputs()]),
            outputs=self._outputs,
            request_id=self._request_id,
            correlation_id=self._correlation_id,
            flags=self._flags,
            timeout_us=self._timeout,
            parameters=dict(self._parameters),
            decoupled=bool(decoupled),
            trace=0 if self._trace is None else self._trace._id,
        )
        try:
            if self._model_version < -1:
                raise NotFound(calls.not_ready(self._model_name))
            for value in self._parameters.values():
                if isinstance(value, int) and not -_BEYOND_INT64 <= value < _BEYOND_INT64:
                    raise InvalidArgument("Unsupported value type on parameters")
            if not decoupled:
                return _response(services.call("infer", call, calls.InferAnswer))
            stream = services.call("infer", call, calls.StreamAnswer).stream
        except NaiadError as error:
            reason = f"Model {self._model_name} - Error when running inference: {error.message}"
            refused = InferenceResponse(error=TritonError(reason))
            return ResponseIterator(services, None, [refused]) if decoupled else refused
        return ResponseIterator(services, stream)

    def async_exec(self, decoupled: object = False) -> "asyncio.Future[InferenceResponse | ResponseIterator]":
        """`exec` in a thread; for `await`."""
        return asyncio.get_running_loop().run_in_executor(None, self.exec, decoupled)

    def __repr__(self) -> str:
        return f"<InferenceRequest {self.request_id()!r} {self.inputs()}>"


class ReceivedRequest(InferenceRequest):
    """A request that the model has to answer. Made for each request of each batch, so it fetches what is asked."""

    __slots__ = ("_is_decoupled", "_sender", "_source")

    def __init__(
        self, source: BackendRequest, is_decoupled: bool, sender: InferenceResponseSender | None = None
    ) -> None:
        self._source = source
        self._is_decoupled = is_decoupled
        # A decoupled request nobody keeps must end, which its sender sees to.
        self._sender = InferenceResponseSender(source, True) if is_decoupled and sender is None else sender
        self._inputs = None
        self._flags = -1
        self._release_flags = REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        tensors = self._inputs
        if tensors is None:
            tensors = self._inputs = [Tensor(name, array) for name, array in self._source.inputs.items()]
        return tensors

    def request_id(self) -> str:
        return self._source.id

    def correlation_id(self) -> int | str:
        return self._source.correlation_id

    def requested_output_names(self) -> set[str]:
        return set(self._source.outputs)

    def flags(self) -> int:
        return self._source.flags if self._flags < 0 else self._flags

    def timeout(self) -> int:
        return self._source.timeout_us

    def parameters(self) -> str:
        return json_text(dict(self._source.parameters))

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self._source.trace_context, self._source.trace)

    def is_cancelled(self) -> bool:
        return self._source.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        sender = self._sender
        if sender is None:
            sender = self._sender = InferenceResponseSender(self._source, self._is_decoupled)
        return sender

    def exec(self, decoupled: object = False) -> "InferenceResponse | ResponseIterator":
        raise TritonModelException(
            "A request that a model has received cannot be executed. Make an InferenceRequest with its inputs."
        )


class ResponseIterator:
    """The responses of a decoupled call, as they come. Iterating once more goes through them again.

    Made when the first is here: coroutines that wait for a call in a thread iterate on their loop.
    """

    __slots__ = ("_at", "_endings", "_responses", "_services", "_stream")

    def __init__(
        self, services: Services, stream: int | None, responses: list[InferenceResponse] | None = None
    ) -> None:
        self._services = services
        #: None when the final response is here.
        self._stream = stream
        self._responses = responses or []
        self._endings = dropped.endings()
        self._at = 0
        if stream is not None:
            self._responses.append(self._next(stream))

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._stream is None and self._at >= len(self._responses):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._at == len(self._responses):
            if self._stream is None:
                raise StopIteration
            self._responses.append(self._next(self._stream))
        self._at += 1
        return self._responses[self._at - 1]

    def _next(self, stream: int) -> InferenceResponse:
        try:
            answer = self._services.call("next_response", calls.StreamCall(stream), calls.InferAnswer)
        except NaiadError as error:
            self._stream = None
            return InferenceResponse(error=_error(error.triton_code, error.message))
        if answer.final:
            self._stream = None
        return _response(answer)

    def cancel(self) -> None:
        """Asks the called model to stop; what it still sends can be fetched."""
        if self._stream is not None:
            self._services.call("cancel", calls.StreamCall(self._stream), type(None))

    def __del__(self) -> None:
        # The called model runs to its end, as it does in Triton; the server must not keep the answers.
        if self._stream is not None:
            self._endings.put(partial(_start_reading, self._services, self._stream))


def get_input_tensor_by_name(inference_request: Any, name: str) -> Any:
    """The `Tensor`, or None. Takes what has the same methods too, with which models are tested."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def _integer(value: Any, name: str, least: int, beyond: int) -> int:
    """An argument that is an integer; a bool is one. Raises TypeError where Triton's type does not hold it."""
    number = int(index(value))
    if not least <= number < beyond:
        raise TypeError(f"InferenceRequest takes {least} to {beyond - 1} as {name}, got {number}")
    return number


def _start_reading(services: Services, stream: int) -> None:
    threading.Thread(target=_read_to_end, args=(services, stream), name="dropped-stream", daemon=True).start()


def _read_to_end(services: Services, stream: int) -> None:
    for _ in ResponseIterator(services, stream):
        pass


def _value(tensor: Tensor) -> calls.TensorValue:
    array = host_array(tensor)
    datatype = datatypes.from_numpy(array.dtype)
    assert datatype is not None
    if datatype is DataType.BYTES:
        data = memoryview(pack_bytes(array.ravel()))
    else:
        data = array.reshape(-1).view(np.uint8).data
    return calls.TensorValue(tensor.name(), datatype.number, array.shape, data)


def _tensor(value: calls.TensorValue) -> Tensor:
    datatype = datatypes.BY_NUMBER[value.datatype]
    if datatype is DataType.BYTES:
        return Tensor(value.name, unpack_bytes(value.data, value.shape))
    # A copy: model code may change it, and in the message it would not be aligned.
    return Tensor(value.name, np.frombuffer(value.data, datatype.numpy).reshape(value.shape).copy())


def _response(answer: calls.InferAnswer) -> InferenceResponse:
    if answer.error is not None:
        return InferenceResponse(error=_error(answer.error.code, answer.error.message))
    response = InferenceResponse([_tensor(value) for value in answer.outputs])
    response._parameters = answer.parameters
    return response


def _error(code: str, message: str) -> TritonError:
    return TritonError(message, ErrorCode.__members__.get(code, ErrorCode.UNKNOWN))
