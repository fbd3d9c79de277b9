"""The models of the benchmark, all made by code: Python models from `model_code`, ONNX models with the `onnx` package.

Weights are random, but the same every time: what is measured is how fast answers come, and that they are right is seen
from the framework itself.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

CODE = Path(__file__).parent / "model_code"
#: How many models are there where the question is what many models cost.
MANY = 100


@dataclass(frozen=True)
class Model:
    """A `config.pbtxt` without its name, and what makes the model's file: model code or an ONNX graph, which `framework`
    may turn into a model of its own."""

    config: str
    code: str = ""
    graph: Callable[[], onnx.ModelProto] | None = None
    framework: str = ""

    def write(self, repository: Path, name: str) -> None:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(f'name: "{name}"\n{self.config}')
        if self.graph:
            file = version / "model.onnx"
            onnx.save_model(self.graph(), str(file))
            if self.framework:
                command = [sys.executable, "-m", "benchmarks.frameworks", self.framework, str(file), str(version)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if self.code:
            shutil.copyfile(CODE / f"{self.code}.py", version / "model.py")


def write(repository: Path, names: tuple[str, ...]) -> None:
    for name in names:
        MODELS[name].write(repository, name)


def _python(code: str, datatype: str = "FP32", dims: str = "-1", extra: str = "dynamic_batching { }") -> Model:
    config = f"""backend: "python"
max_batch_size: 64
input [ {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{extra}
"""
    return Model(config, code)


def _onnx(graph: Callable[[], onnx.ModelProto], max_batch_size: int) -> Model:
    """The tensors are left to the server to complete."""
    batching = "dynamic_batching { }\n" if max_batch_size else ""
    return Model(f'backend: "onnxruntime"\nmax_batch_size: {max_batch_size}\n{batching}', graph=graph)


def _model(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, NDArray[Any]]
) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "benchmark", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def _tensor(name: str, *shape: int | str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def add_sub() -> onnx.ModelProto:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, of 16 floats each."""
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    inputs, outputs = ([_tensor(f"{side}{index}", "n", 16) for index in (0, 1)] for side in ("INPUT", "OUTPUT"))
    return _model(nodes, inputs, outputs, {})


def mlp() -> onnx.ModelProto:
    """784 -> 256 -> 10, as for handwritten digits."""
    random = np.random.default_rng(1)
    weights = {
        "w0": random.normal(0, 0.05, (784, 256)).astype(np.float32),
        "b0": np.zeros(256, np.float32),
        "w1": random.normal(0, 0.1, (256, 10)).astype(np.float32),
        "b1": np.zeros(10, np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["INPUT0", "w0", "b0"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "w1", "b1"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["OUTPUT0"], axis=1),
    ]
    return _model(nodes, [_tensor("INPUT0", "n", 784)], [_tensor("OUTPUT0", "n", 10)], weights)


def resnet50() -> onnx.ModelProto:
    """ResNet-50 (v1.5: the stride is in the 3x3 convolution), batch normalization folded into the convolutions."""
    random = np.random.default_rng(2)
    nodes: list[Any] = []
    weights: dict[str, NDArray[Any]] = {}

    def convolution(source: str, name: str, channels: tuple[int, int], size: int, stride: int, gain: float = 2) -> str:
        inward, outward = channels
        scale = np.sqrt(gain / (inward * size * size))
        weights[f"{name}.w"] = random.standard_normal((outward, inward, size, size), np.float32) * np.float32(scale)
        weights[f"{name}.b"] = np.zeros(outward, np.float32)
        nodes.append(
            helper.make_node(
                "Conv", [source, f"{name}.w", f"{name}.b"], [name],
                kernel_shape=[size, size], strides=[stride, stride], pads=[size // 2] * 4,
            )
        )  # fmt: skip
        return name

    def relu(source: str) -> str:
        nodes.append(helper.make_node("Relu", [source], [f"{source}.relu"]))
        return f"{source}.relu"

    def bottleneck(source: str, name: str, inward: int, width: int, stride: int) -> str:
        narrow = relu(convolution(source, f"{name}.a", (inward, width), 1, 1))
        middle = relu(convolution(narrow, f"{name}.b", (width, width), 3, stride))
        # A small gain keeps the sums of sixteen blocks of random weights within FP32's comfort.
        wide = convolution(middle, f"{name}.c", (width, 4 * width), 1, 1, gain=0.2)
        if inward != 4 * width:
            source = convolution(source, f"{name}.d", (inward, 4 * width), 1, stride, gain=1)
        nodes.append(helper.make_node("Add", [wide, source], [name]))
        return relu(name)

    image = relu(convolution("INPUT0", "stem", (3, 64), 7, 2))
    nodes.append(helper.make_node("MaxPool", [image], ["pooled"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    image, inward = "pooled", 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            image = bottleneck(image, f"s{stage}.{block}", inward, width, 2 if stage and not block else 1)
            inward = 4 * width
    weights["fc.w"] = random.normal(0, 0.02, (2048, 1000)).astype(np.float32)
    weights["fc.b"] = np.zeros(1000, np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [image], ["average"]),
        helper.make_node("Flatten", ["average"], ["features"]),
        helper.make_node("Gemm", ["features", "fc.w", "fc.b"], ["OUTPUT0"]),
    ]
    return _model(nodes, [_tensor("INPUT0", "n", 3, 224, 224)], [_tensor("OUTPUT0", "n", 1000)], weights)


def _classifier(framework: str, backend: str) -> Model:
    """ResNet-50 in one instance, which has all cores, as the loop has. `framework` "" takes the ONNX file as it is."""
    config = f"""backend: "{backend}"
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1000 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ }}
"""
    return Model(config, graph=resnet50, framework=framework)


_STEP = """  {{ model_name: "step{0}" model_version: -1
    input_map {{ key: "INPUT0" value: "{1}" }} output_map {{ key: "OUTPUT0" value: "{2}" }} }}"""
_ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 64
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
ensemble_scheduling {{ step [
{_STEP.format(0, "INPUT0", "first")},
{_STEP.format(1, "first", "second")},
{_STEP.format(2, "second", "OUTPUT0")}
] }}
"""
#: Idle for long: on a busy machine the next request of a live sequence may come late.
_SEQUENCES = """sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
  { name: "SEQUENCE" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
] }
"""
_DECOUPLED = "model_transaction_policy { decoupled: true }"

MODELS = {
    "identity": _python("identity"),
    "identity_strings": _python("identity", "STRING"),
    "increment": _python("increment"),
    **{f"step{index}": _python("increment") for index in range(3)},
    "ensemble": Model(_ENSEMBLE),
    "three_calls": _python("three_calls"),
    "repeat": _python("repeat", "INT32", "1", _DECOUPLED),
    "accumulate": _python("accumulate", "INT32", "1", _SEQUENCES),
    "add_sub": _onnx(add_sub, 64),
    "mlp": _onnx(mlp, 64),
    "resnet50": _classifier("", "onnxruntime"),
    "resnet50_openvino": _classifier("", "openvino"),
    "resnet50_torch": _classifier("torch", "pytorch"),
    "resnet50_tensorflow": _classifier("tensorflow", "tensorflow"),
    **{f"onnx{index}": _onnx(add_sub, 64) for index in range(MANY)},
    **{f"python{index}": _python("identity") for index in range(MANY)},
}
