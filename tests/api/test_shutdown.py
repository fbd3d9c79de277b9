"""How servers end, and starts that come to nothing. `Server.wait` sees to it that no process is left, every time."""

import http.client
import os
import signal
import socket
import time

import pytest
from served import Gate, Server, error_of, free_ports, until


def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_what_is_in_flight_ends_before_the_server_does(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("model")
    repository.doer("idle")
    with Server(repository).started() as server:
        running = server.ask(server.grpc.do, "model", gate.do)
        gate.reached()
        waiting = server.ask(server.grpc.do, "model")
        until(lambda: server.pending("model") == 1, "it waits")
        server.signal(signal.SIGTERM)
        server.says("Model 'model' (version 1) has 2 in-flight inferences")
        assert not accepts(server.ports[0])
        stopping = "Server is stopping, scheduler for model has stopped accepting new inference requests"
        assert error_of(server.grpc.do, "model") == f"[request id: <id_unknown>] {stopping}"
        assert error_of(server.grpc.do, "idle") == f"[request id: <id_unknown>] {stopping}"
        assert error_of(server.grpc.is_ready) == "Server exiting"
        assert error_of(server.grpc.is_model_ready, "idle") == "Server not ready"
        assert server.pending("model") == 1
        assert server.process.poll() is None
        assert not running.done()
        gate.open()
        assert [running.result(60), waiting.result(60)] == ["model 1", "model 1"]
        assert server.wait() == 0
        assert "All models are stopped, unloading models" in server.log


@pytest.mark.parametrize("flags", [(), ("--frontends=2",)], ids=["one process", "front ends"])
def test_connections_of_http_are_served_until_they_close(repository, tmp_path, flags):
    gate = Gate(tmp_path)
    repository.doer("model")
    with Server(repository, flags=flags).started() as server:
        known = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=60)

        def status(path):
            known.request("GET", path)
            answer = known.getresponse()
            answer.read()
            return answer.status

        assert status("/v2/health/ready") == 200
        running = server.ask(server.http.do, "model", gate.do)
        gate.reached()
        server.signal(signal.SIGTERM)
        server.says("Timeout 30: Found 2 HTTP service connections")
        assert not accepts(server.ports[0])
        # Nothing else has changed.
        waiting = server.ask(server.grpc.do, "model")
        until(lambda: server.pending("model") == 1, "it waits")
        gate.open()
        assert [running.result(60), waiting.result(60)] == ["model 1", "model 1"]
        server.says("Timeout 29: Found 1 HTTP service connections")
        assert (status("/v2/health/ready"), status("/v2/models/model/ready")) == (200, 200)
        assert server.grpc.do("model") == "model 1"
        assert "in-flight" not in server.log
        known.close()
        assert server.wait() == 0
        assert server.log.count("Timeout 30: ") == 1


def test_idle_connections_of_http_keep_the_server_for_the_exit_timeout(repository):
    repository.doer("model")
    with Server(repository, flags=("--exit-timeout-secs=1",)).started() as server:
        known = http.client.HTTPConnection("127.0.0.1", server.ports[0])
        known.request("GET", "/v2/health/ready")
        known.getresponse().read()
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert "Timeout 1: Found 1 HTTP service connections" in server.log
        known.close()


def test_a_second_signal_does_not_wait_for_idle_connections(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("model")
    with Server(repository).started() as server:
        known = http.client.HTTPConnection("127.0.0.1", server.ports[0])
        known.request("GET", "/v2/health/ready")
        known.getresponse().read()
        running = server.ask(server.http.do, "model", gate.do)
        gate.reached()
        server.signal(signal.SIGINT)
        server.says("Timeout 30: Found 2 HTTP service connections")
        server.signal(signal.SIGINT)
        server.says("Model 'model' (version 1) has 1 in-flight inferences")
        gate.open()
        assert running.result(60) == "model 1"
        began = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - began < 10
        known.close()


def test_what_an_ensemble_has_begun_goes_on_and_new_ones_name_themselves(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("first")
    repository.doer("second")
    repository.ensemble("both", "first", "second")
    with Server(repository).started() as server:
        running = server.ask(server.grpc.do, "both", gate.do + "result = 'result = 7'")
        gate.reached()
        server.signal(signal.SIGTERM)
        server.says("Model 'both' (version 1) has 1 in-flight inferences")
        error = error_of(server.grpc.do, "both")
        assert error == (
            "in ensemble 'both', [request id: <id_unknown>] Server is stopping, scheduler for model has stopped accepting "
            "new inference requests"
        )
        gate.open()
        assert running.result(60) == "7"
        assert server.wait() == 0


def test_calls_of_models_go_on_while_they_have_requests_and_no_longer(repository, tmp_path):
    gate = Gate(tmp_path)
    call = (
        "pb_utils.InferenceRequest(model_name='called', inputs=[pb_utils.Tensor('DO', np.array([b''], object))], "
        "requested_output_names=['OUT']).exec()"
    )
    repository.doer("called")
    repository.doer("calling")
    repository.doer("restless")
    with Server(repository).started() as server:
        server.grpc.do(
            "restless", f"import threading\nthreading.Thread(target=lambda: [{call} for _ in iter(int, 1)]).start()"
        )
        until(lambda: server.grpc.statistics("called")["inferences"] > 0, "a thread of a model calls")
        text = f"{gate.do}result = {call}.output_tensors()[0].as_numpy()[0].decode()"
        running = server.ask(server.grpc.do, "calling", text)
        gate.reached()
        server.signal(signal.SIGTERM)
        server.says("Model 'calling' (version 1) has 1 in-flight inferences")
        gate.open()
        assert running.result(60) == "called 1"
        began = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_model_that_is_stuck_does_not_keep_the_server(repository, tmp_path, protocol):
    gate = Gate(tmp_path)
    repository.doer("model")
    with Server(repository, flags=("--exit-timeout-secs=1",)).started() as server:
        running = server.ask(server.client(protocol).do, "model", gate.do)
        gate.reached()
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 1
        assert time.monotonic() - began < 10
        assert "Exit timeout expired" in server.log
        assert running.exception(20) is not None


def test_a_model_that_never_finalizes_does_not_keep_the_server(repository):
    folder = repository.doer("model")
    with (folder / "1" / "model.py").open("a") as file:
        file.write("\n\n    def finalize(self):\n        time.sleep(1000)\n")
    with Server(repository, flags=("--exit-timeout-secs=1",)).started() as server:
        assert server.http.do("model") == "model 1"
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 1
        assert "Exit timeout expired" in server.log


def test_a_signal_during_the_start_ends_it(repository, tmp_path):
    begun = tmp_path / "begun"
    repository.doer("model", initialize=f"pathlib.Path({str(begun)!r}).touch(); time.sleep(1000)")
    with Server(repository) as server:
        until(begun.exists, "the model is being loaded")
        server.signal(signal.SIGINT)
        assert server.wait(20) == 0
        assert "Traceback" not in server.log
        assert "Signal received, shutting down" in server.log


def test_signals_in_a_row_are_one(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("model")
    with Server(repository).started() as server:
        running = server.ask(server.http.do, "model", gate.do)
        gate.reached()
        for _ in range(3):
            server.signal(signal.SIGINT)
            server.signal(signal.SIGTERM)
        until(lambda: not accepts(server.ports[0]), "no connection is accepted")
        gate.open()
        assert running.result(60) == "model 1"
        assert server.wait() == 0


@pytest.mark.parametrize("which", [0, 1, 2], ids=["http", "grpc", "metrics"])
def test_a_port_that_is_taken_is_an_error(repository, which):
    repository.doer("model")
    ports = free_ports(3)
    with socket.create_server(("127.0.0.1", ports[which])), Server(repository, ports=ports) as server:
        assert server.wait() == 1
        assert f"127.0.0.1:{ports[which]}" in server.log
        assert "Traceback" not in server.log


def test_a_killed_server_leaves_no_process(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("busy")
    repository.doer("idle")
    repository.doer("deaf", initialize="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    repository.doer("parent")
    with Server(repository).started() as server:
        server.ask(error_of, server.http.do, "busy", gate.do)
        gate.reached()
        server.http.do("parent", "import subprocess; subprocess.Popen(['sleep', '1000'])")
        assert len(server.pids()) >= 6
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL


def test_what_models_have_started_ends_with_them(repository):
    repository.doer("model")
    with Server(repository).started() as server:
        child = int(server.http.do("model", "import subprocess; result = subprocess.Popen(['sleep', '1000']).pid"))
        fork = int(server.http.do("model", "pid = os.fork()\nif not pid:\n time.sleep(1000)\nresult = pid"))
        assert {child, fork} <= set(server.pids())
        os.kill(server.named("naiad:model")[0], signal.SIGKILL)
        until(lambda: not {child, fork} & set(server.pids()), "they have ended")
        assert server.http.do("model") == "model 1"
        server.http.do("model", "import subprocess; subprocess.Popen(['sleep', '1000'])")
        assert server.stop() == 0
