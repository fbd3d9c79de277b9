"""One SavedModel in three frameworks at once: as it is in TensorFlow and OpenVINO, converted in ONNX Runtime."""

import importlib.util
import shutil
import subprocess
import sys

import numpy as np
import pytest
from served import NAIAD, Repository, Server, put

_NEEDED = ("tensorflow", "openvino", "onnxruntime", "tf2onnx")
_ABSENT = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_ABSENT), reason=f"{', '.join(_ABSENT)} not installed")

_MODEL = """
import keras
keras.utils.set_random_seed(3)
model = keras.Sequential([
    keras.Input((16, 16, 3), name="image"),
    keras.layers.Conv2D(8, 3, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.MaxPooling2D(),
    keras.layers.Conv2D(16, 3, activation="gelu"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(10, activation="softmax"),
])
model.export("saved", verbose=False)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    subprocess.run([sys.executable, "-c", _MODEL], cwd=folder, check=True, capture_output=True)
    repository = Repository(tmp_path_factory.mktemp("models"))
    for name, backend in (("in_tensorflow", "tensorflow"), ("in_openvino", "openvino")):
        shutil.copytree(folder / "saved", repository.path / name / "1" / "model.savedmodel")
        platform = 'platform: "tensorflow_savedmodel"\n' if backend == "tensorflow" else ""
        put(repository.path / name / "config.pbtxt", f'backend: "{backend}"\n{platform}max_batch_size: 8\n')
    output = repository.path / "in_onnxruntime" / "1"
    subprocess.run(
        [str(NAIAD), "convert", "saved", "--to", "onnx", "--output", str(output)],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (repository.path / "broken" / "1").mkdir(parents=True)
    put(repository.path / "broken" / "config.pbtxt", 'backend: "openvino"\n')
    with Server(repository, flags=("--exit-on-error=false",)).started() as served:
        yield served


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_all_three_answer_the_same(server, protocol, rows):
    image = np.random.default_rng(rows).normal(size=(rows, 16, 16, 3)).astype(np.float32)
    client = server.client(protocol)
    answers = [
        client.infer(f"in_{name}", "image", image, output="output_0")
        for name in ("tensorflow", "openvino", "onnxruntime")
    ]
    assert answers[0].shape == (rows, 10)
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=1e-4)


def test_a_model_that_cannot_be_loaded_harms_none(server):
    states = server.client("http").index()
    state, reason = states["broken", "1"]
    assert state == "UNAVAILABLE"
    assert "unable to find" in reason
    assert "model.xml" in reason
    assert all(states[f"in_{name}", "1"][0] == "READY" for name in ("tensorflow", "openvino", "onnxruntime"))


def test_each_backend_has_processes_of_its_own(server):
    for backend in ("tensorflow", "openvino", "onnxruntime"):
        assert len(server.named(f"naiad-{backend}")) == 1
        assert len(server.named(f"naiad:in_{backend}")) == 1
