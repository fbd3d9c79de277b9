import pytest

from naiad.backends.configured import control_inputs, framework_dims, integer, wrong_dims
from naiad.errors import InvalidArgument


@pytest.mark.parametrize(
    ("tensor", "dims"),
    [
        ({"dims": [2, -1]}, (2, -1)),
        ({"dims": [4], "reshape": {"shape": [2, 2]}}, (2, 2)),
        ({"dims": [1], "reshape": {"shape": []}}, ()),
        ({"dims": [1], "reshape": {}}, ()),
    ],
)
def test_a_reshape_is_above_dims(tensor: dict[str, object], dims: tuple[int, ...]) -> None:
    assert framework_dims(tensor) == dims


@pytest.mark.parametrize(
    ("control", "data_type"),
    [
        ({"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}, "TYPE_UINT64"),
        ({"kind": "CONTROL_SEQUENCE_CORRID"}, "TYPE_INVALID"),
        ({"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}, "TYPE_INT32"),
        ({"kind": "CONTROL_SEQUENCE_END", "fp32_false_true": [0, 1]}, "TYPE_FP32"),
        ({"kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [False, True]}, "TYPE_BOOL"),
    ],
)
def test_data_types_of_control_inputs(control: dict[str, object], data_type: str) -> None:
    config = {"sequence_batching": {"control_input": [{"name": "C", "control": [control]}]}}
    assert control_inputs(config) == [("C", data_type)]


def test_a_model_without_control_inputs() -> None:
    assert control_inputs({"sequence_batching": {}}) == control_inputs({}) == []


@pytest.mark.parametrize(
    ("batching", "end"),
    [
        (False, "specifies 2 dimensions (shape [-1,3])"),
        (
            True,
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor"
            " shape, making complete shape [-1,3])",
        ),
    ],
)
def test_dims_that_do_not_fit(batching: bool, end: str) -> None:
    assert wrong_dims("m", "t", (4,), (-1, 3), batching).message == (
        f"model 'm', tensor 't': the model expects 1 dimensions (shape [4]) but the model configuration {end}"
    )


def test_what_is_no_number() -> None:
    assert integer("-3") == -3
    with pytest.raises(InvalidArgument, match="failed to convert 'x' to integer number"):
        integer("x")
