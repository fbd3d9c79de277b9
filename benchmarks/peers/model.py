"""What the peers' apps share: the model, as fast as plain code can be, and V2's JSON for those without a protocol.

Runs in the environment of each peer, which has numpy, onnxruntime and orjson.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

Arrays = dict[str, Any]
NAME = os.environ["BENCH_MODEL"]
HTTP_PORT = int(os.environ["BENCH_HTTP_PORT"])
MAX_BATCH_SIZE = 8 if NAME == "resnet50" else 64
RAW = "application/octet-stream"
DTYPES = {"FP32": np.float32, "BYTES": np.object_}
NAMES = {"f": "FP32", "O": "BYTES"}


def load() -> Callable[[Arrays], Arrays]:
    """What maps inputs to outputs, by name: the identity, or an ONNX model with as many threads as there are cores."""
    if NAME.startswith("identity"):
        return lambda inputs: {"OUTPUT0": inputs["INPUT0"]}
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(os.environ["BENCH_FILE"], options)
    outputs = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(outputs, session.run(outputs, inputs), strict=True))


def run_batch(run: Callable[[Arrays], Arrays], requests: list[Arrays]) -> list[Arrays]:
    """Several requests, of one row each and of one shape, as one."""
    inputs = {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}
    outputs = run(inputs)
    return [{name: array[row : row + 1] for name, array in outputs.items()} for row in range(len(requests))]


def decode(document: dict[str, Any]) -> Arrays:
    return {t["name"]: np.array(t["data"], DTYPES[t["datatype"]]).reshape(t["shape"]) for t in document["inputs"]}


def decode_raw(body: bytes) -> Arrays:
    array = np.frombuffer(body, np.float32)
    return {"INPUT0": array.reshape(1, 3, 224, 224) if NAME == "resnet50" else array.reshape(1, -1)}


def encode(outputs: Arrays) -> bytes:
    tensors = [
        {
            "name": name,
            "datatype": NAMES[array.dtype.kind],
            "shape": array.shape,
            "data": array.ravel().tolist() if array.dtype == object else np.ascontiguousarray(array).ravel(),
        }
        for name, array in outputs.items()
    ]
    return orjson.dumps({"outputs": tensors}, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_raw(outputs: Arrays) -> bytes:
    (array,) = outputs.values()
    return bytes(array.tobytes())


def decode_http(content_type: str, body: bytes) -> Arrays:
    return decode_raw(body) if content_type == RAW else decode(orjson.loads(body))


def encode_http(content_type: str, outputs: Arrays) -> bytes:
    return encode_raw(outputs) if content_type == RAW else encode(outputs)
