"""Configurations against signatures of TensorFlow models: Triton's rules and texts as tables (reference R7-12 to R7-16)."""

from typing import Any

import pytest

pytest.importorskip("tensorflow")

from naiad.backends.tensorflow.signature import Signature, TensorInfo, check, complete
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument

Shape = tuple[int, ...] | None
FP32, INT32, BYTES = DataType.FP32, DataType.INT32, DataType.BYTES


def signature(inputs: dict[str, Shape], outputs: dict[str, Shape], binding: bool = True) -> Signature:
    def infos(shapes: dict[str, Shape]) -> dict[str, TensorInfo]:
        return {name: TensorInfo(f"{name}:0", FP32, shape) for name, shape in shapes.items()}

    return Signature(infos(inputs), infos(outputs), binding, frozenset({*inputs, *outputs}))


def tensor(name: str, *dims: int, data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims), **more}


class Lines(list[str]):
    def log(self, level: str, message: str) -> None:
        self.append(message)


def completed(config: dict[str, Any], model: Signature, default: int = 4) -> dict[str, Any] | None:
    return complete("m", config, model, default, Lines().log)


BATCHING = signature({"x": (-1, 3)}, {"y": (-1, 2)})
FIXED = signature({"x": (2, 3)}, {"y": (-1, 2)})

# --- completion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "model", "default", "expected"),
    [
        pytest.param(
            {},
            BATCHING,
            4,
            {"max_batch_size": 4, "dynamic_batching": {}, "input": [tensor("x", 3)], "output": [tensor("y", 2)]},
            id="everything",
        ),
        pytest.param(
            {}, BATCHING, 1, {"max_batch_size": 1, "input": [tensor("x", 3)], "output": [tensor("y", 2)]}, id="batch 1"
        ),
        pytest.param({}, BATCHING, 0, {"input": [tensor("x", -1, 3)], "output": [tensor("y", -1, 2)]}, id="default 0"),
        pytest.param({}, FIXED, 4, {"input": [tensor("x", 2, 3)], "output": [tensor("y", -1, 2)]}, id="no batching"),
        pytest.param(
            {"max_batch_size": 8, "sequence_batching": {}},
            BATCHING,
            0,
            {"max_batch_size": 8, "sequence_batching": {}, "input": [tensor("x", 3)], "output": [tensor("y", 2)]},
            id="scheduler chosen",
        ),
        pytest.param(
            {"input": [{"name": "x"}], "output": [{"name": "y"}]},
            BATCHING,
            4,
            {"max_batch_size": 4, "dynamic_batching": {}, "input": [tensor("x", 3)], "output": [tensor("y", 2)]},
            id="names only",
        ),
        pytest.param(
            {"input": [tensor("x", -1, 3)]},
            BATCHING,
            4,
            {"input": [tensor("x", -1, 3)], "output": [tensor("y", -1, 2)]},
            id="dims with the first extent say no batching",
        ),
        pytest.param(
            {"input": [tensor("x", 3)]},
            BATCHING,
            4,
            {"max_batch_size": 4, "dynamic_batching": {}, "input": [tensor("x", 3)], "output": [tensor("y", 2)]},
            id="dims without it say batching",
        ),
        pytest.param(
            {},
            signature({"x": (-1,)}, {"y": (-1,)}),
            4,
            {
                "max_batch_size": 4,
                "dynamic_batching": {},
                "input": [tensor("x", 1, reshape={"shape": []})],
                "output": [tensor("y", 1, reshape={"shape": []})],
            },
            id="nothing behind the batch",
        ),
        pytest.param(
            {"output": [{"name": "b"}]},
            signature({"x": (2,)}, {"a": (1,), "b": (2,)}),
            4,
            {"input": [tensor("x", 2)], "output": [tensor("b", 2)]},
            id="outputs that are not listed are left out",
        ),
        pytest.param(
            {
                "max_batch_size": 1,
                "batch_input": [{"target_name": ["n"]}],
                "sequence_batching": {
                    "control_input": [{"name": "s", "control": [{"kind": "CONTROL_SEQUENCE_START"}]}]
                },
            },
            signature({"x": (-1, 3), "n": (-1, 1), "s": (-1, 1)}, {}),
            4,
            {"input": [tensor("x", 3)], "output": []},
            id="inputs that the server makes are no inputs",
        ),
        pytest.param(
            {"max_batch_size": 1, "sequence_batching": {"state": [{"input_name": "s", "output_name": "t"}]}},
            signature({"x": (-1, 3), "s": (-1, 1)}, {"y": (-1, 2), "t": (-1, 1)}),
            4,
            {"input": [tensor("x", 3)], "output": [tensor("y", 2)]},
            id="nor is state",
        ),
        pytest.param(
            {"input": [tensor("x", 2)], "output": [tensor("y", 5)]},
            signature({"x": None}, {"y": None}),
            4,
            {"input": [tensor("x", 2)], "output": [tensor("y", 5)]},
            id="unknown rank with dims",
        ),
    ],
)
def test_completion(config: dict[str, Any], model: Signature, default: int, expected: dict[str, Any]) -> None:
    found = completed(config, model, default)
    assert found is not None
    assert found == {**config, **expected}


@pytest.mark.parametrize(
    ("config", "model", "kind", "text"),
    [
        (
            {"max_batch_size": 7},
            FIXED,
            Internal,
            "unable to autofill for 'm', configuration specified max-batch 7 but model signature does not support batching",
        ),
        (
            {"input": [tensor("x", 3)], "output": [tensor("y", -1, 2)]},
            BATCHING,
            Internal,
            "unable to autofill for 'm', model tensor configurations are contradicting each other in terms of whether"
            " batching is supported",
        ),
        (
            {},
            signature({"x": None}, {"y": (-1, 1)}),
            InvalidArgument,
            "Unable to autofill for 'm': the rank of model tensor 'x' is 0 and dimensions are not defined",
        ),
        (
            {},
            signature({"x": (2,)}, {"y": ()}),
            InvalidArgument,
            "Unable to autofill for 'm': the rank of model tensor 'y' is 0 which is not supported",
        ),
    ],
)
def test_completion_that_fails(config: dict[str, Any], model: Signature, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as failed:
        completed(config, model)
    assert str(failed.value) == text


def test_completion_leaves_the_configuration_alone() -> None:
    config: dict[str, Any] = {"input": [{"name": "x"}]}
    completed(config, BATCHING)
    assert config == {"input": [{"name": "x"}]}


def test_what_of_a_graph_cannot_be_completed_is_said() -> None:
    lines = Lines()
    infos = {"x": TensorInfo("x:0", FP32, (-1, 3)), "rate": TensorInfo("rate:0", FP32, ())}
    outputs = {"y": TensorInfo("y:0", FP32, (-1, 2)), "z": TensorInfo("z:0", BYTES, None)}
    model = Signature(infos, outputs, False, frozenset({"x", "y", "z"}))
    found = complete("m", {}, model, 4, lines.log)
    assert found is not None
    assert found["input"] == [tensor("x", 3)]
    assert found["output"] == [tensor("y", 2)]
    assert any("'rate'" in line and "not completed" in line for line in lines)
    assert any("'z'" in line and "rank" in line for line in lines)


def test_a_graph_with_a_number_is_completed() -> None:
    found = completed({}, signature({"x": ()}, {"y": (2,)}, binding=False))
    assert found is not None
    assert found["input"] == [tensor("x", 1)]


def test_a_complete_configuration_of_a_graph_stays() -> None:
    config = {"max_batch_size": 0, "input": [tensor("x", 3)], "output": [tensor("y", 2)]}
    assert completed(config, signature({"x": (-1, 3)}, {"y": (-1, 2)}, binding=False)) is None


def test_a_batch_size_that_a_graph_has_fixed_is_the_user_s_business() -> None:
    found = completed({"max_batch_size": 1}, signature({"x": (1, 3)}, {"y": (1, 2)}, binding=False))
    assert found == {"max_batch_size": 1, "input": [tensor("x", 3)], "output": [tensor("y", 2)]}


# --- checks -------------------------------------------------------------------------------------------------------


def config(inputs: list[Any], outputs: list[Any] | None = None, max_batch_size: int = 8, **more: Any) -> dict[str, Any]:
    default = [tensor("y", 2)] if outputs is None else outputs
    return {"max_batch_size": max_batch_size, "input": inputs, "output": default, **more}


def controls(name: str = "start", **control: Any) -> dict[str, Any]:
    return {"sequence_batching": {"control_input": [{"name": name, "control": [control]}]}}


X = tensor("x", 3)
STATE = {
    "sequence_batching": {"state": [{"input_name": "s", "output_name": "t", "data_type": "TYPE_FP32", "dims": [1]}]}
}
STATEFUL = signature({"x": (-1, 3), "s": (-1, 1)}, {"y": (-1, 2), "t": (-1, 1)})
START = signature({"x": (-1, 3), "start": (-1, 1)}, {"y": (-1, 2)})
RAGGED = signature({"x": (-1,)}, {"y": (-1, 2)})


@pytest.mark.parametrize(
    ("made", "model"),
    [
        (config([X]), BATCHING),
        (config([tensor("x", -1, 3)], [tensor("y", -1, 2)], 0), BATCHING),
        (config([tensor("x", 5, 3)], [tensor("y", -1, 2)], 0), BATCHING),
        (config([tensor("x", 3, reshape={"shape": [3]})]), BATCHING),
        (config([tensor("x", 1)], max_batch_size=0), signature({"x": ()}, {"y": (2,)})),
        (config([tensor("x", 9, 9)]), signature({"x": None}, {"y": None})),
        (config([X], **controls(kind="CONTROL_SEQUENCE_START", fp32_false_true=[0, 1])), START),
        (config([X], batch_input=[{"target_name": ["start"]}]), START),
        (config([tensor("x", -1, allow_ragged_batch=True)]), RAGGED),
        (config([X], **STATE), STATEFUL),
        (config([X], [tensor("y", 7)], batch_output=[{"target_name": ["y"]}]), BATCHING),
        (config([X]), signature({"x": (1, 3)}, {"y": (-1, -1)}, binding=False)),
        (config([X]), signature({"x": (-1, 3), "more": (2,)}, {"y": None}, binding=False)),
    ],
)
def test_configurations_that_fit(made: dict[str, Any], model: Signature) -> None:
    check("m", made, model)


@pytest.mark.parametrize(
    ("made", "model", "text"),
    [
        (
            config([tensor("x", 4)]),
            BATCHING,
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,3]) but the model configuration specifies 2"
            " dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape,"
            " making complete shape [-1,4])",
        ),
        (
            config([tensor("x", 3, 3, 3)], max_batch_size=0),
            BATCHING,
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,3]) but the model configuration specifies 3"
            " dimensions (shape [3,3,3])",
        ),
        (
            config([tensor("x", -1, 3)], [tensor("y", 2, 2)], 0),
            BATCHING,
            "model 'm', tensor 'y': the model expects 2 dimensions (shape [-1,2]) but the model configuration specifies 2"
            " dimensions (shape [2,2])",
        ),
        (
            config([tensor("x", 3)]),
            FIXED,
            "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 dimension and the"
            " first dimension must be -1; but shape expected by the model is [2,3]",
        ),
        (
            config([tensor("x", 3, data_type="TYPE_INT32")]),
            BATCHING,
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32",
        ),
        (
            config([X], [tensor("y", 2, data_type="TYPE_STRING")]),
            BATCHING,
            "unable to load model 'm', configuration expects datatype TYPE_STRING for output 'y', model provides TYPE_FP32",
        ),
        (
            config([tensor("x", 3, data_type="TYPE_BF16")]),
            BATCHING,
            "unsupported datatype 'TYPE_BF16' for tensor 'x' for model 'm'",
        ),
        (
            config([X]),
            START,
            "unable to load model 'm', configuration expects 1 inputs, model provides 2",
        ),
        (
            config([X, tensor("z", 3)]),
            signature({"x": (-1, 3)}, {"y": (-1, 2)}, binding=False),
            "unable to load model 'm', configuration expects 2 inputs, model provides at most 1",
        ),
        (config([tensor("z", 3)]), START, "unexpected inference input 'z', allowed inputs are: start, x"),
        (config([X], [tensor("z", 3)]), BATCHING, "unexpected inference output 'z', allowed outputs are: y"),
        (
            config([tensor("x", -1, allow_ragged_batch=True)]),
            BATCHING,
            "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged input 'x',"
            " model provides [-1,3]",
        ),
        (
            config([X], **controls("stop")),
            START,
            "configuration specified sequence control 'stop', but model does not provide that input",
        ),
        (
            config([X], **controls(kind="CONTROL_SEQUENCE_START", int32_false_true=[0, 1])),
            START,
            "unable to load model 'm', sequence control 'start': the model expects TYPE_FP32 but the model configuration"
            " specifies data-type TYPE_INT32",
        ),
        (
            config([tensor("start", 1)], **controls("x", fp32_false_true=[0, 1])),
            START,
            "unable to load model 'm', sequence control 'x': model 'm', tensor 'x': the model expects 2 dimensions (shape"
            " [-1,3]) but the model configuration specifies 2 dimensions (an initial batch dimension because"
            " max_batch_size > 0 followed by the explicit tensor shape, making complete shape [-1,1])",
        ),
        (
            config([X], **STATE),
            signature({"x": (-1, 3), "s": (-1, 1)}, {"y": (-1, 2)}),
            "unexpected inference output 't', allowed outputs are: y",
        ),
        (
            config([tensor("x", 5)]),
            signature({"x": (-1, 3)}, {"y": None}, binding=False),
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,3]) but the model configuration specifies 2"
            " dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape,"
            " making complete shape [-1,5])",
        ),
    ],
)
def test_configurations_that_do_not_fit(made: dict[str, Any], model: Signature, text: str) -> None:
    with pytest.raises((InvalidArgument, Internal)) as refused:
        check("m", made, model)
    assert str(refused.value) == text
