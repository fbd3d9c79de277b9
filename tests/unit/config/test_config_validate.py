"""What a configuration may say: every rule with Triton's words, and that all problems are found."""

from collections.abc import Callable, Iterator

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config import complete, validate
from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.config.validate import InvalidConfig, resolve_ensemble

IO = 'input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } '
START = "control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }"


def _first(check: Callable[[Proto], Iterator[str]], text: str) -> list[str]:
    proto = parse_text(text)
    complete.defaults(proto)
    return list(check(proto))


def _model(body: str) -> str:
    return f'name: "m" backend: "python" max_batch_size: 4 {body}'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (_model(""), []),
        (_model("dynamic_batching { preferred_batch_size: [ 1, 4 ] }"), []),
        ('backend: "python"', ["model configuration must specify 'name'"]),
        ('name: "m"', ["unexpected platform type '' for m"]),
        ('name: "m" platform: "some"', ["unexpected platform type 'some' for m"]),
        (
            'name: "m" platform: "libtorch" backend: "pytorch"',
            ["unexpected 'platform' and 'backend' pair, got:libtorch, pytorch"],
        ),
        (
            'name: "m" platform: "ensemble" backend: "b" ensemble_scheduling { step { model_name: "a" '
            'input_map { key: "A" value: "X" } output_map { key: "B" value: "Y" } } } input { name: "X" } '
            'output { name: "Y" }',
            ["Ensemble model 'm' must have platform type 'ensemble' and empty backend type"],
        ),
        (
            'name: "m" platform: "ensemble"',
            ["ensemble scheduling must be set for ensemble m whose platform is ensemble"],
        ),
        (
            _model('model_repository_agents { agents { name: "checksum" } }'),
            ["model 'm' names the repository agent 'checksum'; this server has no repository agents"],
        ),
        ('name: "m" backend: "b" max_batch_size: -1', ["'max_batch_size' must be non-negative value for m"]),
        (
            _model("dynamic_batching { preferred_batch_size: [ 0 ] }"),
            ["dynamic batching preferred size must be positive for m"],
        ),
        (
            _model("dynamic_batching { preferred_batch_size: [ 5 ] }"),
            ["dynamic batching preferred size must be <= max batch size for m"],
        ),
        (_model("dynamic_batching { priority_levels: 2 default_priority_level: 2 }"), []),
        (
            _model("dynamic_batching { priority_levels: 2 }"),
            ["default priority level must be in range [1, 2] for m"],
        ),
        (
            _model("dynamic_batching { priority_levels: 2 default_priority_level: 3 }"),
            ["default priority level must be in range [1, 2] for m"],
        ),
        (
            _model(
                "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
                "priority_queue_policy { key: 3 value { } } }"
            ),
            ["priority queue policy must have priority level in range [1, 2] for m"],
        ),
        (
            _model("dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }"),
            ["Only one priority level is allowed when 'preserve_ordering' is true for m"],
        ),
        (
            _model(
                "dynamic_batching { preserve_ordering: true "
                "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }"
            ),
            ["Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"],
        ),
        (
            _model(
                "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
                "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1 } } }"
            ),
            ["Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"],
        ),
        (
            _model("dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }"),
            [],
        ),
        (
            _model("sequence_batching { } response_cache { enable: true }"),
            [
                "Response Cache does not currently support model m with sequence batching scheduler. "
                "Please disable the response cache."
            ],
        ),
        (
            _model("model_transaction_policy { decoupled: true } response_cache { enable: true }"),
            [
                "Response Cache does not currently support model m with 'decoupled' transaction policy. "
                "Please disable the response cache."
            ],
        ),
        (
            _model(f"sequence_batching {{ control_input {{ {START} }} }}"),
            ["sequence batching control tensor must have a name for m"],
        ),
        (
            _model(
                f'sequence_batching {{ control_input {{ name: "C" {START} }} '
                'control_input { name: "C" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } } }'
            ),
            ["sequence batching control tensor 'C' is specified for multiple control kinds for m"],
        ),
        (
            _model(
                f'sequence_batching {{ control_input {{ name: "C" {START} }} control_input {{ name: "D" {START} }} }}'
            ),
            ["sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"],
        ),
        (
            _model('sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_READY } } }'),
            [
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                "for CONTROL_SEQUENCE_READY for m"
            ],
        ),
        (
            _model(
                'sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_END '
                "int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ] } } }"
            ),
            [
                "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
                "'bool_false_true' for CONTROL_SEQUENCE_END for m"
            ],
        ),
        (
            _model(
                'sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_START '
                "fp32_false_true: [ 1 ] } } }"
            ),
            [
                "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START "
                "for m"
            ],
        ),
        (
            _model(
                'sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID '
                "data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ] } } }"
            ),
            [
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
                "'bool_false_true' for CONTROL_SEQUENCE_CORRID for m"
            ],
        ),
        (
            _model(
                'sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID '
                "data_type: TYPE_FP32 } } }"
            ),
            [
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
                "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            ],
        ),
        (
            _model("sequence_batching { oldest { preferred_batch_size: [ 0, 5 ] } }"),
            [
                "sequence batching preferred batch size must be positive for m",
                "sequence batching preferred batch size must be <= max batch size for m",
            ],
        ),
        (
            _model("sequence_batching { direct { minimum_slot_utilization: 1.5 } }"),
            ["sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"],
        ),
        (_model("sequence_batching { direct { minimum_slot_utilization: 1.0 } }"), []),
        (
            _model("model_metrics { metric_control { } }"),
            [
                "metric control must specify 'metric_identifier'",
                "metric control must specify 'histogram_options'",
            ],
        ),
        (
            _model("model_metrics { metric_control { metric_identifier { } histogram_options { } } }"),
            [
                "metric identifier must specify non-empty 'family'",
                "histogram options must specify non-empty 'buckets'",
            ],
        ),
    ],
)
def test_configuration(text: str, problems: list[str]) -> None:
    assert _first(validate.config_problems, text) == problems


def _io(io: str, rest: str = "max_batch_size: 4") -> str:
    return f'name: "m" backend: "b" {rest} {io}'


def _input(body: str) -> str:
    return f'input {{ name: "X" data_type: TYPE_FP32 {body} }}'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (_io(IO), []),
        (_io("input { data_type: TYPE_FP32 dims: 1 }"), ["model input must specify 'name' for m"]),
        (_io('output { name: "Y" dims: 1 }'), ["model output 'Y' must specify 'data_type' for m"]),
        (_io(_input("")), ["model input 'X' must specify 'dims' for m"]),
        (
            _io(_input("dims: [ 0 ]")),
            [
                "model input 'X' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
            ],
        ),
        (
            _io(_input("dims: [ 1 ] reshape { shape: [ 0 ] }")),
            [
                "model input 'X' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size "
                "dimension for m",
            ],
        ),
        (_io(_input("dims: [ 1, 1 ] reshape { }")), []),
        (_io(_input("dims: [ 2 ] reshape { }")), ["model input 'X' has different size for dims and reshape for m"]),
        (
            _io(_input("dims: [ 1 ] reshape { }"), ""),
            [
                "model input 'X' cannot have empty reshape for non-batching model as scalar tensors are not "
                "supported for m"
            ],
        ),
        (_io(_input("dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] }")), []),
        (
            _io(_input("dims: [ 2, -1, 6 ] reshape { shape: [ 3, -1, 4 ] }")),
            ["model input 'X' has different size for dims and reshape for m"],
        ),
        (
            _io(_input("dims: [ -1, 2 ] reshape { shape: [ -1, -1 ] }")),
            ["model input 'X' has different number of variable-size dimensions for dims and reshape for m"],
        ),
        (
            _io(_input("dims: [ -1 ] reshape { shape: [ 4 ] }")),
            ["model input 'X' has different size for dims and reshape for m"],
        ),
        (_io(_input("dims: [ 1, 2, 3 ] format: FORMAT_NCHW")), []),
        (_io(_input("dims: [ 2 ] format: FORMAT_NHWC")), ["model input NHWC/NCHW require 3 dims for m"]),
        (
            _io(_input("dims: 1 is_shape_tensor: true is_non_linear_format_io: true")),
            [
                "shape tensors are only supported for TensorRT platform for m",
                "Non-linear IO format is only supported for the TensorRT platform for m",
            ],
        ),
        (
            _io(_input("dims: 1 is_shape_tensor: true is_non_linear_format_io: true"), 'platform: "tensorrt_plan"'),
            ["Non-linear IO format input requires 3 dims for m"],
        ),
        (_io(IO + 'batch_input { target_name: "T" data_type: TYPE_INT32 source_input: "X" }'), []),
        (
            _io(IO + 'batch_input { target_name: "T" data_type: TYPE_INT64 source_input: [ "X", "Z" ] }'),
            [
                "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
                "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
                "unknown source input name 'Z' for m",
            ],
        ),
        (
            _io(IO + 'batch_output { target_name: [ "Y", "Y", "Z" ] source_input: "Q" }'),
            [
                "unknown source input name 'Q' for m",
                "target output name 'Y' can only be specified once for m",
                "unknown target output name 'Z' for m",
            ],
        ),
        (
            _io(IO + 'batch_output { target_name: "Y" }'),
            ["batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m"],
        ),
    ],
)
def test_inputs_and_outputs(text: str, problems: list[str]) -> None:
    assert _first(validate.io_problems, text) == problems


def test_all_problems_come_together_the_first_of_triton_in_front() -> None:
    text = _io('input { dims: [ 0 ] } output { name: "Y" }')
    with pytest.raises(InvalidConfig) as caught:
        validate.require(validate.io_problems(parse_text(text)))
    assert caught.value.problems[0] == "model input must specify 'name' for m"
    assert len(caught.value.problems) == 5
    assert caught.value.message == "; also: ".join(caught.value.problems)


def _state(body: str) -> str:
    return f'sequence_batching {{ state {{ input_name: "S" data_type: TYPE_FP32 dims: 2 {body} }} }}'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (_state('initial_state { name: "i" data_type: TYPE_FP32 dims: 2 zero_data: true }'), []),
        (
            _state(
                "initial_state { data_type: TYPE_INT32 dims: [ -1, 1 ] zero_data: true } "
                'initial_state { name: "i" data_type: TYPE_FP32 dims: 2 data_file: "f" }'
            ),
            [
                "initial_state field for state input 'S' must contain exactly one or zero element. Found '2' elements.",
                "The data type used for 'initial_state' field of state 'S' does not match the state data type.",
                "Field 'name' must be set when using initial_state for state input 'S'.",
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state "
                "input 'S'. 2 != 1",
                "'initial_state' field for state input name 'S' contains variable dimensions.",
            ],
        ),
        (
            'name: "m" sequence_batching { state { input_name: "S" data_type: TYPE_FP32 } state { input_name: "S" } }',
            ["state 'S' must specify 'data_type' for m"],
        ),
        (
            'name: "m" sequence_batching { state { input_name: "S" data_type: TYPE_FP32 initial_state { name: "i" '
            'data_type: TYPE_FP32 zero_data: true } } state { input_name: "S" data_type: TYPE_FP32 initial_state { '
            'name: "j" data_type: TYPE_FP32 zero_data: true } } }',
            ["State input name 'S' specified more than once."],
        ),
        (
            _state('initial_state { name: "i" data_type: TYPE_FP32 dims: 3 }'),
            [
                "'initial_state' dim for input name 'S' doesn't match 'state' dim description. 3 != 2",
                "initial_state setting expects state'S' to have state_data set",
            ],
        ),
        (
            'name: "m" input { name: "X" data_type: TYPE_FP32 dims: 1 } '
            'model_warmup { name: "w" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: 1 } } }',
            ["[request id: <id_unknown>] warmup setting expects input 'X' to have input_data_type set"],
        ),
        (
            'name: "m" input { name: "X" data_type: TYPE_FP32 dims: -1 } '
            'model_warmup { name: "w" inputs { key: "X" value { dims: -1 } } }',
            [
                "[request id: <id_unknown>] inference input 'X' data-type is '<invalid>', but model 'm' expects 'FP32'",
                "warmup setting expects all variable-size dimensions are specified for input 'X'",
            ],
        ),
    ],
)
def test_state_and_warmup(text: str, problems: list[str]) -> None:
    assert _first(validate.scheduling_problems, text) == problems


def _group(body: str, rest: str = "") -> str:
    return f'name: "m" {rest} instance_group {{ name: "g" {body} }}'


@pytest.mark.parametrize(
    ("text", "gpus", "problems"),
    [
        (_group("kind: KIND_CPU"), [], []),
        (_group("kind: KIND_GPU gpus: 1"), [0, 1], []),
        ('name: "m"', [], ["must specify one or more 'instance group's for m"]),
        (_group("kind: KIND_GPU"), [], ["instance group g of model m has kind KIND_GPU but no GPUs are available"]),
        (_group("kind: KIND_GPU"), [0], ["instance group g of model m has kind KIND_GPU but specifies no GPUs"]),
        (
            _group("kind: KIND_GPU gpus: 3"),
            [0, 1],
            [
                "instance group g of model m specifies invalid or unsupported gpu id 3. GPUs with at least the "
                "minimum required CUDA compute compatibility of 6.000000 are: 0, 1"
            ],
        ),
        (
            _group("kind: KIND_CPU gpus: 0"),
            [0],
            ["instance group g of model m has kind KIND_CPU but specifies one or more GPUs"],
        ),
        (
            _group("kind: KIND_MODEL gpus: 0"),
            [0],
            ["instance group g of model m has kind KIND_MODEL but specifies one or more GPUs"],
        ),
        (
            _group('kind: KIND_CPU profile: "1"', 'platform: "p"'),
            [],
            [
                "instance group g of model m and platform pspecifies profile field which is only supported for "
                "TensorRT models"
            ],
        ),
        (
            _group('kind: KIND_CPU profile: [ "1", "x" ]', 'platform: "tensorrt_plan"'),
            [],
            [
                "instance group g of model m and platform tensorrt_plan specifies invalid profile x. The field should "
                "contain the string representation of a non-negative integer."
            ],
        ),
        ("ensemble_scheduling { }", [], []),
    ],
)
def test_instance_groups(text: str, gpus: list[int], problems: list[str]) -> None:
    assert list(validate.instance_group_problems(parse_text(text), gpus)) == problems


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" {" ".join(maps)} }}'


def _ensemble(*steps: str, io: str = IO, rest: str = "") -> str:
    return f'name: "e" platform: "ensemble" {rest} {io} ensemble_scheduling {{ {" ".join(steps)} }}'


STEP = _step("a", {"A": "X"}, {"B": "Y"})


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (_ensemble(STEP), []),
        (_ensemble(), ["must specify 'step' for ensemble 'e'"]),
        (
            _ensemble(STEP, rest="instance_group { } optimization { } model_warmup { }"),
            [
                "instance group should not be specified for ensemble 'e'",
                "optimization should not be specified for ensemble 'e'",
                "model_warmup can not be specified for ensemble 'e'",
            ],
        ),
        (
            _ensemble(_step("", {}, {})),
            [
                "must specify 'model_name' in step 0 of ensemble 'e'",
                "must specify 'input_map' in step 0 of ensemble 'e'",
                "must specify 'output_map' in step 0 of ensemble 'e'",
            ],
        ),
        (
            _ensemble(STEP, STEP),
            ["ensemble tensor 'Y' can appear in an output map only once for ensemble 'e' step 1"],
        ),
        (
            _ensemble(STEP, io=IO + 'input { name: "Z" } output { name: "Q" }'),
            [
                "ensemble input 'Z' for ensemble e' is not used",
                "ensemble output 'Q' for ensemble e' is not used",
            ],
        ),
        (
            _ensemble(STEP, _step("b", {"A": "X"}, {"B": "left"})),
            ["ensemble tensor 'left' is unused in ensemble 'e'"],
        ),
        # `source` is never written, so nothing after it is
        (
            _ensemble(_step("a", {"A": "X", "C": "source"}, {"B": "mid"}), _step("b", {"A": "mid"}, {"B": "Y"})),
            [
                "output 'Y' for ensemble 'e' is not written: at least one of its depending tensors, 'source', is not "
                "connected",
                "ensemble tensor 'mid' is unused in ensemble 'e'",
                "ensemble tensor 'source' is unused in ensemble 'e'",
            ],
        ),
        # a circle ends the search for the cause
        (
            _ensemble(
                _step("a", {"A": "q"}, {"B": "p"}),
                _step("b", {"A": "p"}, {"B": "q"}),
                _step("c", {"A": "X", "B": "p"}, {"C": "Y"}),
            ),
            [
                "output 'Y' for ensemble 'e' is not written: at least one of its depending tensors, 'q', is not "
                "connected",
                "ensemble tensor 'p' is unused in ensemble 'e'",
                "ensemble tensor 'q' is unused in ensemble 'e'",
            ],
        ),
    ],
)
def test_ensembles(text: str, problems: list[str]) -> None:
    assert list(validate.config_problems(_defaults(text))) == problems


def test_steps_are_for_ensembles_only() -> None:
    text = f'name: "m" backend: "b" {IO} ensemble_scheduling {{ {STEP} }}'
    assert list(validate.config_problems(_defaults(text))) == [
        "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble"
    ]


def _defaults(text: str) -> Proto:
    proto = parse_text(text)
    complete.defaults(proto)
    return proto


def _config(text: str) -> ModelConfig:
    return ModelConfig(_defaults(text))


def _member(name: str, body: str = "", *, dims: str = "2", kind: str = "TYPE_FP32", batch: int = 0) -> ModelConfig:
    return _config(
        f'name: "{name}" backend: "b" max_batch_size: {batch} {body} '
        f'input {{ name: "A" data_type: {kind} dims: [ {dims} ] }} '
        f'output {{ name: "B" data_type: {kind} dims: [ {dims} ] }}'
    )


CHAIN = _ensemble(_step("a", {"A": "X"}, {"B": "mid"}), _step("b", {"A": "mid"}, {"B": "Y"}))
DECOUPLED = "model_transaction_policy { decoupled: true }"
OPTIONAL = 'input { name: "O" data_type: TYPE_FP32 dims: 1 optional: true }'


@pytest.mark.parametrize(
    ("ensemble", "models", "problem"),
    [
        (CHAIN, [_member("b")], "ensemble e contains models that are not available or ambiguous: a"),
        (CHAIN, [], "ensemble e contains models that are not available or ambiguous: a, b"),
        (
            CHAIN,
            [_member("a"), _member("b", kind="TYPE_INT32")],
            "in ensemble e, ensemble tensor mid: inconsistent data type: TYPE_FP32 is inferred from model a while "
            "TYPE_INT32 is inferred from model b",
        ),
        (
            CHAIN,
            [_member("a"), _member("b", dims="3")],
            "in ensemble e, ensemble tensor mid: inconsistent shape: [2] is inferred from model a while [3] is "
            "inferred from model b",
        ),
        (
            _ensemble(STEP, rest="max_batch_size: 4", io=IO.replace("[ 2 ]", "[ 5 ]")),
            [_member("a", batch=4, dims="5, 1")],
            "in ensemble e, ensemble tensor X: inconsistent shape: [-1,5] is inferred from model e while [-1,5,1] is "
            "inferred from model a",
        ),
        (
            _ensemble(STEP, rest="max_batch_size: 8"),
            [_member("a", batch=4)],
            "ensemble e allows maximum batch size 8, but it contains model a which only allows maximum batch size to "
            "be 4",
        ),
        (
            _ensemble(_step("a", {"WRONG": "X"}, {"B": "Y"})),
            [_member("a")],
            "in ensemble e, ensemble tensor X is mapping to non-existing input WRONG in model a",
        ),
        (
            _ensemble(_step("a", {"A": "X"}, {"WRONG": "Y"})),
            [_member("a")],
            "in ensemble e, ensemble tensor Y is mapped from non-existing output WRONG in model a",
        ),
        (
            _ensemble(_step("a", {"O": "X"}, {"B": "Y"}), io=IO.replace("[ 2 ]", "[ 1 ]")),
            [_member("a", OPTIONAL, dims="1")],
            "in ensemble e, input A in model a is not mapped to any ensemble tensors",
        ),
        (
            _ensemble(
                _step("d1", {"A": "X"}, {"B": "p"}),
                _step("d2", {"A": "X"}, {"B": "q"}),
                _step("join", {"A": "p", "O": "q"}, {"B": "Y"}),
            ),
            [
                _member("d1", DECOUPLED),
                _member("d2", DECOUPLED),
                _member("join", OPTIONAL.replace("dims: 1", "dims: 2")),
            ],
            "in ensemble e, step of model 'join' receives inputs originated from different decoupled models",
        ),
        (
            _ensemble(
                _step("d1", {"A": "X"}, {"B": "Y"}),
                _step("d2", {"A": "X"}, {"B": "Z"}),
                io=IO + 'output { name: "Z" data_type: TYPE_FP32 dims: 2 }',
            ),
            [_member("d1", DECOUPLED), _member("d2", DECOUPLED)],
            "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
        ),
        (
            CHAIN + " response_cache { enable: true }",
            [_member("a", DECOUPLED), _member("b")],
            "Response Cache does not currently support model e with 'decoupled' transaction policy. Please disable the "
            "response cache.",
        ),
    ],
)
def test_ensembles_that_do_not_fit_their_models(ensemble: str, models: list[ModelConfig], problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        resolve_ensemble(_config(ensemble), {model.name: model for model in models})
    assert caught.value.message == problem


@pytest.mark.parametrize(
    ("ensemble", "models", "decoupled"),
    [
        (CHAIN, [_member("a"), _member("b")], False),
        (CHAIN, [_member("a", DECOUPLED), _member("b")], True),
        (CHAIN, [_member("a", DECOUPLED), _member("b", DECOUPLED)], True),
        (CHAIN, [_member("a", OPTIONAL), _member("b", dims="-1")], False),
        # a model without batching may spell out the batch dimension
        (_ensemble(STEP, rest="max_batch_size: 4"), [_member("a", dims="-1, 2")], False),
        (_ensemble(STEP, rest="max_batch_size: 4"), [_member("a", batch=8)], False),
    ],
)
def test_ensembles_that_fit_their_models(ensemble: str, models: list[ModelConfig], decoupled: bool) -> None:
    config = _config(ensemble)
    resolved = resolve_ensemble(config, {model.name: model for model in models})
    assert resolved.decoupled is decoupled
    assert resolved.as_dict()["model_transaction_policy"] == {"decoupled": decoupled}
    assert "model_transaction_policy" not in config.as_dict()


def test_other_models_have_nothing_to_resolve() -> None:
    config = _member("a")
    assert resolve_ensemble(config, {}) is config
