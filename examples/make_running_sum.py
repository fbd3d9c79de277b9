"""Writes the model of the example `running_sum` as ONNX: a model with a state that the server keeps.

    python examples/make_running_sum.py [model.onnx]      # needs onnx

Without a path it replaces the model in the package.
"""

import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from naiad import examples

PACKAGED = Path(examples.__file__).parent / "repository" / "running_sum" / "1" / "model.onnx"


def running_sum() -> onnx.ModelProto:
    """VALUE, SUM_BEFORE -> SUM, SUM_AFTER, all FP32 [-1, 1]. The state comes and goes under names of its own."""
    shape = ["batch", 1]
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["SUM_BEFORE", "VALUE"], ["SUM"]),
            helper.make_node("Identity", ["SUM"], ["SUM_AFTER"]),
        ],
        "running_sum",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("VALUE", "SUM_BEFORE")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("SUM", "SUM_AFTER")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED
    target.write_bytes(running_sum().SerializeToString(deterministic=True))
    print(f"wrote {target}")
