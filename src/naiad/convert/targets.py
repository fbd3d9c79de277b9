"""Has the frameworks' converters write the result. In the converting process."""

import importlib
import inspect
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from naiad.backends.api import Array, ConfigDict
from naiad.convert.job import Job
from naiad.convert.sources import Source, keras_input
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument, NaiadError

#: The newest that tf2onnx writes.
_TF_OPSET = 18
#: Above this, weights go to a file beside model.onnx: a file of protobuf has at most 2 GiB.
_EXTERNAL_BYTES = 1_500_000_000


def write(
    job: Job, source: Source, path: Path, example: Mapping[str, Array], answer: Mapping[str, Array]
) -> ConfigDict:
    """Writes `path`. `example` is what the source has just been run on, `answer` what it answered. Returns what of
    the configuration the written file does not say, dims with the batch. Raises NaiadError, or what the converter does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what converters think of other parts of their framework
        if job.kind == "keras":
            return _from_keras(job, source, path)
        if job.kind in ("savedmodel", "onnx"):
            _from_file(job.target, source.model, path)
        elif job.kind == "sklearn":
            _from_sklearn(source, path, answer)
        else:
            return _from_torch(job, source, path, example, list(answer))
    return {}


def _configured(source: Source) -> list[dict[str, Any]]:
    """The inputs of a configuration, the batch dimension included."""
    return [{"name": it.name, "data_type": it.datatype.config_name, "dims": list(it.dims)} for it in source.inputs]


# --- TensorFlow, ONNX -------------------------------------------------------------------------------------------------


def _from_keras(job: Job, source: Source, path: Path) -> ConfigDict:
    if job.target == "graphdef":
        return _freeze(source, path)
    if job.target == "savedmodel":
        source.model.export(str(path), verbose=False)
        return {"platform": "tensorflow_savedmodel"}
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model.savedmodel"
        source.model.export(str(saved), verbose=False)
        _from_file(job.target, saved, path)
    return {}


def _freeze(source: Source, path: Path) -> ConfigDict:
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    model = source.model
    names = _keras_outputs(model)

    def call(*tensors: Any) -> list[Any]:
        by_name = dict(zip((it.name for it in model.inputs), tensors, strict=True))
        result = model(keras.tree.map_structure(lambda it: by_name[it.name], keras_input(model)))
        flat = [result[name] for name in names] if isinstance(result, dict) else keras.tree.flatten(result)
        return [tf.identity(value, name=name) for name, value in zip(names, flat, strict=True)]

    specs = [tf.TensorSpec(it.shape, it.dtype, name=it.name) for it in model.inputs]
    frozen = convert_variables_to_constants_v2(tf.function(call).get_concrete_function(*specs))
    graph = frozen.graph.as_graph_def()
    nodes = {node.name for node in graph.node}
    unknown = [name for name in (*names, *(it.name for it in model.inputs)) if name not in nodes]
    if unknown:
        raise InvalidArgument(f"TensorFlow has renamed {', '.join(unknown)} in the graph: give the layers other names")
    path.write_bytes(graph.SerializeToString())
    return {
        "platform": "tensorflow_graphdef",
        "input": _configured(source),
        "output": [{"name": name} for name in names],
    }


def _keras_outputs(model: Any) -> list[str]:
    """What a dictionary calls its outputs, else the names of the layers they come from, else as a SavedModel has them."""
    if type(model).__name__ == "Sequential":
        return [model.layers[-1].name]
    names = list(model.output) if isinstance(model.output, dict) else list(model.output_names)
    if len(set(names)) == len(names):
        return names
    return [f"output_{at}" for at in range(len(names))]  # a layer gives two of them, or is called twice


def _openvino() -> Any:
    """OpenVINO, which does not report what is converted: the backend's module sees to that."""
    importlib.import_module("naiad.backends.openvino")
    return importlib.import_module("openvino")


def _from_file(target: str, source: Path, path: Path) -> None:
    """A SavedModel or an ONNX file."""
    if target == "openvino":
        ov = _openvino()
        ov.save_model(ov.convert_model(str(source)), str(path), compress_to_fp16=False)
        return
    command = [sys.executable, "-P", "-m", "tf2onnx.convert", "--saved-model", str(source), "--output", str(path)]
    done = subprocess.run([*command, "--opset", str(_TF_OPSET)], capture_output=True, text=True, check=False)
    if done.returncode or not path.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NaiadError("tf2onnx has failed: " + "\n".join(lines[-5:]))
    _complete_tf2onnx(path)


def _complete_tf2onnx(path: Path) -> None:
    """tf2onnx copies operators it does not know into the file. Erfc, of which Keras makes an exact GELU, is 1 - erf.
    Raises NaiadError for all others."""
    import onnx
    from onnx import helper

    model = onnx.load(str(path))
    nodes: list[Any] = []
    unknown = set()
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type):
            if node.op_type != "Erfc":
                unknown.add(node.op_type)
                continue
            out = node.output[0]
            one = helper.make_tensor(f"{out}_one", onnx.TensorProto.FLOAT, [], [1.0])
            nodes += [
                helper.make_node("Erf", list(node.input), [f"{out}_erf"]),
                helper.make_node("Constant", [], [f"{out}_one"], value=one),
                helper.make_node("CastLike", [f"{out}_one", f"{out}_erf"], [f"{out}_like"]),
                helper.make_node("Sub", [f"{out}_like", f"{out}_erf"], [out]),
            ]
        else:
            nodes.append(node)
    if unknown:
        raise NaiadError(f"tf2onnx cannot convert these operators of the model: {', '.join(sorted(unknown))}")
    if len(nodes) != len(model.graph.node):
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        onnx.save(model, str(path))


# --- scikit-learn ---------------------------------------------------------------------------------------------------


def _from_sklearn(source: Source, path: Path, answer: Mapping[str, Array]) -> None:
    from skl2onnx import get_latest_tested_opset_version, to_onnx
    from skl2onnx.common import data_types as types

    kinds = {
        DataType.FP32: types.FloatTensorType,
        DataType.FP64: types.DoubleTensorType,
        DataType.INT64: types.Int64TensorType,
        DataType.INT32: types.Int32TensorType,
        DataType.BOOL: types.BooleanTensorType,
        DataType.BYTES: types.StringTensorType,
    }
    (it,) = source.inputs
    if it.datatype not in kinds:
        raise InvalidArgument(f"skl2onnx takes no {it.datatype.name}, only {', '.join(kind.name for kind in kinds)}")
    shape = [None if dim == -1 else dim for dim in it.dims]

    def converted_with(options: dict[Any, Any]) -> Any:
        # Version 3 has all that is needed; the converter's inner graphs refuse its own default.
        opsets = {"": get_latest_tested_opset_version(), "ai.onnx.ml": 3}
        types_in = [(it.name, kinds[it.datatype](shape))]
        return to_onnx(source.model, initial_types=types_in, options=options, target_opset=opsets)

    try:
        # Probabilities as a matrix: a list of dictionaries is no tensor.
        converted = converted_with({"zipmap": False})
    except NameError:
        # What has no probabilities does not know the option; of a pipeline it gets it, unless it has options of its own.
        last = source.model.steps[-1][1] if hasattr(source.model, "steps") else source.model
        converted = converted_with({id(last): {}})
    for output in converted.graph.output:
        # The converter calls two targets of a forest one.
        if output.name in answer:
            dims = output.type.tensor_type.shape.dim
            for dim, extent in zip(dims[1:], answer[output.name].shape[1:], strict=False):
                dim.dim_value = extent
    path.write_bytes(converted.SerializeToString())


# --- PyTorch ------------------------------------------------------------------------------------------------------


def _from_torch(job: Job, source: Source, path: Path, example: Mapping[str, Array], outputs: list[str]) -> ConfigDict:
    import torch

    arguments = tuple(torch.from_numpy(example[it.name].copy()) for it in source.inputs)
    if job.target == "openvino":
        _torch_to_openvino(job, source, path, arguments, outputs)
        return {}
    if job.target == "torchscript":
        if job.kind == "torchscript":
            shutil.copyfile(job.source, path)
        else:
            with torch.no_grad():
                torch.jit.trace(source.model, arguments, strict=False, check_trace=False).save(str(path))
        return {"input": _configured(source)}
    exported = _exported(job, source, arguments)
    if job.target == "pt2":
        torch.export.save(exported, str(path))
        return {}
    size = sum(it.numel() * it.element_size() for it in exported.state_dict.values())
    names = [it.name for it in source.inputs]
    program = torch.onnx.export(exported, (), input_names=names, output_names=outputs, dynamo=True, verbose=False)
    _rename_inside(program.model.graph)
    program.save(str(path), external_data=size > _EXTERNAL_BYTES)
    return {}


def _rename_inside(graph: Any) -> None:
    """Takes the names of the outputs away from other values: those of operations and weights are the exporter's, which
    gives "embedding" to both."""
    outputs = {value.name: value for value in graph.outputs}
    values = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*values, *graph.initializers.values()):
        if outputs.get(value.name, value) is not value:
            value.name = f"{value.name}__inside"


def _exported(job: Job, source: Source, arguments: tuple[Any, ...]) -> Any:
    import torch

    module = source.model
    if job.kind == "torchscript":
        # torch.export reads modules only; this is PyTorch's own way to make one of TorchScript.
        from torch._export.converter import TS2EPConverter

        with torch.no_grad():
            module = _with_names(TS2EPConverter(module, arguments).convert().module(), source)
    dynamic = tuple(
        {at: torch.export.Dim.DYNAMIC for at, dim in enumerate(it.dims) if dim == -1} or None for it in source.inputs
    )
    try:
        return torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        if not any(dynamic):
            raise
        raise NaiadError(
            f"torch.export has failed with dynamic shapes: {error}\nIf the model takes one shape only, give that with"
            " --shape, and --no-batch"
        ) from error


def _with_names(module: Any, source: Source) -> Any:
    """The module with the arguments that the source had: "x", where the converter calls it "x_1"."""
    import torch

    class Renamed(torch.nn.Module):  # type: ignore[misc]  # torch is not there for mypy
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *arguments: Any) -> Any:
            return self.inner(*arguments)

    names = ["self", *(it.name for it in source.inputs)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    Renamed.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Renamed()


def _torch_to_openvino(job: Job, source: Source, path: Path, arguments: tuple[Any, ...], outputs: list[str]) -> None:
    ov = _openvino()
    if job.kind == "pt2":
        import torch

        model = ov.convert_model(torch.export.load(job.source))
    elif job.kind == "torchscript":
        # What is scripted has no types and shapes, and OpenVINO takes its inputs in an order of its own.
        model = ov.convert_model(_exported(job, source, arguments))
    else:
        model = ov.convert_model(source.model, example_input=arguments)
    # OpenVINO opens all extents of what it has traced.
    shapes = {at: ov.PartialShape([ov.Dimension(dim) for dim in it.dims]) for at, it in enumerate(source.inputs)}
    model.reshape(shapes)
    for port, it in zip(model.inputs, source.inputs, strict=True):
        port.get_tensor().set_names({it.name})
    if len(model.outputs) == len(outputs):
        for port, name in zip(model.outputs, outputs, strict=True):
            port.get_tensor().set_names({name})
    ov.save_model(model, str(path), compress_to_fp16=False)
