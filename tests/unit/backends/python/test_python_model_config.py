import json
from typing import Any

import pytest

from naiad.backends.python.pb_utils import ModelConfig


def config(**more: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 4, "input": [], "output": [], **more}))


X: dict[str, Any] = {"name": "X", "data_type": "TYPE_FP32", "dims": [2]}
WHERE = "in auto-complete-config function for model 'm'"


def test_an_empty_configuration_can_be_completed() -> None:
    completed = ModelConfig("{}")
    completed.set_max_batch_size(8)
    completed.set_dynamic_batching()
    completed.add_input({**X, "optional": True})
    completed.add_output(X)
    completed.set_model_transaction_policy({"decoupled": True})
    assert completed.as_dict() == {
        "name": "",
        "max_batch_size": 8,
        "dynamic_batching": {},
        "input": [{**X, "optional": True}],
        "output": [X],
        "model_transaction_policy": {"decoupled": True},
    }


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    "configured",
    [
        {"name": "X", "data_type": "TYPE_INVALID", "dims": []},
        {"name": "X", "data_type": "TYPE_FP32", "dims": []},
        {"name": "X", "data_type": "TYPE_INVALID", "dims": [2]},
        X,
    ],
)
def test_a_tensor_that_is_configured_in_part_is_filled_in(kind: str, configured: dict[str, Any]) -> None:
    completed = config(**{kind: [configured]})
    getattr(completed, f"add_{kind}")(X)
    assert completed.as_dict()[kind] == [X]


def test_dynamic_batching_as_configured_stays() -> None:
    completed = config(dynamic_batching={"max_queue_delay_microseconds": 5})
    completed.set_dynamic_batching()
    assert completed.as_dict()["dynamic_batching"] == {"max_queue_delay_microseconds": 5}


@pytest.mark.parametrize(
    ("configured", "change", "text"),
    [
        (
            {},
            lambda c: c.set_max_batch_size(2),
            "configuration specified max_batch_size 4, but in auto-complete-config function for model 'm' specified "
            "max_batch_size 2",
        ),
        (
            {"sequence_batching": {}},
            lambda c: c.set_dynamic_batching(),
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for "
            "model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
        (
            {},
            lambda c: c.add_input({**X, "huh": 1}),
            f"input 'X' {WHERE} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
        ),
        (
            {},
            lambda c: c.add_output({**X, "optional": True}),
            f"output 'X' {WHERE} contains property other than 'name', 'data_type' and 'dims'.",
        ),
        ({}, lambda c: c.add_input({"dims": [1]}), f"input {WHERE} is missing 'name' property."),
        ({}, lambda c: c.add_input({"name": "X", "dims": [1]}), f"input 'X' {WHERE} is missing 'data_type' property."),
        (
            {},
            lambda c: c.add_output({"name": "X", "data_type": "TYPE_BOOL"}),
            f"output 'X' {WHERE} is missing 'dims' property.",
        ),
        (
            {"input": [{**X, "data_type": "TYPE_BOOL"}]},
            lambda c: c.add_input(X),
            "unable to load model 'm', configuration expects datatype TYPE_BOOL for input 'X', model provides "
            "TYPE_FP32",
        ),
        (
            {"output": [{**X, "dims": [3]}]},
            lambda c: c.add_output(X),
            "model 'm', tensor 'X': the model expects dims [2] but the model configuration specifies dims [3]",
        ),
        (
            {"input": [{**X, "optional": False}]},
            lambda c: c.add_input({**X, "optional": True}),
            "model 'm', tensor 'X': the model expects optional True but the model configuration specifies optional "
            "False",
        ),
        (
            {},
            lambda c: c.set_model_transaction_policy({"huh": 1}),
            f"model transaction property {WHERE} contains property other than 'decoupled'.",
        ),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set to "
            "'False'.",
        ),
    ],
)
def test_what_the_file_says_stays(configured: dict[str, Any], change: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared whole
        change(config(**configured))
    assert str(error.value) == text
