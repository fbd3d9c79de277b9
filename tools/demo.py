"""`make demo`: the example repository, served and asked about images its models never saw.

Starts `naiad` on free ports with the models of all frameworks that are installed, sends the held-out digits with NVIDIA's
client over HTTP and gRPC from several threads, and prints how many each model got right and how fast. Then shows the
ensemble, the model that asks others, the stream and the sequence. Exits with 1 when anything of that fails.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from rich import box
from rich.console import Console
from rich.table import Table

from naiad.examples import FRAMEWORKS, installed
from naiad.examples.digits import as_png, holdout

LEAST_ACCURACY = 0.95
START_TIMEOUT_S = 120
BACKENDS = {
    "digits": "ONNX Runtime",
    "digits_linear": "ONNX, smaller",
    "digits_keras": "TensorFlow, Keras",
    "digits_graphdef": "TensorFlow, graph",
    "digits_torch": "PyTorch",
    "digits_openvino": "OpenVINO",
    "digits_cascade": "Python, asks both",
}


@dataclass
class Outcome:
    accuracy: float
    rate: float
    latencies_ms: Any


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


@contextmanager
def served(repository: Path, log: Path) -> Iterator[tuple[str, str]]:
    """Runs the server while the block runs; the addresses of HTTP and gRPC. Raises SystemExit if it does not start."""
    http, grpc, metrics = free_ports(3)
    command = [str(Path(sys.executable).parent / "naiad"), "serve", f"--model-repository={repository}"]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_ready(process, f"localhost:{http}", log)
        yield f"localhost:{http}", f"localhost:{grpc}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    limit = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < limit:
        with tritonclient.http.InferenceServerClient(address) as client:
            try:
                if client.is_server_ready():
                    return
            except OSError:
                pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not start; its log:\n{log.read_text(errors='replace')}")


def tensor(library: ModuleType, name: str, datatype: str, array: Any) -> Any:
    made = library.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def ask(library: ModuleType, address: str, model: str, images: Any, labels: Any, threads: int) -> Outcome:
    """Sends every image as a request of its own; each thread has a client and sends one request after the other."""

    def recognise(share: Any) -> tuple[list[int], list[float]]:
        found, times = [], []
        # The HTTP client belongs to the thread that made it.
        with library.InferenceServerClient(address) as client:
            for image in share:
                times.append(time.perf_counter())
                inputs = [tensor(library, "IMAGE", "FP32", image.reshape(1, 64))]
                result = client.infer(model, inputs, outputs=[library.InferRequestedOutput("LABEL")])
                found.append(int(result.as_numpy("LABEL").item()))
            times.append(time.perf_counter())
        return found, times

    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(recognise, np.array_split(images, threads)))
    found = np.concatenate([found for found, _ in answers])
    seconds = max(times[-1] for _, times in answers) - min(times[0] for _, times in answers)
    latencies_ms = np.concatenate([np.diff(times) for _, times in answers]) * 1000
    return Outcome(float(np.mean(found == labels)), len(images) / seconds, latencies_ms)


def show_classifiers(console: Console, http: str, grpc: str, models: list[str], rounds: int, threads: int) -> None:
    """Asks each model over both protocols. Raises SystemExit if one is wrong too often."""
    images, labels = holdout()
    images, labels = np.tile(images, (rounds, 1, 1)), np.tile(labels, rounds)
    console.print(
        f"\n{len(images)} requests to each classifier over each protocol, {threads} at a time, of one image each that it"
        " was not trained on:"
    )
    columns = ("model", "backend", "correct", "HTTP\nper s", "p50\nms", "gRPC\nper s", "p50\nms")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    wrong = []
    for model in models:
        outcomes = [
            ask(library, address, model, images, labels, threads)
            for library, address in ((tritonclient.http, http), (tritonclient.grpc, grpc))
        ]
        worst = min(outcome.accuracy for outcome in outcomes)
        if worst < LEAST_ACCURACY:
            wrong.append(model)
        speeds = (f"{it.rate:,.0f} {np.percentile(it.latencies_ms, 50):.1f}".split() for it in outcomes)
        table.add_row(model, BACKENDS[model], f"{worst:.1%}", *(cell for pair in speeds for cell in pair))
    console.print(table)
    if wrong:
        raise SystemExit(f"too many answers of {', '.join(wrong)} are wrong; {LEAST_ACCURACY:.0%} should be right")


def expect(what: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        raise SystemExit(f"{what}: got {got!r}, wanted {wanted!r}")


def show_others(console: Console, address: str) -> None:
    """The models that are no classifiers, and what they answer. Raises SystemExit if that is wrong."""
    grpc = tritonclient.grpc
    images, labels = holdout()
    with grpc.InferenceServerClient(address) as client:
        console.print("\nensemble: PNG files -> digits_png -> digits -> names (digits_from_png)")
        files = np.array([[as_png(image)] for image in images[:8]], object)
        best = grpc.InferRequestedOutput("PROBABILITIES", class_count=1)
        result = client.infer("digits_from_png", [tensor(grpc, "PNG", "BYTES", files)], outputs=[best])
        found = [text.decode().split(":") for text in result.as_numpy("PROBABILITIES").reshape(-1)]
        console.print("    " + ", ".join(f"{name} ({float(share):.0%})" for share, _, name in found))
        right = sum(int(index) == label for (_, index, _), label in zip(found, labels[:8], strict=True))
        expect("at least 7 of 8 digits right", right >= 7, True)

        console.print("\none model asks others: which of them has answered (digits_cascade)")
        asked = [
            client.infer("digits_cascade", [tensor(grpc, "IMAGE", "FP32", batch)])
            .as_numpy("MODEL")
            .reshape(-1)
            .tolist()
            for batch in np.split(images.reshape(-1, 64), 12)
        ]
        answers = [model.decode() for batch in asked for model in batch]
        counts = {model: answers.count(model) for model in sorted(set(answers))}
        console.print("    " + ", ".join(f"{model}: {count} images" for model, count in counts.items()))
        expect("who has answered", sorted(counts), ["digits", "digits_linear"])

        console.print("\na decoupled model: a response for each word, as it is made (words)")
        text = "any number of responses to one request"
        spoken = list(words(client, text))
        console.print("    " + " | ".join(spoken))
        expect("words", spoken, text.split())

        console.print("\na sequence: the server keeps its state between the requests (running_sum)")
        sums = []
        for number, value in enumerate([3.0, 4.0, 5.0]):
            inputs = [tensor(grpc, "VALUE", "FP32", np.array([[value]], np.float32))]
            flags = {"sequence_id": 7, "sequence_start": number == 0, "sequence_end": number == 2}
            sums.append(client.infer("running_sum", inputs, **flags).as_numpy("SUM").item())
        console.print("    3, 4, 5 -> " + ", ".join(f"{value:g}" for value in sums))
        expect("sums", sums, [3.0, 7.0, 12.0])


def words(client: Any, text: str) -> Iterator[str]:
    """The responses of `words` until the one that says it is the last."""
    answers: Queue[Any] = Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    try:
        inputs = [tensor(tritonclient.grpc, "text_input", "BYTES", np.array([text.encode()], object))]
        client.async_stream_infer("words", inputs, enable_empty_final_response=True)
        while True:
            answer = answers.get(timeout=30)
            if isinstance(answer, Exception):
                raise answer
            if (word := answer.as_numpy("text_output")) is not None:
                yield word.item().decode()
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return
    finally:
        client.stop_stream()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="written anew each time")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="how often each image is sent")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    repository = arguments.directory / "models"
    if repository.exists():
        shutil.rmtree(repository)
    naiad = Path(sys.executable).parent / "naiad"
    subprocess.run([naiad, "init", "--example", "--with=installed", repository], check=True)
    frameworks = installed()
    variants = [model for framework in frameworks for model in FRAMEWORKS[framework]]
    with served(repository, arguments.directory / "server.log") as (http, grpc):
        models = ["digits", *variants, "digits_linear", "digits_cascade"]
        show_classifiers(console, http, grpc, models, arguments.rounds, arguments.threads)
        show_others(console, grpc)
    missing = [framework for framework in FRAMEWORKS if framework not in frameworks]
    if missing:
        pip = f"{Path(sys.executable).parent / 'pip'} install -c constraints.txt -e '.[{','.join(missing)}]'"
        # `soft_wrap`: lines to copy stay whole.
        console.print(
            f"\nNot shown: {', '.join(missing)}. They take part after:\n\n    {pip}", markup=False, soft_wrap=True
        )
    line = f"{naiad} serve --model-repository={repository}"
    console.print(f"\nThe server has been stopped. Start it again with:\n\n    {line}\n", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
