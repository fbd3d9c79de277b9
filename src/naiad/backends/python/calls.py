"""What a Python model in a host asks of the server: the messages behind `Services.call`.

    method            argument           answer
    "infer"           InferCall          InferAnswer, or StreamAnswer where `decoupled` is set
    "next_response"   StreamCall         InferAnswer; after the one that is `final` the stream is gone
    "cancel"          StreamCall         None; the stream goes on until its final answer
    "load_model"      LoadCall           None, when the model is ready
    "unload_model"    UnloadCall         None
    "is_model_ready"  ReadyCall          bool
    "metric"          MetricCall         the value of the last change that is a MetricValue, else 0.0

Errors. "infer" raises a NaiadError for what goes wrong before the called model has the request; the caller sees
it as `Model M - Error when running inference: <text>`. These are in particular

    Failed for execute the inference request. Model 'M' is not ready.
    Model M is using the decoupled. The current BLS request call doesn't support models using the decoupled ...

(`not_ready` and `needs_decoupled` below). What the called model itself answers, errors included, is an
`InferAnswer`. All other methods raise a NaiadError with the engine's text.
"""

from typing import Literal

import msgspec

from naiad.messages import ParameterValue


class TensorValue(msgspec.Struct, frozen=True):
    """A tensor on its way between models: `datatype` is `DataType.number`, `data` is as in `messages.Tensor`."""

    name: str
    datatype: int
    shape: tuple[int, ...]
    data: memoryview


class InferCall(msgspec.Struct, frozen=True):
    """A request for another model. `flags` are 1 = first and 2 = last of a sequence; no `outputs` means all.

    A correlation id of 0 or "" is none. `model_version` -1 is the newest. `trace` is the number of the trace that
    this request belongs to, 0 for none.
    """

    model_name: str
    model_version: int
    inputs: tuple[TensorValue, ...]
    outputs: tuple[str, ...]
    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    parameters: dict[str, ParameterValue] = {}
    decoupled: bool = False
    trace: int = 0


class ErrorValue(msgspec.Struct, frozen=True):
    """An error of the called model: `code` is `NaiadError.triton_code`."""

    code: str
    message: str


class InferAnswer(msgspec.Struct, frozen=True):
    """One response of the called model; with `final` it may be empty."""

    outputs: tuple[TensorValue, ...] = ()
    parameters: dict[str, ParameterValue] = {}
    error: ErrorValue | None = None
    final: bool = True


class StreamAnswer(msgspec.Struct, frozen=True):
    """The number under which the responses of a decoupled call are fetched. It is given up with the final one."""

    stream: int


class StreamCall(msgspec.Struct, frozen=True):
    stream: int


class LoadCall(msgspec.Struct, frozen=True):
    """`config` is JSON, "" for the repository's. Keys of `files` are "file:<path>", as in the load API."""

    name: str
    config: str = ""
    files: dict[str, bytes] = {}


class UnloadCall(msgspec.Struct, frozen=True):
    name: str
    unload_dependents: bool = False


class ReadyCall(msgspec.Struct, frozen=True):
    """`version` -1 is any."""

    name: str
    version: int = -1


MetricKind = Literal["counter", "gauge", "histogram"]
Labels = dict[str, str]


class NewFamily(msgspec.Struct, frozen=True, tag="new_family"):
    """A family of metrics. Many instances announce the same one; only a different kind is an error."""

    family: str
    description: str
    kind: MetricKind


class DropFamily(msgspec.Struct, frozen=True, tag="drop_family"):
    """The announcer needs the family no more; it goes when nobody does. A host that ends drops all of its own."""

    family: str


class NewMetric(msgspec.Struct, frozen=True, tag="new_metric"):
    """A member of a family, shown with the value 0. `buckets` are a histogram's upper bounds."""

    family: str
    labels: Labels
    buckets: tuple[float, ...] | None = None


class DropMetric(msgspec.Struct, frozen=True, tag="drop_metric"):
    family: str
    labels: Labels


class Increment(msgspec.Struct, frozen=True, tag="increment"):
    family: str
    labels: Labels
    value: float


class SetValue(msgspec.Struct, frozen=True, tag="set"):
    family: str
    labels: Labels
    value: float


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    family: str
    labels: Labels
    values: tuple[float, ...]


class MetricValue(msgspec.Struct, frozen=True, tag="value"):
    family: str
    labels: Labels


MetricChange = NewFamily | DropFamily | NewMetric | DropMetric | Increment | SetValue | Observe | MetricValue


class MetricCall(msgspec.Struct, frozen=True):
    """Changes of metrics, in order. Those that are refused keep no others from being made; the first of them is raised."""

    changes: tuple[MetricChange, ...]


def not_ready(model_name: str) -> str:
    """Why "infer" refuses a model that is unknown or not ready."""
    return f"Failed for execute the inference request. Model '{model_name}' is not ready."


def needs_decoupled(model_name: str) -> str:
    """Why "infer" refuses a decoupled model in a call that is not."""
    return (
        f"Model {model_name} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
        "decoupled models.'"
    )
