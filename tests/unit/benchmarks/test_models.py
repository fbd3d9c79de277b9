"""The models of the benchmark compute what they say."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks import models


def test_add_sub_adds_and_subtracts() -> None:
    session = onnxruntime.InferenceSession(models.add_sub().SerializeToString())
    one, two = np.ones((2, 16), np.float32), np.full((2, 16), 2, np.float32)
    total, difference = session.run(["OUTPUT0", "OUTPUT1"], {"INPUT0": one, "INPUT1": two})
    assert (total == 3).all()
    assert (difference == -1).all()


def test_mlp_answers_with_probabilities() -> None:
    session = onnxruntime.InferenceSession(models.mlp().SerializeToString())
    (found,) = session.run(["OUTPUT0"], {"INPUT0": np.random.default_rng(0).random((3, 784), dtype=np.float32)})
    assert found.shape == (3, 10)
    assert found.sum(axis=1) == pytest.approx(1)


def test_resnet50_is_resnet50() -> None:
    """25.6 million numbers, less those of the batch normalizations, which are folded in: 53 convolutions and a layer."""
    graph = models.resnet50().graph
    assert sum(node.op_type == "Conv" for node in graph.node) == 53
    assert sum(int(np.prod(weight.dims)) for weight in graph.initializer) == 25_530_472


def test_a_model_is_written_as_a_repository_has_it(tmp_path: Path) -> None:
    models.write(tmp_path, ("identity", "add_sub", "ensemble"))
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert files == {
        "identity/config.pbtxt", "identity/1/model.py",
        "add_sub/config.pbtxt", "add_sub/1/model.onnx",
        "ensemble/config.pbtxt",
    }  # fmt: skip
    assert 'name: "add_sub"' in (tmp_path / "add_sub" / "config.pbtxt").read_text()


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_resnet50_of_a_framework_computes_the_same(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    models.write(tmp_path, (f"resnet50_{framework}",))
    folder = tmp_path / f"resnet50_{framework}" / "1"
    images = np.random.default_rng(0).random((2, 3, 224, 224), dtype=np.float32)
    (want,) = onnxruntime.InferenceSession(folder / "model.onnx").run(["OUTPUT0"], {"INPUT0": images})
    program = (
        "import sys, numpy; from benchmarks.direct import FRAMEWORKS; framework, folder = sys.argv[1:]\n"
        "numpy.save(f'{folder}/found.npy', FRAMEWORKS[framework](folder, 1)(numpy.load(f'{folder}/images.npy')))"
    )
    np.save(folder / "images.npy", images)
    subprocess.run([sys.executable, "-c", program, framework, str(folder)], check=True, capture_output=True)
    np.testing.assert_allclose(np.load(folder / "found.npy"), want, rtol=1e-2, atol=1e-3)
