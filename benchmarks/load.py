"""The load: outside programs that send prepared requests (wrk for HTTP, h2load for gRPC and for fixed rates).

What needs NVIDIA's client, streams, runs in a process of its own too (`benchmarks.stream`). All run on one core.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.utils import shared_memory

from benchmarks.bodies import Arrays, Body, encode
from benchmarks.servers import GRPC_INFER, Running

#: Debian package of each program.
PROGRAMS = {"wrk": "wrk", "h2load": "nghttp2-client"}
#: Requests of each sequence, and responses to each request of a stream.
SEQUENCE_LENGTH, RESPONSES = 10, 100
#: Connections that share a fixed rate; one of them can only send when its last request is answered.
RATE_CONNECTIONS = 64


@dataclass(frozen=True)
class Measurement:
    """`value` in the workload's unit, 0 where there was no answer in time; `requests` as the generator counted them.

    `cpu_us` is the CPU time that the server took for each answer, `batch` the requests of an execution.
    """

    value: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    requests: int = 0
    cpu_us: float | None = None
    batch: float | None = None


@dataclass(frozen=True)
class Task:
    """What to send where. `level` is the number of requests in flight or, in open loop, per second."""

    running: Running
    form: str
    inputs: Arrays
    expected: Arrays
    level: int
    seconds: int
    core: int

    @property
    def url(self) -> str:
        return f"http://localhost:{self.running.place.http_port}{self.running.infer_path}"


def install_programs() -> None:
    """Gets what is missing from Debian. Raises SystemExit with what to do where that is not possible."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not missing:
        return
    try:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"the benchmark needs {' and '.join(missing)}, and installing them failed ({error}). "
            f"Install them by hand, on Debian or Ubuntu: sudo apt-get install {' '.join(missing)}"
        ) from error


def closed_loop(task: Task) -> Measurement:
    """Keeps `level` requests in flight: with wrk, or for gRPC with h2load, up to 8 of them on each connection."""
    form = task.running.server.form(task.form)
    body = encode(form, task.inputs, task.running.model)
    if form == "grpc":
        streams = min(task.level, 8)
        return _h2load_grpc(task, body, f"--clients={task.level // streams}", f"--max-concurrent-streams={streams}")
    return _wrk_body(task, body)


def open_loop(task: Task) -> Measurement:
    """Sends `level` requests per second, however fast the answers come."""
    form = task.running.server.form(task.form)
    body = encode(form, task.inputs, task.running.model)
    if form == "grpc":
        return _h2load_grpc(task, body, "--clients=4", "--max-concurrent-streams=100", f"--rps={task.level / 4}")
    headers = [f"--header={name}: {value}" for name, value in body.headers.items()]
    rate = f"--rps={task.level / RATE_CONNECTIONS}"
    return _h2load(task, body, task.url, "--h1", f"--clients={RATE_CONNECTIONS}", rate, *headers)


def sequences(task: Task) -> Measurement:
    """Keeps `level` sequences live, each with one request in flight."""
    return _wrk(task, task.level, "sequences.lua", str(SEQUENCE_LENGTH))


def system_shared_memory(task: Task) -> Measurement:
    """Requests that only name where tensors lie in shared memory: all of them in the same two regions."""
    with _regions(task) as body:
        return _wrk_body(task, body)


def stream(task: Task) -> Measurement:
    """Responses per second over `level` streams of NVIDIA's client; latencies are those of the first response."""
    port = task.running.place.grpc_port
    numbers = (port, task.level, task.expected["OUTPUT0"].item() + 1, task.seconds)
    output = _run(task.core, sys.executable, "-m", "benchmarks.stream", task.running.model, *map(str, numbers))
    return Measurement(**json.loads(output.splitlines()[-1]))


def stream_h2load(task: Task) -> Measurement:
    """Responses per second with h2load, which spends less on a response than any client; latencies are of all of it."""
    body = encode("grpc", task.inputs, task.running.model)
    path = GRPC_INFER.replace("ModelInfer", "ModelStreamInfer")
    found = _h2load_grpc(task, body, f"--clients={task.level}", "--max-concurrent-streams=1", path=path)
    return Measurement(found.value * RESPONSES, found.p50_ms, found.p99_ms)


@contextmanager
def _regions(task: Task) -> Iterator[Body]:
    """Registers a region for the input and one for the output while the block runs; the body that names them."""
    (array,) = task.inputs.values()
    number = time.monotonic_ns()  # a server may still be writing to the regions of the run before
    tensors: dict[str, dict[str, Any]] = {}
    regions: list[Any] = []
    for name in ("INPUT0", "OUTPUT0"):
        region = f"{name}-{number}"
        regions.append(shared_memory.create_shared_memory_region(region, f"/{region}", array.nbytes))
        described = json.dumps({"key": f"/{region}", "offset": 0, "byte_size": array.nbytes}).encode()
        task.running.http("POST", f"/v2/systemsharedmemory/region/{region}/register", Body(described))
        tensors[name] = {
            "name": name,
            "parameters": {"shared_memory_region": region, "shared_memory_byte_size": array.nbytes},
        }
    try:
        shared_memory.set_shared_memory_region(regions[0], [array])
        tensors["INPUT0"] |= {"datatype": "FP32", "shape": list(array.shape)}
        request = {"inputs": [tensors["INPUT0"]], "outputs": [tensors["OUTPUT0"]]}
        body = Body(json.dumps(request).encode(), {"Content-Type": "application/json"})
        status, _, data = task.running.http("POST", task.running.infer_path, body)
        found = shared_memory.get_contents_as_numpy(regions[1], np.float32, array.shape)
        if status != 200 or not np.array_equal(found, array):
            raise RuntimeError(f"{task.running.server.name}: wrong answer through shared memory: {data[:500]!r}")
        yield body
    finally:
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)


def _run(core: int, *command: str) -> str:
    done = subprocess.run(
        ["taskset", "-c", str(core), *command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def _wrk_body(task: Task, body: Body) -> Measurement:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(body.data)
        return _wrk(task, 1, "infer.lua", file.name, *(f"{name}: {value}" for name, value in body.headers.items()))


def _wrk(task: Task, threads: int, script: str, *arguments: str) -> Measurement:
    output = _run(
        task.core, "wrk", f"--threads={threads}", f"--connections={task.level}", f"--duration={task.seconds}s",
        "--timeout=60s", f"--script={Path(__file__).parent / script}", task.url, "--", *arguments,
    )  # fmt: skip
    line = next((line for line in output.splitlines() if line.startswith("RESULT ")), "")
    if not line:
        raise RuntimeError(f"wrk reported nothing:\n{output}")
    requests, duration_us, p50_us, p99_us, errors = map(int, line.split()[1:])
    if errors:
        raise RuntimeError(f"{task.running.server.name}: {errors} failed requests\n{output}\n{task.running.log()}")
    return Measurement(requests / duration_us * 1e6, p50_us / 1000, p99_us / 1000, requests)


def _h2load_grpc(task: Task, body: Body, *options: str, path: str = GRPC_INFER) -> Measurement:
    url = f"http://localhost:{task.running.place.grpc_port}{path}"
    windows = ("--window-bits=26", "--connection-window-bits=28")
    return _h2load(
        task, body, url, *windows, "--header=content-type: application/grpc", "--header=te: trailers", *options
    )


def _h2load(task: Task, body: Body, url: str, *options: str) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        data, log = Path(folder) / "data", Path(folder) / "log"
        data.write_bytes(body.data)
        common = ["--threads=1", f"--duration={task.seconds}", f"--log-file={log}", f"--data={data}"]
        output = _run(task.core, "h2load", *common, *options, url)
        if not log.stat().st_size:
            return Measurement(0)
        rows = np.loadtxt(log, dtype=np.int64, ndmin=2)
    if (rows[:, 1] != 200).any():
        raise RuntimeError(f"{task.running.server.name}: failed requests\n{output}\n{task.running.log()}")
    start_us, took_us = rows[:, 0], rows[:, 2]
    duration_us = (start_us + took_us).max() - start_us.min()
    p50_us, p99_us = np.percentile(took_us, (50, 99))
    return Measurement(len(rows) / duration_us * 1e6, float(p50_us) / 1000, float(p99_us) / 1000, len(rows))
