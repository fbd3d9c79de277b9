"""The whole plug-in contract of backends. Runs in host processes, never in the server.

A backend is a class named by an entry point of the group `naiad.backends`; its name there is the `backend` of
config.pbtxt. Most derive from `ArrayBackend` and write a constructor that loads and a `run` that maps arrays to
arrays. `RequestBackend` is for those that must see single requests or answer them later. A backend knows
nothing of queues, protocols or other versions. Its exceptions become errors of the model, with their text; a
`NaiadError` keeps its kind.

Arrays: numpy, C order, batch dimension first where `max_batch_size` > 0, then the configured `reshape`, else the
`dims`. A number without dimensions is configured, and travels, as [1]. BYTES tensors are object arrays of
`bytes`, BF16 arrays have `ml_dtypes.bfloat16`. Inputs are valid until `run` returns and may be written to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import msgspec
import numpy.typing as npt

from naiad.errors import NaiadError
from naiad.messages import ParameterValue

# Called an alias: where wheels are built there is no numpy, and mypyc would take it for a variable.
Array: TypeAlias = npt.NDArray[Any]
#: A model configuration in Triton's JSON form: what `GET /v2/models/M/config` shows.
ConfigDict = dict[str, Any]
T = TypeVar("T")


class Services(Protocol):
    """What the server does for code in a host. All methods may be called from any thread."""

    def log(self, level: Literal["ERROR", "WARNING", "INFO", "VERBOSE"], message: str, file: str, line: int) -> None:
        """Writes a line to the server's log, as of `file:line`."""

    def call(self, method: str, arguments: Any, kind: type[T]) -> T:
        """Asks the server for something by name ("infer", "load_model", ...) and blocks for the answer, a `kind`.

        `arguments` and the answer are what msgspec can encode. Raises NaiadError.
        """


class Shared(dict[str, Any]):
    """What `ModelContext.shared` has made."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    """One model version, as a backend sees it. `config` is complete, except in `autocomplete`."""

    name: str
    version: int
    directory: Path
    version_directory: Path
    #: The model's file or folder: `default_model_filename`, else the platform's default name. May not exist.
    path: Path
    config: ConfigDict
    #: `--backend-config=<backend>,<key>=<value>`, with the values for all backends below them.
    settings: Mapping[str, str]
    services: Services
    #: Whether no other model ever runs in this process, so that its code may take any module names.
    is_alone: bool = True
    _shared: Shared = field(default_factory=Shared)

    @property
    def parameters(self) -> dict[str, str]:
        """The `parameters` of the configuration as plain strings."""
        return {key: value["string_value"] for key, value in self.config.get("parameters", {}).items()}

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """Something all instances of this version in this host share, made by the first that asks, and gone with the
        last one. Those that are added later share it too: their configuration may have other instance groups.

        Instances are constructed one after another, so no lock is needed in a constructor.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class InstanceContext:
    """One instance: its name, where it runs. `device_id` counts GPUs; it is 0 for CPU and MODEL."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU", "KIND_MODEL"]
    device_id: int = 0


class _Backend:
    #: Modules the zygote imports once, before any model is loaded. They must not start threads.
    modules: ClassVar[tuple[str, ...]] = ()
    #: The extra of the distribution `naiad` that brings `modules`, for the error text when one is missing.
    extra: ClassVar[str] = ""
    #: Instances of one model as threads of one host, or in a host each.
    instances_as: ClassVar[Literal["threads", "processes"]] = "threads"

    @classmethod
    def uses_gpus(cls) -> bool:
        """Whether instances of KIND_AUTO shall be placed on the machine's GPUs. Asked in the zygote, once `modules` are
        imported: it must neither start a thread nor CUDA, which does not survive the fork."""
        return False

    @classmethod
    def autocomplete(cls, model: ModelContext) -> ConfigDict | None:
        """The configuration with what the model's files say filled in, or None to leave it as it is.

        May set `max_batch_size`, `input`, `output`, a scheduler where none is chosen, and
        `model_transaction_policy`. Raises where file and configuration contradict each other.
        """
        return None

    @property
    def checks_readiness(self) -> bool:
        """Whether `is_ready` is worth asking. Looked at once, when the instance has been constructed."""
        return False

    def is_ready(self) -> bool:
        """What clients are told that ask whether the model is ready; inference does not ask. Called from a thread of
        its own, also while a batch runs. Raises where the model cannot say."""
        return True

    def close(self) -> None:
        """Called once, when the instance goes. The process usually ends right after."""


class ArrayBackend(_Backend):
    """One loaded instance of a model that maps arrays to arrays. Used by one thread at a time."""

    #: Whether its models may keep arrays of their inputs, which then stay as they are: code of users does. It costs a copy
    #: of what is small.
    keeps_inputs: bool = False

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        """Loads the model; raises with the reason if it cannot be loaded."""

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Computes one batch. `outputs` names what somebody asked for; more may be returned.

        Inputs with `allow_ragged_batch` come as one dimension, the elements of request behind request; those of
        `batch_input` that tell them apart come with them. InvalidArgument says that the inputs cannot be used: then
        each request of the batch is run by itself, so that only those at fault fail.
        """
        raise NotImplementedError  # pragma: no cover - the contract


class BackendResponse(msgspec.Struct, frozen=True):
    """One answer of a RequestBackend to one request."""

    outputs: Mapping[str, Array]
    parameters: Mapping[str, ParameterValue] = {}


class BackendRequest(Protocol):
    """One request of a batch, as a RequestBackend sees it. Threads may keep it until it is answered.

    `outputs` are the names asked for, all of the configuration where the client named none. `flags` are
    Triton's: 1 = first, 2 = last of its sequence.
    """

    id: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    parameters: Mapping[str, ParameterValue]
    correlation_id: int | str
    flags: int
    priority: int
    timeout_us: int
    #: Number of the trace that follows the request (0 is none) and its OpenTelemetry context as JSON.
    trace: int
    trace_context: str | None

    def send(self, result: BackendResponse | NaiadError | None, final: bool) -> None:
        """Answers. Exactly one call with `final`; `None` only with `final`, for "nothing more".

        Arrays are copied before it returns. Raises NaiadError if the result cannot be sent.
        """

    def reschedule(self) -> None:
        """In place of a final answer: gives the request back, to be executed once more with whatever else waits by
        then. It comes as a new object. For models with `iterative_sequence` only; raises NaiadError for others."""

    def is_cancelled(self) -> bool:
        """Whether the client has withdrawn the request."""


class RequestBackend(_Backend):
    """One loaded instance that gets the requests of a batch themselves, and answers each through `send`."""

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        """Loads the model; raises with the reason if it cannot be loaded."""

    def execute(self, requests: Sequence[BackendRequest]) -> "Sequence[BackendResponse | NaiadError] | None":
        """Runs one batch. A model with a decoupled transaction policy may answer after it has returned; all others
        answer each request exactly once before, or return the answers of all. An exception fails the requests not yet
        answered."""
        raise NotImplementedError  # pragma: no cover - the contract
