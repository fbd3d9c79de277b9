"""Text and JSON forms of a configuration: what is accepted, what is said about the rest, and the way back."""

from typing import Any

import orjson
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config.parse import from_dict, parse_json, parse_text, to_dict
from naiad.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name: "a"\nmax_batchsize: 3',
            "2:1: ModelConfig has no field 'max_batchsize'; did you mean 'max_batch_size'?",
        ),
        ('input [ { nam: "x" } ]', "1:11: ModelInput has no field 'nam'; did you mean 'name'?"),
        ("some_field: 3", "1:1: ModelConfig has no field 'some_field'"),
        (
            "input { data_type: TYPE_FP17 }",
            "1:20: field 'data_type': DataType has no value 'TYPE_FP17'; did you mean 'TYPE_FP16'?",
        ),
        (
            "input { data_type: FP32 }",
            "1:20: field 'data_type': DataType has no value 'FP32'; did you mean 'TYPE_FP32'?",
        ),
        (
            "input { data_type: TYPE_FLOAT }",
            "1:20: field 'data_type': DataType has no value 'TYPE_FLOAT'; did you mean 'TYPE_FP32'?",
        ),
        (
            "instance_group { kind: gpu }",
            "1:24: field 'kind': Kind has no value 'gpu'; did you mean 'KIND_GPU'?",
        ),
        (
            "instance_group { kind: XYZ }",
            "1:24: field 'kind': Kind has no value 'XYZ'; known are KIND_AUTO, KIND_CPU, KIND_GPU, KIND_MODEL",
        ),
        ("instance_group { kind: 77 }", ": field 'kind': Kind has no value 77"),
        (
            "dynamic_batching {}\nsequence_batching {}",
            "2:1: field 'sequence_batching' cannot stand together with 'dynamic_batching'",
        ),
        ('name: "a" name: "b"', "1:17: field 'name' is given more than once"),
        ('max_batch_size: "x"', "1:17: field 'max_batch_size': Couldn't parse integer: \"x\""),
        ("max_batch_size: 99999999999", "1:17: field 'max_batch_size': Value out of range: 99999999999"),
        ("input { dims: [ 1, x ] }", "1:20: field 'dims': Couldn't parse integer: x"),
        ('input [ { name: "a" ]', "1:21: Expected identifier or number, got ]."),
        ("// a\n", "1:1: Expected identifier or number, got /: comments begin with '#'"),
        ('{"name": "a"}', "1:1: Expected identifier or number, got {: this is protobuf's text format, not JSON"),
    ],
)
def test_a_mistake_in_the_text_is_shown_with_its_place_and_what_was_meant(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_text(text, "/repository/m/config.pbtxt")
    assert caught.value.message.startswith("failed to read text proto from /repository/m/config.pbtxt:")
    assert caught.value.message.endswith(message)


def test_text() -> None:
    proto = parse_text('# comment\nname: "a", input [ { name: "x" dims: [ -1, 2 ] data_type: TYPE_STRING } ]')
    assert proto.name == "a"
    assert list(proto.input[0].dims) == [-1, 2]
    assert proto.input[0].data_type == 13


@pytest.mark.parametrize(
    ("document", "field", "value"),
    [
        ({"max_batch_size": 4}, "max_batch_size", 4),
        ({"maxBatchSize": 4}, "max_batch_size", 4),
        ({"name": None}, "name", ""),
    ],
)
def test_json_fields(document: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(from_dict(document), field) == value


def test_json_takes_numbers_and_strings_for_64_bits_and_any_case_for_enumerations() -> None:
    proto = parse_json(
        '{"input": [{"data_type": "type_fp32", "dims": ["3", 4], "format": "format-nhwc"}],'
        ' "dynamic_batching": {"priority_queue_policy": {"1": {"timeout_action": "delay"}}}}'
    )
    assert proto.input[0].data_type == 11
    assert list(proto.input[0].dims) == [3, 4]
    assert proto.input[0].format == 1
    assert proto.dynamic_batching.priority_queue_policy[1].timeout_action == 1


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ('{"max_batch_size": 4,}', {"max_batch_size": 4}),
        ('{"input": [{"name": "X",},],}', {"input": [{"name": "X"}]}),
        ("{max_batch_size: 4, name : 'm'}", {"max_batch_size": 4, "name": "m"}),
        (r"""{'name': 'it\'s "a\n,] b: '}""", {"name": "it's \"a\n,] b: "}),
        (b"{'name': \"don't: ,}\"}", {"name": "don't: ,}"}),
        ('{"max_batch_size": 4, "max_batch_size": 2}', {"max_batch_size": 2}),
        ('{"max_batch_size": 1e1}', {"max_batch_size": 10}),
        ('{"input": {"name": "X", "dims": 3}}', {"input": [{"name": "X", "dims": [3]}]}),
        ('{"input": null, "dynamic_batching": null}', {}),
        ('{"model_transaction_policy": {"decoupled": "true"}}', {"model_transaction_policy": {"decoupled": True}}),
        ('{"response_cache": {"enable": "false"}}', {"response_cache": {"enable": False}}),
    ],
)
def test_json_is_forgiven_what_triton_forgives(text: str | bytes, same_as: dict[str, Any]) -> None:
    assert parse_json(text) == from_dict(same_as)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_batch_size": 4 "name": "m"}', "the configuration is not JSON"),
        ("{'name': 'm}", "the configuration is not JSON"),
        (b"{'name': '\xff'}", "the configuration is not JSON"),
        ('{"response_cache": {"enable": 1}}', "Failed to parse response_cache field"),
        ("max_batch_size: 2", "the configuration is not JSON"),
        ("", "the configuration is not JSON"),
        ("[]", "the configuration must be a JSON object, got list"),
        ('{"colour": "red"}', "colour: ModelConfig has no field 'colour'"),
        (
            '{"input": [{}, {"data_typ": 1}]}',
            "input[1].data_typ: ModelInput has no field 'data_typ'; did you mean 'data_type'?",
        ),
        (
            '{"parameters": {"a": {"string": "x"}}}',
            "parameters.a.string: ModelParameter has no field 'string'; did you mean 'string_value'?",
        ),
        (
            '{"instance_group": [{"kind": "cpu"}]}',
            "instance_group[0].kind: Kind has no value 'cpu'; did you mean 'KIND_CPU'?",
        ),
        ('{"instance_group": [{"kind": 77}]}', "field 'kind': Kind has no value 77"),
        ('{"max_batch_size": "x"}', "Failed to parse max_batch_size field"),
        ('{"input": [{"dims": [0.5]}]}', "Couldn't parse integer: 0.5"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "should not have multiple"),
    ],
)
def test_a_mistake_in_the_json_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_json(text)
    assert message in caught.value.message


def test_json_shows_defaults_and_numbers_but_nothing_that_was_not_chosen() -> None:
    document = to_dict(parse_text('name: "m" version_policy { latest { } } sequence_batching { direct { } }'))
    assert document["max_batch_size"] == 0
    assert document["platform"] == ""
    assert document["input"] == []
    assert document["parameters"] == {}
    assert document["version_policy"] == {"latest": {"num_versions": 0}}
    assert document["sequence_batching"] == {
        "direct": {"max_queue_delay_microseconds": 0, "minimum_slot_utilization": 0},
        "max_sequence_idle_microseconds": 0,
        "control_input": [],
        "state": [],
        "iterative_sequence": False,
    }
    assert not {"dynamic_batching", "ensemble_scheduling", "optimization", "response_cache"} & document.keys()


def test_json_leaves_those_64_bit_fields_strings_that_triton_leaves() -> None:
    document = to_dict(
        parse_text(
            "sequence_batching { state { dims: 2 initial_state { dims: 2 } } }"
            " instance_group { secondary_devices { device_id: 1 } }"
        )
    )
    state = document["sequence_batching"]["state"][0]
    assert state["dims"] == [2]
    assert state["initial_state"][0]["dims"] == ["2"]
    assert document["instance_group"][0]["secondary_devices"][0]["device_id"] == "1"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("0", 0), ("1.0", 1), ("0.5", 0.5), ("0.1", 0.1), ("16777216", 16777216), ("nan", "NaN"), ("-inf", "-Infinity")],
)
def test_json_floats(text: str, shown: Any) -> None:
    document = to_dict(parse_text(f"sequence_batching {{ direct {{ minimum_slot_utilization: {text} }} }}"))
    value = document["sequence_batching"]["direct"]["minimum_slot_utilization"]
    assert value == shown
    assert type(value) is type(shown)


def test_a_field_younger_than_the_recorded_release_is_shown_only_when_set() -> None:
    assert to_dict(parse_text("ensemble_scheduling {}"))["ensemble_scheduling"] == {"step": []}
    shown = to_dict(parse_text("ensemble_scheduling { max_inflight_requests: 3 }"))["ensemble_scheduling"]
    assert shown["max_inflight_requests"] == 3


_INTEGERS = {
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _messages(field.message_type, depth)
    if field.enum_type is not None:
        return st.sampled_from(sorted(field.enum_type.values_by_name))
    if field.type in _INTEGERS:
        return _INTEGERS[field.type]
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(st.characters(codec="utf-8"), max_size=4)
    width: Any = 32 if field.type == FieldDescriptor.TYPE_FLOAT else 64
    return st.floats(width=width, allow_nan=False).map(lambda value: value + 0.0)  # no -0.0: JSON says 0


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(_values(entry["key"], 0).map(str), _values(entry["value"], depth), max_size=2)
    values = _values(field, depth)
    return st.lists(values, max_size=2) if field.is_repeated else values


@st.composite
def _messages(draw: st.DrawFn, kind: Descriptor, depth: int = 4) -> dict[str, Any]:
    """A configuration in JSON form with few fields, any of them."""
    known = sorted(kind.fields_by_name) if depth else []
    names = draw(st.sets(st.sampled_from(known), max_size=3)) if known else set()
    chosen: dict[str, Any] = {}
    taken: set[str] = set()
    for name in sorted(names):
        field = kind.fields_by_name[name]
        oneof = field.containing_oneof
        if oneof is not None:
            if oneof.name in taken:
                continue
            taken.add(oneof.name)
        chosen[name] = draw(_field(field, depth - 1))
    return chosen


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_messages(Proto.DESCRIPTOR))
def test_every_configuration_survives_both_forms(document: dict[str, Any]) -> None:
    proto = from_dict(document)
    shown = to_dict(proto)
    assert from_dict(shown) == proto
    assert parse_json(orjson.dumps(shown)) == proto
    assert parse_text(text_format.MessageToString(proto)) == proto
    assert to_dict(from_dict(shown)) == shown
