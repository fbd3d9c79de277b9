"""`max_inflight_requests`: a decoupled step does not flood the one behind it."""

from pathlib import Path

import numpy as np
import tritonclient.grpc
from served import Repository, Server, put

FEED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item(0))):
                tensor = pb_utils.Tensor("NUMBER", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: Answers how many requests it has: it would take them all at once.
COUNT = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.now = 0

    async def execute(self, requests):
        self.now += len(requests)
        most = self.now
        await asyncio.sleep(0.05)
        self.now -= len(requests)
        tensors = [pb_utils.Tensor("MOST", np.array([[most]], np.float32)) for _ in requests]
        return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
"""


def model(repository: Repository, name: str, code: str, config: str) -> None:
    folder = repository.path / name / "1"
    folder.mkdir(parents=True)
    if code:
        put(folder / "model.py", code)
    put(repository.path / name / "config.pbtxt", config)


def tensors(kind: str, **names: str) -> str:
    return "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }}\n' for name, dims in names.items()
    )


def test_no_more_than_the_limit_reach_the_next_step(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models")
    decoupled = "model_transaction_policy { decoupled: true }\n"
    feed = 'backend: "python"\n' + decoupled
    model(repository, "feed", FEED, feed + tensors("input", COUNT="1") + tensors("output", NUMBER="1"))
    count = 'backend: "python" max_batch_size: 64 dynamic_batching { max_queue_delay_microseconds: 20000 }\n'
    model(repository, "count", COUNT, count + tensors("input", NUMBER="1") + tensors("output", MOST="1"))
    steps = """
    ensemble_scheduling {
      max_inflight_requests: 3
      step { model_name: "feed" model_version: -1
             input_map { key: "COUNT" value: "COUNT" } output_map { key: "NUMBER" value: "number" } }
      step { model_name: "count" model_version: -1
             input_map { key: "NUMBER" value: "number" } output_map { key: "MOST" value: "MOST" } }
    }
    """
    io = tensors("input", COUNT="1") + tensors("output", MOST="-1, 1")
    model(repository, "both", "", 'platform: "ensemble"\n' + decoupled + io + steps)
    with Server(repository).started() as server:
        counts: list[float] = []
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports[1]}") as client:
            results: list[object] = []
            client.start_stream(lambda result, error: results.append(error or result))
            tensor = tritonclient.grpc.InferInput("COUNT", [1], "FP32")
            tensor.set_data_from_numpy(np.array([12], np.float32))
            client.async_stream_infer("both", [tensor])
            client.stop_stream()
            for result in results:
                assert isinstance(result, tritonclient.grpc.InferResult), result
                counts.append(result.as_numpy("MOST").item())
    assert len(counts) == 12
    assert max(counts) <= 3
