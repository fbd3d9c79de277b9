"""What a model configuration may say. Pure: each check yields every problem it finds, in the words of Triton.

Triton stops at the first problem; here all of a configuration are reported together, Triton's first in front.
The checks come in four groups, because Triton makes them at different moments (see `read`): of the configuration
itself, of its inputs and outputs, of the instance groups, and of an ensemble together with its models.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config import platforms
from naiad.config.model_config import ModelConfig
from naiad.datatypes import BY_NUMBER
from naiad.errors import InvalidArgument

_CONTROL = model_config_pb2.ModelSequenceBatching.Control
_BATCH_INPUT = model_config_pb2.BatchInput
_BATCH_OUTPUT = model_config_pb2.BatchOutput
_GROUP = model_config_pb2.ModelInstanceGroup
_DELAY = model_config_pb2.ModelQueuePolicy.DELAY

_CORRELATION_ID_TYPES = frozenset(
    getattr(model_config_pb2, name)
    for name in ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
)
_BATCH_INPUT_TYPES = frozenset({model_config_pb2.TYPE_INT32, model_config_pb2.TYPE_FP32})


class InvalidConfig(InvalidArgument):
    """A configuration with `problems`. The text is the first; where there are more, they follow after "; also: "."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("; also: ".join(self.problems))


def require(problems: Iterable[str]) -> None:
    """Raises InvalidConfig if there are any problems."""
    if found := list(problems):
        raise InvalidConfig(found)


# -- the configuration itself ------------------------------------------------------------------------------------


def config_problems(config: Proto) -> Iterator[str]:
    """Of a configuration completed from files and defaults; inputs and outputs may still be missing."""
    if not config.name:
        yield "model configuration must specify 'name'"
    yield from _platform_problems(config)
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {config.name}"
    if not config.HasField("version_policy"):
        yield f"must specify 'version policy' for {config.name}"
    for agent in config.model_repository_agents.agents:
        # An agent checks or changes the files: to serve them without it could be what it is there to prevent.
        yield f"model '{config.name}' names the repository agent '{agent.name}'; this server has no repository agents"
    scheduling = config.WhichOneof("scheduling_choice")
    if scheduling == "dynamic_batching":
        yield from _dynamic_batching_problems(config)
    elif scheduling == "sequence_batching":
        if config.response_cache.enable:
            yield (
                f"Response Cache does not currently support model {config.name} with sequence batching scheduler. "
                "Please disable the response cache."
            )
        yield from _sequence_batching_problems(config)
    if scheduling == "ensemble_scheduling":
        yield from ensemble_problems(config)
    elif config.platform == platforms.ENSEMBLE:
        yield f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble"
    if config.model_transaction_policy.decoupled and config.response_cache.enable:
        yield _not_cached_decoupled(config.name)
    yield from _metric_problems(config)


def _not_cached_decoupled(name: str) -> str:
    return (
        f"Response Cache does not currently support model {name} with 'decoupled' transaction policy. "
        "Please disable the response cache."
    )


def _platform_problems(config: Proto) -> Iterator[str]:
    if not config.backend:
        if config.platform != platforms.ENSEMBLE:
            yield f"unexpected platform type '{config.platform}' for {config.name}"
    elif config.platform == platforms.ENSEMBLE:
        yield f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type"
    elif not platforms.is_pair(config.platform, config.backend):
        yield f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}"


def _dynamic_batching_problems(config: Proto) -> Iterator[str]:
    name, batching = config.name, config.dynamic_batching
    for size in batching.preferred_batch_size:
        if size <= 0:
            yield f"dynamic batching preferred size must be positive for {name}"
        elif size > config.max_batch_size:
            yield f"dynamic batching preferred size must be <= max batch size for {name}"
    levels = batching.priority_levels
    policies = [batching.priority_queue_policy[level] for level in sorted(batching.priority_queue_policy)]
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"default priority level must be in range [1, {levels}] for {name}"
        if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
            yield f"priority queue policy must have priority level in range [1, {levels}] for {name}"
    if batching.preserve_ordering:
        if levels > 1:
            yield f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        for policy in (batching.default_queue_policy, *policies):
            if policy.default_timeout_microseconds and policy.timeout_action == _DELAY:
                yield f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"


def _sequence_batching_problems(config: Proto) -> Iterator[str]:
    name, batching = config.name, config.sequence_batching
    seen: set[str] = set()
    for item in batching.control_input:
        if not item.name:
            yield f"sequence batching control tensor must have a name for {name}"
        elif item.name in seen:
            yield (f"sequence batching control tensor '{item.name}' is specified for multiple control kinds for {name}")
        seen.add(item.name)
    controls = [control for item in batching.control_input for control in item.control]
    for kind in (_CONTROL.CONTROL_SEQUENCE_START, _CONTROL.CONTROL_SEQUENCE_END, _CONTROL.CONTROL_SEQUENCE_READY):
        yield from _boolean_control_problems(name, kind, controls)
    yield from _correlation_id_problems(name, controls)
    if batching.HasField("oldest"):
        for size in batching.oldest.preferred_batch_size:
            if size <= 0:
                yield f"sequence batching preferred batch size must be positive for {name}"
            elif size > config.max_batch_size:
                yield f"sequence batching preferred batch size must be <= max batch size for {name}"
    if batching.HasField("direct") and not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"


def _boolean_control_problems(name: str, kind: int, controls: Sequence[Any]) -> Iterator[str]:
    kind_name = _CONTROL.Kind.Name(kind)
    of_kind = [control for control in controls if control.kind == kind]
    for index, control in enumerate(of_kind):
        if index:
            yield f"sequence batching specifies multiple {kind_name} tensors for {name}"
        fields = {
            field: len(getattr(control, field))
            for field in ("int32_false_true", "fp32_false_true", "bool_false_true")
            if getattr(control, field)
        }
        if not fields:
            yield (
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                f"for {kind_name} for {name}"
            )
        elif len(fields) > 1:
            yield (
                "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
                f"'bool_false_true' for {kind_name} for {name}"
            )
        else:
            ((field, count),) = fields.items()
            if count != 2:
                yield f"sequence batching control '{field}' must have exactly 2 entries for {kind_name} for {name}"


def _correlation_id_problems(name: str, controls: Sequence[Any]) -> Iterator[str]:
    kind_name = "CONTROL_SEQUENCE_CORRID"
    of_kind = [control for control in controls if control.kind == _CONTROL.CONTROL_SEQUENCE_CORRID]
    for index, control in enumerate(of_kind):
        if index:
            yield f"sequence batching specifies multiple {kind_name} tensors for {name}"
        if control.int32_false_true or control.fp32_false_true or control.bool_false_true:
            yield (
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
                f"'bool_false_true' for {kind_name} for {name}"
            )
        if control.data_type not in _CORRELATION_ID_TYPES:
            yield (
                f"unexpected data type for control {kind_name} for {name}. Allowed data types are TYPE_UINT64, "
                "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )


def _metric_problems(config: Proto) -> Iterator[str]:
    for control in config.model_metrics.metric_control:
        if not control.HasField("metric_identifier"):
            yield "metric control must specify 'metric_identifier'"
        elif not control.metric_identifier.family:
            yield "metric identifier must specify non-empty 'family'"
        if not control.HasField("histogram_options"):
            yield "metric control must specify 'histogram_options'"
        elif not control.histogram_options.buckets:
            yield "histogram options must specify non-empty 'buckets'"


# -- inputs and outputs ------------------------------------------------------------------------------------------


def io_problems(config: Proto) -> Iterator[str]:
    """Of inputs, outputs and what refers to them, once the backend has completed the configuration."""
    for io in config.input:
        for problem in _input_problems(io, config):
            yield f"{problem} for {config.name}"
    for io in config.output:
        for problem in _output_problems(io, config):
            yield f"{problem} for {config.name}"
    for problem in _batch_io_problems(config):
        yield f"{problem} for {config.name}"


def _input_problems(io: Any, config: Proto) -> Iterator[str]:
    yield from _shape_problems(io, config.max_batch_size, "model input ")
    if io.format in (io.FORMAT_NHWC, io.FORMAT_NCHW) and len(io.dims) != 3:
        yield "model input NHWC/NCHW require 3 dims"
    yield from _tensorrt_only_problems(io, config.platform, "input")


def _output_problems(io: Any, config: Proto) -> Iterator[str]:
    yield from _shape_problems(io, config.max_batch_size, "model output ")
    yield from _tensorrt_only_problems(io, config.platform, "output")


def _tensorrt_only_problems(io: Any, platform: str, kind: str) -> Iterator[str]:
    if io.is_shape_tensor and platform != platforms.TENSORRT_PLATFORM:
        yield "shape tensors are only supported for TensorRT platform"
    if io.is_non_linear_format_io:
        if platform != platforms.TENSORRT_PLATFORM:
            yield "Non-linear IO format is only supported for the TensorRT platform"
        elif len(io.dims) != 3:
            yield f"Non-linear IO format {kind} requires 3 dims"


def _is_dim(dim: int) -> bool:
    return dim >= 1 or dim == -1


def _shape_problems(io: Any, max_batch_size: int, prefix: str) -> Iterator[str]:
    if not io.name:
        yield f"{prefix}must specify 'name'"
    subject = f"{prefix}'{io.name}' "
    if io.data_type not in BY_NUMBER:
        yield f"{subject}must specify 'data_type'"
    if not io.dims:
        yield f"{subject}must specify 'dims'"
        return
    if io.HasField("reshape") and not io.reshape.shape and max_batch_size == 0:
        yield f"{subject}cannot have empty reshape for non-batching model as scalar tensors are not supported"
    sound = True
    if not all(map(_is_dim, io.dims)):
        sound = False
        yield f"{subject}dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    if io.HasField("reshape"):
        if not all(map(_is_dim, io.reshape.shape)):
            sound = False
            yield f"{subject}reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        if sound:
            yield from _reshape_problems(subject, tuple(io.dims), tuple(io.reshape.shape))


def _reshape_problems(subject: str, dims: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[str]:
    """Between variable dimensions, which map to each other in order, the products must be the same."""
    different_size = f"{subject}has different size for dims and reshape"
    if not shape:
        if dims != (1,) * len(dims):
            yield different_size
        return
    left, right = _products(dims), _products(shape)
    if (len(left) == 1) != (len(right) == 1):
        yield different_size
    elif len(left) != len(right):
        yield f"{subject}has different number of variable-size dimensions for dims and reshape"
    elif left != right:
        yield different_size


def _products(dims: tuple[int, ...]) -> list[int]:
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _batch_io_problems(config: Proto) -> Iterator[str]:
    inputs = {io.name for io in config.input}
    outputs = {io.name for io in config.output}
    for item in config.batch_input:
        if len(item.source_input) != 1:
            kind = _BATCH_INPUT.Kind.Name(item.kind)
            yield f"batch input kind '{kind}' expects 1 source input, got {len(item.source_input)}"
        if item.data_type not in _BATCH_INPUT_TYPES:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
        for source in item.source_input:
            if source not in inputs:
                yield f"unknown source input name '{source}'"
    for item in config.batch_output:
        if len(item.source_input) != 1:
            kind = _BATCH_OUTPUT.Kind.Name(item.kind)
            yield f"batch output kind '{kind}' expects 1 source input, got {len(item.source_input)}"
        for source in item.source_input:
            if source not in inputs:
                yield f"unknown source input name '{source}'"
        seen: set[str] = set()
        for target in item.target_name:
            if target not in outputs:
                yield f"unknown target output name '{target}'"
            elif target in seen:
                yield f"target output name '{target}' can only be specified once"
            seen.add(target)


def scheduling_problems(config: Proto) -> Iterator[str]:
    """Of implicit state and warm-up samples: what Triton finds when it makes the scheduler and the instances."""
    name = config.name
    seen: set[str] = set()
    for state in config.sequence_batching.state:
        label = state.input_name
        if state.initial_state:
            if label in seen:
                yield f"State input name '{label}' specified more than once."
            seen.add(label)
        if state.data_type not in BY_NUMBER:
            yield f"state '{label}' must specify 'data_type' for {name}"
        if len(state.initial_state) > 1:
            yield (
                f"initial_state field for state input '{label}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements."
            )
        for initial in state.initial_state:
            yield from _initial_state_problems(state, initial)
    expected = {io.name: BY_NUMBER[io.data_type].name for io in config.input if io.data_type in BY_NUMBER}
    for sample in config.model_warmup:
        for key in sorted(sample.inputs):
            value = sample.inputs[key]
            if value.data_type not in BY_NUMBER:
                # The words of the request that the sample would become.
                yield (
                    f"[request id: <id_unknown>] inference input '{key}' data-type is '<invalid>', but model '{name}' "
                    f"expects '{expected.get(key, 'no such input')}'"
                )
            if any(dim < 0 for dim in value.dims):
                yield f"warmup setting expects all variable-size dimensions are specified for input '{key}'"
            if sample.batch_size and value.WhichOneof("input_data_type") is None:
                yield f"[request id: <id_unknown>] warmup setting expects input '{key}' to have input_data_type set"


def _initial_state_problems(state: Any, initial: Any) -> Iterator[str]:
    label = state.input_name
    if initial.data_type != state.data_type:
        yield f"The data type used for 'initial_state' field of state '{label}' does not match the state data type."
    if not initial.name:
        yield f"Field 'name' must be set when using initial_state for state input '{label}'."
    if len(initial.dims) != len(state.dims):
        yield (
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{label}'. {len(initial.dims)} != {len(state.dims)}"
        )
    if any(dim == -1 for dim in initial.dims):
        yield f"'initial_state' field for state input name '{label}' contains variable dimensions."
    for dim, expected in zip(initial.dims, state.dims, strict=False):
        if dim != expected and -1 not in (dim, expected):
            yield (
                f"'initial_state' dim for input name '{label}' doesn't match 'state' dim description. {dim} != {expected}"
            )
    if initial.WhichOneof("state_data") is None:
        yield f"initial_state setting expects state'{label}' to have state_data set"


# -- instance groups ---------------------------------------------------------------------------------------------


def instance_group_problems(config: Proto, gpus: Sequence[int]) -> Iterator[str]:
    """Of completed instance groups on a machine whose GPUs have the ids `gpus`."""
    if config.HasField("ensemble_scheduling"):
        return
    if not config.instance_group:
        yield f"must specify one or more 'instance group's for {config.name}"
    for group in config.instance_group:
        subject = f"instance group {group.name} of model {config.name}"
        kind = _GROUP.Kind.Name(group.kind)
        if group.kind == _GROUP.KIND_GPU:
            if not group.gpus:
                yield f"{subject} has kind KIND_GPU but {'specifies no GPUs' if gpus else 'no GPUs are available'}"
            for gpu in group.gpus:
                if gpu not in gpus:
                    yield (
                        f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                        f"required CUDA compute compatibility of 6.000000 are: {', '.join(map(str, gpus))}"
                    )
        elif group.gpus:
            yield f"{subject} has kind {kind} but specifies one or more GPUs"
        if config.platform != platforms.TENSORRT_PLATFORM:
            if group.profile:
                yield (
                    f"{subject} and platform {config.platform}specifies profile field which is only supported for "
                    "TensorRT models"
                )
        else:
            for profile in group.profile:
                if not profile.isdecimal():
                    yield (
                        f"{subject} and platform {config.platform} specifies invalid profile {profile}. The field "
                        "should contain the string representation of a non-negative integer."
                    )


# -- ensembles ---------------------------------------------------------------------------------------------------


def ensemble_problems(config: Proto) -> Iterator[str]:
    """Of an ensemble by itself: what it must not set, its steps, and the way of its tensors."""
    name = config.name
    if config.platform != platforms.ENSEMBLE:
        yield f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
    if config.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if config.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if config.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    if not config.ensemble_scheduling.step:
        yield f"must specify 'step' for ensemble '{name}'"
        return
    step_problems = list(_step_problems(config))
    yield from step_problems
    if not step_problems:
        yield from _flow_problems(config)


def _step_problems(config: Proto) -> Iterator[str]:
    name = config.name
    written: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        if not step.model_name:
            yield f"must specify 'model_name' in step {index} of ensemble '{name}'"
        if not step.input_map:
            yield f"must specify 'input_map' in step {index} of ensemble '{name}'"
        if not step.output_map:
            yield f"must specify 'output_map' in step {index} of ensemble '{name}'"
        for output in sorted(step.output_map):
            tensor = step.output_map[output]
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                    f"step {index}"
                )
            written.add(tensor)


def _flow_problems(config: Proto) -> Iterator[str]:
    """Every input is used, every output is written, and everything in between leads from one to the other."""
    name = config.name
    needs: dict[str, list[str]] = {}
    used_by: dict[str, list[str]] = {}
    for step in config.ensemble_scheduling.step:
        sources = [step.input_map[key] for key in sorted(step.input_map)]
        targets = [step.output_map[key] for key in sorted(step.output_map)]
        for tensor in (*targets, *sources):
            needs.setdefault(tensor, [])
            used_by.setdefault(tensor, [])
        for source in sources:
            used_by[source].extend(targets)
        for target in targets:
            needs[target].extend(sources)
    ready: set[str] = set()
    queue: list[str] = []
    for io in config.input:
        if io.name in needs:
            ready.add(io.name)
            queue.append(io.name)
        else:
            yield f"ensemble input '{io.name}' for ensemble {name}' is not used"
    while queue:
        for target in used_by[queue.pop(0)]:
            if target not in ready and all(source in ready for source in needs[target]):
                ready.add(target)
                queue.append(target)
    outputs = {io.name for io in config.output}
    for io in config.output:
        if io.name not in needs:
            yield f"ensemble output '{io.name}' for ensemble {name}' is not used"
        elif io.name not in ready:
            yield f"output '{io.name}' for ensemble '{name}' is not written{_unconnected(io.name, needs, ready)}"
    for tensor in needs:
        if tensor not in outputs and (tensor not in ready or not used_by[tensor]):
            yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


def _unconnected(output: str, needs: Mapping[str, list[str]], ready: set[str]) -> str:
    last, seen = output, {""}
    while True:
        blocking = next((source for source in needs[last] if source not in ready and source not in seen), None)
        if blocking is None:
            break
        seen.add(blocking)
        last = blocking
    return "" if last == output else f": at least one of its depending tensors, '{last}', is not connected"


Dims = tuple[int, ...]


class _Inferred:
    """An ensemble tensor as the first model (or the ensemble) that names it has it, and its part in the flow."""

    def __init__(self, model: str, batching: bool, data_type: int, dims: Dims) -> None:
        self.model = model
        self.data_type = data_type
        self.dims = dims
        self.full_dims = (-1, *dims) if batching else dims
        self.label = 0

    def conflict(self, other: "_Inferred") -> str | None:
        if self.data_type != other.data_type:
            ours, theirs = (model_config_pb2.DataType.Name(side.data_type) for side in (self, other))
            return (
                f"inconsistent data type: {ours} is inferred from model {self.model} while {theirs} is inferred "
                f"from model {other.model}"
            )
        # The full shapes may agree where the dims do not: a model that does not batch may spell out the batch.
        if not _compatible(self.dims, other.dims) and not _compatible(self.full_dims, other.full_dims):
            return (
                f"inconsistent shape: {_dims_text(self.full_dims)} is inferred from model {self.model} while "
                f"{_dims_text(other.full_dims)} is inferred from model {other.model}"
            )
        return None


def _compatible(left: Dims, right: Dims) -> bool:
    return len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in zip(left, right, strict=True))


def _dims_text(dims: Dims) -> str:
    return f"[{','.join(map(str, dims))}]"


def resolve_ensemble(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> ModelConfig:
    """The ensemble's configuration, checked against those of its models: decoupled if one of its models makes it so.

    `models` holds the completed configurations of the loaded models by name. Raises InvalidConfig with Triton's
    texts ("in ensemble E, ..."), or, with the names, when models are missing.
    """
    if ensemble.scheduling != "ensemble":
        return ensemble
    missing = sorted({step.model_name for step in ensemble.ensemble_steps} - models.keys())
    if missing:
        raise InvalidConfig(
            [f"ensemble {ensemble.name} contains models that are not available or ambiguous: {', '.join(missing)}"]
        )
    tensors = _mapped_tensors(ensemble, models)
    decoupled = _decoupled_flow(ensemble, models, tensors)
    if decoupled and ensemble.proto.response_cache.enable:
        raise InvalidConfig([_not_cached_decoupled(ensemble.name)])
    proto = Proto()
    proto.CopyFrom(ensemble.proto)
    proto.model_transaction_policy.decoupled = decoupled
    return ModelConfig(proto)


def _mapped_tensors(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> dict[str, _Inferred]:
    """The tensors by name. Raises at the first contradiction: what follows is mostly its consequence, and a client
    sees the text."""
    prefix = f"in ensemble {ensemble.name}, "
    tensors = {
        tensor.name: _Inferred(
            ensemble.name,
            ensemble.batching,
            tensor.datatype.number,
            tensor.dims if tensor.reshape is None else tensor.reshape,
        )
        for tensor in (*reversed(ensemble.outputs.values()), *ensemble.inputs.values())
    }

    def place(name: str, seen: _Inferred) -> None:
        known = tensors.setdefault(name, seen)
        if conflict := known.conflict(seen):
            raise InvalidConfig([f"{prefix}ensemble tensor {name}: {conflict}"])

    for step in ensemble.ensemble_steps:
        model = models[step.model_name]
        if 0 < model.max_batch_size < ensemble.max_batch_size:
            raise InvalidConfig(
                [
                    f"ensemble {ensemble.name} allows maximum batch size {ensemble.max_batch_size}, but it contains model "
                    f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
                ]
            )
        for name, mapped in step.inputs.items():
            if name not in model.inputs:
                raise InvalidConfig(
                    [f"{prefix}ensemble tensor {mapped} is mapping to non-existing input {name} in model {model.name}"]
                )
        for tensor in model.inputs.values():
            if tensor.name in step.inputs:
                inferred = _Inferred(model.name, model.batching, tensor.datatype.number, tensor.dims)
                place(step.inputs[tensor.name], inferred)
            elif not tensor.optional:
                raise InvalidConfig(
                    [f"{prefix}input {tensor.name} in model {model.name} is not mapped to any ensemble tensors"]
                )
        for name, mapped in step.outputs.items():
            if name not in model.outputs:
                raise InvalidConfig(
                    [
                        f"{prefix}ensemble tensor {mapped} is mapped from non-existing output {name} in model {model.name}"
                    ]
                )
            tensor = model.outputs[name]
            place(mapped, _Inferred(model.name, model.batching, tensor.datatype.number, tensor.dims))
    return tensors


def _decoupled_flow(ensemble: ModelConfig, models: Mapping[str, ModelConfig], tensors: Mapping[str, _Inferred]) -> bool:
    """Whether the ensemble is decoupled. All inputs of a step, and all outputs of the ensemble, must come from the
    same decoupled step, or from none: responses of two such steps could not be matched."""
    visited = set(ensemble.inputs)
    waiting = list(ensemble.ensemble_steps)
    label = 0

    def common(names: Iterable[str], receiver: str) -> int:
        labels = {tensors[name].label for name in names}
        if len(labels) > 1:
            raise InvalidConfig(
                [
                    f"in ensemble {ensemble.name}, step of model '{receiver}' receives inputs originated from "
                    "different decoupled models"
                ]
            )
        return labels.pop() if labels else 0

    while ready := [step for step in waiting if visited.issuperset(step.inputs.values())]:
        waiting = [step for step in waiting if step not in ready]
        for step in ready:
            source = common(step.inputs.values(), step.model_name)
            if models[step.model_name].decoupled:
                label += 1
                source = label
            for name in step.outputs.values():
                tensors[name].label = source
                visited.add(name)
    common(ensemble.outputs, ensemble.name)
    return label != 0
