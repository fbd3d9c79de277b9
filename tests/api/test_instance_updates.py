"""Instance groups that change while a model serves: what stays, what comes, what goes, and that nobody notices."""

import json
import textwrap
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from served import DOER_CONFIG, Client, Gate, Repository, Server, error_of, put, until
from test_batch_shaping import text as onnx_model

BOTH = pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])


class Counted:
    """A doer whose instances write down when they begin and end."""

    def __init__(self, repository: Repository, name: str, folder: Path, initialize: str = "pass", config: str = ""):
        self.name = name
        self.config = repository.path / name / "config.pbtxt"
        self.more = config
        self._repository = repository
        self._log = folder / f"{name}.log"
        self._log.touch()
        self._initialize = f"""{initialize}
        log, instance = {str(self._log)!r}, args["model_instance_name"].removeprefix({name!r})
        def note(sign, text=instance):
            with open(log, "a") as file:
                file.write(sign + text + " ")
        note("+")
        type(self).finalize = lambda self: note("-")"""
        self.write()
        self.instances(1)

    def write(self) -> None:
        """New model files."""
        self._repository.doer(self.name, initialize=self._initialize, config=None)

    def groups(self, groups: str) -> None:
        put(self.config, DOER_CONFIG.format(more=f"instance_group [ {groups} ] {self.more}"))

    def instances(self, count: int, more: str = "") -> None:
        self.groups(f"{{ count: {count} kind: KIND_CPU {more} }}")

    @property
    def history(self) -> list[str]:
        """What has begun (+) and ended (-) since it was asked last."""
        found = self._log.read_text().split()
        self._log.write_text("")
        return found


@pytest.fixture
def counted(explicit, name, tmp_path):
    return Counted(explicit.repository, name, tmp_path)


def counts(client: Client, name: str, times: int = 6) -> dict[str, int]:
    """How often each instance has been called by now: state of theirs, lost when they are loaded again."""
    code = (
        "import gc; self = next(o for o in gc.get_objects() if type(o).__name__ == 'TritonPythonModel')\n"
        "self.calls = getattr(self, 'calls', 0) + 1; result = f'{os.getpid()} {self.calls}'"
    )
    return {pid: int(calls) for pid, calls in (client.do(name, code).split() for _ in range(times))}


def test_instances_come_and_go_and_the_others_keep_what_they_know(explicit, client, counted):
    client.load(counted.name)
    assert counted.history == ["+_0_0"]
    before = counts(client, counted.name)
    counted.instances(3)
    client.load(counted.name)
    assert sorted(counted.history) == ["+_0_1", "+_0_2"]
    after = counts(client, counted.name)
    assert len(after) == 3
    assert all(after[pid] > calls for pid, calls in before.items())
    assert client.statistics(counted.name)["inferences"] == 12
    assert client.config(counted.name)["instance_group"][0]["count"] == 3
    counted.instances(1)
    client.load(counted.name)
    assert sorted(counted.history) == ["-_0_1", "-_0_2"]
    assert counts(client, counted.name).keys() == before.keys()
    counted.instances(2)
    client.load(counted.name)
    assert counted.history == ["+_0_1"]
    assert len(explicit.named(f"naiad:{counted.name}")) == 2
    client.unload(counted.name)
    until(lambda: not explicit.named(f"naiad:{counted.name}"), "all hosts have ended")
    assert sorted(counted.history) == ["-_0_0", "-_0_1"]


@pytest.mark.parametrize(
    ("before", "after", "history"),
    [
        pytest.param("{ count: 2 }", "{ count: 2 } # a remark\n", [], id="another text"),
        pytest.param("{ count: 2 }", '{ count: 2 name: "x" }', [], id="another name"),
        pytest.param("{ count: 2 }", '{ count: 1 name: "x" }, { count: 1 name: "y" }', [], id="two groups of one"),
        pytest.param("{ count: 2 }", "{ count: 0 }", ["-_0_1"], id="none is one"),
        pytest.param(
            "{ count: 1 }",
            "{ count: 1 rate_limiter { priority: 2 } }",
            ["+_0_0", "-_0_0"],
            id="another kind of instance",
        ),
    ],
)
def test_what_makes_another_instance(explicit, counted, before, after, history):
    counted.groups(before)
    explicit.http.load(counted.name)
    assert counted.history
    counted.groups(after)
    explicit.http.load(counted.name)
    assert counted.history == history
    explicit.http.unload(counted.name)


def test_other_changes_load_the_model_again(explicit, client, counted):
    counted.instances(1)
    client.load(counted.name)
    counted.more = 'parameters { key: "color" value: { string_value: "blue" } }'
    counted.instances(2)
    client.load(counted.name)
    until(lambda: len(explicit.named(f"naiad:{counted.name}")) == 2, "the old host has ended")
    assert sorted(counted.history) == ["+_0_0", "+_0_0", "+_0_1", "-_0_0"]
    counted.write()
    counted.instances(1)
    client.load(counted.name)
    until(lambda: len(explicit.named(f"naiad:{counted.name}")) == 1, "the old hosts have ended")
    assert sorted(counted.history) == ["+_0_0", "-_0_0", "-_0_1"]
    client.unload(counted.name)


def test_a_new_version_leaves_the_one_that_stays_alone(explicit, client, name, tmp_path):
    counted = Counted(explicit.repository, name, tmp_path, config="version_policy: { all { } }")
    client.load(name)
    explicit.repository.doer(name, version=2, config=None)
    counted.instances(2)
    client.load(name)
    assert client.do(name, version="2") == f"{name} 2"
    assert sorted(counted.history) == ["+_0_0", "+_0_1"]
    client.unload(name)


def test_the_configuration_that_is_shown_can_be_sent_back_with_another_count(explicit, client, counted):
    client.load(counted.name)
    config = client.config(counted.name)
    config["instance_group"][0]["count"] = 2
    client.load(counted.name, config=json.dumps(config))
    assert sorted(counted.history) == ["+_0_0", "+_0_1"]
    client.load(counted.name, config=json.dumps(config))
    assert counted.history == []
    client.load(counted.name)  # nothing is new in the repository: what was sent counts
    assert counted.history == []
    counted.instances(1)
    client.load(counted.name)
    assert counted.history == ["-_0_1"]
    client.unload(counted.name)


def test_the_shown_configuration_of_a_model_that_was_completed_can_be_sent_back(explicit, client, name):
    explicit.repository.onnx(name, onnx_model())
    client.load(name)
    (pid,) = explicit.named(f"naiad:{name}")
    config = client.config(name)
    for count in (3, 1, 2):
        config["instance_group"][0]["count"] = count
        client.load(name, config=json.dumps(config))
        # Threads of one process.
        assert explicit.named(f"naiad:{name}") == [pid]
        assert client.config(name)["instance_group"][0]["count"] == count
        assert client.is_model_ready(name)
    client.unload(name)


def test_no_request_is_lost_while_instances_come_and_go(explicit, counted):
    name = counted.name
    explicit.http.load(name)
    stopped = []
    readiness = []

    def ask(client):
        done = 0
        while not stopped:
            assert client.do(name) == f"{name} 1"
            readiness.append(client.is_model_ready(name))
            done += 1
        return done

    asking = [explicit.ask(ask, client) for client in (explicit.http, explicit.grpc) * 3]
    for count in (3, 1, 2, 4, 1):
        counted.instances(count)
        explicit.grpc.load(name)
        served = explicit.http.statistics(name)["inferences"]
        until(lambda served=served: explicit.http.statistics(name)["inferences"] > served + 10, "requests go on")
    stopped.append(True)
    done = [each.result(60) for each in asking]
    assert all(done)
    assert all(readiness)
    assert explicit.http.statistics(name) == {"inferences": sum(done), "executions": sum(done), "failures": 0}
    explicit.http.unload(name)


def test_an_ensemble_goes_on_with_the_other_instances_of_its_member(explicit, client, counted):
    ensemble = f"{counted.name}_e"
    explicit.repository.ensemble(ensemble, counted.name)
    client.load(ensemble)
    client.do(ensemble)
    counted.instances(2)
    client.load(counted.name)
    assert client.do(ensemble) == f"{counted.name} 1"
    assert client.statistics(ensemble)["inferences"] == 2
    counted.write()
    client.load(counted.name)
    client.do(ensemble)
    assert client.statistics(ensemble)["inferences"] == 1
    client.unload(ensemble, dependents=True)
    client.unload(counted.name)


def test_an_instance_ends_what_it_runs_before_it_leaves(explicit, client, counted, tmp_path):
    counted.instances(2)
    client.load(counted.name)
    gates = [Gate(tmp_path), Gate(tmp_path)]
    running = [explicit.ask(client.do, counted.name, gate.do + "result = os.getpid()") for gate in gates]
    for gate in gates:
        gate.reached()
    waiting = explicit.ask(client.do, counted.name)
    until(lambda: explicit.pending(counted.name) == 1, "waits")
    counted.instances(1)
    update = explicit.ask(client.load, counted.name)
    until(lambda: client.config(counted.name)["instance_group"][0]["count"] == 1, "the update is in effect")
    assert client.index()[counted.name, "1"] == ("READY", "")
    assert not update.done()
    for gate in gates:
        gate.open()
    assert len({each.result(60) for each in running}) == 2
    assert waiting.result(60) == f"{counted.name} 1"
    update.result(60)
    assert sorted(counted.history) == ["+_0_0", "+_0_1", "-_0_1"]
    client.unload(counted.name)


def updating(explicit: Server, client: Client, name: str, folder: Path) -> tuple[Counted, "Future[None]", Gate]:
    """A model with one instance, and a load under way that brings a second one, which begins when the gate is opened."""
    gate = Gate(folder)
    begin = 'if args["model_instance_name"].endswith("_1"):\n' + textwrap.indent(gate.do, 12 * " ")
    counted = Counted(explicit.repository, name, folder, begin)
    client.load(name)
    counted.instances(2)
    update = explicit.ask(client.load, name)
    gate.reached()
    return counted, update, gate


def test_old_instances_serve_while_a_new_one_begins(explicit, client, name, tmp_path):
    counted, update, gate = updating(explicit, client, name, tmp_path)
    assert client.do(name) == f"{name} 1"
    assert client.index()[name, "1"] == ("READY", "")
    assert client.config(name)["instance_group"][0]["count"] == 1
    assert not update.done()
    # A second one in the meantime waits for the first, and for what it asks for itself.
    counted.instances(3)
    second = explicit.ask(client.load, name)
    gate.open()
    update.result(60)
    second.result(60)
    assert sorted(counted.history) == ["+_0_0", "+_0_1", "+_0_2"]
    client.unload(name)


def test_an_unload_during_an_update_waits_for_it(explicit, client, name, tmp_path):
    _, update, gate = updating(explicit, client, name, tmp_path)
    unload = explicit.ask(client.unload, name)
    with pytest.raises(TimeoutError):
        unload.result(0.2)
    gate.open()
    update.result(60)
    unload.result(60)
    assert "has no available versions" in error_of(client.do, name)
    until(lambda: client.index()[name, "1"] == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
    until(lambda: not explicit.named(f"naiad:{name}"), "all hosts have ended")
    client.load(name)
    assert client.do(name) == f"{name} 1"
    client.unload(name)


def test_an_unload_does_not_wait_for_more_than_the_requests_of_an_instance_that_leaves(
    explicit, client, counted, tmp_path
):
    counted.instances(2)
    client.load(counted.name)
    gates = [Gate(tmp_path), Gate(tmp_path)]
    running = [explicit.ask(client.do, counted.name, gate.do) for gate in gates]
    for gate in gates:
        gate.reached()
    counted.instances(1)
    update = explicit.ask(client.load, counted.name)
    until(lambda: client.config(counted.name)["instance_group"][0]["count"] == 1, "the update is in effect")
    client.unload(counted.name)
    assert client.index()[counted.name, "1"][0] == "UNLOADING"
    for gate in gates:
        gate.open()
    assert [each.result(60) for each in running] == [f"{counted.name} 1"] * 2
    update.result(60)
    until(lambda: client.index()[counted.name, "1"] == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
    assert not explicit.named(f"naiad:{counted.name}")
    assert sorted(counted.history) == ["+_0_0", "+_0_1", "-_0_0", "-_0_1"]


def test_new_instances_that_fail_change_nothing(explicit, client, name, tmp_path):
    broken = tmp_path / "broken"
    counted = Counted(
        explicit.repository, name, tmp_path, f'if os.path.exists({str(broken)!r}): raise ValueError("no more of us")'
    )
    counted.instances(2)
    client.load(name)
    before = counts(client, name)
    broken.touch()
    counted.groups('{ count: 4 kind: KIND_CPU name: "x" }')
    error = error_of(client.load, name)
    assert error.startswith(
        f"load failed for model '{name}': version 1 is at READY state: Internal: ValueError: no more"
    )
    state, reason = client.index()[name, "1"]
    assert state == "READY"
    assert reason.startswith("Internal: ValueError: no more of us")
    assert client.config(name)["instance_group"][0]["count"] == 2
    assert counts(client, name).keys() == before.keys()
    until(lambda: len(explicit.named(f"naiad:{name}")) == 2, "nothing is left of the new ones")
    broken.unlink()
    client.load(name)
    assert client.index()[name, "1"] == ("READY", "")
    assert len(counts(client, name, 12)) == 4
    assert sorted(counted.history) == ["+_0_0", "+_0_1", "+x_2", "+x_3"]
    client.unload(name)


def test_a_gpu_that_is_not_there_changes_nothing(explicit, client, counted):
    client.load(counted.name)
    counted.groups("{ count: 1 kind: KIND_GPU gpus: [ 77 ] }")
    assert "unsupported gpu id 77" in error_of(client.load, counted.name)
    assert client.do(counted.name) == f"{counted.name} 1"
    assert counted.history == ["+_0_0"]
    client.unload(counted.name)


def test_an_instance_that_died_for_good_is_replaced(explicit, client, name, tmp_path):
    dead = tmp_path / "dead"
    counted = Counted(
        explicit.repository, name, tmp_path, f"if os.path.exists({str(dead)!r}): raise ValueError('never again')"
    )
    counted.instances(2)
    client.load(name)
    dead.touch()
    assert "exited with code 3" in error_of(client.do, name, "os._exit(3)")
    explicit.says("it is not restarted")
    dead.unlink()
    assert counted.history
    counted.instances(2, 'name: "again"')
    client.load(name)
    assert len(counts(client, name)) == 2
    assert len(counted.history) == 1
    client.unload(name)


def test_polling_follows_instance_groups(repository, tmp_path):
    counted = Counted(repository, "polled", tmp_path)
    with Server(repository, flags=("--model-control-mode=poll", "--repository-poll-secs=1")).started() as server:
        assert counted.history == ["+_0_0"]
        counted.instances(3)
        until(lambda: server.http.config("polled")["instance_group"][0]["count"] == 3, "the update is in effect")
        assert sorted(counted.history) == ["+_0_1", "+_0_2"]
        assert server.http.do("polled") == "polled 1"


@pytest.mark.parametrize("isolation", ["none", "backend"])
def test_wherever_the_instances_run(repository, isolation):
    flags = ("--model-control-mode=explicit", f"--isolation={isolation}")
    folder = repository.onnx("text", onnx_model())
    repository.onnx("other", onnx_model())
    with Server(repository, flags=flags).started() as server:
        for model in ("text", "other"):
            server.grpc.load(model)
        for count in (3, 1, 2):
            put(folder / "config.pbtxt", f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]")
            server.grpc.load("text")
            assert server.http.config("text")["instance_group"][0]["count"] == count
            assert server.http.is_model_ready("text")
        assert server.log.count("updated 'text' version 1: ") == 3
        server.grpc.unload("text")
        until(lambda: server.http.index()["text", "1"] == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
        assert server.http.is_model_ready("other")


def test_a_server_that_ends_during_an_update_waits_for_nobody(repository, tmp_path):
    begun = tmp_path / "begun"
    counted = Counted(
        repository,
        "slow",
        tmp_path,
        f"""
        if args["model_instance_name"].endswith("_1"):
            pathlib.Path({str(begun)!r}).touch()
            time.sleep(1000)""",
    )
    flags = ("--model-control-mode=explicit", "--load-model=slow", "--exit-timeout-secs=5")
    with Server(repository, flags=flags).started() as server:
        counted.instances(2)
        server.ask(server.http.load, "slow")
        until(begun.exists, "the new instance begins")
        assert server.stop() == 0  # 1 where it had to give somebody up


# ---------------------------------------------------------------- sequences


def step(client: Client, name: str, key: int, start: bool = False, end: bool = False) -> str:
    """The process that has answered a request of a sequence."""
    tensor = client._module.InferInput("DO", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"result = os.getpid()"], dtype=object))
    with client._connected() as connected:
        flags = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
        return connected.infer(name, [tensor], **flags).as_numpy("OUT").item(0).decode()


@BOTH
def test_sequences_go_on_where_they_began_and_the_last_one_takes_its_instance_along(explicit, name, tmp_path, strategy):
    client = explicit.http
    batching = f"sequence_batching {{ {strategy} max_sequence_idle_microseconds: 60000000 }}"
    counted = Counted(explicit.repository, name, tmp_path, config=batching)
    counted.instances(3)
    client.load(name)
    places = {key: step(client, name, key, start=True) for key in (1, 2)}
    assert len(set(places.values())) == 2
    assert counted.history
    counted.instances(1, "rate_limiter { priority: 2 }")
    client.load(name)
    until(lambda: len(explicit.named(f"naiad:{name}")) == 3, "the instance without a sequence has left")
    assert sorted(counted.history) == ["+_0_0", "-_0_2"]
    assert {key: step(client, name, key) for key in (1, 2)} == places
    new = step(client, name, 3, start=True)
    assert new not in places.values()
    assert step(client, name, 1, end=True) == places[1]
    until(lambda: len(explicit.named(f"naiad:{name}")) == 2, "the first of them has left")
    assert step(client, name, 2, end=True) == places[2]
    until(lambda: len(explicit.named(f"naiad:{name}")) == 1, "the second has left")
    assert step(client, name, 3, end=True) == new
    client.unload(name)


@BOTH
def test_a_model_whose_instances_still_have_sequences_can_be_unloaded(explicit, name, tmp_path, strategy):
    client = explicit.grpc
    batching = f"sequence_batching {{ {strategy} max_sequence_idle_microseconds: 600000000 }}"
    counted = Counted(explicit.repository, name, tmp_path, config=batching)
    client.load(name)
    step(client, name, 1, start=True)
    counted.instances(1, "rate_limiter { priority: 2 }")
    client.load(name)
    assert len(explicit.named(f"naiad:{name}")) == 2
    client.unload(name)
    until(lambda: client.index()[name, "1"] == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
    assert not explicit.named(f"naiad:{name}")
    assert sorted(counted.history) == ["+_0_0", "+_0_0", "-_0_0", "-_0_0"]


def test_a_sequence_that_rests_too_long_holds_its_instance_no_longer(explicit, name, tmp_path):
    client = explicit.grpc
    batching = "sequence_batching { direct { } max_sequence_idle_microseconds: 300000 }"
    counted = Counted(explicit.repository, name, tmp_path, config=batching)
    client.load(name)
    step(client, name, 1, start=True)
    counted.instances(1, "rate_limiter { priority: 2 }")
    client.load(name)
    until(lambda: len(explicit.named(f"naiad:{name}")) == 1, "the old instance has left")
    assert step(client, name, 2, start=True, end=True)
    client.unload(name)


# ---------------------------------------------------------------- rate limiter


def test_resources_follow_the_instances(repository, tmp_path):
    counted = Counted(repository, "limited", tmp_path)

    def needs(count: int) -> None:
        counted.instances(1, f'rate_limiter {{ resources [ {{ name: "R" count: {count} }} ] }}')

    needs(2)
    flags = ("--model-control-mode=explicit", "--rate-limit=execution_count", "--rate-limit-resource=R:10")
    with Server(repository, flags=flags).started() as server:
        client = server.http
        client.load("limited")
        needs(32)
        assert 'Resource count for "R" is limited to 10' in error_of(client.load, "limited")
        assert client.do("limited") == "limited 1"
        needs(10)
        # The instance that leaves waits for what another one has, and what waits in it is not lost.
        gate = Gate(tmp_path)
        repository.doer(
            "other",
            config='instance_group [ { kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 9 } ] } } ]',
        )
        client.load("other")
        held = server.ask(client.do, "other", gate.do)
        gate.reached()
        waiting = server.ask(client.do, "limited")
        until(lambda: server.pending("limited") == 0 and not waiting.done(), "it waits in its instance")
        update = server.ask(client.load, "limited")
        until(lambda: counted.history[:1], "the new instance has begun")
        gate.open()
        assert held.result(60) == "other 1"
        assert waiting.result(60) == "limited 1"
        update.result(60)
        assert server.grpc.do("limited") == "limited 1"
        client.unload("limited")
        needs(1)
        client.load("limited")
        assert client.do("limited") == "limited 1"
