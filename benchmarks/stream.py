"""Load on a decoupled model with NVIDIA's client, in a process of its own; prints one line of JSON.

    python -m benchmarks.stream MODEL GRPC_PORT STREAMS RESPONSES SECONDS

On each stream one request is under way, each of RESPONSES responses; they have to come complete and in order.
"""

import json
import sys
import time
from functools import partial
from queue import Queue
from typing import Any

import numpy as np
import tritonclient.grpc


def main() -> None:
    model = sys.argv[1]
    port, streams, responses, seconds = map(int, sys.argv[2:])
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[responses]], np.int32))
    arrived: Queue[tuple[int, Any, Any]] = Queue()
    clients = [tritonclient.grpc.InferenceServerClient(f"localhost:{port}") for _ in range(streams)]
    for index, client in enumerate(clients):
        client.start_stream(partial(lambda index, result, error: arrived.put((index, result, error)), index))
    sent, seen = [0.0] * streams, [0] * streams
    firsts_s: list[float] = []
    count = 0

    def send(index: int) -> None:
        seen[index], sent[index] = 0, time.perf_counter()
        clients[index].async_stream_infer(model, [tensor])

    start = time.perf_counter()
    for index in range(streams):
        send(index)
    while time.perf_counter() < start + seconds:
        index, result, error = arrived.get(timeout=60)
        if error is not None:
            raise error
        if seen[index] == 0:
            firsts_s.append(time.perf_counter() - sent[index])
            if result.as_numpy("OUTPUT0").item() != 0:
                raise RuntimeError("the first response is not the first")
        seen[index] += 1
        count += 1
        if seen[index] == responses:
            if result.as_numpy("OUTPUT0").item() != responses - 1:
                raise RuntimeError("the last response is not the last")
            send(index)
    value = count / (time.perf_counter() - start)
    for client in clients:
        client.stop_stream(cancel_requests=True)
        client.close()
    p50_s, p99_s = np.percentile(firsts_s, (50, 99))
    print(json.dumps({"value": value, "p50_ms": p50_s * 1000, "p99_ms": p99_s * 1000}))


if __name__ == "__main__":
    main()
