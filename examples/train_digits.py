"""Trains the classifiers of the example, `digits` and `digits_linear`, and writes them as ONNX.

    python examples/train_digits.py [DIR]      # needs scikit-learn and onnx

Writes <model>/1/model.onnx for both below DIR, and weights.npz, from which `naiad init --with` makes `digits` for other
frameworks. Without DIR it replaces the models in the package. The result is the same each time on the same versions of
scikit-learn, numpy and onnx.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from naiad import examples
from naiad.examples.digits import holdout, training

PACKAGE = Path(examples.__file__).parent
WHITE = 16.0

Layers = list[tuple[Any, Any]]


def train() -> dict[str, Layers]:
    """Model -> its layers, each a matrix [from, to] and an offset [to]."""
    images, labels = training()
    pixels = images.reshape(-1, 64) / WHITE
    network = MLPClassifier(hidden_layer_sizes=(96,), alpha=0.5, max_iter=400, random_state=0).fit(pixels, labels)
    linear = LogisticRegression(C=0.3, max_iter=2000).fit(pixels, labels)
    layers = {
        "digits": list(zip(network.coefs_, network.intercepts_, strict=True)),
        "digits_linear": [(linear.coef_.T, linear.intercept_)],
    }
    return {name: [(w.astype(np.float32), b.astype(np.float32)) for w, b in found] for name, found in layers.items()}


def score(layers: Layers) -> float:
    """The share of the held-out digits that it is right about."""
    images, labels = holdout()
    values = images.reshape(-1, 64) / WHITE
    for index, (w, b) in enumerate(layers):
        values = (np.maximum(values, 0) if index else values) @ w + b
    return float((values.argmax(axis=1) == labels).mean())


def export(name: str, layers: Layers) -> onnx.ModelProto:
    """IMAGE [-1, 64], FP32 from 0 to 16, to PROBABILITIES [-1, 10], FP32, and LABEL [-1, 1], INT64."""
    nodes = [helper.make_node("Div", ["IMAGE", "white"], ["scaled"])]
    constants = [numpy_helper.from_array(np.asarray(WHITE, np.float32), "white")]
    last = "scaled"
    for number, (w, b) in enumerate(layers, 1):
        constants += [numpy_helper.from_array(w, f"w{number}"), numpy_helper.from_array(b, f"b{number}")]
        result = "scores" if number == len(layers) else f"hidden{number}"
        nodes.append(helper.make_node("Gemm", [last, f"w{number}", f"b{number}"], [result]))
        last = result
        if number < len(layers):
            last = f"active{number}"
            nodes.append(helper.make_node("Relu", [result], [last]))
    nodes += [
        helper.make_node("Softmax", ["scores"], ["PROBABILITIES"], axis=1),
        helper.make_node("ArgMax", ["scores"], ["LABEL"], axis=1, keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        name,
        inputs=[helper.make_tensor_value_info("IMAGE", TensorProto.FLOAT, ["batch", 64])],
        outputs=[
            helper.make_tensor_value_info("PROBABILITIES", TensorProto.FLOAT, ["batch", 10]),
            helper.make_tensor_value_info("LABEL", TensorProto.INT64, ["batch", 1]),
        ],
        initializer=constants,
    )
    # An opset and a format that every onnxruntime of the last years reads.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    repository, weights = PACKAGE / "repository", PACKAGE / "weights.npz"
    if len(sys.argv) > 1:
        repository = Path(sys.argv[1])
        weights = repository / "weights.npz"
    trained = train()
    for name, layers in trained.items():
        target = repository / name / "1" / "model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(export(name, layers).SerializeToString(deterministic=True))
        print(f"{target}: right about {score(layers):.1%} of the digits it has not seen")
    (w1, b1), (w2, b2) = trained["digits"]
    np.savez(weights, w1=w1, b1=b1, w2=w2, b2=b2)
    print(weights)


if __name__ == "__main__":
    main()
