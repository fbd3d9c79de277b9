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


class InferRequest(msgspec.Struct, frozen=True):
    """A request for one model.

    `model_version` -1 is the newest that is ready. `outputs` are the names asked for, empty for all.
    `timeout_us` and `priority` 0 are "as configured". `parameters` are the free ones only.
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


Result = InferResponse | NaiadError


class ResponseSink(Protocol):
    """Where the results of a call go: called on the event loop, never after `final` was true once.

    A call of an ordinary model gets exactly one `send(result, True)`. One of a decoupled model gets any number
    of `send(result, False)` and one ending, `send(result, True)` or `send(None, True)`.
    """

    def send(self, result: Result | None, final: bool) -> None: ...
