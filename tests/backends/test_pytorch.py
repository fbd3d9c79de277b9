"""What is special about the backend pytorch; what it shares with the others is in test_backend_contract.py."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from in_process import FakeServices, Loaded, backend_class, context

from naiad.backends.api import ConfigDict, InstanceContext, ModelContext
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable

torch = pytest.importorskip("torch")

from makers.pytorch import save_exported, save_module, save_script  # noqa: E402

from naiad.backends.pytorch import settings  # noqa: E402
from naiad.backends.pytorch.backend import PyTorchBackend  # noqa: E402
from naiad.backends.pytorch.tensors import Device  # noqa: E402

CPU = InstanceContext("m_0_0", "KIND_CPU")
X = np.arange(6, dtype=np.float32).reshape(2, 3)

IDENTITY = """
    class Model(torch.nn.Module):
        def forward(self, x: Tensor):
            return x
"""


def tensors(**types: str) -> list[dict[str, Any]]:
    """x="FP32 3 -1": an input or output of that type and those dims."""
    made = []
    for name, text in types.items():
        datatype, *dims = text.split()
        made.append({"name": name, "data_type": f"TYPE_{datatype}", "dims": [int(dim) for dim in dims]})
    return made


def config(inputs: Any, outputs: Any, batch: int = 0, parameters: dict[str, str] | None = None, **more: Any) -> Any:
    return {
        "backend": "pytorch",
        "max_batch_size": batch,
        "input": inputs if isinstance(inputs, list) else tensors(**inputs),
        "output": outputs if isinstance(outputs, list) else tensors(**outputs),
        "parameters": {key: {"string_value": value} for key, value in (parameters or {}).items()},
        **more,
    }


def script(folder: Path, source: str, configured: ConfigDict) -> ModelContext:
    made = context(folder / "m", configured, "model.pt")
    save_script(made.path, source)
    return made


def module(folder: Path, source: str, configured: ConfigDict) -> ModelContext:
    made = context(folder / "m", configured, "model.py")
    save_module(made.path, source)
    return made


def exported(folder: Path, model: Any, args: tuple[Any, ...], configured: ConfigDict, **how: Any) -> ModelContext:
    made = context(folder / "m", configured, "model.pt2")
    save_exported(made.path, model, args, **how)
    return made


def run(model: ModelContext, **inputs: Any) -> dict[str, Any]:
    names = [tensor["name"] for tensor in model.config["output"]]
    with Loaded(model) as loaded:
        return {name: array.tolist() for name, array in loaded.run(inputs, names).items()}


def logged(model: ModelContext) -> list[str]:
    assert isinstance(model.services, FakeServices)
    return model.services.lines


def refused(model: ModelContext) -> str:
    with pytest.raises(NaiadError) as raised:
        Loaded(model)
    return str(raised.value)


# --- which input is which argument ------------------------------------------------------------------------------------

LETTERS = """
    class Model(torch.nn.Module):
        def forward(self, a, b, c: {kind} = None):
            return a * 100 + b * 10 + (torch.zeros(1) if c is None else c)
"""
SCRIPT_LETTERS = LETTERS.format(kind="Optional[Tensor]")
MODULE_LETTERS = LETTERS.format(kind="Tensor | None")


@pytest.mark.parametrize("write", [script, module])
@pytest.mark.parametrize(
    ("inputs", "expected", "warned"),
    [
        ({"a": 1, "b": 2, "c": 3}, 123, False),
        ({"c": 3, "b": 2, "a": 1}, 123, False),
        ({"b": 2, "a": 1}, 120, False),
        ({"X__1": 2, "X__0": 1, "Y__2": 3}, 123, False),
        ({"X__1": 2, "X__0": 1}, 120, False),
        ({"one": 1, "two": 2, "three": 3}, 123, True),
        ({"b": 1, "X__0": 2}, 120, True),  # conventions mix: strict order
        ({"c": 1, "b": 2, "z": 3}, 123, True),
    ],
)
def test_input_names(write: Any, inputs: dict[str, int], expected: int, warned: bool, tmp_path: Path) -> None:
    source = SCRIPT_LETTERS if write is script else MODULE_LETTERS
    model = write(tmp_path, source, config(dict.fromkeys(inputs, "FP32 1"), {"out": "FP32 1"}))
    arrays = {name: np.array([value], np.float32) for name, value in inputs.items()}
    assert run(model, **arrays) == {"out": [expected]}
    assert any("Falling back to enforcing strict ordering from model configuration" in it for it in logged(model)) == (
        warned
    )


@pytest.mark.parametrize("write", [script, module])
def test_an_optional_input_may_be_missing(write: Any, tmp_path: Path) -> None:
    inputs = tensors(a="FP32 1", b="FP32 1", c="FP32 1")
    inputs[2]["optional"] = True
    source = SCRIPT_LETTERS if write is script else MODULE_LETTERS
    one = np.array([1], np.float32)
    assert run(write(tmp_path, source, config(inputs, {"out": "FP32 1"})), a=one, b=one) == {"out": [110]}


def test_an_argument_behind_one_that_is_missing_is_named(tmp_path: Path) -> None:
    inputs = tensors(a="FP32 1", b="FP32 1", c="FP32 1")
    inputs[1]["optional"] = True
    source = """
        class Model(torch.nn.Module):
            def forward(self, a, b: Optional[Tensor] = None, c: Optional[Tensor] = None):
                return a if c is None else c * 2
    """
    three = np.array([3], np.float32)
    assert run(script(tmp_path, source, config(inputs, {"out": "FP32 1"})), a=three * 3, c=three) == {"out": [6]}


@pytest.mark.parametrize(
    ("source", "kind"),
    [("Dict[str, Tensor]", script), ("dict[str, Tensor]", module), ("dict", module)],
)
def test_a_dictionary_of_inputs(source: str, kind: Any, tmp_path: Path) -> None:
    text = f"""
        class Model(torch.nn.Module):
            def forward(self, batch: {source}):
                return batch["a"] - batch["b__0"]
    """
    model = kind(tmp_path, text, config({"b__0": "FP32 1", "a": "FP32 1"}, {"out": "FP32 1"}))
    assert run(model, a=np.array([5], np.float32), b__0=np.array([3], np.float32)) == {"out": [2]}


def test_keyword_and_open_ended_arguments(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, *tensors, scale=1, **named):
                return {"sum": sum(tensors, torch.zeros(1)) * scale, **named}
    """
    one = np.array([1], np.float32)
    model = module(tmp_path, source, config({"X__0": "FP32 1", "X__1": "FP32 1"}, {"sum": "FP32 1"}))
    assert run(model, X__0=one, X__1=one * 5) == {"sum": [6]}
    source = """
        class Model(torch.nn.Module):
            def forward(self, *, scale: int, **named):
                return {name: value * scale for name, value in named.items()}
    """
    model = module(tmp_path, source, config({"scale": "INT32 1", "a": "FP32 1"}, {"a": "FP32 1"}))
    assert run(model, scale=np.array([7], np.int32), a=one) == {"a": [7]}


@pytest.mark.parametrize(
    ("arguments", "inputs", "text"),
    [
        ("a, b", {"a": "FP32 1"}, "unable to load model 'm', configuration expects 1 inputs, model provides 2"),
        ("a", {"a": "FP32 1", "b": "FP32 1"}, "configuration expects 2 inputs, model provides 1"),
        ("a", {}, "unable to load model 'm', configuration expects 0 inputs, model provides 1: forward() takes 'a'"),
        (
            "a: bool = True",
            {},
            "model configuration must contain at least one input, none were specified. forward() takes 'a'",
        ),
        (
            "a: Dict[str, Tensor], b: Dict[str, Tensor]",
            {"a": "FP32 1", "b": "FP32 1"},
            "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is supported.",
        ),
        (
            "a: List[Tensor]",
            {"a": "FP32 1"},
            "An input of type 'List[Tensor]' was detected in the model. Only a single input of type Dict(str, Tensor) or"
            " input(s) of type Tensor are supported.",
        ),
        ("a: List[str]", {"a": "FP32 1"}, "configuration expects datatype TYPE_FP32 for input 'a'"),
        (
            "a: List[str]",
            {"a": "STRING 2 2"},
            "Triton only supports 1 dimensional List of String as input for 'a' for model 'm'",
        ),
        ("a: float", {"a": "FP32 2"}, "the argument 'a' of forward() is a single number"),
        ("a, b", {"X__0": "FP32 1", "X__2": "FP32 1"}, "an input has the index 2, and forward() takes 'a', 'b'"),
        ("a, b", {"X__0": "FP32 1", "Y__0": "FP32 1"}, "the same index"),
    ],
)
def test_configurations_that_do_not_fit(arguments: str, inputs: dict[str, str], text: str, tmp_path: Path) -> None:
    source = f"""
        class Model(torch.nn.Module):
            def forward(self, {arguments}):
                return torch.zeros(1)
    """
    assert text in refused(script(tmp_path, source, config(inputs, {"out": "FP32 1"})))


@pytest.mark.parametrize(
    ("annotation", "fits"),
    [
        ("Tensor", True),
        ("Tensor | None", True),
        ("Tensor | float", True),
        ("typing.Annotated[Tensor, 'batch 1']", True),
        ("'NotImported'", True),
        ("list[Tensor]", False),
        ("tuple[Tensor, Tensor]", False),
        ("dict[int, Tensor]", False),
        ("str", False),
    ],
)
def test_annotations_of_modules(annotation: str, fits: bool, tmp_path: Path) -> None:
    source = f"""
        import typing

        class Model(torch.nn.Module):
            def forward(self, x: {annotation}):
                return x
    """
    model = module(tmp_path, source, config({"x": "FP32 3"}, {"o": "FP32 3"}, 4))
    if fits:
        assert run(model, x=X) == {"o": X.tolist()}
    else:
        assert "was detected in the model. Only a single input of type Dict(str, Tensor)" in refused(model)


def test_no_output(tmp_path: Path) -> None:
    model = script(tmp_path, IDENTITY, config({"x": "FP32 1"}, {}))
    assert refused(model) == "model configuration must contain at least one output, none were specified."


def test_sequence_controls_and_states(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, x, start, state):
                state = torch.where(start > 0, torch.zeros_like(state), state) + x
                return state * 10, state
    """
    sequence = {
        "control_input": [
            {"name": "START__1", "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}]}
        ],
        "state": [
            {"input_name": "IN__2", "output_name": "OUT__1", "data_type": "TYPE_FP32", "dims": [1]},
        ],
    }
    configured = config({"X__0": "FP32 1"}, {"OUT__0": "FP32 1"}, batch=2, sequence_batching=sequence)
    arrays = {
        "X__0": np.ones((1, 1), np.float32),
        "START__1": np.zeros((1, 1), np.float32),
        "IN__2": np.full((1, 1), 4, np.float32),
    }
    with Loaded(script(tmp_path, source, configured)) as loaded:
        results = loaded.run(arrays, ["OUT__0", "OUT__1"])
    assert {name: array.tolist() for name, array in results.items()} == {"OUT__0": [[50]], "OUT__1": [[5]]}
    sequence["state"][0]["input_name"] = "state_in"
    assert "using sequence batching with state but not all inputs and outputs follow the <name>__<index>" in refused(
        script(tmp_path, source, configured)
    )
    sequence["state"][0]["input_name"] = "IN__2"
    sequence["control_input"][0]["name"] = "START"
    assert "input 'START' does not follow <name>__<index> naming convention." in refused(
        script(tmp_path, source, configured)
    )


# --- what comes out ----------------------------------------------------------------------------------------------------


def test_dictionaries_of_torchscript(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Dict[str, Tensor]:
                return {"double": x * 2, "sum": x.sum(1, keepdim=True)}
    """
    configured = config({"x": "FP32 3"}, {"sum": "FP32 1", "double": "FP32 3"}, batch=4)
    assert run(script(tmp_path, source, configured), x=X) == {"sum": [[3], [12]], "double": (X * 2).tolist()}


def test_texts_and_numbers(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, words: List[str], times: int) -> Tuple[List[str], int, float, bool]:
                return [word + word for word in words], len(words), 0.5, times > 1
    """
    configured = config(
        {"words": "STRING -1", "times": "INT64 1"},
        {"OUT__0": "STRING -1", "OUT__1": "INT32 1", "OUT__2": "FP32 1", "OUT__3": "BOOL 1"},
    )
    words = np.array([b"a", "\u00f6".encode()], np.object_)
    assert run(script(tmp_path, source, configured), words=words, times=np.array([2])) == {
        "OUT__0": [b"aa", "\u00f6\u00f6".encode()],
        "OUT__1": [2],
        "OUT__2": [0.5],
        "OUT__3": [True],
    }


LONG_WORDS = """
    class Model(torch.nn.Module):
        def forward(self, words: List[str]) -> Tuple[List[str], int]:
            long: List[str] = []
            for word in words:
                if len(word) > 3:
                    long.append(word)
            return long, len(words)
"""


@pytest.mark.parametrize(
    ("outputs", "empty"),
    [
        ({"OUT__0": "STRING -1", "OUT__1": "INT64 1"}, {"OUT__0": [], "OUT__1": [1]}),
        ({"words": "STRING -1", "count": "INT64 1"}, {"words": [], "count": [1]}),
        ({"OUT__1": "INT64 1"}, {"OUT__1": [1]}),
    ],
)
def test_an_empty_list_of_texts_is_an_output(outputs: dict[str, str], empty: dict[str, Any], tmp_path: Path) -> None:
    model = script(tmp_path, LONG_WORDS, config({"words": "STRING -1"}, outputs))
    full = {name: [b"long"] if value == [] else value for name, value in empty.items()}
    assert run(model, words=np.array([b"long"], np.object_)) == full
    assert run(model, words=np.array([b"abc"], np.object_)) == empty


def test_outputs_behind_an_empty_list_are_completed_in_their_place(tmp_path: Path) -> None:
    model = script(tmp_path, LONG_WORDS, config({"words": "STRING 1"}, {}))
    assert completed(model)[1] == {"OUTPUT__1": "INT64 1"}


KEEPING = """
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.zeros(1)

        def forward(self, x: Tensor):
            last = self.last
            self.last = x
            return last
"""


@pytest.mark.parametrize(("make", "may"), [(script, True), (module, True), (exported, False)])
def test_code_of_users_may_keep_inputs(make: Any, may: bool, tmp_path: Path) -> None:
    configured = config({"input" if make is exported else "x": "FP32 3"}, {"out": "FP32 3"})
    source = torch.nn.Identity() if make is exported else KEEPING
    more = ((torch.zeros(3),),) if make is exported else ()
    backend = PyTorchBackend(make(tmp_path, source, *more, configured), CPU)
    assert backend.keeps_inputs is may


def test_models_in_one_process_have_their_own_files(tmp_path: Path) -> None:
    source = """
        from parts import NUMBER

        class Model(torch.nn.Module):
            def forward(self, x):
                return x * NUMBER
    """
    configured = config({"x": "FP32 3"}, {"out": "FP32 3"})
    models = [module(tmp_path / str(number), source, configured) for number in (2, 3)]

    def load(number: int, model: ModelContext) -> PyTorchBackend:
        (model.version_directory / "parts.py").write_text(f"NUMBER = {number}")
        return PyTorchBackend(model, CPU)

    # The second one is loaded before the first computes, and then the first anew, with another file.
    one, other = load(2, models[0]), load(3, models[1])
    again = load(4, models[0])
    factors = [backend.run({"x": X[0]}, ["out"])["out"][1].item() for backend in (one, other, again)]
    assert factors == [2, 3, 4]


def test_an_output_that_is_empty_for_zeros_is_completed_as_one_of_any_length(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, x: Tensor):
                return x[x > 0]
    """
    assert completed(script(tmp_path, source, config({"x": "FP32 3"}, {})))[1] == {"OUTPUT__0": "FP32 -1"}


def test_lists_of_different_lengths_are_no_tensor(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> List[List[str]]:
                return [["a"], ["b", "c"]]
    """
    model = script(tmp_path, source, config({"x": "FP32 3"}, {"out": "STRING -1 -1"}))
    with pytest.raises(InvalidArgument, match="output 'out' of model 'm' has lists of different lengths"):
        run(model, x=X[0])


def test_a_batch_of_single_strings_is_a_list(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, x: List[str]) -> List[str]:
                return [word + "!" for word in x]
    """
    configured = config({"x": "STRING 1"}, {"out": "STRING 1"}, batch=4)
    assert run(script(tmp_path, source, configured), x=np.array([[b"a"], [b"b"]], np.object_)) == {
        "out": [[b"a!"], [b"b!"]]
    }


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    bits = np.arange(256, dtype=np.uint16).reshape(1, 256) * 257
    x = bits.view(ml_dtypes.bfloat16)
    model = script(tmp_path, IDENTITY, config({"x": "BF16 256"}, {"out": "BF16 256"}, batch=1))
    with Loaded(model) as loaded:
        result = loaded.run({"x": x}, ["out"])["out"]
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.view(np.uint16), bits)


def test_inputs_and_contiguous_outputs_are_not_copied(tmp_path: Path) -> None:
    x = X.copy()
    with Loaded(script(tmp_path, IDENTITY, config({"x": "FP32 3"}, {"out": "FP32 3"}, batch=2))) as loaded:
        assert np.shares_memory(loaded.run({"x": x}, ["out"])["out"], x)


def test_outputs_are_in_c_order(tmp_path: Path) -> None:
    source = IDENTITY.replace("return x", "return x.transpose(1, 2)")
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    with Loaded(script(tmp_path, source, config({"x": "FP32 2 3"}, {"out": "FP32 3 2"}, batch=2))) as loaded:
        result = loaded.run({"x": x}, ["out"])["out"]
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(result, x.transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("body", "output", "batch", "kind", "text"),
    [
        (
            "x.long()",
            "FP32 3",
            1,
            InvalidArgument,
            "configuration expects datatype TYPE_FP32 for output 'out', model provides TYPE_INT64",
        ),
        ("x.to(torch.complex64)", "FP32 3", 1, InvalidArgument, "'out', model provides torch.complex64"),
        ("['a']", "FP32 3", 1, InvalidArgument, "TYPE_FP32 for output 'out', model provides TYPE_BYTES"),
        ("1.5", "INT32 1", 0, InvalidArgument, "TYPE_INT32 for output 'out', model provides TYPE_FP64"),
        ("300", "UINT8 1", 0, InvalidArgument, "output 'out' is 300"),
        ("x.sum()", "FP32 1", 1, InvalidArgument, "output 'out' is a scalar which is not supported."),
        ("None", "FP32 1", 0, Internal, "output 'out' of model 'm' must be of type Tensor, List[str] or a number"),
        ("{'logits': x}", "FP32 3", 1, Internal, "{'logits': Tensor(float32[2, 3])}. Outputs can be named 'logits'"),
        ("x @ x", "FP32 3", 1, Internal, "PyTorch execute failure: mat1 and mat2"),
        ("x.nothing", "FP32 3", 1, Internal, "PyTorch execute failure: AttributeError: 'Tensor' object has no"),
    ],
)
def test_what_cannot_be_answered(
    body: str, output: str, batch: int, kind: type[Exception], text: str, tmp_path: Path
) -> None:
    source = f"""
        class Model(torch.nn.Module):
            def forward(self, x):
                return {body}
    """
    dims = "FP32 3" if batch else "FP32 2 3"
    with (
        Loaded(module(tmp_path, source, config({"x": dims}, {"out": output}, batch * 4))) as loaded,
        pytest.raises(kind) as raised,
    ):
        loaded.run({"x": X}, ["out"])
    assert text in str(raised.value)


def test_the_structure_may_change_from_run_to_run(tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def forward(self, x):
                return {"rest": x, "y": x * 2} if x.sum() > 3 else {"y": x * 2}
    """
    with Loaded(module(tmp_path, source, config({"x": "FP32 3"}, {"y": "FP32 3", "rest": "FP32 3"}, 4))) as loaded:
        for x in (X, X[:1], X):
            np.testing.assert_array_equal(loaded.run({"x": x}, ["y"])["y"], x * 2)
        with pytest.raises(Internal, match=r"output 'rest' .*\{'y': Tensor"):
            loaded.run({"x": X[:1]}, ["y", "rest"])
        assert set(loaded.run({"x": X}, ["y", "rest"])) == {"y", "rest"}


# --- files ----------------------------------------------------------------------------------------------------------------


class Nested(torch.nn.Module):
    def forward(self, x: Any, options: Any, *, scale: Any) -> Any:
        return {"sum": x + options["bias"], "rest": (x * scale, {"deep": options["other"][0]})}


def nested(folder: Path, inputs: Any, outputs: Any) -> ModelContext:
    one, two, three, four = (torch.full((2, 3), float(value)) for value in (1, 2, 3, 4))
    batch = {0: torch.export.Dim("batch")}
    return exported(
        folder,
        Nested(),
        (one, {"bias": two, "other": [three]}),
        config(inputs, outputs, batch=4),
        dynamic={"x": batch, "options": {"bias": batch, "other": [batch]}, "scale": batch},
        scale=four,
    )


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["x", "bias", "options.other.0", "scale"], ["sum", "rest__0", "rest__1.deep"]),
        (["INPUT__0", "INPUT__1", "INPUT__2", "INPUT__3"], ["OUTPUT__0", "OUTPUT__1", "OUTPUT__2"]),
        (
            ["ARGS[0]", "ARGS[1][bias]", "ARGS[1][other][0]", "KWARGS[scale]"],
            ["RESULT[sum]", "RESULT[rest][0]", "RESULT[rest][1][deep]"],
        ),
    ],
)
def test_names_in_exported_programs(inputs: list[str], outputs: list[str], tmp_path: Path) -> None:
    model = nested(tmp_path, dict.fromkeys(inputs, "FP32 3"), dict.fromkeys(outputs, "FP32 3"))
    arrays = {name: X * (at + 1) for at, name in enumerate(inputs)}
    values = [X + X * 2, X * (X * 4), X * 3]
    assert run(model, **arrays) == {name: value.tolist() for name, value in zip(outputs, values, strict=True)}


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (["x", "bias"], "configuration expects 2 inputs, model provides 4: the exported program takes 'x', 'bias', "),
        (["x", "bias", "nothing", "scale"], "input 'nothing' is no argument of its own"),
        (["x", "bias", "INPUT__0", "scale"], "input 'INPUT__0' is no argument of its own"),
    ],
)
def test_names_that_exported_programs_do_not_have(inputs: list[str], text: str, tmp_path: Path) -> None:
    assert text in refused(nested(tmp_path, dict.fromkeys(inputs, "FP32 3"), {"sum": "FP32 3"}))


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    model = exported(
        tmp_path, torch.nn.Identity(), (torch.ones(2, 3),), config({"input": "FP32 3"}, {"o": "FP32 3"}, 4)
    )
    assert "the first dimension of input 'input' is not dynamic in the exported program" in refused(model)


def test_compiled_packages(tmp_path: Path) -> None:
    """AOTInductor: compiled here, so it needs a C++ compiler."""
    batch = {0: torch.export.Dim("batch")}
    one = torch.ones(2, 3)
    configured = config({"INPUT__0": "FP32 3", "ARGS[1]": "FP32 3"}, {"RESULT[y]": "FP32 3", "OUT__1": "FP32 3"}, 4)
    model = context(tmp_path / "m", configured, "model.pt2")
    source = "class Model(torch.nn.Module):\n    def forward(self, a, b):\n        return {'y': a + b, 'z': a - b}\n"
    names: dict[str, Any] = {"torch": torch}
    exec(source, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(names["Model"](), (one, one.clone()), dynamic_shapes={"a": batch, "b": batch})
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(model.path))
        except torch._inductor.exc.InvalidCxxCompiler:
            pytest.skip("no C++ compiler")
    with Loaded(model) as loaded:
        results = loaded.run({"INPUT__0": X, "ARGS[1]": X * 3}, ["RESULT[y]", "OUT__1"])
        np.testing.assert_array_equal(results["RESULT[y]"], X * 4)
        np.testing.assert_array_equal(results["OUT__1"], X * -2)
        with pytest.raises(Internal, match=r"PyTorch execute failure.*unmatched"):
            loaded.run({"INPUT__0": X.astype(np.float64), "ARGS[1]": X}, ["RESULT[y]"])
    model.config["input"][1]["name"] = "other"
    assert "input 'other' is no argument of its own; the exported program takes 'INPUT__0', 'INPUT__1'" in refused(
        model
    )


LINEAR = """
    import os
    from dataclasses import dataclass
    from parts import Out

    class Block(torch.nn.Linear):
        def __init__(self, size):
            super().__init__(size, size)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Block(3)
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x):
            return Out(self.drop(self.fc(x)))
"""


@pytest.mark.parametrize("how", ["state", "wrapped", "script"])
def test_a_module_with_its_weights(how: str, tmp_path: Path) -> None:
    """The file's first class that needs no arguments, weights of the same name, evaluation mode, its own imports."""
    model = module(tmp_path, LINEAR, config({"x": "FP32 3"}, {"logits": "FP32 3"}, 4, runtime="model.py"))
    parts = "from dataclasses import dataclass\nfrom typing import Any\n@dataclass\nclass Out:\n    logits: Any\n"
    (model.version_directory / "parts.py").write_text(parts)
    sys.modules.pop("parts", None)
    state = {"fc.weight": torch.eye(3) * 2, "fc.bias": torch.ones(3)}
    weights = model.path.with_suffix(".pt")
    if how == "script":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 3)})
            net.load_state_dict(state)
            traced = torch.jit.trace_module(net["fc"], {"forward": torch.ones(1, 3)})
            holder = torch.nn.Module()
            holder.fc = traced
            torch.jit.script(holder).save(str(weights))
    else:
        torch.save(state if how == "state" else {"state_dict": state, "epoch": 3}, weights)
    # As the server sees it, whose platform table knows no model.py for this backend.
    seen = context(model.directory, model.config, "model.pt")
    assert run(seen, x=X) == {"logits": (X * 2 + 1).tolist()}


@pytest.mark.parametrize(
    ("beside", "level", "text"),
    [
        ([], "INFO", "Model parameter file not found for 'm'"),
        (
            ["model.pth", "labels.txt"],
            "WARNING",
            "Model parameter file not found for 'm': weights are read from model.pt, not from model.pth",
        ),
    ],
)
def test_a_module_without_its_weights(beside: list[str], level: str, text: str, tmp_path: Path) -> None:
    model = module(tmp_path, LINEAR, config({"x": "FP32 3"}, {"logits": "FP32 3"}))
    (model.version_directory / "parts.py").write_text("Any = Out = object")
    sys.modules.pop("parts", None)
    for name in beside:
        (model.version_directory / name).touch()
    with Loaded(model):
        assert f"{level}: {text}" in logged(model)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1", "Cannot find a subclass of torch.nn.Module in"),
        (
            "class Net(torch.nn.Module):\n    def __init__(self, size):\n        pass",
            "Net cannot be made without arguments",
        ),
        ("import nothing_like_this", "failed to load model 'm': No module named 'nothing_like_this'"),
    ],
)
def test_modules_that_cannot_be_made(source: str, text: str, tmp_path: Path) -> None:
    assert text in refused(module(tmp_path, source, config({"x": "FP32 3"}, {"o": "FP32 3"})))


def test_libraries_of_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = {"op_library_filename": ["own.so", "/elsewhere/other.so"]}
    model = script(tmp_path, IDENTITY, config({"x": "FP32 3"}, {"o": "FP32 3"}, 4, model_operations=operations))
    (model.directory / "own.so").write_bytes(b"no library")
    assert "failed to load model 'm': " in (text := refused(model))
    assert "own.so" in text
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert run(model, x=X) == {"o": X.tolist()}
    assert loaded == [str(model.directory / "own.so"), "/elsewhere/other.so"]


def test_weights_are_no_model(tmp_path: Path) -> None:
    model = context(tmp_path / "m", config({"x": "FP32 3"}, {"o": "FP32 3"}), "model.pt")
    torch.save({"w": torch.ones(1)}, model.path)
    assert "model.pt was written by torch.save and holds weights or a pickled object" in refused(model)
    model.path.write_bytes(b"nothing")
    assert refused(model).startswith("failed to load model 'm': ")
    model.path.unlink()
    with pytest.raises(Unavailable, match=r"unable to find '.*/1/model.pt' for model instance 'm'"):
        Loaded(model)


def test_weights_are_not_unpickled_as_code(tmp_path: Path) -> None:
    model = module(tmp_path, IDENTITY, config({"x": "FP32 3"}, {"o": "FP32 3"}))

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"w": Evil()}, model.path.with_suffix(".pt"))
    assert "failed to load model 'm': Weights only load failed" in refused(model)
    assert not (tmp_path / "touched").exists()


# --- parameters ------------------------------------------------------------------------------------------------------------

MODES = """
    class Model(torch.nn.Module):
        def forward(self, x):
            modes = [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch._C._get_graph_executor_optimize(),
                     torch.get_num_threads(), torch.get_num_interop_threads(), torch.backends.cudnn.enabled,
                     torch._C._jit_texpr_fuser_enabled()]
            return torch.tensor(modes, dtype=torch.int32)
"""
NAMES = ["inference", "grad", "optimized", "intra", "inter", "cudnn", "fuser"]

#: Runs in a process of its own: what the parameters set belongs to the process.
_PROBE = """
import sys, json
sys.path.insert(0, {tests!r})
from pathlib import Path
from in_process import Loaded, context
import numpy as np, torch
config = json.loads({config!r})
model = context(Path({folder!r}), config, "model.py")
with Loaded(model) as loaded:
    modes = loaded.run({{"x": np.zeros(1, np.float32)}}, ["o"])["o"].tolist()
executor = torch._C._jit_set_profiling_executor(True)
profiling = torch._C._jit_set_profiling_mode(True)
print(json.dumps([modes, executor, profiling, model.services.lines]))
"""


def modes(folder: Path, **parameters: str) -> dict[str, Any]:
    import json

    configured = config({"x": "FP32 1"}, {"o": "INT32 7"}, parameters=parameters)
    model = module(folder, MODES, configured)
    code = _PROBE.format(tests=str(Path(__file__).parent), config=json.dumps(configured), folder=str(model.directory))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    values, executor, profiling, lines = json.loads(done.stdout.splitlines()[-1])
    return {**dict(zip(NAMES, values, strict=True)), "executor": executor, "profiling": profiling, "lines": lines}


def test_parameters_as_they_are(tmp_path: Path) -> None:
    seen = modes(tmp_path)
    assert (seen["inference"], seen["grad"], seen["optimized"], seen["cudnn"]) == (1, 0, 1, 1)
    assert (seen["executor"], seen["profiling"]) == (True, True)


def test_parameters_turned_round(tmp_path: Path) -> None:
    fuser = modes(tmp_path / "as_is")["fuser"]
    seen = modes(
        tmp_path,
        INFERENCE_MODE="false",
        DISABLE_OPTIMIZED_EXECUTION="true",
        DISABLE_CUDNN="1",
        ENABLE_JIT_EXECUTOR="off",
        ENABLE_JIT_PROFILING="0",
        ENABLE_TENSOR_FUSER="false" if fuser else "true",
        INTRA_OP_THREAD_COUNT="3",
        INTER_OP_THREAD_COUNT="5",
    )
    assert (seen["inference"], seen["grad"], seen["optimized"], seen["cudnn"]) == (0, 0, 0, 0)
    assert (seen["intra"], seen["inter"], seen["fuser"]) == (3, 5, 1 - fuser)
    assert (seen["executor"], seen["profiling"]) == (False, False)


def test_thread_counts_of_the_python_runtime(tmp_path: Path) -> None:
    seen = modes(tmp_path, NUM_THREADS="3", NUM_INTEROP_THREADS="2")
    assert (seen["intra"], seen["inter"]) == (3, 2)


def test_modes_of_a_run_do_not_outlive_it(tmp_path: Path) -> None:
    before = torch._C._get_graph_executor_optimize()
    chosen = settings.read({"DISABLE_OPTIMIZED_EXECUTION": "true"})
    seen: list[bool] = []

    def fail() -> None:
        with settings.running(chosen):
            seen.append(torch._C._get_graph_executor_optimize())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [False]
    assert torch._C._get_graph_executor_optimize() == before
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"INFERENCE_MODE": "maybe"}, "parameter INFERENCE_MODE: failed to convert 'maybe' to boolean value"),
        (
            {"INTRA_OP_THREAD_COUNT": "two"},
            "parameter INTRA_OP_THREAD_COUNT: failed to convert 'two' to integer number",
        ),
        (
            {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"model": 1}'},
            "'model' is not an optional parameter for 'torch.compile'",
        ),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{"}, "parameter TORCH_COMPILE_OPTIONAL_PARAMETERS: '{' is not JSON"),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": "[]"}, "is not a JSON object"),
    ],
)
def test_parameters_that_are_wrong(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        settings.read(parameters)
    assert text in str(raised.value)


@pytest.mark.parametrize("shared", [True, False])
def test_weight_sharing(shared: bool, tmp_path: Path) -> None:
    parameters = {"ENABLE_WEIGHT_SHARING": "true"} if shared else {}
    model = script(tmp_path, IDENTITY, config({"x": "FP32 3"}, {"o": "FP32 3"}, 4, parameters))
    first, second = (PyTorchBackend(model, InstanceContext(f"m_0_{at}", "KIND_CPU")) for at in range(2))
    assert (first._program is second._program) == shared
    first.close()
    np.testing.assert_array_equal(second.run({"x": X}, ["o"])["o"], X)


@pytest.mark.parametrize("key", ["ENABLE_CACHE_CLEANING", "CACHE_CLEANING_ENABLED"])
def test_cache_cleaning(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[None] = []
    monkeypatch.setattr(Device, "clean_cache", lambda self: cleaned.append(None))
    for value, times in (("true", 2), ("false", 0)):
        cleaned.clear()
        model = script(tmp_path, IDENTITY, config({"x": "FP32 3"}, {"o": "FP32 3"}, 4, {key: value}))
        with Loaded(model) as loaded:
            loaded.run({"x": X}, ["o"])
            loaded.run({"x": X}, ["o"])
        assert len(cleaned) == times


def test_compilation_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compile_(model: Any, **options: Any) -> Any:
        asked.append(options)
        return lambda x: model(x) * 2

    monkeypatch.setattr(torch, "compile", compile_)
    parameters = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": true}'}
    configured = config({"x": "FP32 3"}, {"o": "FP32 3"}, 4, parameters)
    assert run(module(tmp_path, IDENTITY, configured), x=X) == {"o": (X * 2).tolist()}
    assert asked == [{"dynamic": True}]
    configured["parameters"]["DISABLE_OPTIMIZED_EXECUTION"] = {"string_value": "true"}
    assert run(module(tmp_path, IDENTITY, configured), x=X) == {"o": X.tolist()}
    assert len(asked) == 1


# --- devices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    model = script(tmp_path, IDENTITY, config({"x": "FP32 3"}, {"o": "FP32 3"}))
    with pytest.raises(Unavailable, match=r"instance 'm_0_0' is to run on GPU 1, and PyTorch .* sees 0 GPUs"):
        PyTorchBackend(model, InstanceContext("m_0_0", "KIND_GPU", 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("write", [script, module])
def test_on_a_gpu(write: Any, tmp_path: Path) -> None:
    source = """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = torch.nn.Linear(3, 3)

            def forward(self, x: Tensor):
                return {"y": self.fc(x), "on_gpu": torch.full([x.size(0), 1], int(x.is_cuda))}
    """
    model = write(tmp_path, source, config({"x": "FP32 3"}, {"y": "FP32 3", "on_gpu": "INT64 1"}, 4))
    backend = PyTorchBackend(model, InstanceContext("m_0_0", "KIND_GPU", 0))
    results = backend.run({"x": X}, ["y", "on_gpu"])
    assert results["on_gpu"].tolist() == [[1], [1]]
    assert results["y"].shape == (2, 3)


def test_inputs_of_a_gpu_are_read_when_the_results_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no result comes from the GPU, which would be waited for."""
    waits: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waits.append(str(self.device))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    device = Device("m", InstanceContext("m_0_0", "KIND_GPU", 1))
    assert [array.tolist() for array in device.arrays([torch.arange(2)])] == [[0, 1]]
    assert device.arrays([]) == []
    device.wait()
    assert waits == ["cuda:1", "cuda:1", "cuda:1"]
    assert Device("m", InstanceContext("m_0_0", "KIND_CPU")).arrays([]) == []


def test_exported_programs_are_moved_to_the_device_of_the_instance(tmp_path: Path) -> None:
    class Elsewhere(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"y": x * 2, "made": torch.ones(3, device="meta")}

    model = exported(tmp_path, Elsewhere(), (torch.zeros(2, 3),), config({"x": "FP32 2 3"}, {"made": "FP32 3"}))
    assert run(model, x=X) == {"made": [1, 1, 1]}


def test_a_probing_run_is_the_devices_from_its_inputs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def entered(device: Device) -> Iterator[None]:
        events.append("enter")
        yield
        events.append("leave")

    def tensor(device: Device, array: Any) -> Any:
        events.append("input")
        return torch.from_numpy(array)

    monkeypatch.setattr(Device, "entered", entered)
    monkeypatch.setattr(Device, "tensor", tensor)
    monkeypatch.setattr(Device, "wait", lambda device: events.append("wait"))
    completed(script(tmp_path, IDENTITY, config({"x": "FP32 3"}, [], 4)))
    loading, probing = events[:2], events[2:]
    assert loading == ["enter", "leave"]
    assert probing == ["enter", "input", "wait", "leave"]


def test_the_model_decides(tmp_path: Path) -> None:
    """KIND_MODEL: tensors of the CPU go in, and what comes out may lie elsewhere."""
    source = """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(3, device="meta"))

            def forward(self, x):
                return x * self.w.numel(), torch.tensor([x.device.type == "cpu", self.w.device.type == "meta"])
    """
    model = module(tmp_path, source, config({"x": "FP32 3"}, {"O__0": "FP32 3", "O__1": "BOOL 2"}))
    backend = PyTorchBackend(model, InstanceContext("m_0_0", "KIND_MODEL"))
    results = backend.run({"x": X}, ["O__0", "O__1"])
    assert results["O__1"].tolist() == [True, True]
    np.testing.assert_array_equal(results["O__0"], X * 3)


# --- completion ------------------------------------------------------------------------------------------------------------


def completed(model: ModelContext) -> tuple[dict[str, str], dict[str, str]]:
    """Inputs and outputs as `tensors` takes them."""
    configured = backend_class("pytorch").autocomplete(model) or model.config

    def shown(kind: str) -> dict[str, str]:
        return {
            tensor.get("name", "?"): " ".join(
                [tensor.get("data_type", "?").removeprefix("TYPE_"), *map(str, tensor.get("dims", "?"))]
                + (["reshaped"] if "reshape" in tensor else [])
            )
            for tensor in configured.get(kind, ())
        }

    return shown("input"), shown("output")


SHAPES = """
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor):
            return {"double": x * 2, "many": x.repeat(1, 2).int(), "top": x.argmax(1), "words": ids[:, :2].to(torch.bfloat16)}
"""


@pytest.mark.parametrize("write", [script, module])
def test_outputs_are_completed_by_a_run(write: Any, tmp_path: Path) -> None:
    inputs = tensors(x="FP32 -1", ids="INT64 5")
    expected = {"double": "FP32 -1", "many": "INT32 -1", "top": "INT64 1 reshaped", "words": "BF16 2"}
    model = write(tmp_path, SHAPES, config(inputs, [], batch=4))
    assert completed(model) == ({"x": "FP32 -1", "ids": "INT64 5"}, expected)
    assert any("from a run on zeros" in line for line in logged(model))
    # Names may be missing too: those of forward(), in its order.
    for tensor in inputs:
        del tensor["name"]
    assert completed(write(tmp_path, SHAPES, config(inputs, [], batch=4))) == (
        {"x": "FP32 -1", "ids": "INT64 5"},
        expected,
    )
    # What is configured stays, and is completed; what is not is left out.
    outputs = [{"name": "many"}, {"name": "double", "data_type": "TYPE_FP32", "dims": [-1]}]
    assert completed(write(tmp_path, SHAPES, config(tensors(x="FP32 -1", ids="INT64 5"), outputs, batch=4)))[1] == {
        "many": "INT32 -1",
        "double": "FP32 -1",
    }


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("x", {"OUTPUT__0": "FP32 2 -1"}),
        ("x.sum()", {"OUTPUT__0": "FP32 1"}),
        ("(x, [x.shape[0], 0.5, True, 'text'], ['a', 'b'])", None),
        ("torch.nn.functional.conv1d(x[None], torch.ones(1, 2, 33))", {"OUTPUT__0": "FP32 1 1 -1"}),
        ("x[:, :224].reshape(2, 224)", {"OUTPUT__0": "FP32 2 224"}),
    ],
)
def test_probing_finds_extents(body: str, outputs: dict[str, str] | None, tmp_path: Path) -> None:
    source = f"""
        class Model(torch.nn.Module):
            def forward(self, x):
                return {body}
    """
    expected = outputs or {
        "OUTPUT__0": "FP32 2 -1",
        "OUTPUT__1": "INT64 1",
        "OUTPUT__2": "FP64 1",
        "OUTPUT__3": "BOOL 1",
        "OUTPUT__4": "BYTES 1",
        "OUTPUT__5": "BYTES -1",
    }
    expected = {name: text.replace("BYTES", "STRING") for name, text in expected.items()}
    assert completed(module(tmp_path, source, config({"x": "FP32 2 -1"}, [])))[1] == expected


@pytest.mark.parametrize(
    ("inputs", "body", "text"),
    [
        ([], "x", "cannot complete the inputs of model 'm': forward() takes 'x'"),
        ([{"name": "x"}], "x", "cannot complete the inputs x of model 'm'"),
        (tensors(x="FP32 3"), "x.nothing", "cannot complete the outputs of model 'm': a run on zeros"),
    ],
)
def test_what_cannot_be_completed_is_said(inputs: Any, body: str, text: str, tmp_path: Path) -> None:
    source = f"""
        class Model(torch.nn.Module):
            def forward(self, x):
                return {body}
    """
    model = module(tmp_path, source, config(inputs, []))
    assert completed(model)[1] == {}
    assert any(text in line for line in logged(model))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "x.sum(0)",
            r"with a batch of 2, output 'OUTPUT__0' has the shape \[3\], whose first dimension is not the batch",
        ),
        ("None", "model 'm' returned NoneType, in which there is nothing to be an output"),
    ],
)
def test_outputs_that_cannot_be(body: str, text: str, tmp_path: Path) -> None:
    source = f"""
        class Model(torch.nn.Module):
            def forward(self, x):
                return {body}
    """
    with pytest.raises(InvalidArgument, match=text):
        completed(module(tmp_path, source, config({"x": "FP32 3"}, [], batch=4)))


def test_exported_programs_complete_themselves(tmp_path: Path) -> None:
    model = nested(tmp_path, {}, {})
    assert completed(model) == (
        {"x": "FP32 3", "bias": "FP32 3", "other": "FP32 3", "scale": "FP32 3"},
        {"sum": "FP32 3", "rest__0": "FP32 3", "rest__1.deep": "FP32 3"},
    )
    model.config["output"] = [{"name": "RESULT[rest][1][deep]"}]
    assert completed(model)[1] == {"RESULT[rest][1][deep]": "FP32 3"}


def test_exported_programs_without_a_batch(tmp_path: Path) -> None:
    model = exported(tmp_path, torch.nn.Identity(), (torch.ones(2, 3),), {"backend": "pytorch"})
    assert completed(model) == ({"input": "FP32 2 3"}, {"OUTPUT__0": "FP32 2 3"})
    model.config["max_batch_size"] = 4
    with pytest.raises(InvalidArgument, match="autofill failed for model 'm': model does not support batching"):
        completed(model)


# --- processes ---------------------------------------------------------------------------------------------------------------

_FORKED = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from naiad.instances.references import load_backend
load_backend("pytorch", "pytorch")
assert len(os.listdir("/proc/self/task")) == 1, "a thread before the fork"
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        import torch
        torch.set_num_threads(4)
        before = len(os.listdir("/proc/self/task"))
        x = torch.randn(2000, 1000)
        x @ x.T
        (x + 1).exp()
        os._exit(0 if len(os.listdir("/proc/self/task")) > before else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_threads_start_behind_the_fork() -> None:
    subprocess.run([sys.executable, "-c", _FORKED], check=True, timeout=120)
