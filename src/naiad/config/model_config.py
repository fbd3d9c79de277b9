"""The typed, read-only view of a complete and valid model configuration.

A `ModelConfig` is made once per load; everything a request needs is an attribute. Pure; knows neither files nor
backends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config.parse import ConfigDict, to_dict
from naiad.datatypes import BY_NUMBER, DataType

Scheduling = Literal["none", "dynamic", "sequence", "ensemble"]

_SCHEDULING: dict[str | None, Scheduling] = {
    None: "none",
    "dynamic_batching": "dynamic",
    "sequence_batching": "sequence",
    "ensemble_scheduling": "ensemble",
}


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or output. `shape` is what metadata shows: `dims`, with -1 in front where the model batches.

    `reshape` is the shape without the batch as the backend sees it, None where that is `dims`.
    """

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    ragged: bool = False
    label_filename: str = ""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What happens to a request that waits. 0 is "no limit" for the timeout and the queue size."""

    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """`preferred_batch_sizes` ascend. `priority_levels` 0 means that there are none; 1 is the most urgent."""

    preferred_batch_sizes: tuple[int, ...]
    max_queue_delay_us: int
    preserve_ordering: bool
    priority_levels: int
    default_priority_level: int
    default_queue_policy: QueuePolicy
    priority_queue_policies: Mapping[int, QueuePolicy]


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """A control input. For CORRID, `datatype` is that of the id and the two values are None."""

    name: str
    kind: Literal["START", "READY", "END", "CORRID"]
    datatype: DataType
    false_value: int | float | bool | None = None
    true_value: int | float | bool | None = None


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a sequence's state begins with: zeros, or the file `data_file` of the folder `initial_state`."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    data_file: str = ""


@dataclass(frozen=True, slots=True)
class SequenceState:
    input_name: str
    output_name: str
    datatype: DataType
    dims: tuple[int, ...]
    initial_state: tuple[InitialState, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """`minimum_slot_utilization` belongs to "direct"; the three fields after it to "oldest"."""

    strategy: Literal["direct", "oldest"]
    max_sequence_idle_us: int
    max_queue_delay_us: int
    minimum_slot_utilization: float
    max_candidate_sequences: int
    preferred_batch_sizes: tuple[int, ...]
    preserve_ordering: bool
    controls: tuple[SequenceControl, ...]
    states: tuple[SequenceState, ...]
    iterative: bool


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """`inputs` maps the model's input to the ensemble's tensor, `outputs` the model's output. Version -1: latest."""

    model_name: str
    model_version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Resource:
    """What an instance occupies under `--rate-limit=execution_count`."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances, per GPU where `gpus` are listed. `priority` is the weight of the rate limiter, at least 1."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU", "KIND_MODEL"]
    count: int
    gpus: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""
    resources: tuple[Resource, ...] = ()
    priority: int = 1


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """`dims` are without the batch. `data_file` is a name in the model's folder `warmup`."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    data: Literal["zero", "random", "file"]
    data_file: str = ""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A request to run on every instance `count` times before the model is ready. `batch_size` 0: skip it."""

    name: str
    batch_size: int
    inputs: tuple[WarmupInput, ...]
    count: int


class ModelConfig:
    """A complete, valid configuration. Never changed after it is made; `proto` is for reading only.

    Two are equal when their messages are: that decides between keeping a loaded version and loading it again.
    """

    __slots__ = (
        "backend",
        "batching",
        "decoupled",
        "dynamic_batching",
        "ensemble_steps",
        "inputs",
        "instance_groups",
        "json",
        "max_batch_size",
        "max_inflight_requests",
        "metric_tags",
        "name",
        "outputs",
        "platform",
        "proto",
        "required_inputs",
        "response_cache",
        "scheduling",
        "sequence_batching",
        "warmup",
    )

    def __init__(self, proto: Proto) -> None:
        """Makes the view of a message that `validate` has accepted. The message is taken over, not copied."""
        self.proto = proto
        self.name: str = proto.name
        self.platform: str = proto.platform
        self.backend: str = proto.backend
        self.max_batch_size: int = proto.max_batch_size
        self.batching = self.max_batch_size > 0
        self.inputs: dict[str, TensorConfig] = {io.name: _tensor(io, self.batching) for io in proto.input}
        self.outputs: dict[str, TensorConfig] = {io.name: _tensor(io, self.batching) for io in proto.output}
        self.required_inputs = frozenset(tensor.name for tensor in self.inputs.values() if not tensor.optional)
        self.decoupled: bool = proto.model_transaction_policy.decoupled
        #: Whether the model asks for it; the server may have no cache.
        self.response_cache: bool = proto.response_cache.enable
        self.scheduling: Scheduling = _SCHEDULING[proto.WhichOneof("scheduling_choice")]
        self.dynamic_batching = _dynamic_batching(proto.dynamic_batching) if self.scheduling == "dynamic" else None
        self.sequence_batching = _sequence_batching(proto.sequence_batching) if self.scheduling == "sequence" else None
        self.ensemble_steps = tuple(_step(step) for step in proto.ensemble_scheduling.step)
        #: How many requests of each step of an ensemble may be under way; 0 is any number.
        self.max_inflight_requests: int = proto.ensemble_scheduling.max_inflight_requests
        self.instance_groups = tuple(_instance_group(group) for group in proto.instance_group)
        self.metric_tags: dict[str, str] = dict(sorted(proto.metric_tags.items()))
        self.warmup = tuple(_warmup(sample) for sample in proto.model_warmup)
        #: What `GET /v2/models/M/config` answers.
        self.json: bytes = orjson.dumps(to_dict(proto))

    def as_dict(self) -> ConfigDict:
        """Triton's JSON form; the caller's own copy."""
        return to_dict(self.proto)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelConfig) and bool(self.proto == other.proto)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ModelConfig {self.name}>"


def only_instances_differ(old: Proto, new: Proto) -> bool:
    """Whether the change from `old` to `new` needs other instances or versions, but no reload."""
    left, right = Proto(), Proto()
    left.CopyFrom(old)
    right.CopyFrom(new)
    for message in (left, right):
        message.ClearField("instance_group")
        message.ClearField("version_policy")
    return not old.HasField("ensemble_scheduling") and bool(left == right)


def _enum_name(message: Any, field: str) -> str:
    return str(message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number[getattr(message, field)].name)


def _tensor(io: Any, batching: bool) -> TensorConfig:
    is_input = io.DESCRIPTOR.name == "ModelInput"
    dims = tuple(io.dims)
    return TensorConfig(
        name=io.name,
        datatype=BY_NUMBER[io.data_type],
        dims=dims,
        shape=(-1, *dims) if batching else dims,
        reshape=tuple(io.reshape.shape) if io.HasField("reshape") else None,
        optional=is_input and io.optional,
        ragged=is_input and io.allow_ragged_batch,
        label_filename="" if is_input else io.label_filename,
    )


def _queue_policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        timeout_action="DELAY" if policy.timeout_action == policy.DELAY else "REJECT",
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _dynamic_batching(batching: Any) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policies={
            level: _queue_policy(batching.priority_queue_policy[level])
            for level in sorted(batching.priority_queue_policy)
        },
    )


def _control(name: str, control: Any) -> SequenceControl:
    kind = _enum_name(control, "kind").removeprefix("CONTROL_SEQUENCE_")
    if kind == "CORRID":
        return SequenceControl(name, "CORRID", BY_NUMBER[control.data_type])
    for values, datatype in (
        (control.int32_false_true, DataType.INT32),
        (control.fp32_false_true, DataType.FP32),
        (control.bool_false_true, DataType.BOOL),
    ):
        if values:
            return SequenceControl(name, kind, datatype, values[0], values[1])  # type: ignore[arg-type]
    raise AssertionError(f"control '{name}' without values passed validation: this is a bug")


def _sequence_batching(batching: Any) -> SequenceBatching:
    oldest = batching.HasField("oldest")
    strategy = batching.oldest if oldest else batching.direct
    return SequenceBatching(
        strategy="oldest" if oldest else "direct",
        max_sequence_idle_us=batching.max_sequence_idle_microseconds,
        max_queue_delay_us=strategy.max_queue_delay_microseconds,
        minimum_slot_utilization=0.0 if oldest else strategy.minimum_slot_utilization,
        max_candidate_sequences=strategy.max_candidate_sequences if oldest else 0,
        preferred_batch_sizes=tuple(sorted(set(strategy.preferred_batch_size))) if oldest else (),
        preserve_ordering=oldest and strategy.preserve_ordering,
        controls=tuple(_control(item.name, control) for item in batching.control_input for control in item.control),
        states=tuple(
            SequenceState(
                input_name=state.input_name,
                output_name=state.output_name,
                datatype=BY_NUMBER[state.data_type],
                dims=tuple(state.dims),
                initial_state=tuple(
                    InitialState(initial.name, BY_NUMBER[initial.data_type], tuple(initial.dims), initial.data_file)
                    for initial in state.initial_state
                ),
            )
            for state in batching.state
        ),
        iterative=batching.iterative_sequence,
    )


def _step(step: Any) -> EnsembleStep:
    return EnsembleStep(
        model_name=step.model_name,
        model_version=step.model_version,
        inputs=dict(sorted(step.input_map.items())),
        outputs=dict(sorted(step.output_map.items())),
    )


def _instance_group(group: Any) -> InstanceGroup:
    return InstanceGroup(
        name=group.name,
        kind=_enum_name(group, "kind"),  # type: ignore[arg-type]
        count=group.count,
        gpus=tuple(group.gpus),
        profiles=tuple(group.profile),
        passive=group.passive,
        host_policy=group.host_policy,
        resources=tuple(
            Resource(resource.name, resource.count, getattr(resource, "global"))
            for resource in group.rate_limiter.resources
        ),
        priority=max(group.rate_limiter.priority, 1),
    )


def _warmup(sample: Any) -> WarmupSample:
    return WarmupSample(
        name=sample.name,
        batch_size=sample.batch_size,
        inputs=tuple(_warmup_input(name, sample.inputs[name]) for name in sorted(sample.inputs)),
        count=max(sample.count, 1),
    )


def _warmup_input(name: str, value: Any) -> WarmupInput:
    choice = value.WhichOneof("input_data_type")
    return WarmupInput(
        name=name,
        datatype=BY_NUMBER[value.data_type],
        dims=tuple(value.dims),
        data="file" if choice == "input_data_file" else "random" if choice == "random_data" else "zero",
        data_file=value.input_data_file,
    )
