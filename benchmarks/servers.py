"""The servers under comparison: how each is started, and one of them as a process on the chosen cores."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from benchmarks import environments, triton
from benchmarks.bodies import Arrays, Body, decode, encode

START_TIMEOUT_S = 180
APPS = Path(__file__).parent / "peers"
V2_INFER = "/v2/models/{model}/infer"
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
NO_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class Place:
    """Where a server is to run, and what it is to serve: the models in `repository`, of which `model` is asked."""

    repository: Path
    model: str
    http_port: int
    grpc_port: int
    metrics_port: int
    flags: tuple[str, ...]


Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Server:
    """`command` gives the command line and the environment variables; `binary` is the form it knows for tensors as bytes.

    `counts`: it keeps Triton's statistics, so what the generator saw is compared with what the model did.
    """

    name: str
    command: Callable[[Place], Command]
    infer_path: str = V2_INFER
    ready_path: str = "/v2/health/ready"
    binary: str = "binary"
    counts: bool = False
    #: What its environment is made of.
    requirements: tuple[str, ...] = ()

    def form(self, form: str) -> str:
        return self.binary if form == "binary" else form


class Running:
    """A server's process, entered when it is ready, left when it has ended."""

    def __init__(self, server: Server, repository: Path, model: str, cores: list[int], flags: tuple[str, ...]) -> None:
        self.server = server
        self.model = model
        http_port, grpc_port, metrics_port = _free_ports(3)
        self.place = Place(repository, model, http_port, grpc_port, metrics_port, flags)
        #: Seconds from the start of the process until it said that it is ready.
        self.ready_s = 0.0
        command, variables = server.command(self.place)
        self._command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        self._variables = os.environ | variables
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process

    def __enter__(self) -> Self:
        start = time.monotonic()
        self._process = subprocess.Popen(
            self._command, env=self._variables, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > start + START_TIMEOUT_S:
                self.__exit__(None, None, None)
                raise RuntimeError(f"{self.server.name} did not start ({' '.join(self._command)}):\n{self.log()}")
            time.sleep(0.01)
        self.ready_s = time.monotonic() - start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):  # what it left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def _is_ready(self) -> bool:
        try:
            status, _, _ = self.http("GET", self.server.ready_path.format(model=self.model))
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def http(self, method: str, path: str, body: Body | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body of the answer."""
        connection = http.client.HTTPConnection("localhost", self.place.http_port, timeout=60)
        try:
            connection.request(method, path, body.data if body else None, body.headers if body else {})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    @property
    def infer_path(self) -> str:
        return self.server.infer_path.format(model=self.model)

    def ask(self, form: str, inputs: Arrays, expected: Arrays, parameters: dict[str, Any] | None = None) -> Arrays:
        """The answer to one request. Raises RuntimeError where there is none."""
        form = self.server.form(form)
        body = encode(form, inputs, self.model, parameters)
        if form == "grpc":
            with grpc.insecure_channel(f"localhost:{self.place.grpc_port}", NO_LIMITS) as channel:
                call = channel.unary_unary(GRPC_INFER, bytes, bytes)
                return decode(form, call(body.data[5:], timeout=60), 0, expected)
        status, headers, data = self.http("POST", self.infer_path, body)
        if status != 200:
            raise RuntimeError(f"{self.server.name} answered {status}: {data[:500]!r}\n{self.log()}")
        return decode(form, data, int(headers.get("inference-header-content-length", 0)), expected)

    def manage(self, verb: str, model: str) -> None:
        """Loads or unloads a model. Raises RuntimeError where that fails."""
        status, _, data = self.http("POST", f"/v2/repository/models/{model}/{verb}", Body(b"{}"))
        if status != 200:
            raise RuntimeError(f"{self.server.name} could not {verb} {model}: {data[:500]!r}")

    def is_loaded(self, model: str) -> bool:
        return self.http("GET", f"/v2/models/{model}/ready")[0] == 200

    def executed(self) -> dict[str, int]:
        """How many requests the model has answered and failed, and in how many executions, so far."""
        (model,) = json.loads(self.http("GET", f"/v2/models/{self.model}/stats")[2])["model_stats"]
        infer = model["inference_stats"]
        return {
            "success": infer["success"]["count"],
            "fail": infer["fail"]["count"],
            "executions": model["execution_count"],
        }

    def cpu_s(self) -> float:
        """CPU time so far of the process and all that came from it and still lives."""
        return sum(_cpu_s(pid) for pid in _family(self._process.pid))

    def memory_mb(self) -> float:
        """The proportional share of memory of the process and all that came from it."""
        return sum(_pss_kb(pid) for pid in _family(self._process.pid)) / 1000


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _family(root: int) -> list[int]:
    """The process and its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:  # the name in parentheses may hold anything
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it ended meanwhile
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _triton_flags(place: Place) -> list[str]:
    return [
        f"--model-repository={place.repository}",
        f"--http-port={place.http_port}",
        f"--grpc-port={place.grpc_port}",
        f"--metrics-port={place.metrics_port}",
        *place.flags,
    ]


def _naiad(*flags: str) -> Callable[[Place], Command]:
    return lambda place: ([str(Path(sys.executable).parent / "naiad"), *_triton_flags(place), *flags], {})


def naiad(name: str, *flags: str) -> Server:
    return Server(name, _naiad(*flags), counts=True)


def _peer(name: str, *requirements: str, binary: str, infer_path: str = "/infer", ready_path: str = "/ready") -> Server:
    """A peer whose server is `peers/NAME_app.py`, which is told everything in environment variables."""

    def command(place: Place) -> Command:
        binaries = environments.install(name, requirements)
        variables = {
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "BENCH_MODEL": place.model,
            "BENCH_FILE": str(place.repository / place.model / "1" / "model.onnx"),
            "BENCH_HTTP_PORT": str(place.http_port),
            "BENCH_GRPC_PORT": str(place.grpc_port),
            "BENCH_METRICS_PORT": str(place.metrics_port),
        }
        return [str(binaries / "python"), str(APPS / f"{name}_app.py")], variables

    return Server(name, command, infer_path, ready_path, binary, requirements=requirements)


#: What the apps of the peers use themselves.
_COMMON = ("numpy==2.4.6", "onnxruntime==1.31.1", "orjson==3.13.0")
_v2_peer = partial(_peer, infer_path=V2_INFER, ready_path="/v2/models/{model}/ready")
_PEERS = (
    _v2_peer("mlserver", "mlserver==1.7.1", "uvloop==0.21.0", *_COMMON, binary="json"),
    _v2_peer("kserve", "kserve==0.21.0", *_COMMON, binary="binary"),
    _peer("litserve", "litserve==0.2.19", *_COMMON, binary="json", ready_path="/health"),
    _peer("bentoml", "bentoml==1.4.39", *_COMMON, binary="json", ready_path="/readyz"),
    _peer("ray", "ray[serve]==2.60.0", *_COMMON, binary="raw"),
    _peer(
        "fastapi", "fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0", *_COMMON, binary="raw"
    ),
)
PEERS = tuple(server.name for server in _PEERS)
#: Those that speak the V2 protocol over gRPC too.
V2_PEERS = tuple(server.name for server in _PEERS if server.infer_path == V2_INFER)

SERVERS = {
    server.name: server
    for server in (
        Server(
            "triton", lambda place: triton.command(_triton_flags(place)), counts=True, requirements=triton.REQUIREMENTS
        ),
        naiad("naiad"),
        naiad("naiad-silent", "--allow-metrics=false"),
        naiad("naiad-logging", "--access-log=true"),
        *_PEERS,
    )
}
