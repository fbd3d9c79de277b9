"""`naiad convert` as users run it: real frameworks, real files. What it wrote has been loaded and compared by it."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click.testing
import numpy as np
import pytest

from naiad.cli.convert import command
from naiad.config.parse import parse_text

KERAS = """
import keras
keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.Input((8, 8, 1), name="image"),
    keras.layers.Conv2D(4, 3, activation="relu", name="edges"),
    keras.layers.Flatten(),
    keras.layers.Dense(10, activation="softmax", name="probabilities"),
])
model.save("digits.keras")
model.save("digits.h5")
model.export("digits.savedmodel", verbose=False)
one, other, shared = keras.Input((4,), name="one"), keras.Input((4,), name="other"), keras.layers.Dense(3, name="shared")
keras.Model([one, other], [shared(one), shared(other)]).save("shared.keras")
"""

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, y):
        h = self.linear(x) + y
        return {"sum": h, "prob": h.softmax(-1)}


class Named(torch.nn.Module):
    # Its outputs are called as what torch.onnx calls other values: an operation, a weight.

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 3)
        self.weight = torch.nn.Parameter(torch.rand(3))

    def forward(self, x):
        return {"embedding": self.table(x) + 1, "weight": self.table(x) * self.weight}


class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no weights")


class FirstOnly(torch.nn.Module):
    def forward(self, x):
        return x + torch.ones_like(x) * float(x.shape[0])


class Centred(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class Pairs(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] < 2:
            raise ValueError("a row needs another")
        return x + 1


class Loop(torch.nn.Module):
    def forward(self, x):
        for step in range(x.shape[1]):
            x = x + step
        return x
"""

TORCH = """
import numpy as np
import torch
from net import Net

torch.manual_seed(0)
model = Net().eval()
torch.save(model.state_dict(), "weights.pt")
torch.save(model, "whole.pt")
torch.jit.script(model).save("script.pt")
batch = torch.export.Dim.DYNAMIC
example = (torch.rand(2, 4), torch.rand(2, 3))
torch.export.save(torch.export.export(model, example, dynamic_shapes=({0: batch}, {0: batch})), "net.pt2")
"""

SKLEARN = """
import joblib, pickle
import numpy as np
from sklearn.cluster import DBSCAN, KMeans
from sklearn.ensemble import IsolationForest, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC

x = np.random.default_rng(0).normal(size=(200, 5))
y = (x.sum(1) > 0).astype(int)
joblib.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y), "classifier.joblib")
with open("words.pkl", "wb") as file:
    pickle.dump(LogisticRegression().fit(x, np.array(["no", "yes"])[y]), file)
joblib.dump(RandomForestRegressor(5, random_state=0).fit(x, x.sum(1)), "regressor.joblib")
joblib.dump(KMeans(3, random_state=0).fit(x), "clusters.joblib")
joblib.dump(RandomForestRegressor(5, random_state=0).fit(x, x[:, :2]), "targets.joblib")
joblib.dump(IsolationForest(n_estimators=5, random_state=0).fit(x), "outliers.joblib")
joblib.dump(make_pipeline(StandardScaler(), SVC()).fit(x, y), "svc.joblib")
joblib.dump(make_pipeline(StandardScaler(), LinearSVC()).fit(x, y), "linear.joblib")
joblib.dump(DBSCAN().fit(x), "dbscan.joblib")
"""

SHAPES = ("--shape", "x:FP32:-1,4", "--shape", "y:FP32:-1,3")


def needs(*modules: str) -> pytest.MarkDecorator:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the sources, which has those of the framework."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "net.py").write_text(NET)
    programs = {"tensorflow": KERAS, "torch": TORCH, "sklearn": SKLEARN}
    made: set[str] = set()

    def make(framework: str) -> Path:
        if framework not in made:
            made.add(framework)
            (folder / f"make_{framework}.py").write_text(programs[framework])
            subprocess.run([sys.executable, f"make_{framework}.py"], cwd=folder, check=True, capture_output=True)
        return folder

    return make


Run = Callable[..., click.testing.Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def convert(source: str | Path, target: str, *more: str, name: str = "made") -> click.testing.Result:
        output = ["--output", str(tmp_path / "models" / name / "1")]
        return click.testing.CliRunner().invoke(command, [str(source), "--to", target, *output, *more])

    return convert


def configuration(tmp_path: Path, name: str = "made"):
    return parse_text((tmp_path / "models" / name / "config.pbtxt").read_text())


def shapes(tensors) -> dict[str, list[int]]:
    return {it.name: list(it.dims) for it in tensors}


TENSORFLOW = needs("tensorflow")
OPENVINO = needs("openvino")
TF2ONNX = needs("tensorflow", "tf2onnx", "onnx")
TORCH_HERE = needs("torch")
ONNXSCRIPT = needs("torch", "onnxscript", "onnx")
SKL2ONNX = needs("sklearn", "skl2onnx", "joblib", "onnx")


@pytest.mark.parametrize(
    ("source", "target", "file", "output"),
    [
        pytest.param("digits.keras", "savedmodel", "model.savedmodel", "output_0", marks=TENSORFLOW),
        pytest.param("digits.h5", "savedmodel", "model.savedmodel", "output_0", marks=TENSORFLOW),
        pytest.param("digits.keras", "graphdef", "model.graphdef", "probabilities", marks=TENSORFLOW),
        pytest.param("digits.keras", "onnx", "model.onnx", "output_0", marks=TF2ONNX),
        pytest.param("digits.keras", "openvino", "model.xml", "output_0", marks=[TENSORFLOW, OPENVINO]),
        pytest.param("digits.savedmodel", "onnx", "model.onnx", "output_0", marks=TF2ONNX),
        pytest.param("digits.savedmodel", "openvino", "model.xml", "output_0", marks=[TENSORFLOW, OPENVINO]),
    ],
)
def test_from_tensorflow(source, target, file, output, models, run, tmp_path):
    result = run(models("tensorflow") / source, target)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "models" / "made" / "1" / file).exists()
    config = configuration(tmp_path)
    assert config.max_batch_size == 8
    assert config.HasField("dynamic_batching")
    assert shapes(config.input) == {"image": [8, 8, 1]}
    assert shapes(config.output) == {output: [10]}
    assert f"│ {output}" in result.output


@TENSORFLOW
def test_chosen_layers_are_the_outputs(models, run, tmp_path):
    result = run(models("tensorflow") / "digits.keras", "graphdef", "--layers", "edges, probabilities")
    assert result.exit_code == 0, result.output
    assert shapes(configuration(tmp_path).output) == {"edges": [6, 6, 4], "probabilities": [10]}


@TENSORFLOW
def test_two_outputs_of_one_layer_are_numbered(models, run, tmp_path):
    result = run(models("tensorflow") / "shared.keras", "graphdef")
    assert result.exit_code == 0, result.output
    assert shapes(configuration(tmp_path).output) == {"output_0": [3], "output_1": [3]}


@TENSORFLOW
def test_a_layer_there_is_not(models, run):
    result = run(models("tensorflow") / "digits.keras", "graphdef", "--layers", "nope")
    assert result.exit_code == 1
    assert "has the layers edges, flatten, probabilities, not all of nope" in result.output


@TENSORFLOW
@OPENVINO
def test_without_a_batch(models, run, tmp_path):
    result = run(models("tensorflow") / "digits.keras", "openvino", "--no-batch")
    assert result.exit_code == 0, result.output
    config = configuration(tmp_path)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert shapes(config.input) == {"image": [-1, 8, 8, 1]}


@pytest.mark.parametrize(
    ("target", "file"),
    [
        pytest.param("torchscript", "model.pt", marks=TORCH_HERE),
        pytest.param("pt2", "model.pt2", marks=TORCH_HERE),
        pytest.param("onnx", "model.onnx", marks=ONNXSCRIPT),
        pytest.param("openvino", "model.xml", marks=[TORCH_HERE, OPENVINO]),
    ],
)
@pytest.mark.parametrize(
    ("source", "more"),
    [("net.py:Net", (*SHAPES, "--weights", "weights.pt")), ("script.pt", SHAPES), ("net.pt2", ())],
    ids=["module", "TorchScript", "torch.export"],
)
def test_from_pytorch(source, more, target, file, models, run, tmp_path, monkeypatch):
    monkeypatch.chdir(models("torch"))
    result = run(source, target, *more)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "models" / "made" / "1" / file).is_file()
    config = configuration(tmp_path)
    assert config.max_batch_size == 8
    assert shapes(config.input) == {"x": [4], "y": [3]}
    assert shapes(config.output) == {"sum": [3], "prob": [3]}


@ONNXSCRIPT
def test_outputs_keep_their_names(models, run, tmp_path, monkeypatch):
    monkeypatch.chdir(models("torch"))
    result = run("net.py:Named", "onnx", "--shape", "x:INT64:-1,2")
    assert result.exit_code == 0, result.output
    assert shapes(configuration(tmp_path).output) == {"embedding": [2, 3], "weight": [2, 3]}


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        pytest.param("m.keras", (), "as a Keras model: ValueError:", marks=TENSORFLOW),
        pytest.param("m.pth", SHAPES, "as a PyTorch module: ", marks=TORCH_HERE),
        pytest.param("m.pkl", (), "as a scikit-learn model: ", marks=SKL2ONNX),
    ],
)
def test_a_file_that_is_no_model(name, options, text, run, tmp_path):
    (tmp_path / name).write_text("garbage")
    target = "pt2" if name.endswith(".pth") else "savedmodel" if name.endswith(".keras") else "onnx"
    result = run(tmp_path / name, target, *options)
    assert result.exit_code == 1
    assert f"cannot open {tmp_path / name} {text}" in result.output
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@TORCH_HERE
def test_given_inputs_say_what_a_module_takes(models, run, tmp_path, monkeypatch):
    monkeypatch.chdir(models("torch"))
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=np.ones((5, 4), np.float32), y=np.ones((5, 3), np.float32))
    result = run("whole.pt", "pt2", "--inputs", str(inputs))
    assert result.exit_code == 0, result.output
    assert "the given inputs" in result.output
    assert shapes(configuration(tmp_path).input) == {"x": [4], "y": [3]}


@TORCH_HERE
def test_a_result_that_is_not_the_source_is_not_written(models, run, tmp_path, monkeypatch):
    """Tracing writes down the batch size it has seen."""
    monkeypatch.chdir(models("torch"))
    result = run("net.py:FirstOnly", "torchscript", "--shape", "x:FP32:-1,4")
    assert result.exit_code == 1
    assert "random inputs, batch of 3" in result.output
    assert not (tmp_path / "models").exists()


@TORCH_HERE
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "Centred",
            "it does not batch: output 'OUTPUT__0' of one row depends on the others of random inputs, batch of 2",
        ),
        ("Pairs", "it does not batch: the source fails on one row of random inputs, batch of 2: a row needs another"),
    ],
)
def test_rows_that_depend_on_each_other_are_no_batch(name, text, models, run, tmp_path, monkeypatch):
    monkeypatch.chdir(models("torch"))
    result = run(f"net.py:{name}", "torchscript", "--shape", "x:FP32:-1,4")
    assert result.exit_code == 0, result.output
    assert text in result.output
    config = configuration(tmp_path)
    assert config.max_batch_size == 0
    assert shapes(config.input) == {"x": [-1, 4]}


@TORCH_HERE
def test_open_lengths_are_compared_with_two(models, run, tmp_path, monkeypatch):
    """Tracing writes down the length it has seen."""
    monkeypatch.chdir(models("torch"))
    result = run("net.py:Loop", "torchscript", "--shape", "x:FP32:-1,-1")
    assert result.exit_code == 1
    assert "on random inputs, batch of 2, lengths of 12" in result.output
    assert not (tmp_path / "models").exists()


@TORCH_HERE
@pytest.mark.parametrize(
    ("source", "more", "text"),
    [
        ("net.py:Net", (), "--shape x:FP32:-1,3,224,224 --shape y:FP32:-1,3,224,224"),
        ("net.py:Net", ("--shape", "x:FP32:-1,4"), "forward() takes x, y; given are x"),
        ("net.py:Nobody", SHAPES, "net.py has no Nobody"),
        ("net.py:Net", ("--shape", "x:FP32:4", "--shape", "x:FP32:5"), "--shape is given twice for one input: x, x"),
        (
            "net.py:Broken",
            SHAPES,
            "cannot open net.py:Broken as a PyTorch module: RuntimeError: no weights (net.py, line 30)",
        ),
        ("weights.pt", SHAPES, "file.py:Name with --weights weights.pt"),
    ],
)
def test_what_a_module_needs_is_said(source, more, text, models, run, monkeypatch):
    monkeypatch.chdir(models("torch"))
    result = run(source, "torchscript", *more)
    assert result.exit_code == 1
    assert text in result.output


@SKL2ONNX
@pytest.mark.parametrize(
    ("source", "outputs"),
    [
        ("classifier.joblib", {"label": "TYPE_INT64", "probabilities": "TYPE_FP32"}),
        ("words.pkl", {"label": "TYPE_STRING", "probabilities": "TYPE_FP32"}),
        ("regressor.joblib", {"variable": "TYPE_FP32"}),
        ("clusters.joblib", {"label": "TYPE_INT64", "scores": "TYPE_FP32"}),
        ("outliers.joblib", {"label": "TYPE_INT64", "scores": "TYPE_FP32"}),
    ],
)
def test_from_scikit_learn(source, outputs, models, run, tmp_path):
    result = run(models("sklearn") / source, "onnx")
    assert result.exit_code == 0, result.output
    config = configuration(tmp_path)
    assert shapes(config.input) == {"X": [5]}
    kinds = type(config.input[0]).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    assert {it.name: kinds[it.data_type].name for it in config.output} == outputs


@SKL2ONNX
@pytest.mark.parametrize("source", ["svc.joblib", "linear.joblib"])
def test_an_output_that_the_source_does_not_have_is_left_out(source, models, run, tmp_path):
    """What skl2onnx calls probabilities are decisions, of an SVC with two classes those for the other class."""
    result = run(models("sklearn") / source, "onnx")
    assert result.exit_code == 0, result.output
    assert [it.name for it in configuration(tmp_path).output] == ["label"]
    assert "output 'probabilities' is left out" in result.output


@SKL2ONNX
def test_the_configuration_has_the_shape_of_the_answers(models, run, tmp_path):
    """skl2onnx says that a forest has one target."""
    assert run(models("sklearn") / "targets.joblib", "onnx").exit_code == 0
    assert shapes(configuration(tmp_path).output) == {"variable": [2]}


@SKL2ONNX
def test_a_clustering_that_says_nothing_of_new_rows(models, run):
    result = run(models("sklearn") / "dbscan.joblib", "onnx")
    assert result.exit_code == 1
    assert "a DBSCAN, which has neither predict() nor transform()" in result.output


@needs("onnx", "openvino")
def test_from_onnx(run, tmp_path):
    import onnx
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", 4)) for name in ("a", "b")]
    graph = helper.make_graph([helper.make_node("Tanh", ["a"], ["b"])], "g", tensors[:1], tensors[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    result = run(tmp_path / "m.onnx", "openvino")
    assert result.exit_code == 0, result.output
    again = run(tmp_path / "m.onnx", "openvino")
    assert again.exit_code == 1
    assert "--force replaces it" in again.output
    assert run(tmp_path / "m.onnx", "openvino", "--force", "--max-batch-size", "2").exit_code == 0
    assert configuration(tmp_path).max_batch_size == 2


def test_missing_packages_are_named(run, tmp_path, monkeypatch):
    (tmp_path / "m.onnx").touch()
    monkeypatch.setattr("naiad.cli.convert.missing", lambda kind, target: ["naiad[openvino]", "onnx"])
    result = run(tmp_path / "m.onnx", "openvino")
    assert result.exit_code == 1
    assert "from an ONNX model to openvino needs more packages: pip install 'naiad[openvino]' 'onnx'" in result.output


@pytest.mark.parametrize("shape", ["x", "x:FLOAT:1", "x:FP32:a", "x:FP32:0", ":FP32:1"])
def test_shapes_that_cannot_be_read(shape, run, tmp_path):
    (tmp_path / "m.onnx").touch()
    result = run(tmp_path / "m.onnx", "openvino", "--shape", shape)
    assert result.exit_code == 2
    assert "is not like x:FP32:-1,3,224,224" in result.output
