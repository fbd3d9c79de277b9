"""A server as its users see it: a process on free ports, repositories in folders, tritonclient on both protocols."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

NAIAD = Path(sys.executable).parent / "naiad"
#: In the environment of all processes of a server, whoever their parent is.
_MARK = "NAIAD_TEST_SERVER"
#: For what should happen at once, on a machine that is busy with other things.
PATIENCE_S = 60.0

#: Runs the Python text it is sent as its only input; `result` is the answer, in text.
_DOER = """
import triton_python_backend_utils as pb_utils
import numpy as np
import os, sys, time, signal, pathlib

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        version = args["model_version"]
        {initialize}

    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().item(0).decode()
            names = dict(globals(), request=request, answer="{answer}", result=None, responses=None)
            exec(text, names)
            if names["responses"] is not None:
                return names["responses"]
            result = names["answer"] if names["result"] is None else str(names["result"])
            output = pb_utils.Tensor("OUT", np.array([result], dtype=object))
            answers.append(pb_utils.InferenceResponse([output]))
        return answers
"""

DOER_CONFIG = """
backend: "python"
input [ {{ name: "DO" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
{more}
"""


class Repository:
    """A model repository, written model by model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def doer(
        self, name: str, *, version: int = 1, answer: str = "", initialize: str = "pass", config: str | None = ""
    ) -> Path:
        """A model that does what it is asked; `answer` is what it says to an empty question."""
        folder = self.path / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        # A longer text for each writing: Python takes a file of the same size and second for the same file.
        path = folder / "model.py"
        padding = "#" * (path.stat().st_size + 1 if path.exists() else 0)
        text = _DOER.format(answer=answer or f"{name} {version}", initialize=initialize)
        put(path, text + padding)
        if config is not None:
            put(self.path / name / "config.pbtxt", DOER_CONFIG.format(more=config))
        return self.path / name

    def echo(self, name: str, *, version: int = 1, dims: str = "-1", datatype: str = "FP32", config: str = "") -> Path:
        """A model that answers its input IN as OUT."""
        folder = self.path / name / str(version)
        folder.mkdir(parents=True)
        put(
            folder / "model.py",
            "import triton_python_backend_utils as pb_utils\n"
            "class TritonPythonModel:\n"
            "    def execute(self, requests):\n"
            "        return [\n"
            "            pb_utils.InferenceResponse([pb_utils.Tensor('OUT', request.inputs()[0].as_numpy())])\n"
            "            for request in requests\n"
            "        ]\n",
        )
        tensor = f"data_type: TYPE_{datatype} dims: [ {dims} ]"
        put(
            self.path / name / "config.pbtxt",
            f'backend: "python"\ninput [ {{ name: "IN" {tensor} }} ]\noutput [ {{ name: "OUT" {tensor} }} ]\n{config}',
        )
        return self.path / name

    def ensemble(self, name: str, *members: str, version: int = 1) -> Path:
        """Doers one behind the other: each does what the one before it has answered."""
        (self.path / name / str(version)).mkdir(parents=True)
        tensors = ["DO", *(f"between_{number}" for number in range(len(members) - 1)), "OUT"]
        steps = "\n".join(
            f'step [ {{ model_name: "{member}" model_version: -1 '
            f'input_map {{ key: "DO" value: "{tensors[at]}" }} output_map {{ key: "OUT" value: "{tensors[at + 1]}" }} }} ]'
            for at, member in enumerate(members)
        )
        put(
            self.path / name / "config.pbtxt",
            DOER_CONFIG.replace('backend: "python"', 'platform: "ensemble"').format(
                more=f"ensemble_scheduling {{ {steps} }}"
            ),
        )
        return self.path / name

    def onnx(self, name: str, data: bytes, version: int = 1) -> Path:
        folder = self.path / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(data)
        return self.path / name


def put(path: Path, text: str) -> None:
    """Writes a file as one step, so that nobody sees half of it."""
    half = path.with_name(f".{path.name}.half")
    half.write_text(text)
    half.replace(path)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def until(met: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Asks again until `met` is true; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := met()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return value


class Client:
    """One of the protocols. Errors are InferenceServerException. A client for each thread: that of HTTP needs it."""

    def __init__(self, protocol: str, ports: list[int]) -> None:
        self.protocol = protocol
        self._module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        self._address = f"127.0.0.1:{ports[0] if protocol == 'http' else ports[1]}"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        more = {"network_timeout": 120.0} if self.protocol == "http" else {}
        client = self._module.InferenceServerClient(self._address, **more)
        try:
            yield client
        finally:
            client.close()

    def infer(self, model: str, name: str, array: Any, version: str = "", output: str = "OUT") -> Any:
        datatype = "BYTES" if array.dtype == object else "FP32" if array.dtype == np.float32 else "UINT8"
        tensor = self._module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        with self._connected() as client:
            return client.infer(model, [tensor], model_version=version).as_numpy(output)

    def do(self, model: str, text: str = "", version: str = "") -> str:
        """Has a doer run a text; its answer."""
        return self.infer(model, "DO", np.array([text.encode()], dtype=object), version).item(0).decode()

    def load(self, model: str, **more: Any) -> None:
        with self._connected() as client:
            client.load_model(model, **more)

    def unload(self, model: str, dependents: bool = False) -> None:
        with self._connected() as client:
            client.unload_model(model, unload_dependents=dependents)

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """(name, version) -> (state, reason)"""
        with self._connected() as client:
            found = client.get_model_repository_index()
        if self.protocol == "grpc":
            return {(m.name, m.version): (m.state, m.reason) for m in found.models}
        return {(m["name"], m.get("version", "")): (m.get("state", ""), m.get("reason", "")) for m in found}

    def is_ready(self) -> bool:
        with self._connected() as client:
            return bool(client.is_server_ready())

    def is_model_ready(self, model: str, version: str = "") -> bool:
        with self._connected() as client:
            return bool(client.is_model_ready(model, version))

    def statistics(self, model: str) -> dict[str, int]:
        """Counts of the newest version: inferences, executions, requests that fail and that wait."""
        with self._connected() as client:
            if self.protocol == "http":
                found = client.get_inference_statistics(model)["model_stats"][-1]
            else:
                found = client.get_inference_statistics(model, as_json=True)["model_stats"][-1]
        ended = found["inference_stats"]
        return {
            "inferences": int(found.get("inference_count", 0)),
            "executions": int(found.get("execution_count", 0)),
            "failures": int(ended.get("fail", {}).get("count", 0)),
        }

    def config(self, model: str) -> dict[str, Any]:
        with self._connected() as client:
            if self.protocol == "http":
                return client.get_model_config(model)
            return client.get_model_config(model, as_json=True)["config"]


class Server:
    """A server process and all that come from it."""

    #: Flags of all servers.
    flags: tuple[str, ...] = ()

    def __init__(self, *repositories: Repository, flags: tuple[str, ...] = (), ports: list[int] | None = None) -> None:
        self.ports = ports or free_ports(3)
        self.http = Client("http", self.ports)
        self.grpc = Client("grpc", self.ports)
        self._mark = uuid.uuid4().hex
        self._log = open(os.path.join("/tmp", f"naiad-test-{self._mark}.log"), "w+b")  # noqa: SIM115
        os.unlink(self._log.name)
        self._threads = ThreadPoolExecutor(64)
        self.process = subprocess.Popen(
            [
                str(NAIAD),
                "serve",
                *(f"--model-repository={repository.path}" for repository in repositories),
                f"--http-port={self.ports[0]}",
                f"--grpc-port={self.ports[1]}",
                f"--metrics-port={self.ports[2]}",
                *(f"--{address}-address=127.0.0.1" for address in ("http", "grpc", "metrics")),
                *self.flags,
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, _MARK: self._mark},
        )

    def client(self, protocol: str) -> Client:
        return self.http if protocol == "http" else self.grpc

    @property
    def log(self) -> str:
        """What it has said."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def pids(self) -> list[int]:
        """All living processes of it, hosts and zygotes included, and what models have started."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    # A process that has ended and was not asked how has no environment.
                    found.append(int(entry))
        return found

    def named(self, name: str) -> list[int]:
        """Its processes that ps shows as `name`."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name[:15]:
                    found.append(pid)
        return found

    def started(self) -> "Server":
        """Waits for the end of the start. Where that does not come nothing of the server is left."""

        def is_live() -> bool:
            assert self.process.poll() is None, f"the server has ended:\n{self.log}"
            return self.is_live()

        try:
            until(is_live, "the server answers")
        except BaseException:
            print(self.log)
            self._kill()
            raise
        return self

    def is_live(self) -> bool:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=5)
        try:
            connection.request("GET", "/v2/health/live")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def pending(self, model: str, version: int = 1) -> int:
        """The requests that wait for an instance."""
        line = f'nv_inference_pending_request_count{{model="{model}",version="{version}"}} '
        return int(float(self.metrics().split(line)[1].split()[0]))

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def says(self, text: str) -> None:
        """Waits for a text in the log."""
        until(lambda: text in self.log, f"{text!r} in the log")

    def ask(self, call: Callable[..., Any], *args: Any, **more: Any) -> "Future[Any]":
        """Calls in a thread."""
        return self._threads.submit(call, *args, **more)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit status; there may be no process left of it then."""
        status = self.process.wait(timeout_s)
        until(lambda: not self.pids(), f"no process is left, there are {[_name(pid) for pid in self.pids()]}", 5)
        return status

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and self.process.poll() is None:
                assert self.stop() == 0
                # Those of hosts, where models make them, are in the log as they are.
                assert not re.search(r"^E\d{4} .*(Traceback|This is a bug)", self.log, re.MULTILINE)
        finally:
            print(self.log)
            self._kill()
            self._threads.shutdown(wait=False)
            self._log.close()

    def _kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _name(pid: int) -> str:
    try:
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)


class Gate:
    """Holds a doer until it is opened: `do` is the text to send."""

    def __init__(self, folder: Path) -> None:
        name = uuid.uuid4().hex
        self._begun = folder / f"{name}.begun"
        self._open = folder / f"{name}.open"
        self.do = (
            f"pathlib.Path({str(self._begun)!r}).touch()\n"
            f"while not os.path.exists({str(self._open)!r}): time.sleep(0.005)\n"
        )

    def reached(self) -> None:
        """Waits until the model is at the gate."""
        until(self._begun.exists, "the model has begun")

    def open(self) -> None:
        self._open.touch()


def error_of(call: Callable[..., Any], *args: Any, **more: Any) -> str:
    """The text of the error that a call ends with."""
    try:
        value = call(*args, **more)
    except InferenceServerException as error:
        return str(error.message())
    raise AssertionError(f"no error, but {value!r}")
