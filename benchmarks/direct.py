"""The framework called in a loop, one call after the other, without any server: what a server can at best come near to.

    python -m benchmarks.direct onnxruntime|openvino|torch|tensorflow VERSION_FOLDER SECONDS THREADS IMAGES

A process of its own, so that nothing of the benchmark disturbs it; prints one line of JSON, images per second.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def onnxruntime(folder: str, threads: int) -> Callable[[Any], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", options)
    return lambda array: session.run(None, {"INPUT0": array})


def openvino(folder: str, threads: int) -> Callable[[Any], Any]:
    import openvino

    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(f"{folder}/model.onnx", "CPU", hints).create_infer_request()
    return lambda array: request.infer({0: array})


def torch(folder: str, threads: int) -> Callable[[Any], Any]:
    import torch

    torch.set_num_threads(threads)
    model = torch.jit.load(f"{folder}/model.pt").eval()

    def call(array: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(array)).numpy()

    return call


def tensorflow(folder: str, threads: int) -> Callable[[Any], Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    model = tf.saved_model.load(f"{folder}/model.savedmodel")
    signature = model.signatures["serving_default"]
    # The signature alone does not keep its variables.
    signature.model = model
    return lambda array: signature(INPUT0=tf.constant(array))["OUTPUT0"].numpy()


FRAMEWORKS = {"onnxruntime": onnxruntime, "openvino": openvino, "torch": torch, "tensorflow": tensorflow}


def main() -> None:
    framework, folder = sys.argv[1:3]
    seconds, threads, images = float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    call = FRAMEWORKS[framework](folder, threads)
    array = np.random.default_rng(0).random((images, 3, 224, 224), dtype=np.float32)
    # TorchScript compiles itself anew in its first calls.
    for _ in range(5):
        call(array)
    took_s = []
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        before = time.perf_counter()
        call(array)
        took_s.append(time.perf_counter() - before)
    p50_s, p99_s = np.percentile(took_s, (50, 99))
    value = images * len(took_s) / (time.perf_counter() - start)
    print(json.dumps({"value": value, "p50_ms": p50_s * 1000, "p99_ms": p99_s * 1000}))


if __name__ == "__main__":
    main()
