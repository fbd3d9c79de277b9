"""Ragged batches and what batches do with bad requests, through a server that runs ONNX models."""

import numpy as np
import onnx
import pytest
import tritonclient.http
from onnx import TensorProto, helper
from served import Repository, Server, error_of, put
from tritonclient.utils import np_to_triton_dtype

RAGGED = """
backend: "onnxruntime"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [
  { name: "doubled" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "ends" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "shape" data_type: TYPE_FP32 dims: [ 1 ] }
]
batch_input [
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "end" data_type: TYPE_FP32 source_input: "x" },
  { kind: BATCH_ITEM_SHAPE target_name: "item" data_type: TYPE_FP32 source_input: "x" }
]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "doubled" source_input: "x" } ]
dynamic_batching { max_queue_delay_microseconds: 100000 }
"""


def ragged() -> bytes:
    """Doubles; says where the elements of each request end in the batch, and its shape."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "x"], ["doubled"]),
            helper.make_node("Unsqueeze", ["end", "axis"], ["ends"]),
            helper.make_node("Identity", ["item"], ["shape"]),
        ],
        "ragged",
        [
            value("x", TensorProto.FLOAT, ["n"]),
            value("end", TensorProto.FLOAT, ["batch"]),
            value("item", TensorProto.FLOAT, ["batch", 1]),
        ],
        [
            value("doubled", TensorProto.FLOAT, ["n"]),
            value("ends", TensorProto.FLOAT, ["batch", 1]),
            value("shape", TensorProto.FLOAT, ["batch", 1]),
        ],
        [helper.make_tensor("axis", TensorProto.INT64, [1], [1])],
    )
    return saved(graph)


def text() -> bytes:
    value = helper.make_tensor_value_info
    names = {"x": TensorProto.STRING, "y": TensorProto.STRING}
    shaped = {name: value(name, kind, ["batch", 1]) for name, kind in names.items()}
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "text", [shaped["x"]], [shaped["y"]])
    return saved(graph)


def saved(graph: onnx.GraphProto) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # The first three requests of each model are one batch.
        patch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
        repository = Repository(tmp_path_factory.mktemp("models"))
        put(repository.onnx("ragged", ragged()) / "config.pbtxt", RAGGED)
        repository.onnx("text", text())
        with Server(repository).started() as server:
            yield server


def infer(server, model, array):
    tensor = tritonclient.http.InferInput("x", list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports[0]}")
    try:
        result = client.infer(model, [tensor])
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}
    finally:
        client.close()


def test_requests_of_different_shapes_share_a_batch(server):
    sizes = (2, 3, 4)
    answers = [server.ask(infer, server, "ragged", np.full((1, size), size, np.float32)) for size in sizes]
    found = {int(answer.result()["shape"].item()): answer.result() for answer in answers}
    assert {size: answer["doubled"].tolist() for size, answer in found.items()} == {
        size: [[size * 2] * size] for size in sizes
    }
    # Where they end says in which order they came, and that they came together.
    ends = sorted((answer["ends"].item(), size) for size, answer in found.items())
    assert [end for end, _ in ends] == np.cumsum([size for _, size in ends]).tolist()
    assert ends[-1][0] == sum(sizes)


def test_text_that_is_none_fails_alone(server):
    texts = [b"one", b"\xff\xfe", b"three"]
    answers = [server.ask(infer, server, "text", np.array([[value]], object)) for value in texts]
    assert answers[0].result()["y"].item() == b"one"
    assert "which is not UTF-8" in error_of(answers[1].result)
    assert answers[2].result()["y"].item() == b"three"
