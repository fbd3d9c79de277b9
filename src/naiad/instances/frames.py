"""What the server, the zygotes and the hosts say to each other: msgpack arrays, nothing pickled.

Five conversations, each on a socket of its own: server and zygote, server and host (control), server and
instance (batches), model code that asks and server (calls). Tensors are not in the frames: they lie in arenas, and a frame says where. Those of batches are
in no reference cycle, so the garbage collector need not know of them.
"""

from typing import Any, Generic, TypeVar

import msgspec

from naiad import errors
from naiad.errors import NaiadError, text_of
from naiad.messages import ParameterValue

_KINDS: dict[str, type[NaiadError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NaiadError)
}


class Failure(msgspec.Struct, array_like=True):
    """An error on its way between processes: the name of its class and its text."""

    kind: str
    message: str

    def error(self) -> NaiadError:
        return _KINDS.get(self.kind, errors.Internal)(self.message)


def failure(error: BaseException) -> Failure:
    """The frame of an exception. One that is no NaiadError becomes Internal with its own text."""
    text = text_of(error)
    if isinstance(error, NaiadError):
        return Failure(type(error).__name__, text)
    # The text of a KeyError is the key; some exceptions have none.
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return Failure("Internal", text)


# ---- batches -------------------------------------------------------------------------------------------------


class Input(msgspec.Struct, array_like=True, gc=False):
    """An input of a batch: the rows of all requests, one behind the other, from `offset` on.

    `shape` is that of the whole batch. `sizes` are the bytes of each request, where equal rows do not tell them
    (BYTES and ragged inputs). `shapes` are the shapes of each request if they cannot be stacked, None for a
    request without this input.
    """

    name: str
    datatype: int
    shape: tuple[int, ...]
    offset: int
    byte_size: int
    sizes: list[int] | None
    shapes: list[tuple[int, ...] | None] | None


class Details(msgspec.Struct, array_like=True, gc=False):
    """What a RequestBackend may want to know of a request besides its tensors."""

    id: str
    outputs: tuple[str, ...]
    parameters: dict[str, ParameterValue]
    correlation_id: int | str
    flags: int
    priority: int
    timeout_us: int
    #: Number and OpenTelemetry context of the trace that follows the request; 0 is none.
    trace: int = 0
    trace_context: str | None = None


class Target(msgspec.Struct, array_like=True, gc=False):
    """A place in memory of a client's for an output of request `index`, of `byte_size` bytes from `position` on. `file` is
    the number of its descriptor among those of clients' memory, which are the last of the frame; in the host the descriptor."""

    output: str
    index: int
    file: int
    position: int
    byte_size: int


class Source(msgspec.Struct, array_like=True, gc=False):
    """Where `byte_size` bytes of the inputs, at `offset` of the arena, are to be copied from: memory of a client's, from
    `position` on. `file` is as in `Target`."""

    offset: int
    file: int
    position: int
    byte_size: int


class Execute(msgspec.Struct, array_like=True, gc=False):
    """One batch. `outputs` are those anybody asked for, empty for all. `details` is None where all requests ask for just
    these and say nothing else.

    With `one_shot` > 0 the inputs lie in a memfd of that many bytes which comes with the frame, else in the
    instance's input arena. A descriptor without `one_shot` is a new input arena. `targets` are there for outputs that all
    requests want in memory of their clients', `sources` for inputs that still lie there; `file_count` descriptors of that
    memory come last.
    """

    batch: int
    inputs: list[Input]
    rows: list[int]
    outputs: tuple[str, ...]
    details: list[Details] | None
    one_shot: int
    targets: list[Target] | None = None
    sources: list[Source] | None = None
    file_count: int = 0


class Output(msgspec.Struct, array_like=True, gc=False):
    """An output of a batch or of one response: in the frame (`data`), else at `offset` of arena or one-shot.

    `sizes` are the bytes of each request's rows where equal rows do not tell them (BYTES). `shapes` are the shapes of
    each request's part where that is not rows of `shape`; then there are `sizes`. `is_written`: each request's part has been
    written to its target, and is nowhere else.
    """

    name: str
    datatype: int
    shape: tuple[int, ...]
    offset: int
    byte_size: int
    sizes: list[int] | None
    data: bytes | None
    shapes: list[tuple[int, ...]] | None = None
    is_written: bool = False


class Response(msgspec.Struct, array_like=True, gc=False):
    """A response to request `index` of a batch; neither outputs nor failure: only the ending.

    `again` in place of an ending: model code wants to be given the request once more.
    """

    index: int
    outputs: list[Output] | None
    parameters: dict[str, ParameterValue]
    failure: Failure | None
    final: bool
    again: bool = False


class Results(msgspec.Struct, array_like=True, gc=False):
    """Results of a batch, one frame or several. `outputs` are batched: the server splits them by rows.

    `failure` is for all requests that have no final response yet. `times` (received, inputs ready, outputs
    computed, done; ns of CLOCK_MONOTONIC) says that the instance can take another batch. `keeps_inputs`: model code
    still holds arrays that lie in the input arena, which therefore is not to be used again. `lost` are the sources of which
    there was not enough left, by their places in `Execute.sources`: zeros were computed with.
    """

    batch: int
    outputs: list[Output] | None
    responses: list[Response] | None
    failure: Failure | None
    times: tuple[int, int, int, int] | None
    one_shot: int
    keeps_inputs: bool = False
    lost: list[int] | None = None


# ---- control -------------------------------------------------------------------------------------------------


class InstanceSpec(msgspec.Struct, array_like=True):
    """An instance to be loaded; its socket, input arena and output arena come with the frame, in this order."""

    name: str
    kind: str
    device_id: int


class VersionSpec(msgspec.Struct, array_like=True):
    """A model version as a host must know it: the fields of `ModelContext`."""

    name: str
    version: int
    directory: str
    version_directory: str
    path: str
    settings: dict[str, str]


class Complete(msgspec.Struct, array_like=True, tag="complete"):
    """Wants the completed configuration. `reply` names the Reply."""

    reply: int
    model: int
    spec: VersionSpec
    config: dict[str, Any]


class Load(msgspec.Struct, array_like=True, tag="load"):
    """Loads the instances of a model version. `model` is its number in this host. Those with the same `sharing` are
    instances of one version that came one after the other."""

    reply: int
    model: int
    sharing: int
    spec: VersionSpec
    config: dict[str, Any]
    instances: list[InstanceSpec]
    batch_byte_limit: int


class IsReady(msgspec.Struct, array_like=True, tag="ready"):
    """Asks all instances of a model whether they are."""

    reply: int
    model: int


class Unload(msgspec.Struct, array_like=True, tag="unload"):
    """Wants to know when a model's instances have closed; they do so when their sockets end."""

    reply: int
    model: int


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """The client of a request has left."""

    model: int
    instance: str
    batch: int
    index: int


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """Answers Complete; Load, with whether IsReady is worth asking; IsReady; or Unload."""

    reply: int
    value: Any
    failure: Failure | None


class Log(msgspec.Struct, array_like=True, tag="log"):
    """A line for the server's log."""

    model: int
    level: str
    message: str
    file: str
    line: int


class OpenCalls(msgspec.Struct, array_like=True, tag="calls"):
    """Model code has something to ask; the socket for it comes with the frame."""


class Ending(msgspec.Struct, array_like=True, tag="ending"):
    """The last frame of a host that ends itself; `reason` continues the sentence "its host process ..."."""

    reason: str


ToHost = Complete | Load | IsReady | Unload | Cancel
FromHost = Reply | Log | OpenCalls | Ending


# ---- calls ---------------------------------------------------------------------------------------------------

#: What model code says to the server, and the server to it: read by those who know what it is, hence Raw until then.
A = TypeVar("A")


class Call(msgspec.Struct, Generic[A], array_like=True):
    """Model code asks the server for something, and nothing else on this socket before the Answer."""

    model: int
    method: str
    arguments: A


class Answer(msgspec.Struct, Generic[A], array_like=True):
    """Answers the Call."""

    value: A
    failure: Failure | None


# ---- zygotes -------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first frame: which backend to import. `path` replaces sys.path where it is not None."""

    backend: str
    reference: str
    path: list[str] | None


class Fork(msgspec.Struct, array_like=True, tag="fork"):
    """Wants a host; its control socket comes with the frame. `exclusive`: it will load one instance only.
    `busy_poll_ns`: the window of its `BusyPoll`."""

    reply: int
    name: str
    exclusive: bool
    busy_poll_ns: int


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """What the server must know of the backend, whose class it cannot import; or why there is none."""

    instances_as: str
    takes_requests: bool
    uses_gpus: bool
    threads: int
    failure: Failure | None


class Forked(msgspec.Struct, array_like=True, tag="forked"):
    """A host has begun; its pidfd comes with the frame."""

    reply: int
    pid: int
    failure: Failure | None


class Exited(msgspec.Struct, array_like=True, tag="exited"):
    """A host has ended: `status` is the exit code, or the signal if `by_signal`."""

    pid: int
    status: int
    by_signal: bool


ToZygote = Start | Fork
FromZygote = Hello | Forked | Exited
