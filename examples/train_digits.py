"""Trains the classifier of the example `digits` and writes it as ONNX.

    python examples/train_digits.py [model.onnx]      # needs scikit-learn and onnx

Without a path it replaces the model in the package. The result is the same each time on the same versions of
scikit-learn, numpy and onnx.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.neural_network import MLPClassifier

from naiad import examples
from naiad.examples.digits import holdout, training

PACKAGED = Path(examples.__file__).parent / "repository" / "digits" / "1" / "model.onnx"
WHITE = 16.0


def train() -> MLPClassifier:
    images, labels = training()
    network = MLPClassifier(hidden_layer_sizes=(96,), alpha=0.5, max_iter=400, random_state=0)
    return network.fit(images.reshape(-1, 64) / WHITE, labels)


def export(network: MLPClassifier) -> onnx.ModelProto:
    """IMAGE [-1, 64], FP32 from 0 to 16, to PROBABILITIES [-1, 10], FP32, and LABEL [-1, 1], INT64."""

    def constant(name: str, values: Any) -> TensorProto:
        return numpy_helper.from_array(np.asarray(values, np.float32), name)

    (w1, w2), (b1, b2) = network.coefs_, network.intercepts_
    graph = helper.make_graph(
        nodes=[
            helper.make_node("Div", ["IMAGE", "white"], ["scaled"]),
            helper.make_node("Gemm", ["scaled", "w1", "b1"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("Gemm", ["active", "w2", "b2"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["PROBABILITIES"], axis=1),
            helper.make_node("ArgMax", ["scores"], ["LABEL"], axis=1, keepdims=1),
        ],
        name="digits",
        inputs=[helper.make_tensor_value_info("IMAGE", TensorProto.FLOAT, ["batch", 64])],
        outputs=[
            helper.make_tensor_value_info("PROBABILITIES", TensorProto.FLOAT, ["batch", 10]),
            helper.make_tensor_value_info("LABEL", TensorProto.INT64, ["batch", 1]),
        ],
        initializer=[constant("white", WHITE), *map(constant, ("w1", "b1", "w2", "b2"), (w1, b1, w2, b2))],
    )
    # An opset and a format that every onnxruntime of the last years reads.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED
    network = train()
    images, labels = holdout()
    print(f"{network.score(images.reshape(-1, 64) / WHITE, labels):.1%} of {len(labels)} unseen digits are right")
    target.write_bytes(export(network).SerializeToString(deterministic=True))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
