"""OpenVINO models in its own format, made operation by operation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from makers import ALL, Maker
from naiad.datatypes import DataType

#: Names of openvino.Type.
ELEMENT_TYPES = {
    DataType.BOOL: "boolean",
    DataType.UINT8: "u8",
    DataType.UINT16: "u16",
    DataType.UINT32: "u32",
    DataType.UINT64: "u64",
    DataType.INT8: "i8",
    DataType.INT16: "i16",
    DataType.INT32: "i32",
    DataType.INT64: "i64",
    DataType.FP16: "f16",
    DataType.FP32: "f32",
    DataType.FP64: "f64",
    DataType.BF16: "bf16",
    DataType.BYTES: "string",
}


def parameter(name: str, shape: Sequence[int], datatype: DataType = DataType.FP32, layout: str = "") -> Any:
    import openvino as ov

    made = ov.opset15.parameter(ov.PartialShape(list(shape)), getattr(ov.Type, ELEMENT_TYPES[datatype]))
    made.set_friendly_name(name)  # what is left of it where the parameter is a result too
    made.output(0).tensor.set_names({name})
    if layout:
        made.set_layout(ov.Layout(layout))
    return made


def result(name: str, node: Any, layout: str = "") -> Any:
    import openvino as ov

    made = ov.opset15.result(node)
    made.output(0).tensor.set_names({name})
    if layout:
        made.set_layout(ov.Layout(layout))
    return made


def write(path: Path, results: list[Any], parameters: list[Any]) -> None:
    import openvino as ov

    path.parent.mkdir(parents=True, exist_ok=True)
    ov.save_model(ov.Model(results, parameters, "model"), path, compress_to_fp16=False)


class OpenVinoMaker(Maker):
    backend = "openvino"
    requires = ("openvino",)
    filename = "model.xml"
    datatypes: ClassVar[frozenset[DataType]] = ALL - {DataType.BYTES, DataType.FP64}
    completes_batching = False  # the first dimension is the batch only where a layout says so
    converts_datatypes = True

    def add_sub(self, path: Path, batching: bool) -> None:
        import openvino as ov

        shape = (-1, 4) if batching else (4,)
        a, b = parameter("INPUT0", shape), parameter("INPUT1", shape)
        write(path, [result("OUTPUT0", ov.opset15.add(a, b)), result("OUTPUT1", ov.opset15.subtract(a, b))], [a, b])

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        import openvino as ov

        a = parameter("INPUT0", (-1, *dims), datatype)
        # OpenVINO's CPU computes INT64 in INT32, even where there is nothing to compute.
        same = a if datatype is DataType.INT64 else ov.opset15.squeeze(ov.opset15.unsqueeze(a, 0), 0)
        write(path, [result("OUTPUT0", same)], [a])

    def scalar(self, path: Path) -> None:
        import openvino as ov

        a = parameter("INPUT0", ())
        write(path, [result("OUTPUT0", ov.opset15.add(a, a))], [a])

    def failing(self, path: Path) -> None:
        import openvino as ov

        a = parameter("INPUT0", (-1,))
        write(path, [result("OUTPUT0", ov.opset15.reshape(a, ov.opset15.constant([2, 3]), False))], [a])
