"""Requests and answers of whole servers that take long to read, to look through or to write: they are right, and the same
however they come."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from served import Repository, Server
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

TEXTS = np.array([b"x" * (number % 7) for number in range(300_000)], object)
NUMBERS = np.arange(-1000, 400_000, dtype=np.int32)
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(scope="module", params=[(), ("--frontends=2",)], ids=["alone", "frontends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.echo("texts", datatype="STRING")
    repository.echo("numbers", datatype="INT32")
    with Server(repository, flags=request.param) as server:
        yield server.started()


@pytest.fixture
def stub(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.ports[1]}", options=UNLIMITED) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def typed(model: str, datatype: str, count: int, **contents: Any) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="IN", datatype=datatype, shape=[count], contents=pb.InferTensorContents(**contents)
    )
    return pb.ModelInferRequest(model_name=model, inputs=[tensor])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_many_strings(server: Server, protocol: str) -> None:
    client = server.client(protocol)
    np.testing.assert_array_equal(client.infer("texts", "IN", TEXTS), TEXTS)
    with pytest.raises(InferenceServerException, match="unexpected inference input 'NO' for model 'texts'"):
        client.infer("texts", "NO", TEXTS)


def test_typed_contents(stub: Any) -> None:
    answer = stub.ModelInfer(typed("numbers", "INT32", len(NUMBERS), int_contents=NUMBERS.tolist()))
    assert answer.raw_output_contents[0] == NUMBERS.tobytes()
    texts = typed("texts", "BYTES", len(TEXTS), bytes_contents=TEXTS.tolist())
    answer = stub.ModelInfer(texts)
    assert answer.raw_output_contents[0] == b"".join([len(text).to_bytes(4, "little") + text for text in TEXTS])
    texts.inputs[0].shape[0] += 1
    with pytest.raises(grpc.RpcError, match=f"expected {len(TEXTS) + 1} string elements") as caught:
        stub.ModelInfer(texts)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (answer,) = stub.ModelStreamInfer(iter([texts]))
    assert f"got {len(TEXTS)}" in answer.error_message


def test_classes(stub: Any) -> None:
    request = typed("numbers", "INT32", len(NUMBERS), int_contents=NUMBERS.tolist())
    request.outputs.add(name="OUT").parameters["classification"].int64_param = 1
    top = f"{NUMBERS[-1]}:{len(NUMBERS) - 1}".encode()
    assert stub.ModelInfer(request).raw_output_contents[0][4:] == top
    (answer,) = stub.ModelStreamInfer(iter([request]))
    assert answer.infer_response.raw_output_contents[0][4:] == top
