"""KServe's Python server: HTTP and gRPC of the V2 protocol, no batching of its own."""

import os
from typing import Any

import kserve
import numpy as np
from kserve import InferOutput, InferRequest, InferResponse
from kserve.utils.numpy_codec import from_np_dtype
from model import HTTP_PORT, NAME, load


class Model(kserve.Model):
    def __init__(self) -> None:
        super().__init__(NAME)
        self.run = load()
        self.ready = True

    def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        outputs = self.run({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        tensors = []
        for name, array in outputs.items():
            tensor = InferOutput(name, list(array.shape), from_np_dtype(array.dtype))
            binary = payload.from_grpc or payload.use_binary_outputs
            tensor.set_data_from_numpy(np.ascontiguousarray(array), binary_data=binary)
            tensors.append(tensor)
        return InferResponse(payload.id or NAME, NAME, tensors)


grpc_port = int(os.environ["BENCH_GRPC_PORT"])
kserve.ModelServer(http_port=HTTP_PORT, grpc_port=grpc_port, enable_latency_logging=False).start([Model()])
