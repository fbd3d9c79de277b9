"""Bytes of requests, and arrays out of answers, in each form a server may speak. Knows no server and sends nothing.

json    the V2 protocol's JSON
binary  the same with tensors as bytes behind it
raw     one tensor's bytes and nothing else, for servers that have no protocol of their own
grpc    one gRPC message, as it lies in an HTTP/2 stream
"""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

Arrays = dict[str, NDArray[Any]]
NAMES = {"f4": "FP32", "i4": "INT32", "O": "BYTES"}
DTYPES = {"FP32": np.float32, "INT32": np.int32, "BYTES": np.object_}


@dataclass(frozen=True)
class Body:
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


def encode(form: str, arrays: Arrays, model: str = "", parameters: dict[str, Any] | None = None) -> Body:
    """A request of these arrays. `parameters` are the request's own, for the forms of HTTP."""
    if form == "raw":
        (array,) = arrays.values()
        return Body(array.tobytes(), {"Content-Type": "application/octet-stream"})
    if form == "grpc":
        data = message(arrays, model).SerializeToString()
        return Body(struct.pack(">BI", 0, len(data)) + data)
    tensors = [_tensor(name, array) for name, array in arrays.items()]
    document: dict[str, Any] = {"inputs": tensors}
    if form == "json":
        for tensor, array in zip(tensors, arrays.values(), strict=True):
            tensor["data"] = array.ravel().tolist()
        if parameters:
            document["parameters"] = parameters
        return Body(orjson.dumps(document, default=bytes.decode), {"Content-Type": "application/json"})
    parts = [_bytes(array) for array in arrays.values()]
    for tensor, part in zip(tensors, parts, strict=True):
        tensor["parameters"] = {"binary_data_size": len(part)}
    head = orjson.dumps(document | {"parameters": {"binary_data_output": True, **(parameters or {})}})
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return Body(b"".join([head, *parts]), headers)


def message(arrays: Arrays, model: str) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[_bytes(a) for a in arrays.values()])
    for name, array in arrays.items():
        request.inputs.add(**_tensor(name, array))
    return request


def decode(form: str, data: bytes, head_length: int, expected: Arrays) -> Arrays:
    """The arrays of an answer. Of `expected` only the names and dtypes of raw answers are taken."""
    if form == "raw":
        ((name, array),) = expected.items()
        return {name: np.frombuffer(data, array.dtype)}
    if form == "grpc":
        response = service_pb2.ModelInferResponse.FromString(data)
        if response.raw_output_contents:
            parts = zip(response.outputs, response.raw_output_contents, strict=True)
            return {tensor.name: _array(tensor.datatype, part) for tensor, part in parts}
        return {tensor.name: np.array(tensor.contents.fp32_contents, np.float32) for tensor in response.outputs}
    document = orjson.loads(data[:head_length] if head_length else data)
    rest, arrays = memoryview(data)[head_length:], {}
    for tensor in document["outputs"]:
        size = (tensor.get("parameters") or {}).get("binary_data_size")
        if size is None:
            arrays[tensor["name"]] = _listed(tensor)
        else:
            arrays[tensor["name"]] = _array(tensor["datatype"], bytes(rest[:size]))
            rest = rest[size:]
    return arrays


def difference(found: Arrays, expected: Arrays) -> str:
    """What is wrong with `found`; nothing if it is right. Shapes are not compared: raw answers have none."""
    for name, array in expected.items():
        if name not in found:
            return f"there is no {name} in {sorted(found)}"
        got, want = found[name].ravel(), array.ravel()
        if got.shape != want.shape:
            return f"{name} has {got.size} elements, not {want.size}"
        same = (got == want).all() if want.dtype == object else np.allclose(got, want, rtol=1e-2, atol=1e-3)
        if not same:
            return f"{name} is {got[:8]}..., not {want[:8]}..."
    return ""


def _tensor(name: str, array: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": NAMES[array.dtype.str.lstrip("<|")], "shape": list(array.shape)}


def _bytes(array: NDArray[Any]) -> bytes:
    return bytes(serialize_byte_tensor(array).item()) if array.dtype == object else array.tobytes()


def _array(datatype: str, data: bytes) -> NDArray[Any]:
    return deserialize_bytes_tensor(data) if datatype == "BYTES" else np.frombuffer(data, DTYPES[datatype])


def _listed(tensor: dict[str, Any]) -> NDArray[Any]:
    if tensor["datatype"] == "BYTES":
        return np.array([str(text).encode() for text in tensor["data"]], np.object_)
    return np.array(tensor["data"], DTYPES.get(tensor["datatype"], np.float32))
