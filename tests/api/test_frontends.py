"""Several front-end processes: clients cannot tell. Scenarios of other files once more, and what is special here."""

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from served import Client, Gate, Repository, Server, error_of, until
from test_isolation import test_clients_that_leave_leave_nothing_behind
from test_lifecycle import (
    test_files_in_the_load_request_come_and_go,
    test_in_flight_finishes_on_its_version_while_the_model_is_reloaded,
    test_loads_and_unloads_on_request,
    test_many_loads_and_unloads_at_the_same_time,
)
from test_served_logs import models, test_access_log_in_json
from test_shutdown import (
    test_a_killed_server_leaves_no_process,
    test_what_is_in_flight_ends_before_the_server_does,
)
from test_tracing import test_a_file_shows_requests_steps_and_calls_from_models

__all__ = [
    "models",
    "test_a_file_shows_requests_steps_and_calls_from_models",
    "test_a_killed_server_leaves_no_process",
    "test_access_log_in_json",
    "test_clients_that_leave_leave_nothing_behind",
    "test_files_in_the_load_request_come_and_go",
    "test_in_flight_finishes_on_its_version_while_the_model_is_reloaded",
    "test_loads_and_unloads_on_request",
    "test_many_loads_and_unloads_at_the_same_time",
    "test_what_is_in_flight_ends_before_the_server_does",
]

#: So many new connections reach both processes, but once in 30,000 times.
MANY = 16


@pytest.fixture(scope="module", autouse=True)
def two() -> Iterator[None]:
    Server.flags = ("--frontends=2",)
    yield
    Server.flags = ()


@pytest.fixture(scope="module")
def explicit(two: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    with Server(repository, flags=("--model-control-mode=explicit",)) as server:
        server.repository = repository  # type: ignore[attr-defined]
        yield server.started()


def frontends(server: Server) -> list[int]:
    return server.named("naiad-frontend0") + server.named("naiad-frontend1")


def test_what_one_process_is_told_all_know(explicit: Server, client: Client, name: str) -> None:
    explicit.repository.doer(name)  # type: ignore[attr-defined]
    for _ in range(5):
        client.load(name)
        assert [client.do(name) for _ in range(MANY)] == [f"{name} 1"] * MANY
        client.unload(name)
        errors = {error_of(client.do, name) for _ in range(MANY)}
        assert len(errors) == 1
        assert "has no available versions" in errors.pop()


def test_a_region_is_there_for_all(explicit: Server, name: str) -> None:
    explicit.repository.echo(name)  # type: ignore[attr-defined]
    explicit.http.load(name)
    data = np.arange(16, dtype=np.float32)
    handle = shm.create_shared_memory_region("region", f"/naiad-test-{name}", 128)
    address = f"127.0.0.1:{explicit.ports[0]}"

    def infer(client: tritonclient.http.InferenceServerClient) -> None:
        tensor = tritonclient.http.InferInput("IN", [16], "FP32")
        tensor.set_shared_memory("region", 64)
        output = tritonclient.http.InferRequestedOutput("OUT")
        output.set_shared_memory("region", 64, 64)
        client.infer(name, [tensor], outputs=[output])

    try:
        with tritonclient.http.InferenceServerClient(address) as client:
            client.register_system_shared_memory("region", f"/naiad-test-{name}", 128)
            for number in range(MANY):
                shm.set_shared_memory_region(handle, [data + number])
                with tritonclient.http.InferenceServerClient(address) as other:
                    infer(other)
                np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [16], 64), data + number)
                assert [region["name"] for region in client.get_system_shared_memory_status()] == ["region"]
            client.unregister_system_shared_memory("region")
            for _ in range(MANY):
                with tritonclient.http.InferenceServerClient(address) as other:
                    assert "Unable to find shared memory region: 'region'" in error_of(infer, other)
    finally:
        shm.destroy_shared_memory_region(handle)


def test_large_tensors_and_texts_that_are_not_utf8(explicit: Server, client: Client, name: str) -> None:
    explicit.repository.echo(name)  # type: ignore[attr-defined]
    client.load(name)
    for size in (1, 5_000, 17_000_000):
        data = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(client.infer(name, "IN", data), data)
    connection = http.client.HTTPConnection("127.0.0.1", explicit.ports[0], timeout=60)
    body = b'{"id":"\xff","inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'
    connection.request("POST", f"/v2/models/{name}/infer", body)
    assert b'"id":"\xff"' in connection.getresponse().read()
    connection.request("POST", f"/v2/models/{name}/infer", body.replace(b"IN", b"\xfe"))
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"unexpected inference input '\xfe' for model" in answer.read()
    connection.close()


def test_what_is_written_is_not_told_twice(explicit: Server) -> None:
    assert explicit.log.count("Started HTTPService") == 1
    assert explicit.log.count("Started GRPCInferenceService") == 1


def test_requests_are_counted_once(explicit: Server, client: Client, name: str) -> None:
    explicit.repository.doer(name)  # type: ignore[attr-defined]
    client.load(name)
    for _ in range(MANY):
        client.do(name)
    assert client.statistics(name)["inferences"] == MANY
    assert f'nv_inference_request_success{{model="{name}",version="1"}} {MANY}\n' in explicit.metrics()


def test_a_process_that_dies_is_started_again_and_the_other_goes_on(repository: Repository, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    repository.doer("model")
    with Server(repository).started() as server:
        until(lambda: len(frontends(server)) == 2, "both have their names")
        held = server.ask(server.http.do, "model", gate.do)
        gate.reached()
        waiting = [server.ask(server.grpc.do if number % 2 else server.http.do, "model") for number in range(MANY)]
        until(lambda: server.pending("model") == MANY, "all wait")
        killed, left = frontends(server)
        os.kill(killed, signal.SIGKILL)
        server.says("front-end process 0 was killed by signal 9 (SIGKILL")
        until(lambda: server.pending("model") < MANY, "what came through it waits no more")
        gate.open()
        errors = [call.exception(60) for call in (held, *waiting)]
        assert 0 < sum(error is None for error in errors) < MANY + 1
        server.says("front-end process 0 is running again")
        until(lambda: len(frontends(server)) == 2, "there are two")
        assert left in frontends(server)
        assert {client.do("model") for client in (server.http, server.grpc) for _ in range(MANY)} == {"model 1"}
        server.stop()


def test_ports_that_the_system_chooses_are_those_of_all(repository: Repository) -> None:
    repository.doer("model")
    with Server(repository, flags=("--http-port=0", "--grpc-port=0")) as server:
        server.says("| model")
        http_port, grpc_port = (
            int(re.findall(rf"Started {name} at 127.0.0.1:(\d+) in 2 processes", server.log)[0])
            for name in ("HTTPService", "GRPCInferenceService")
        )
        for protocol in ("http", "grpc"):
            client = Client(protocol, [http_port, grpc_port])
            assert [client.do("model") for _ in range(MANY)] == ["model 1"] * MANY


def test_another_server_cannot_have_the_ports(repository: Repository) -> None:
    repository.doer("model")
    with Server(repository).started() as server:
        others = [Server(repository, flags=flags, ports=server.ports) for flags in ((), ("--frontends=1",))]
        for other in others:
            with other:
                assert other.wait() == 1
                assert f"127.0.0.1:{server.ports[1]}" in other.log
        assert server.http.do("model") == "model 1"


def test_responses_of_a_stream_come_as_they_are_made(repository: Repository) -> None:
    folder = repository.path / "counting" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(
        "import numpy as np, triton_python_backend_utils as pb_utils, time\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        for request in requests:\n"
        "            sender = request.get_response_sender()\n"
        "            for number in range(10**9):\n"
        "                if request.is_cancelled():\n"
        "                    break\n"
        "                out = pb_utils.Tensor('OUT', np.array([number], np.int32))\n"
        "                sender.send(pb_utils.InferenceResponse([out]))\n"
        "                time.sleep(0.001)\n"
        "            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n"
    )
    (folder.parent / "config.pbtxt").write_text(
        'backend: "python" model_transaction_policy { decoupled: true }\n'
        'input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
        'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
    )
    with Server(repository).started() as server:
        body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}]}
        with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60) as connection:
            text = json.dumps(body).encode()
            head = f"POST /v2/models/counting/infer_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
            connection.sendall(head.encode() + text)
            data = b""
            while b'"data":[20]' not in data:
                data += connection.recv(65536)
        # The client has left: the model hears of it, and its instance is free for the next.
        until(lambda: server.http.statistics("counting")["inferences"] == 1, "the request has ended")
