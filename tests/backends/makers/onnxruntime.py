"""ONNX models, made with the package onnx."""

from pathlib import Path
from typing import Any

from makers import Maker
from naiad.datatypes import DataType

#: Numbers of onnx.TensorProto.
ELEMENT_TYPES = {
    DataType.BOOL: 9,
    DataType.UINT8: 2,
    DataType.UINT16: 4,
    DataType.UINT32: 12,
    DataType.UINT64: 13,
    DataType.INT8: 3,
    DataType.INT16: 5,
    DataType.INT32: 6,
    DataType.INT64: 7,
    DataType.FP16: 10,
    DataType.FP32: 1,
    DataType.FP64: 11,
    DataType.BYTES: 8,
    DataType.BF16: 16,
}

Shape = tuple[int | str | None, ...]


def tensor(name: str, shape: Shape, datatype: DataType = DataType.FP32) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], shape)


def node(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(operator, inputs, outputs, **attributes)


def write(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: Any = ()) -> None:
    import onnx
    from onnx import helper

    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


class OnnxRuntimeMaker(Maker):
    backend = "onnxruntime"
    requires = ("onnxruntime", "onnx")
    filename = "model.onnx"
    text_only = True

    def add_sub(self, path: Path, batching: bool) -> None:
        shape: Shape = ("batch", 4) if batching else (4,)
        write(
            path,
            [
                node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
                node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
            ],
            [tensor("INPUT0", shape), tensor("INPUT1", shape)],
            [tensor("OUTPUT0", shape), tensor("OUTPUT1", shape)],
        )

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        shape = ("batch", *(f"d{i}" if dim == -1 else dim for i, dim in enumerate(dims)))
        write(
            path,
            [node("Identity", ["INPUT0"], ["OUTPUT0"])],
            [tensor("INPUT0", shape, datatype)],
            [tensor("OUTPUT0", shape, datatype)],
        )

    def scalar(self, path: Path) -> None:
        write(path, [node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])], [tensor("INPUT0", ())], [tensor("OUTPUT0", ())])

    def failing(self, path: Path) -> None:
        from onnx import helper

        write(
            path,
            [node("Reshape", ["INPUT0", "shape"], ["OUTPUT0"])],
            [tensor("INPUT0", ("n",))],
            [tensor("OUTPUT0", (2, 3))],
            [helper.make_tensor("shape", ELEMENT_TYPES[DataType.INT64], [2], [2, 3])],
        )
