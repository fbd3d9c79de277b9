"""The request bodies of the benchmark say the same in each form."""

import json
import struct

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.load import SMALL, WORKLOADS, Workload, body


def test_all_forms_carry_the_same_tensor() -> None:
    text, no_head = body("json", SMALL)
    numbers = np.array(json.loads(text)["inputs"][0]["data"], np.float32)
    data, head = body("binary", SMALL)
    frame, _ = body("grpc", SMALL)
    compressed, length = struct.unpack_from(">BI", frame)
    message = service_pb2.ModelInferRequest.FromString(frame[5:])
    assert (no_head, compressed, length) == (0, 0, len(frame) - 5)
    assert json.loads(data[:head])["inputs"][0]["parameters"]["binary_data_size"] == len(data) - head == 4 * SMALL
    assert np.frombuffer(data[head:], np.float32).tobytes() == numbers.tobytes() == message.raw_input_contents[0]
    assert list(message.inputs[0].shape) == json.loads(text)["inputs"][0]["shape"] == [1, SMALL]


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.form == "grpc"], ids=str)
def test_streams_divide_the_requests_in_flight(workload: Workload) -> None:
    in_flight = workload.in_flight
    assert in_flight % min(in_flight, 8) == 0
