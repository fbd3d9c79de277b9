"""Writes the network of the example `digits` in the formats of frameworks, with the weights that come with the package.

    python -m naiad.examples.frameworks tensorflow DIR

writes `digits_keras` and `digits_graphdef` into the model repository DIR. `naiad init --with` runs that, one process for
each framework: two of them in one process do not always get along, and what they print is shown only if they fail.
"""

import importlib
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

_FOLDER = Path(__file__).parent
_WHITE = 16.0


def write(framework: str, repository: Path) -> None:
    """Writes the models of a framework, which has to be installed. Raises what the framework does."""
    shutil.copytree(
        _FOLDER / "variants" / framework,
        repository,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what frameworks think of their own parts
        _WRITERS[framework](repository)


def _version(repository: Path, model: str) -> Path:
    folder = repository / model / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tensorflow(repository: Path) -> None:
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    weights = np.load(_FOLDER / "weights.npz")
    image = keras.Input([64], name="IMAGE")
    hidden = keras.layers.Dense(96, activation="relu", name="hidden")
    last = keras.layers.Dense(10, name="scores")
    scores = last(hidden(keras.layers.Rescaling(1 / _WHITE)(image)))
    label = keras.ops.cast(keras.ops.argmax(scores, axis=1, keepdims=True), "int64")
    network = keras.Model(image, {"PROBABILITIES": keras.ops.softmax(scores), "LABEL": label})
    hidden.set_weights([weights["w1"], weights["b1"]])
    last.set_weights([weights["w2"], weights["b2"]])
    network.export(str(_version(repository, "digits_keras") / "model.savedmodel"), verbose=False)

    def named(IMAGE: object) -> list[object]:
        return [tf.identity(tensor, name=name) for name, tensor in network(IMAGE).items()]

    function = tf.function(named).get_concrete_function(tf.TensorSpec([None, 64], tf.float32, "IMAGE"))
    graph = convert_variables_to_constants_v2(function).graph.as_graph_def()
    (_version(repository, "digits_graphdef") / "model.graphdef").write_bytes(graph.SerializeToString())


def _torch(repository: Path) -> None:
    import torch

    weights = np.load(_FOLDER / "weights.npz")
    state = {
        "hidden.weight": weights["w1"].T,
        "hidden.bias": weights["b1"],
        "scores.weight": weights["w2"].T,
        "scores.bias": weights["b2"],
    }
    # Contiguous: a transposed view would be saved as such.
    tensors = {name: torch.from_numpy(array.copy(order="C")) for name, array in state.items()}
    torch.save(tensors, _version(repository, "digits_torch") / "model.pt")


def _openvino(repository: Path) -> None:
    # First: it sees to it that OpenVINO does not report what is converted.
    importlib.import_module("naiad.backends.openvino")
    import openvino as ov

    network = ov.convert_model(str(_FOLDER / "repository" / "digits" / "1" / "model.onnx"))
    ov.save_model(network, str(_version(repository, "digits_openvino") / "model.xml"), compress_to_fp16=False)


_WRITERS: dict[str, Callable[[Path], None]] = {"tensorflow": _tensorflow, "torch": _torch, "openvino": _openvino}

if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
