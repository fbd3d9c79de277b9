"""The two servers under comparison, as processes on the same cores."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import triton
from benchmarks.load import MODEL

REPOSITORY = Path(__file__).parent / "repository"
START_TIMEOUT_S = 60


class Server:
    """`triton` or `naiad`, serving the repository; entered when ready, left when the process has ended."""

    def __init__(self, name: str, cores: list[int], flags: list[str]) -> None:
        self.name = name
        self.http_port, self.grpc_port, metrics_port = _free_ports(3)
        flags = [
            f"--model-repository={REPOSITORY}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={metrics_port}",
            *flags,
        ]
        variables = dict(os.environ)
        if name == "triton":
            command, variables = triton.command(flags)
        else:
            command = [str(Path(sys.executable).parent / "naiad"), *flags]
        self._command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        self._variables = variables
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=self._variables, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        limit = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.__exit__(None, None, None)
                raise SystemExit(f"{self.name} did not start ({' '.join(self._command)}):\n{self.log()}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://localhost:{self.http_port}/{path}", timeout=10) as answer:
            return json.loads(answer.read() or b"null")

    def _is_ready(self) -> bool:
        try:
            self._get(f"v2/models/{MODEL}/ready")
        except (OSError, urllib.error.URLError):
            return False
        return True

    @property
    def version(self) -> str:
        metadata = self._get("v2")
        return f"{metadata['name']} {metadata['version']}"

    def executed(self) -> dict[str, int]:
        """How many requests the model has answered and failed, and in how many executions, so far."""
        (model,) = self._get(f"v2/models/{MODEL}/stats")["model_stats"]
        infer = model["inference_stats"]
        return {
            "success": infer["success"]["count"],
            "fail": infer["fail"]["count"],
            "executions": model["execution_count"],
        }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
