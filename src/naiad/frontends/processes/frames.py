"""What the engine's process and its front-end processes say to each other: msgpack arrays, nothing pickled.

Both are the same program: what they say is believed. Requests and answers of one turn of the loop share a frame.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from naiad import errors
from naiad.errors import NaiadError
from naiad.instances.channel import LoopChannel
from naiad.instances.frames import Failure
from naiad.messages import ParameterValue
from naiad.options import ServerOptions


class Stored(msgspec.Struct, array_like=True, gc=False):
    """Bytes that are not in the frame: at `place` of the sender's arena, or where that is negative in a memfd of their
    own, whose descriptor comes with the frame; those of a frame come in the order of the bytes in it."""

    place: int
    byte_size: int


Sendable = bytes | Stored


class SentTensor(msgspec.Struct, array_like=True, gc=False):
    name: str
    datatype: int
    shape: tuple[int, ...]
    data: Sendable


class Followed(msgspec.Struct, array_like=True, gc=False):
    """A request that may be traced: when reading it began and ended, and what its client said of a trace of its own."""

    start_ns: int
    end_ns: int
    headers: dict[str, str]


class Ask(msgspec.Struct, array_like=True, gc=False):
    """An inference request, number `call`. `over_http` else over gRPC; `decoupled` is what the front end takes the
    model for. `sequence` is correlation id, start, end."""

    call: int
    over_http: bool
    decoupled: bool
    model_name: str
    model_version: int
    inputs: list[SentTensor]
    id: str
    outputs: tuple[str, ...]
    parameters: dict[str, ParameterValue]
    sequence: tuple[int | str, bool, bool] | None
    priority: int
    timeout_us: int
    followed: Followed | None


class Answer(msgspec.Struct, array_like=True, gc=False):
    """A result of request `call`: `outputs`, a failure, or neither. `refused`: the engine did not take the request.
    `traced`: the front end says when it has sent the result (Sent)."""

    call: int
    final: bool
    outputs: list[SentTensor] | None
    model_name: str
    model_version: int
    id: str
    parameters: dict[str, ParameterValue]
    failure: Failure | None
    refused: bool
    traced: bool


# ---- to the engine -------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The process is ready to be told what to serve."""


class Started(msgspec.Struct, array_like=True, tag="started"):
    """It listens, or says why it cannot."""

    failure: Failure | None


class Asks(msgspec.Struct, array_like=True, tag="asks"):
    """`cancelled` are requests whose client has left, `freed` places of the engine's that are not used any more."""

    asks: list[Ask]
    cancelled: list[int]
    freed: list[int]


class Sent(msgspec.Struct, array_like=True, tag="sent"):
    """A result of a traced request was sent to its client."""

    call: int
    start_ns: int
    end_ns: int


class HttpManagement(msgspec.Struct, array_like=True, tag="http"):
    """A request that is not inference: the handler `name` of `Management`, and what it reads of the exchange."""

    number: int
    name: str
    arguments: list[str | int]
    method: str
    body: Sendable
    client: str


class GrpcManagement(msgspec.Struct, array_like=True, tag="grpc"):
    """An RPC that is not inference. Values of metadata whose key ends in -bin are bytes, others are text."""

    number: int
    path: str
    body: Sendable
    metadata: list[tuple[str, bytes]]
    peer: str


class Withdraw(msgspec.Struct, array_like=True, tag="withdraw"):
    """Nobody waits for the answer to request `number` any more, which is not inference."""

    number: int


class RegionUsed(msgspec.Struct, array_like=True, tag="used"):
    """The use of a region, made known with `change`, begins or has ended in the front end."""

    change: int
    used: bool


class Known(msgspec.Struct, array_like=True, tag="known"):
    """The front end has taken note of change `change`, or cannot use it."""

    change: int
    failure: Failure | None


class Report(msgspec.Struct, array_like=True, tag="report"):
    """A line for the server's log."""

    level: str
    message: str
    file: str
    line: int


class HttpConnections(msgspec.Struct, array_like=True, tag="connections"):
    """How many HTTP connections there are, after `Refuse`: told at each change."""

    count: int


# ---- to a front end ------------------------------------------------------------------------------------------


class Start(msgspec.Struct, array_like=True, tag="start"):
    """Listen. The ports of `options` are shared."""

    options: ServerOptions


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Accept nothing any more, finish what there is, and end."""


class Refuse(msgspec.Struct, array_like=True, tag="refuse"):
    """Take no new HTTP connections."""


class Answers(msgspec.Struct, array_like=True, tag="answers"):
    """`freed` are places of the front end's."""

    answers: list[Answer]
    freed: list[int]


class Managed(msgspec.Struct, array_like=True, tag="managed"):
    """The answer to HttpManagement or GrpcManagement `number`; status and headers are HTTP's."""

    number: int
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    failure: Failure | None


class Version(msgspec.Struct, array_like=True):
    """A version that serves; `config` is its configuration, as an encoded message."""

    version: int
    config: bytes
    labels: dict[str, list[str]]


class ModelChange(msgspec.Struct, array_like=True, tag="model"):
    """All there is to know of a model by now. `known`: it is wanted, or has been loaded before; `stated` are the
    versions that have a state, `versions` those that serve, ascending."""

    change: int
    name: str
    known: bool
    stated: list[int]
    versions: list[Version]


class RegionAdded(msgspec.Struct, array_like=True, tag="region"):
    """A shared-memory region. The descriptor of a system one comes with the frame; a CUDA one has a handle."""

    change: int
    name: str
    key: str
    offset: int
    byte_size: int
    device_id: int
    raw_handle: bytes


class RegionsRemoved(msgspec.Struct, array_like=True, tag="removed"):
    change: int
    names: list[str]


class Tracing(msgspec.Struct, array_like=True, tag="tracing"):
    """Whether any request may be traced."""

    change: int
    active: bool


class Transcoded(msgspec.Struct, array_like=True, tag="transcoded"):
    """A frame with texts that are not UTF-8, as JSON of clients may bring: each is its bytes, read as Latin-1."""

    frame: Any


ToEngine = (
    Asks | Sent | HttpManagement | GrpcManagement | Withdraw | RegionUsed | Known | Report | Hello | Started
    | HttpConnections | Transcoded
)  # fmt: skip
ToFrontend = (
    Answers | Managed | ModelChange | RegionAdded | RegionsRemoved | Tracing | Start | Refuse | Stop | Transcoded
)  # fmt: skip

_KINDS = frozenset(kind for kind in vars(errors).values() if isinstance(kind, type))


def failure_of(error: NaiadError) -> Failure:
    """The frame of an error: of the nearest of its kinds that both sides know by name."""
    kind = next(kind for kind in type(error).__mro__ if kind in _KINDS)
    return Failure(kind.__name__, error.message)


def can_be_sent(message: msgspec.Struct) -> bool:
    """Whether it can be encoded, whatever texts are in it: model code in this process may answer with any number."""
    try:
        msgspec.msgpack.encode(message)
    except UnicodeEncodeError:
        return True
    except Exception:
        return False
    return True


def send(channel: LoopChannel[Any], frame: ToEngine | ToFrontend, fds: Sequence[int] = ()) -> None:
    """Sends a frame, whatever texts are in it."""
    try:
        channel.send(frame, fds)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(frame, builtin_types=(bytes, bytearray, memoryview))
        channel.send(Transcoded(_mapped(plain, _hidden)), fds)


def restored(frame: Transcoded, kinds: Any) -> Any:
    """The frame that was sent."""
    return msgspec.convert(_mapped(frame.frame, _shown), kinds)


def _hidden(text: str) -> str:
    return text.encode(errors="surrogateescape").decode("latin-1")


def _shown(text: str) -> str:
    return text.encode("latin-1").decode(errors="surrogateescape")


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return value
