"""Models that misbehave: an error for their requests, never for the server and never for other models."""

import contextlib
import os
import signal
import socket
import threading
import time
from functools import partial

import numpy as np
import pytest
from served import Gate, Server, error_of, until
from tritonclient.utils import InferenceServerException


def serve_on(explicit, client, name):
    """It works as if nothing had happened."""
    assert client.do(name) == f"{name} 1"
    assert client.is_ready()
    assert client.index()[name, "1"] == ("READY", "")


def host(server, name):
    """The process of a model with one instance."""
    (pid,) = server.named(f"naiad:{name}")
    return pid


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('no such day')", "no such day"),
        ("sys.exit(3)", "SystemExit"),
        ("x = bytearray(1 << 60)", "MemoryError"),
        ("responses = 5", "Expected a list"),
        ("responses = []", "do not match the number of InferenceRequest"),
        ("responses = ['x']", "Expected an 'InferenceResponse' object"),
        ("responses = [pb_utils.InferenceResponse([])] * 2", "do not match the number of InferenceRequest"),
        ("responses = [pb_utils.InferenceResponse([])]", None),
        ("responses = [pb_utils.InferenceResponse([pb_utils.Tensor('WRONG', np.zeros(1, np.int8))])]", None),
        ("responses = [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.zeros(1, np.int8))])]", None),
        ("responses = [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.array([[b'x', b'y']], object))])]", None),
    ],
    ids=[
        "raises", "exits", "allocates", "a number", "too few", "strings", "too many", "no output", "wrong name",
        "wrong dtype", "wrong shape",
    ],
)  # fmt: skip
def test_nonsense_is_an_error_of_its_request(explicit, client, name, text, message):
    explicit.repository.doer(name)
    client.load(name)
    before = host(explicit, name)
    if message is None:
        # Triton passes such answers on as they are, and so does its client.
        with contextlib.suppress(AttributeError, InferenceServerException):
            client.do(name, text)
    else:
        assert message in error_of(client.do, name, text)
    serve_on(explicit, client, name)
    assert host(explicit, name) == before
    client.unload(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("os._exit(3)", "exited with code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9"),
        ("import ctypes; ctypes.string_at(0)", "was killed by signal 11"),
        ("import ctypes; ctypes.CDLL(None).abort()", "was killed by signal 6"),
        ("os.closerange(3, 1000)", ""),
        ("os.dup2(os.open('/dev/null', os.O_RDWR), [f for f in range(3, 99) if os.path.exists(f'/proc/self/fd/{f}')][0])", ""),
    ],
    ids=["exit", "kill", "segfault", "abort", "close all", "replace one"],
)  # fmt: skip
def test_the_death_of_a_host_is_an_error_of_its_requests(explicit, client, name, text, message):
    explicit.repository.doer(name)
    client.load(name)
    before = host(explicit, name)
    error = None
    try:
        client.do(name, text)
    except InferenceServerException as problem:
        error = problem.message()
    if message:
        assert error is not None
        assert name in error
        assert message in error
        assert "it is being restarted" in error
    serve_on(explicit, client, name)
    if error is not None:
        assert host(explicit, name) != before
    client.unload(name)


def test_a_model_that_blocks_is_killed_in_time(explicit, client, name):
    explicit.repository.doer(
        name, config='parameters { key: "NAIAD_EXECUTION_TIMEOUT_SECS" value: { string_value: "1" } }'
    )
    client.load(name)
    error = error_of(client.do, name, "time.sleep(1000)")
    assert "took longer than 1 s" in error
    assert name in error
    serve_on(explicit, client, name)
    client.unload(name)


def answers(client, model):
    try:
        return client.do(model) == f"{model} 1"
    except InferenceServerException:
        return False


class Load:
    """Requests to a model in a row, until left; what came of them."""

    def __init__(self, client, model, threads):
        self._client = client
        self._model = model
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        self.errors = []
        self.ended = []

    def _run(self):
        while not self._stop.is_set():
            try:
                assert self._client.do(self._model) == f"{self._model} 1"
            except Exception as error:
                self.errors.append(str(error))
            self.ended.append(time.monotonic())

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.ended) > 10, "it runs")
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_killed_host_fails_what_is_inside_and_is_back_soon(explicit, client, name):
    explicit.repository.doer(f"{name}a")
    explicit.repository.doer(f"{name}b")
    client.load(f"{name}a")
    client.load(f"{name}b")

    def has_new_host(old):
        return explicit.named(f"naiad:{name}a") not in ([], [old])

    def has_answered(count):
        return len(killed.ended) >= count

    with Load(client, f"{name}a", 3) as killed, Load(client, f"{name}b", 2) as other:
        for count in range(3):
            before = host(explicit, f"{name}a")
            at = time.monotonic()
            os.kill(before, signal.SIGKILL)
            until(partial(has_new_host, before), "a new host")
            until(partial(has_answered, len(killed.ended) + 5), "it serves again")
            assert time.monotonic() - at < 5  # it takes a tenth of a second, on a machine that does nothing else
            assert len(killed.errors) <= count + 1
    assert not other.errors
    for error in killed.errors:
        assert f"{name}a" in error
        assert "it is being restarted" in error
    client.unload(f"{name}a")
    client.unload(f"{name}b")


def test_a_host_that_keeps_dying_is_given_up_until_it_is_loaded_again(repository):
    repository.doer("dying")
    repository.doer("other")
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with Server(repository, flags=flags).started() as server:
        client = server.grpc

        def is_given_up():
            error = error_of(client.do, "dying", "os._exit(7)")
            assert "dying" in error
            assert "exited with code 7" in error
            return "not restarted" in error

        began = time.monotonic()
        until(is_given_up, "it is given up")
        assert time.monotonic() - began > 7  # 0 + 0.5 + 1 + 2 + 4: the pauses have grown
        state, reason = client.index()["dying", "1"]
        assert state == "UNAVAILABLE"
        assert "exited with code 7" in reason
        assert not client.is_model_ready("dying")
        assert not client.is_ready()
        assert not server.http.is_ready()
        assert "exited with code 7" in error_of(server.http.do, "dying")
        assert client.do("other") == "other 1"
        client.load("dying")
        assert client.do("dying") == "dying 1"
        assert client.is_ready()
        assert client.index()["dying", "1"] == ("READY", "")


def test_a_model_that_dies_while_it_is_loaded_fails_its_load(explicit, client, name):
    explicit.repository.doer(name, initialize="os._exit(5)")
    assert "exited with code 5" in error_of(client.load, name)
    assert "exited with code 5" in client.index()[name, "1"][1]
    assert not explicit.named(f"naiad:{name}")
    client.unload(name)
    # As in Triton it is known until it has been loaded.
    assert "exited with code 5" in client.index()[name, "1"][1]
    assert not client.is_ready()
    explicit.repository.doer(name)
    client.load(name)
    assert client.is_ready()
    client.unload(name)


def test_models_survive_their_zygote(repository):
    repository.doer("first")
    repository.doer("second")
    flags = ("--model-control-mode=explicit", "--load-model=first")
    with Server(repository, flags=flags).started() as server:
        client = server.http
        (zygote,) = server.named("naiad-python")
        os.kill(zygote, signal.SIGKILL)
        until(lambda: zygote not in server.pids(), "it has ended")
        assert client.do("first") == "first 1"
        client.load("second")
        assert client.do("second") == "second 1"
        assert len(server.named("naiad-python")) == 1
        # A host whose zygote is gone is restarted by the new one.
        assert "it is being restarted" in error_of(client.do, "first", "os._exit(1)")
        assert client.do("first") == "first 1"
        # And ends with the server like any other.
        (zygote,) = server.named("naiad-python")
        os.kill(zygote, signal.SIGKILL)
        assert server.stop() == 0


def test_many_zygotes_killed_in_a_row(repository):
    repository.doer("model")
    with Server(repository, flags=("--model-control-mode=explicit",)).started() as server:
        for _ in range(3):
            server.http.load("model")
            assert server.http.do("model") == "model 1"
            for pid in server.named("naiad-python") + server.named("naiad:model"):
                os.kill(pid, signal.SIGKILL)
            until(lambda: answers(server.http, "model"), "it is back")
            server.http.unload("model")


@pytest.mark.parametrize("isolation", ["backend", "none"])
def test_other_isolations_serve_the_same(repository, isolation, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("one")
    repository.doer("two")
    repository.doer("bad", initialize="raise ValueError('bad weights')")
    flags = ("--model-control-mode=explicit", f"--isolation={isolation}")
    with Server(repository, flags=flags).started() as server:
        client = server.grpc
        client.load("one")
        client.load("two")
        assert [client.do(name) for name in ("one", "two")] == ["one 1", "two 1"]
        assert "bad weights" in error_of(client.load, "bad")
        assert "no such day" in error_of(client.do, "one", "raise ValueError('no such day')")
        running = server.ask(client.do, "one", gate.do)
        gate.reached()
        repository.doer("one", answer="new")
        client.load("one")
        assert client.do("one") == "new"
        gate.open()
        assert running.result(60) == "one 1"
        client.unload("two")
        until(lambda: client.index()["two", "1"] == ("UNAVAILABLE", "unloaded"), "it is unloaded")
        client.load("two")
        assert client.do("two") == "two 1"


# ---------------------------------------------------------------- large tensors


@pytest.mark.parametrize("mebibytes", [65, 300])
def test_batches_larger_than_the_arena(explicit, client, name, mebibytes):
    explicit.repository.echo(name, datatype="UINT8")
    client.load(name)
    sent = np.arange(mebibytes << 20, dtype=np.uint8)
    assert np.array_equal(client.infer(name, "IN", sent), sent)
    assert client.infer(name, "IN", np.zeros(3, np.uint8)).tolist() == [0, 0, 0]
    client.unload(name)


@pytest.mark.skipif(not os.environ.get("NAIAD_SLOW_TESTS"), reason="takes long: set NAIAD_SLOW_TESTS=1")
def test_a_gibibyte(explicit, client, name):
    explicit.repository.echo(name, datatype="UINT8")
    client.load(name)
    sent = np.arange(1 << 30, dtype=np.uint8)
    assert np.array_equal(client.infer(name, "IN", sent), sent)
    client.unload(name)


# ---------------------------------------------------------------- clients that leave


def open_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_clients_that_leave_leave_nothing_behind(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("model")
    with Server(repository, flags=("--model-control-mode=explicit", "--load-model=model")).started() as server:
        assert server.http.do("model") == server.grpc.do("model") == "model 1"
        until(lambda: open_files(server), "")
        before = open_files(server)
        held = server.ask(server.http.do, "model", gate.do)
        gate.reached()
        body = b'{"inputs":[{"name":"DO","shape":[1],"datatype":"BYTES","data":[""]}]}'
        head = f"POST /v2/models/model/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for number in range(200):
            with socket.create_connection(("127.0.0.1", server.ports[0])) as connection:
                # Some leave before they have sent everything, some while they wait for the answer.
                connection.sendall((head + body)[: -1 if number % 4 == 0 else None])
        until(lambda: open_files(server) <= before + 2, "all connections are closed")
        until(lambda: server.pending("model") == 0, "none of them waits any more")
        gate.open()
        assert held.result(60) == "model 1"
        assert server.http.do("model") == "model 1"
        until(lambda: open_files(server) <= before, "no descriptor is left")
        server.http.unload("model")
        until(lambda: server.http.index()["model", "1"] == ("UNAVAILABLE", "unloaded"), "no lease is left", 10)


# ---------------------------------------------------------------- models that ask the server


def test_what_a_model_has_asked_for_goes_with_its_host(explicit, client, name, tmp_path):
    gate = Gate(tmp_path)
    explicit.repository.doer(f"{name}a")
    explicit.repository.doer(f"{name}b")
    client.load(f"{name}a")
    client.load(f"{name}b")
    family = f"asked_{name}"
    client.do(
        f"{name}a",
        "sys.family = pb_utils.MetricFamily("
        f"name={family!r}, description='x', kind=pb_utils.MetricFamily.COUNTER)\n"
        "sys.metric = sys.family.Metric(labels={})\nsys.metric.increment(2)",
    )
    until(lambda: f"{family} 2" in explicit.metrics(), "the metric is shown")
    # It asks the other model, which is busy, twice: the second call waits in the queue.
    busy = explicit.ask(client.do, f"{name}b", gate.do)
    gate.reached()
    inner = "pb_utils.Tensor('DO', np.array([b''], dtype=object))"
    asking = explicit.ask(
        error_of,
        client.do,
        f"{name}a",
        f"pb_utils.InferenceRequest(model_name='{name}b', requested_output_names=['OUT'], inputs=[{inner}]).exec()",
    )
    until(lambda: explicit.pending(f"{name}b") == 1, "its call waits")
    os.kill(host(explicit, f"{name}a"), signal.SIGKILL)
    assert "it is being restarted" in asking.result(60)
    until(lambda: explicit.pending(f"{name}b") == 0, "its call is taken back")
    until(lambda: family not in explicit.metrics(), "its metric is gone")
    gate.open()
    assert busy.result(60) == f"{name}b 1"
    client.unload(f"{name}a")
    client.unload(f"{name}b")


#: Asks `called` for many tensors at once, from threads and from coroutines, and counts the right answers.
_MANY_CALLS = """
import asyncio, threading

def question(number):
    values = np.full(1 + 997 * number, number, np.int32)
    tensor = pb_utils.Tensor("IN", values)
    return pb_utils.InferenceRequest(model_name="{called}", requested_output_names=["OUT"], inputs=[tensor]), values

def right(response, values):
    found = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
    found += 1  # it is the model's own
    return np.array_equal(found, values + 2)

def ask(number):
    for _ in range(5):
        call, values = question(number)
        counted.append(right(call.exec(), values))

async def gather():
    asked = [question(number) for number in range(40)]
    answers = await asyncio.gather(*[call.async_exec() for call, _ in asked])
    counted.extend(right(answer, values) for answer, (_, values) in zip(answers, asked))

counted = []
globals().update(locals())
threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
loop = asyncio.new_event_loop()
loop.run_until_complete(gather())
loop.close()
result = (len(counted), all(counted), len(os.listdir("/proc/self/fd")) < 100)
"""
_PLUS_ONE = """
import os, signal
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        if any(-1 in array for array in arrays):
            os.kill(os.getpid(), signal.SIGKILL)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]) for array in arrays]
"""
_PLUS_ONE_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""
_CALL_THAT_KILLS = """
tensor = pb_utils.Tensor("IN", np.array([-1], np.int32))
call = pb_utils.InferenceRequest(model_name="{called}", requested_output_names=["OUT"], inputs=[tensor])
result = call.exec().error().message()
"""


def test_many_calls_at_once_get_their_own_answers_and_survive_the_death_of_the_called(explicit, client, name):
    called = f"{name}_called"
    folder = explicit.repository.path / called / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_PLUS_ONE)
    (folder.parent / "config.pbtxt").write_text(_PLUS_ONE_CONFIG)
    explicit.repository.doer(name)
    client.load(called)
    client.load(name)
    for _ in range(2):
        assert client.do(name, _MANY_CALLS.format(called=called)) == "(120, True, True)"
        assert "was killed by signal 9" in client.do(name, _CALL_THAT_KILLS.format(called=called))
    client.unload(name)
    client.unload(called)
