"""The load: prepared request bodies, and the outside programs that send them (wrk for HTTP, h2load for gRPC).

Both programs run on one core and keep a fixed number of requests in flight.
"""

import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from tritonclient.grpc import service_pb2

MODEL = "identity"
#: Debian package of each program.
PROGRAMS = {"wrk": "wrk", "h2load": "nghttp2-client"}


@dataclass(frozen=True)
class Workload:
    """`form` is json, binary (HTTP) or grpc; `elements` FP32 numbers in, and out again."""

    form: str
    elements: int
    in_flight: int

    @property
    def name(self) -> str:
        size = f"{self.elements} floats" if self.elements < 1000 else f"{self.elements * 4 / 1000:.0f} kB"
        return f"{'gRPC' if self.form == 'grpc' else f'HTTP {self.form}'}, {size}"


@dataclass(frozen=True)
class Measurement:
    """Throughput in requests/s and latency in us of one run."""

    rate: float
    p50_us: float
    p99_us: float
    requests: int


SMALL, IMAGE = 16, 3 * 224 * 224
WORKLOADS = [
    *(Workload("json", SMALL, n) for n in (1, 16, 64)),
    *(Workload("binary", SMALL, n) for n in (1, 16, 64)),
    *(Workload("grpc", SMALL, n) for n in (1, 16, 32, 64, 128)),
    *(Workload("binary", IMAGE, n) for n in (1, 16, 64)),
    *(Workload("grpc", IMAGE, n) for n in (1, 16, 64)),
]


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


def body(form: str, elements: int) -> tuple[bytes, int]:
    """A request body, and the length of the JSON in front of its binary part (0: no such part)."""
    array = np.random.default_rng(0).random((1, elements), dtype=np.float32)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, elements]}
    if form == "json":
        return orjson.dumps({"inputs": [{**tensor, "data": array.ravel().tolist()}]}), 0
    if form == "binary":
        tensor["parameters"] = {"binary_data_size": array.nbytes}
        head = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        return head + array.tobytes(), len(head)
    message = service_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[array.tobytes()])
    message.inputs.add(**tensor)
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data, 0


def send(workload: Workload, port: int, seconds: float, core: int) -> Measurement:
    """Keeps `workload.in_flight` requests in flight for `seconds`. Raises RuntimeError where a request failed."""
    with tempfile.TemporaryDirectory() as folder:
        data, json_length = body(workload.form, workload.elements)
        file = Path(folder) / "body"
        file.write_bytes(data)
        if workload.form == "grpc":
            return _h2load(workload, port, seconds, core, file)
        return _wrk(workload, port, seconds, core, file, json_length)


def _run(core: int, *command: str) -> str:
    return subprocess.run(
        ["taskset", "-c", str(core), *command], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


def _wrk(workload: Workload, port: int, seconds: float, core: int, file: Path, json_length: int) -> Measurement:
    script = Path(__file__).parent / "infer.lua"
    output = _run(
        core, "wrk", "--threads=1", f"--connections={workload.in_flight}", f"--duration={max(1, round(seconds))}s",
        "--timeout=30s", f"--script={script}", f"http://localhost:{port}/v2/models/{MODEL}/infer", "--", str(file),
        str(json_length),
    )  # fmt: skip
    line = next((line for line in output.splitlines() if line.startswith("RESULT ")), "")
    if not line:
        raise RuntimeError(f"wrk reported nothing:\n{output}")
    requests, duration_us, p50_us, p99_us, errors = map(int, line.split()[1:])
    if errors or not requests:
        raise RuntimeError(f"{workload.name}, {workload.in_flight} in flight: {errors} failed requests\n{output}")
    return Measurement(requests / duration_us * 1e6, p50_us, p99_us, requests)


def _h2load(workload: Workload, port: int, seconds: float, core: int, file: Path) -> Measurement:
    log = file.with_name("log")
    streams = min(workload.in_flight, 8)
    output = _run(
        core, "h2load", "--threads=1", f"--clients={workload.in_flight // streams}",
        f"--max-concurrent-streams={streams}", f"--duration={max(1, round(seconds))}", f"--log-file={log}",
        "--window-bits=26", "--connection-window-bits=28", f"--data={file}", "--header=content-type: application/grpc",
        "--header=te: trailers", f"http://localhost:{port}/inference.GRPCInferenceService/ModelInfer",
    )  # fmt: skip
    rows = np.loadtxt(log, dtype=np.int64, ndmin=2)
    if not rows.size or (rows[:, 1] != 200).any():
        raise RuntimeError(f"{workload.name}, {workload.in_flight} in flight: failed requests\n{output}")
    start_us, took_us = rows[:, 0], rows[:, 2]
    duration_us = (start_us + took_us).max() - start_us.min()
    p50_us, p99_us = np.percentile(took_us, (50, 99))
    return Measurement(len(rows) / duration_us * 1e6, float(p50_us), float(p99_us), len(rows))
