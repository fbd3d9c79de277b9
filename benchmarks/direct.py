"""The framework called in a loop, one request after the other, without any server: what a server can at best come near to.

    python -m benchmarks.direct onnxruntime|openvino MODEL_FILE SECONDS THREADS

A process of its own, so that nothing of the benchmark disturbs it; prints one line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SHAPE = (1, 3, 224, 224)


def onnxruntime(file: str, threads: int) -> Callable[[Any], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options)
    return lambda array: session.run(None, {"INPUT0": array})


def openvino(file: str, threads: int) -> Callable[[Any], Any]:
    import openvino

    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(file, "CPU", hints).create_infer_request()
    return lambda array: request.infer({0: array})


def main() -> None:
    framework, file, seconds, threads = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    call = {"onnxruntime": onnxruntime, "openvino": openvino}[framework](file, threads)
    array = np.random.default_rng(0).random(SHAPE, dtype=np.float32)
    call(array)
    took_s = []
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        before = time.perf_counter()
        call(array)
        took_s.append(time.perf_counter() - before)
    p50_s, p99_s = np.percentile(took_s, (50, 99))
    value = len(took_s) / (time.perf_counter() - start)
    print(json.dumps({"value": value, "p50_ms": p50_s * 1000, "p99_ms": p99_s * 1000}))


if __name__ == "__main__":
    main()
