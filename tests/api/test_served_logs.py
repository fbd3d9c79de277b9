"""What a server writes about requests: nothing, lines of the access log, objects of JSON."""

import contextlib
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Repository, Server, error_of, until
from tritonclient.utils import InferenceServerException


@pytest.fixture
def models(repository: Repository) -> Repository:
    repository.echo("echo")
    repository.doer("doer")
    repository.doer("other")
    repository.ensemble("both", "doer", "other")
    return repository


def accesses(server: Server, count: int) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        objects = [json.loads(line) for line in server.log.splitlines()]
        return [line for line in objects if line["message"] == "access"]

    until(lambda: len(found()) >= count, f"{count} lines of the access log")
    return found()


def test_access_log_in_json(models: Repository) -> None:
    flags = ("--access-log=true", "--log-format=json", "--log-info=false")
    with Server(models, flags=flags) as server:
        server.started()
        server.http.infer("echo", "IN", np.zeros(5, np.float32))
        server.grpc.infer("echo", "IN", np.zeros(7, np.float32), version="1")
        assert error_of(server.http.infer, "echo", "WRONG", np.zeros(5, np.float32))
        assert error_of(server.grpc.do, "doer", "raise ValueError('no')")
        server.http.do("both", "result = 'result = 5'")
        http, grpc, refused, failed, ensemble = accesses(server, 5)
        assert (http["protocol"], http["model"], http["version"], http["status"]) == ("HTTP", "echo", 1, "OK")
        assert (http["bytes_in"], http["bytes_out"], http["responses"], http["level"]) == (20, 20, 1, "INFO")
        assert 0 < http["compute_us"] <= http["total_us"]
        assert 0 <= http["queue_us"] <= http["total_us"]
        assert (grpc["protocol"], grpc["version"], grpc["bytes_in"]) == ("GRPC", 1, 28)
        assert (refused["status"], refused["compute_us"], refused["responses"]) == ("INVALID_ARG", 0, 0)
        assert (failed["protocol"], failed["status"]) == ("GRPC", "INTERNAL")
        assert (ensemble["model"], ensemble["status"], ensemble["responses"]) == ("both", "OK", 1)
        assert len(accesses(server, 5)) == 5, "the steps of an ensemble are not requests"


def test_access_log_as_text(models: Repository) -> None:
    with Server(models, flags=("--access-log=true",)) as server:
        server.started()
        server.http.infer("echo", "IN", np.zeros(5, np.float32))
        server.says('] access protocol="HTTP" model="echo" version=1 id="" status="OK" queue_us=')


def ask(server: Server, path: str, body: bytes | None = None, **headers: str) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.ports[0]}{path}", body, headers)
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=30):
        pass


def test_mistakes_of_clients_are_not_logged(models: Repository, tmp_path: Path) -> None:
    with Server(models, flags=("--model-control-mode=none",)) as server:
        server.started()
        server.says("| other")
        before = server.log
        for path, body in (
            ("/nothing", None),
            ("/v2/models/nonesuch", None),
            ("/v2/models/echo/infer", b"{"),
            ("/v2/models/echo/infer", b""),
            ("/v2/models/echo/infer", b'{"inputs":[]}'),
            ("/v2/models/echo/infer_stream", b'{"inputs":[]}'),
            ("/v2/models/echo/generate", b"[]"),
            ("/v2/models/echo/versions/99999999999999999999/infer", b"{}"),
            ("/v2/repository/models/nonesuch/load", b""),
            ("/v2/systemsharedmemory/region/r/register", b'{"key":"/nonesuch","byte_size":9}'),
            ("/v2/logging", b'{"log_file":"/tmp/x"}'),
            ("/v2/trace/setting", b'{"trace_level":["X"]}'),
        ):
            ask(server, path, body)
        ask(server, "/v2/models/echo/infer", b"\xff", **{"Content-Encoding": "gzip"})
        ask(server, "/v2/models/echo/infer", b"{}", **{"Inference-Header-Content-Length": "-1"})
        for client in (server.http, server.grpc):
            with pytest.raises(InferenceServerException):
                client.infer("echo", "WRONG", np.zeros(5, np.float32))
            with pytest.raises(InferenceServerException):
                client.infer("nonesuch", "IN", np.zeros(5, np.float32))
        # What has been logged by now is everything.
        assert server.http.infer("echo", "IN", np.zeros(2, np.float32)).shape == (2,)
        assert server.log == before
