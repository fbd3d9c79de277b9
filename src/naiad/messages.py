"""What is asked and what is answered: frozen values that know no protocol.

A tensor travels through the server as the bytes the client sent (a view, never a copy): its data type, its
shape and a buffer. numpy arrays are made where somebody computes: in a backend, or for JSON. Requests and
responses are made on the event loop and never changed.
"""

from typing import Protocol

import msgspec

from naiad.datatypes import Buffer, DataType
from naiad.errors import NaiadError

ParameterValue = bool | int | float | str


class Tensor(msgspec.Struct, frozen=True):
    """A named tensor.

    `shape` is the full shape, batch dimension included. `data` holds the elements row-major and
    little-endian; BYTES elements each behind a uint32 length. It is read-only for everybody but its maker.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer


class SequenceControl(msgspec.Struct, frozen=True):
    """The place of a request in its sequence; 0 and "" are no correlation id."""

    correlation_id: int | str
    start: bool = False
    end: bool = False


class RequestTrace(Protocol):
    """What the way of a request through the server tells the trace that follows it; see `telemetry.trace`.

    `id` is how model code names it, 0 where model code has none of it, `context` OpenTelemetry's, as JSON. Times are ns
    of CLOCK_MONOTONIC.
    """

    id: int
    context: str | None

    def child(self) -> "RequestTrace | None":
        """For a request that this one causes; None where nobody follows that."""

    def begin(self, request: "InferRequest", version: int, sink: "ResponseSink") -> "ResponseSink":
        """The engine takes the request. Returns the sink that its results have to go through."""

    def end(self) -> None:
        """The request was refused after all: no result will come."""

    def executing(self) -> None:
        """An instance has the request."""

    def computed(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        """That execution has ended."""


class InferRequest(msgspec.Struct, frozen=True):
    """A request for one model.

    `model_version` -1 is the newest that is ready. `outputs` are the names asked for, empty for all.
    `timeout_us` and `priority` 0 are "as configured". `parameters` are the free ones only. `trace` is None
    where the request is not followed, as nearly always.
    """

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: int = -1
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, ParameterValue] = {}
    sequence: SequenceControl | None = None
    priority: int = 0
    timeout_us: int = 0
    trace: RequestTrace | None = None

    @property
    def label(self) -> str:
        """How error texts begin that name the request, as Triton's do."""
        return f"[request id: {self.id or '<id_unknown>'}] "


class InferResponse(msgspec.Struct, frozen=True):
    """One answer of a model. A call of a decoupled model has any number of them.

    The buffers of `outputs` may lie in an arena that is used again: they are valid until the sink that got
    the response returns. Who keeps one longer copies it.
    """

    model_name: str
    model_version: int
    id: str
    outputs: tuple[Tensor, ...]
    parameters: dict[str, ParameterValue] = {}

    def owned(self) -> "InferResponse":
        """The response with buffers of its own, for longer than the sink's call."""
        outputs = tuple(
            [Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in self.outputs]
        )
        return msgspec.structs.replace(self, outputs=outputs)


Result = InferResponse | NaiadError


class ResponseSink(Protocol):
    """Where the results of a call go: called on the event loop, never after `final` was true once.

    A call of an ordinary model gets exactly one `send(result, True)`. One of a decoupled model gets any number
    of `send(result, False)` and one ending, `send(result, True)` or `send(None, True)`.
    """

    def send(self, result: Result | None, final: bool) -> None: ...


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output as metadata shows it; -1 first where the model batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ServerMetadata(msgspec.Struct, frozen=True):
    name: str
    version: str
    extensions: tuple[str, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """`versions` are those that are ready, or the one asked for; `platform` is the backend where there is none."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class IndexEntry(msgspec.Struct, frozen=True):
    """A model version in the repository index; all but the name are None for a model never loaded."""

    name: str
    version: str | None = None
    state: str | None = None
    reason: str | None = None
