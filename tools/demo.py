"""`make demo`: the example repository, served and asked about images its model never saw.

Starts `naiad` on free ports, sends the held-out digits with NVIDIA's client over HTTP and gRPC from several threads, and prints how
many it got right and how fast. Exits with 1 when the server fails or too many answers are wrong.
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
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from rich.console import Console
from rich.table import Table

from naiad.examples.digits import holdout

MODEL = "digits"
LEAST_ACCURACY = 0.95
START_TIMEOUT_S = 60


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


def ask(library: ModuleType, address: str, images: Any, labels: Any, threads: int) -> Outcome:
    """Sends every image as a request of its own; each thread has a client and sends one request after the other."""

    def recognise(share: Any) -> tuple[list[int], list[float]]:
        found, times = [], []
        # The HTTP client belongs to the thread that made it.
        with library.InferenceServerClient(address) as client:
            for image in share:
                times.append(time.perf_counter())
                tensor = library.InferInput("IMAGE", [1, 64], "FP32")
                tensor.set_data_from_numpy(image.reshape(1, 64))
                result = client.infer(MODEL, [tensor], outputs=[library.InferRequestedOutput("LABEL")])
                found.append(int(result.as_numpy("LABEL").item()))
            times.append(time.perf_counter())
        return found, times

    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(recognise, np.array_split(images, threads)))
    found = np.concatenate([found for found, _ in answers])
    seconds = max(times[-1] for _, times in answers) - min(times[0] for _, times in answers)
    latencies_ms = np.concatenate([np.diff(times) for _, times in answers]) * 1000
    return Outcome(float(np.mean(found == labels)), len(images) / seconds, latencies_ms)


def show(console: Console, outcomes: dict[str, Outcome]) -> None:
    table = Table("protocol", "correct", "requests/s", "p50 ms", "p95 ms", "p99 ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for protocol, outcome in outcomes.items():
        percentiles = (f"{value:.2f}" for value in np.percentile(outcome.latencies_ms, (50, 95, 99)))
        table.add_row(protocol, f"{outcome.accuracy:.1%}", f"{outcome.rate:,.0f}", *percentiles)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="written anew each time")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="how often each image is sent")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    repository = arguments.directory / "models"
    if repository.exists():
        shutil.rmtree(repository)
    subprocess.run([Path(sys.executable).parent / "naiad", "init", "--example", repository], check=True)
    images, labels = holdout()
    images, labels = np.tile(images, (arguments.rounds, 1, 1)), np.tile(labels, arguments.rounds)
    console.print(f"sending {len(images)} images that the model was not trained on ({arguments.rounds} times each)")
    outcomes = {}
    with served(repository, arguments.directory / "server.log") as (http, grpc):
        for protocol, library, address in (("HTTP", tritonclient.http, http), ("gRPC", tritonclient.grpc, grpc)):
            outcomes[protocol] = ask(library, address, images, labels, arguments.threads)
    show(console, outcomes)
    worst = min(outcome.accuracy for outcome in outcomes.values())
    if worst < LEAST_ACCURACY:
        console.print(f"[red]only {worst:.1%} of the answers are right; {LEAST_ACCURACY:.0%} are expected[/red]")
        return 1
    console.print(
        f"The server has been stopped. Start it again with:\n\n    naiad serve --model-repository={repository}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
