"""The typed view of a configuration."""

import json

import pytest

from naiad.config import complete
from naiad.config.model_config import (
    DynamicBatching,
    EnsembleStep,
    InitialState,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    Resource,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    TensorConfig,
    WarmupInput,
    WarmupSample,
    only_instances_differ,
)
from naiad.config.parse import parse_text
from naiad.datatypes import DataType


def _config(text: str) -> ModelConfig:
    proto = parse_text(text)
    complete.defaults(proto)
    return ModelConfig(proto)


def test_names_and_switches() -> None:
    config = _config(
        'name: "m" platform: "p" backend: "b" max_batch_size: 4'
        ' metric_tags { key: "team" value: "blue" } response_cache { enable: true }'
        " model_transaction_policy { decoupled: true }"
    )
    assert (config.name, config.platform, config.backend) == ("m", "p", "b")
    assert (config.max_batch_size, config.batching) == (4, True)
    assert config.metric_tags == {"team": "blue"}
    assert config.response_cache
    assert config.decoupled
    assert config.scheduling == "none"
    assert config.dynamic_batching is None
    assert config.sequence_batching is None
    assert repr(config) == "<ModelConfig m>"


def test_tensors() -> None:
    config = _config(
        'max_batch_size: 2 input { name: "B" data_type: TYPE_STRING dims: [ -1 ] optional: true '
        "allow_ragged_batch: true } "
        'input { name: "A" data_type: TYPE_FP32 dims: [ 3, 1, 1 ] reshape { shape: [ 3 ] } } '
        'output { name: "Y" data_type: TYPE_BF16 dims: [ 1 ] label_filename: "labels.txt" reshape { } }'
    )
    assert list(config.inputs) == ["B", "A"]
    assert config.inputs["B"] == TensorConfig("B", DataType.BYTES, (-1,), (-1, -1), None, optional=True, ragged=True)
    assert config.inputs["A"] == TensorConfig("A", DataType.FP32, (3, 1, 1), (-1, 3, 1, 1), (3,))
    assert config.outputs["Y"] == TensorConfig("Y", DataType.BF16, (1,), (-1, 1), (), label_filename="labels.txt")
    assert config.required_inputs == {"A"}


def test_without_batching_metadata_shows_the_dims() -> None:
    config = _config('input { name: "A" data_type: TYPE_INT8 dims: [ 3 ] }')
    assert not config.batching
    assert config.inputs["A"].shape == (3,)


def test_dynamic_batching() -> None:
    config = _config(
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4, 2, 4 ] max_queue_delay_microseconds: 7"
        " preserve_ordering: false priority_levels: 3 default_priority_level: 2"
        " default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 allow_timeout_override: true"
        " max_queue_size: 5 } priority_queue_policy { key: 1 value { max_queue_size: 1 } } }"
    )
    default = QueuePolicy("DELAY", 9, True, 5)
    assert config.scheduling == "dynamic"
    assert config.dynamic_batching == DynamicBatching(
        (2, 4), 7, False, 3, 2, default, {1: QueuePolicy(max_queue_size=1)}
    )


def test_direct_sequence_batching() -> None:
    config = _config(
        "sequence_batching { direct { max_queue_delay_microseconds: 3 minimum_slot_utilization: 0.5 }"
        ' control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
        ' control_input { name: "E" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] }'
        " control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }"
        ' control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }'
        ' state { input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: [ -1 ]'
        ' initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] data_file: "f" } } }'
    )
    assert config.scheduling == "sequence"
    assert config.sequence_batching == SequenceBatching(
        strategy="direct",
        max_sequence_idle_us=1_000_000,
        max_queue_delay_us=3,
        minimum_slot_utilization=0.5,
        max_candidate_sequences=0,
        preferred_batch_sizes=(),
        preserve_ordering=False,
        controls=(
            SequenceControl("S", "START", DataType.INT32, 0, 1),
            SequenceControl("E", "END", DataType.FP32, 0.0, 1.0),
            SequenceControl("E", "READY", DataType.BOOL, False, True),
            SequenceControl("C", "CORRID", DataType.BYTES),
        ),
        states=(SequenceState("I", "O", DataType.FP32, (-1,), (InitialState("i", DataType.FP32, (2,), "f"),)),),
        iterative=False,
    )


def test_oldest_sequence_batching() -> None:
    config = _config(
        "max_batch_size: 4 sequence_batching { max_sequence_idle_microseconds: 5 iterative_sequence: true"
        " oldest { max_candidate_sequences: 6 max_queue_delay_microseconds: 7 preserve_ordering: true } }"
    )
    assert config.sequence_batching == SequenceBatching("oldest", 5, 7, 0.0, 6, (4,), True, (), (), True)


def test_direct_is_the_default_strategy() -> None:
    config = _config("sequence_batching { }")
    assert config.sequence_batching is not None
    assert config.sequence_batching.strategy == "direct"


def test_ensemble() -> None:
    config = _config(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "a" model_version: -1'
        ' input_map { key: "I" value: "X" } output_map { key: "O" value: "Y" } } }'
    )
    assert config.scheduling == "ensemble"
    assert config.ensemble_steps == (EnsembleStep("a", -1, {"I": "X"}, {"O": "Y"}),)


def test_instance_groups() -> None:
    config = _config(
        'instance_group { name: "g" kind: KIND_GPU count: 2 gpus: [ 0, 1 ] profile: "1" passive: true host_policy: "h"'
        ' rate_limiter { priority: 3 resources { name: "R" global: true count: 4 } } }'
        ' instance_group { name: "c" kind: KIND_CPU count: 1 }'
    )
    assert config.instance_groups == (
        InstanceGroup("g", "KIND_GPU", 2, (0, 1), ("1",), True, "h", (Resource("R", 4, True),), 3),
        InstanceGroup("c", "KIND_CPU", 1),
    )


def test_warmup() -> None:
    config = _config(
        'model_warmup { name: "w" batch_size: 2 count: 3'
        ' inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 2 ] random_data: true } }'
        ' inputs { key: "B" value { data_type: TYPE_INT8 dims: [ 1 ] zero_data: true } }'
        ' inputs { key: "C" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "f" } } }'
        ' model_warmup { name: "v" }'
    )
    assert config.warmup == (
        WarmupSample(
            "w",
            2,
            (
                WarmupInput("A", DataType.FP32, (2,), "random"),
                WarmupInput("B", DataType.INT8, (1,), "zero"),
                WarmupInput("C", DataType.BYTES, (1,), "file", "f"),
            ),
            3,
        ),
        WarmupSample("v", 0, (), 1),
    )


def test_json_is_the_dict_and_the_dict_is_the_callers() -> None:
    config = _config('name: "m"')
    document = config.as_dict()
    assert json.loads(config.json) == document
    document["name"] = "changed"
    assert config.as_dict()["name"] == "m"


def test_equality_is_that_of_the_messages() -> None:
    assert _config('name: "m"') == _config('name: "m" version_policy { latest { num_versions: 1 } }')
    assert _config('name: "m"') != _config('name: "n"')
    assert _config('name: "m"') != "m"
    with pytest.raises(TypeError):
        hash(_config(""))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("instance_group { count: 1 }", "instance_group { count: 2 }", True),
        ("version_policy { all { } }", "version_policy { latest { } }", True),
        ("max_batch_size: 1", "max_batch_size: 2 instance_group { count: 2 }", False),
        ("ensemble_scheduling { }", "ensemble_scheduling { } version_policy { all { } }", False),
    ],
)
def test_changes_that_need_no_reload(old: str, new: str, expected: bool) -> None:
    assert only_instances_differ(parse_text(old), parse_text(new)) is expected
