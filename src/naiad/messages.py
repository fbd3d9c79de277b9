"""What is asked and what is answered: frozen values that know no protocol.

A tensor travels through the server as the bytes the client sent (a view, never a copy): its data type, its
shape and a buffer. numpy arrays are made where somebody computes: in a backend, or for JSON. Requests and
responses are made on the event loop and never changed.

The values of a request have their constructors written out: compiled, they are then made and read without the
interpreter, which a constructor that a decorator writes is not.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from naiad.datatypes import Buffer, DataType
from naiad.errors import NaiadError

ParameterValue = bool | int | float | str

_NO_PARAMETERS: dict[str, ParameterValue] = {}
#: What every response of an ensemble says, but those of sequences, of which it says more. Always this very object, so that
#: codecs know it.
NO_SEQUENCE: Final[dict[str, ParameterValue]] = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


class Source(Protocol):
    """Memory of somebody else."""

    def read(self, offset: int, byte_size: int) -> Buffer:
        """A copy of a part of it. Raises NaiadError."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target` with what lies at `offset`. Raises NaiadError."""

    def lost(self) -> NaiadError:
        """Why what was there when a request was read is not there any more."""


#: Less is copied when a request is read.
UNREAD_FROM: Final = 64 * 1024


class Unread:
    """The elements of a tensor, UNREAD_FROM bytes at least, that lie in memory of the client's, who may change them: those
    of an input, to be copied once, to where the batch lies, or of an output that has been written there already. Where that
    memory is the open file `fd` (-1 for none), from `position` on, the host of the model may copy them."""

    def __init__(self, source: Source, offset: int, byte_size: int, fd: int = -1, position: int = 0) -> None:
        self.fd = fd
        self.position = position
        self._source = source
        self._offset = offset
        self._byte_size = byte_size
        #: Why they could not be put into a batch, which goes on without them; whoever answers the request says so.
        self.failure: NaiadError | None = None

    def __len__(self) -> int:
        return self._byte_size

    def is_at(self, source: object, offset: int) -> bool:
        """Whether they begin at that place."""
        return self._source is source and self._offset == offset

    def read(self) -> Buffer:
        """A copy. Raises NaiadError."""
        return self._source.read(self._offset, self._byte_size)

    def for_batch(self) -> Buffer:
        """A copy, of zeros after a failure."""
        try:
            return self.read()
        except NaiadError as error:
            self.failure = error
            return bytes(self._byte_size)

    def read_into_batch(self, target: memoryview) -> None:
        """Fills `target` with them, with zeros after a failure."""
        try:
            self._source.read_into(self._offset, target)
        except NaiadError as error:
            self.failure = error
            target[:] = bytes(self._byte_size)

    def was_lost(self) -> None:
        """Whoever was to copy them has not found them any more."""
        self.failure = self._source.lost()


class Destination:
    """Where the client wants an output: `byte_size` bytes of its memory from `offset` on, which is the open file `fd` from
    `position` on. Whoever makes the output may write it there, and answers what `written` returns."""

    def __init__(self, source: Source, offset: int, fd: int, position: int, byte_size: int) -> None:
        self._source = source
        self._offset = offset
        self.fd = fd
        self.position = position
        self.byte_size = byte_size

    def written(self, byte_size: int) -> Unread:
        return Unread(self._source, self._offset, byte_size)


@dataclass(init=False)
class Tensor:
    """A named tensor.

    `shape` is the full shape, batch dimension included. `contents` holds the elements row-major and
    little-endian; BYTES elements each behind a uint32 length. It is read-only for everybody but its maker.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    contents: Buffer | Unread

    def __init__(self, name: str, datatype: DataType, shape: tuple[int, ...], contents: Buffer | Unread) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.contents = contents

    @property
    def data(self) -> Buffer:
        """The elements, in memory from now on. Raises NaiadError where they cannot be read."""
        contents = self.contents
        if isinstance(contents, Unread):
            self.contents = contents = contents.read()
        return contents


@dataclass(init=False)
class SequenceControl:
    """The place of a request in its sequence; 0 and "" are no correlation id."""

    correlation_id: int | str
    start: bool
    end: bool

    def __init__(self, correlation_id: int | str, start: bool = False, end: bool = False) -> None:
        self.correlation_id = correlation_id
        self.start = start
        self.end = end


class RequestTrace(Protocol):
    """What the way of a request through the server tells the trace that follows it; see `telemetry.trace`.

    `id` is how model code names it, 0 where model code has none of it, `context` OpenTelemetry's, as JSON. Times are ns
    of CLOCK_MONOTONIC.
    """

    id: int

    @property
    def context(self) -> str | None: ...

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


@dataclass(init=False)
class InferRequest:
    """A request for one model.

    `model_version` -1 is the newest that is ready. `outputs` are the names asked for, empty for all.
    `timeout_us` and `priority` 0 are "as configured". `parameters` are the free ones only. `trace` is None
    where the request is not followed, as nearly always. `destinations`, set by who submits it, are those of large outputs
    that an instance may write itself.
    """

    model_name: str
    inputs: tuple[Tensor, ...]
    model_version: int
    id: str
    outputs: tuple[str, ...]
    parameters: dict[str, ParameterValue]
    sequence: SequenceControl | None
    priority: int
    timeout_us: int
    trace: RequestTrace | None
    destinations: dict[str, Destination] | None

    def __init__(
        self,
        model_name: str,
        inputs: tuple[Tensor, ...],
        model_version: int = -1,
        id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, ParameterValue] = _NO_PARAMETERS,
        sequence: SequenceControl | None = None,
        priority: int = 0,
        timeout_us: int = 0,
        trace: RequestTrace | None = None,
    ) -> None:
        self.model_name = model_name
        self.inputs = inputs
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.parameters = parameters
        self.sequence = sequence
        self.priority = priority
        self.timeout_us = timeout_us
        self.trace = trace
        self.destinations = None

    def of(self, inputs: tuple[Tensor, ...]) -> "InferRequest":
        """The same request with other inputs."""
        request = InferRequest(
            self.model_name,
            inputs,
            self.model_version,
            self.id,
            self.outputs,
            self.parameters,
            self.sequence,
            self.priority,
            self.timeout_us,
            self.trace,
        )
        request.destinations = self.destinations
        return request

    def followed(self, trace: RequestTrace) -> "InferRequest":
        """The same request, followed by `trace`."""
        request = self.of(self.inputs)
        request.trace = trace
        return request

    @property
    def label(self) -> str:
        """How error texts begin that name the request, as Triton's do."""
        return f"[request id: {self.id or '<id_unknown>'}] "


@dataclass(init=False)
class InferResponse:
    """One answer of a model. A call of a decoupled model has any number of them.

    The buffers of `outputs` may lie in an arena that is used again: they are valid until the sink that got
    the response returns. Who keeps one longer copies it.
    """

    model_name: str
    model_version: int
    id: str
    outputs: tuple[Tensor, ...]
    parameters: dict[str, ParameterValue]

    def __init__(
        self,
        model_name: str,
        model_version: int,
        id: str,
        outputs: tuple[Tensor, ...],
        parameters: dict[str, ParameterValue] = _NO_PARAMETERS,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.outputs = outputs
        self.parameters = parameters

    def to(self, id: str) -> "InferResponse":
        """The same response to the request `id`."""
        return InferResponse(self.model_name, self.model_version, id, self.outputs, self.parameters)

    def owned(self) -> "InferResponse":
        """The response with buffers of its own, for longer than the sink's call."""
        outputs = tuple(
            [
                tensor
                if isinstance(tensor.contents, Unread)
                else Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.contents))
                for tensor in self.outputs
            ]
        )
        return InferResponse(self.model_name, self.model_version, self.id, outputs, self.parameters)


Result = InferResponse | NaiadError


class ResponseSink(Protocol):
    """Where the results of a call go: called on the event loop, never after `final` was true once.

    A call of an ordinary model gets exactly one `send(result, True)`. One of a decoupled model gets any number
    of `send(result, False)` and one ending, `send(result, True)` or `send(None, True)`.
    """

    def send(self, result: Result | None, final: bool) -> None: ...
