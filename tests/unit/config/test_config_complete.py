"""What a configuration gets that it does not say."""

from typing import Any

import pytest

from naiad.config import complete
from naiad.config.parse import parse_text, to_dict
from naiad.errors import Internal, InvalidArgument


def _defaults(text: str) -> dict[str, Any]:
    proto = parse_text(text)
    complete.defaults(proto)
    return to_dict(proto)


def test_from_files_keeps_what_is_said() -> None:
    proto = parse_text('name: "other"')
    complete.from_files(proto, "folder", {"model.py": False})
    assert (proto.name, proto.backend, proto.default_model_filename) == ("other", "python", "model.py")


def test_the_folder_is_the_name() -> None:
    proto = parse_text("")
    complete.from_files(proto, "folder", {"model.onnx": False})
    assert (proto.name, proto.platform, proto.backend) == ("folder", "onnxruntime_onnx", "onnxruntime")


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", {"latest": {"num_versions": 1}}),
        ("version_policy { }", {}),
        ("version_policy { all { } }", {"all": {}}),
        ("version_policy { latest { num_versions: 3 } }", {"latest": {"num_versions": 3}}),
        ("version_policy { specific { versions: [ 1, 3 ] } }", {"specific": {"versions": [1, 3]}}),
    ],
)
def test_version_policy(text: str, policy: dict[str, Any]) -> None:
    assert _defaults(text)["version_policy"] == policy


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("max_batch_size: 8 dynamic_batching { }", [8]),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] }", [2, 4]),
        ("dynamic_batching { }", []),
    ],
)
def test_preferred_batch_sizes(text: str, sizes: list[int]) -> None:
    assert _defaults(text)["dynamic_batching"]["preferred_batch_size"] == sizes


@pytest.mark.parametrize(
    ("text", "idle", "preferred"),
    [
        ("max_batch_size: 4 sequence_batching { oldest { } }", 1_000_000, [4]),
        (
            "max_batch_size: 4 sequence_batching { max_sequence_idle_microseconds: 5 oldest { preferred_batch_size: 2 } }",
            5,
            [2],
        ),
        ("sequence_batching { oldest { } }", 1_000_000, []),
        ("sequence_batching { }", 1_000_000, None),
    ],
)
def test_sequence_batching(text: str, idle: int, preferred: list[int] | None) -> None:
    batching = _defaults(text)["sequence_batching"]
    assert batching["max_sequence_idle_microseconds"] == idle
    assert batching.get("oldest", {}).get("preferred_batch_size") == preferred


def test_pinned_memory_is_on_unless_it_is_turned_off_and_not_for_ensembles() -> None:
    optimization = _defaults("optimization { input_pinned_memory { enable: false } }")["optimization"]
    assert optimization["input_pinned_memory"] == {"enable": False}
    assert optimization["output_pinned_memory"] == {"enable": True}
    assert "optimization" not in _defaults("ensemble_scheduling { }")


def _groups(text: str, gpus: list[int]) -> list[tuple[Any, ...]]:
    proto = parse_text(f'name: "m" {text}')
    complete.instance_groups(proto, gpus)
    return [(group["name"], group["kind"], group["count"], group["gpus"]) for group in to_dict(proto)["instance_group"]]


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("", [], [("m", "KIND_CPU", 1, [])]),
        ("", [0, 1], [("m", "KIND_GPU", 1, [0, 1])]),
        ('backend: "onnxruntime"', [], [("m", "KIND_CPU", 2, [])]),
        ('backend: "tensorflow"', [], [("m", "KIND_CPU", 2, [])]),
        ('backend: "pytorch"', [], [("m", "KIND_CPU", 1, [])]),
        ('backend: "onnxruntime"', [0], [("m", "KIND_GPU", 1, [0])]),
        (
            'backend: "onnxruntime" instance_group [ { count: 3 }, { kind: KIND_CPU } ]',
            [],
            [("m_0", "KIND_CPU", 3, []), ("m_1", "KIND_CPU", 2, [])],
        ),
        ('instance_group [ { name: "g" kind: KIND_MODEL } ]', [0], [("g", "KIND_MODEL", 1, [])]),
        ("instance_group [ { gpus: [ 1 ] } ]", [0, 1], [("m_0", "KIND_GPU", 1, [1])]),
        # a GPU that is not there sends the group to the CPU
        ("instance_group [ { gpus: [ 0, 5 ] } ]", [0], [("m_0", "KIND_CPU", 1, [0, 5])]),
        ("instance_group [ { count: -1 } ]", [], [("m_0", "KIND_CPU", 1, [])]),
        ("ensemble_scheduling { }", [0], []),
    ],
)
def test_instance_groups(text: str, gpus: list[int], expected: list[tuple[Any, ...]]) -> None:
    assert _groups(text, gpus) == expected


def _merge(text: str, proposal: dict[str, Any]) -> dict[str, Any]:
    proto = parse_text(text)
    complete.merge(proto, proposal)
    return to_dict(proto)


def test_a_proposal_changes_what_it_may_and_nothing_else() -> None:
    merged = _merge(
        'name: "m" backend: "b" input { name: "OLD" }',
        {
            "name": "other",
            "backend": "other",
            "max_batch_size": 4,
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
            "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": ["2"]}],
            "dynamic_batching": {},
            "model_transaction_policy": {"decoupled": True},
            "parameters": {"a": {"string_value": "b"}},
        },
    )
    assert (merged["name"], merged["backend"], merged["max_batch_size"]) == ("m", "b", 4)
    assert [tensor["name"] for tensor in merged["input"]] == ["X"]
    assert merged["output"][0]["dims"] == [2]
    assert merged["dynamic_batching"]["preferred_batch_size"] == []
    assert merged["model_transaction_policy"] == {"decoupled": True}
    assert merged["parameters"] == {}


def test_what_a_proposal_leaves_out_stays() -> None:
    merged = _merge('max_batch_size: 2 input { name: "X" } dynamic_batching { }', {"output": []})
    assert merged["max_batch_size"] == 2
    assert [tensor["name"] for tensor in merged["input"]] == ["X"]
    assert "dynamic_batching" in merged
    assert "model_transaction_policy" not in merged


def test_the_scheduler_chosen_by_the_configuration_keeps_its_settings() -> None:
    merged = _merge(
        "dynamic_batching { max_queue_delay_microseconds: 7 }",
        {"dynamic_batching": {"max_queue_delay_microseconds": 9}},
    )
    assert merged["dynamic_batching"]["max_queue_delay_microseconds"] == 7


def test_a_proposal_cannot_change_the_scheduler() -> None:
    with pytest.raises(Internal, match="Cannot update scheduling choice from 11 to 13 when auto-completing"):
        _merge("dynamic_batching { }", {"sequence_batching": {}})


def test_a_proposal_must_be_a_configuration() -> None:
    with pytest.raises(InvalidArgument, match="has no field 'inputs'; did you mean 'input'"):
        _merge("", {"inputs": []})


@pytest.mark.parametrize(
    ("text", "uses_gpus", "kind"),
    [
        ("", True, "KIND_GPU"),
        ("", False, "KIND_CPU"),
        ("instance_group [ { kind: KIND_AUTO } ]", False, "KIND_CPU"),
        ("instance_group [ { kind: KIND_CPU } ]", True, "KIND_CPU"),
        ("instance_group [ { kind: KIND_GPU } ]", False, "KIND_GPU"),
    ],
)
def test_only_backends_that_use_gpus_get_them_unasked(text: str, uses_gpus: bool, kind: str) -> None:
    proto = parse_text(f'name: "m" backend: "b" {text}')
    complete.instance_groups(proto, [0, 1], uses_gpus=uses_gpus)
    (group,) = to_dict(proto)["instance_group"]
    assert (group["kind"], group.get("gpus", [])) == (kind, [0, 1] if kind == "KIND_GPU" else [])
