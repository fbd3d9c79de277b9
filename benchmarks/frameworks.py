"""ONNX graphs of `models` as models of other frameworks, with the same weights.

    python -m benchmarks.frameworks torch|tensorflow MODEL.onnx FOLDER

A process of its own, so that no framework is loaded into the benchmark. Knows the operators that the graphs have.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Operator = Callable[..., Any]


def compute(graph: onnx.GraphProto, operators: Mapping[str, Operator], values: dict[str, Any]) -> Any:
    """OUTPUT0 of a graph: each operator gets its inputs, and its attributes by name."""
    for node in graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        values[node.output[0]] = operators[node.op_type](*(values[name] for name in node.input), **attributes)
    return values["OUTPUT0"]


def weights(graph: onnx.GraphProto) -> dict[str, Any]:
    return {tensor.name: np.array(numpy_helper.to_array(tensor)) for tensor in graph.initializer}


def torch(graph: onnx.GraphProto, folder: Path) -> None:
    """`model.pt`, TorchScript."""
    import torch
    from torch.nn import functional

    operators: dict[str, Operator] = {
        "Conv": lambda x, w, b, strides, pads, **_: functional.conv2d(x, w, b, strides, pads[:2]),
        "MaxPool": lambda x, kernel_shape, strides, pads: functional.max_pool2d(x, kernel_shape, strides, pads[:2]),
        "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
        "Flatten": lambda x: x.flatten(1),
        "Gemm": lambda x, w, b: torch.addmm(b, x, w),
        "Relu": functional.relu,
        "Add": torch.add,
    }

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in weights(graph).items():
                self.register_buffer(name.replace(".", "_"), torch.from_numpy(array))

        def forward(self, INPUT0: Any) -> Any:
            values = {tensor.name: getattr(self, tensor.name.replace(".", "_")) for tensor in graph.initializer}
            return compute(graph, operators, {**values, "INPUT0": INPUT0})

    with torch.inference_mode():
        torch.jit.trace(Network().eval(), torch.zeros(1, 3, 224, 224)).save(str(folder / "model.pt"))


def tensorflow(graph: onnx.GraphProto, folder: Path) -> None:
    """`model.savedmodel`; images become NHWC at the entrance, as TensorFlow has them on CPUs."""
    import tensorflow as tf

    def padded(x: Any, pads: list[int]) -> Any:
        return tf.pad(x, [(0, 0), (pads[0], pads[2]), (pads[1], pads[3]), (0, 0)])

    operators: dict[str, Operator] = {
        "Conv": lambda x, w, b, strides, pads, **_: tf.nn.conv2d(padded(x, pads), w, strides, "VALID") + b,
        # What is pooled comes from a ReLU: zeros around it are never the largest.
        "MaxPool": lambda x, kernel_shape, strides, pads: tf.nn.max_pool2d(
            padded(x, pads), kernel_shape, strides, "VALID"
        ),
        "GlobalAveragePool": lambda x: tf.reduce_mean(x, [1, 2]),
        "Flatten": tf.identity,
        "Gemm": lambda x, w, b: tf.matmul(x, w) + b,
        "Relu": tf.nn.relu,
        "Add": tf.add,
    }
    module = tf.Module()
    module.weights = {
        name.replace(".", "_"): tf.Variable(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array)
        for name, array in weights(graph).items()
    }

    @tf.function(input_signature=[tf.TensorSpec([None, 3, 224, 224], tf.float32, "INPUT0")])  # type: ignore[untyped-decorator]
    def serve(images: Any) -> dict[str, Any]:
        values = {tensor.name: module.weights[tensor.name.replace(".", "_")] for tensor in graph.initializer}
        image = tf.transpose(images, [0, 2, 3, 1])
        return {"OUTPUT0": compute(graph, operators, {**values, "INPUT0": image})}

    tf.saved_model.save(module, str(folder / "model.savedmodel"), signatures={"serving_default": serve})


if __name__ == "__main__":
    framework, file, target = sys.argv[1:]
    {"torch": torch, "tensorflow": tensorflow}[framework](onnx.load(file).graph, Path(target))
