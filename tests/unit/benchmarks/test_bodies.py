"""The request bodies of the benchmark say the same in each form, and answers are told right from wrong."""

import json
import struct

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.bodies import Arrays, decode, difference, encode, message

ARRAY = np.random.default_rng(0).random((1, 16), dtype=np.float32)
STRINGS = np.array([[b"one", b"", "drei\u00df".encode()]], np.object_)


def test_all_forms_carry_the_same_tensor() -> None:
    text = json.loads(encode("json", {"INPUT0": ARRAY}).data)["inputs"][0]
    binary = encode("binary", {"INPUT0": ARRAY})
    head = int(binary.headers["Inference-Header-Content-Length"])
    described = json.loads(binary.data[:head])["inputs"][0]
    frame = encode("grpc", {"INPUT0": ARRAY}, "identity").data
    compressed, length = struct.unpack_from(">BI", frame)
    request = service_pb2.ModelInferRequest.FromString(frame[5:])
    assert (compressed, length, request.model_name) == (0, len(frame) - 5, "identity")
    assert described["parameters"]["binary_data_size"] == len(binary.data) - head == ARRAY.nbytes
    assert text["shape"] == described["shape"] == list(request.inputs[0].shape) == [1, 16]
    raw = encode("raw", {"INPUT0": ARRAY}).data
    assert np.array(text["data"], np.float32).tobytes() == binary.data[head:] == request.raw_input_contents[0] == raw


def test_parameters_are_those_of_the_request() -> None:
    for form in ("json", "binary"):
        body = encode(form, {"INPUT0": ARRAY}, parameters={"sequence_id": 7})
        head = int(body.headers.get("Inference-Header-Content-Length", len(body.data)))
        assert json.loads(body.data[:head])["parameters"]["sequence_id"] == 7


@pytest.mark.parametrize("form", ["json", "binary", "grpc"])
@pytest.mark.parametrize("array", [ARRAY, STRINGS, np.array([[3]], np.int32)], ids=lambda array: array.dtype.name)
def test_answers_are_read_as_they_were_written(form: str, array: np.ndarray) -> None:
    expected: Arrays = {"OUTPUT0": array}
    if form == "grpc":
        request = message(expected, "identity")
        tensor = service_pb2.ModelInferResponse.InferOutputTensor
        outputs = [tensor(name=i.name, datatype=i.datatype, shape=i.shape) for i in request.inputs]
        raw = request.raw_input_contents
        data, head = service_pb2.ModelInferResponse(outputs=outputs, raw_output_contents=raw).SerializeToString(), 0
    else:  # an answer has outputs where a request has inputs, and is else the same
        body = encode(form, expected)
        data = body.data.replace(b'"inputs"', b'"outputs"', 1)
        head = int(body.headers.get("Inference-Header-Content-Length", -1)) + 1
    assert difference(decode(form, data, head, expected), expected) == ""


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({}, "there is no OUTPUT0 in []"),
        ({"OUTPUT0": ARRAY[:, 1:]}, "OUTPUT0 has 15 elements, not 16"),
        ({"OUTPUT0": ARRAY + 1}, "OUTPUT0 is ["),
    ],
)
def test_a_wrong_answer_is_told(found: Arrays, text: str) -> None:
    assert difference(found, {"OUTPUT0": ARRAY}).startswith(text)
