"""Loading, reloading and unloading, as clients see it."""

import json
import os
import shutil

import pytest
from served import DOER_CONFIG, Gate, Repository, Server, error_of, put, until


def test_loads_and_unloads_on_request(explicit, client, name):
    explicit.repository.doer(name)
    assert client.index()[name, ""] == ("", "")
    assert "is not found" in error_of(client.do, name)
    client.load(name)
    assert client.do(name) == f"{name} 1"
    assert client.index()[name, "1"] == ("READY", "")
    client.unload(name)
    until(lambda: client.index()[name, "1"] == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
    assert "has no available versions" in error_of(client.do, name)
    assert not client.is_model_ready(name)
    assert not explicit.named(f"naiad:{name}")


def test_a_load_of_what_serves_does_not_load_again(explicit, client, name):
    explicit.repository.doer(name)
    client.load(name)
    before = client.do(name, "result = os.getpid()")
    client.load(name)
    assert client.do(name, "result = os.getpid()") == before
    client.unload(name)


def test_in_flight_finishes_on_its_version_while_the_model_is_reloaded(explicit, client, name, tmp_path):
    gate = Gate(tmp_path)
    explicit.repository.doer(name, answer="old")
    client.load(name)
    running = explicit.ask(client.do, name, gate.do)
    gate.reached()
    explicit.repository.doer(name, answer="new")
    client.load(name)
    assert client.do(name) == "new"
    assert not running.done()
    gate.open()
    assert running.result(60) == "old"
    until(lambda: len(explicit.named(f"naiad:{name}")) == 1, "the old host has ended")
    client.unload(name)


def test_in_flight_finishes_while_the_model_is_unloaded(explicit, client, name, tmp_path):
    gate = Gate(tmp_path)
    explicit.repository.doer(name)
    client.load(name)
    running = explicit.ask(client.do, name, gate.do)
    gate.reached()
    waiting = explicit.ask(client.do, name)  # in the queue, behind the one that runs
    until(lambda: explicit.pending(name) == 1, "waits")
    client.unload(name)
    assert client.index()[name, "1"][0] == "UNLOADING"
    assert "has no available versions" in error_of(client.do, name)
    assert not running.done()
    gate.open()
    assert running.result(60) == f"{name} 1"
    assert waiting.result(60) == f"{name} 1"
    until(lambda: client.index()[name, "1"] == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
    until(lambda: not explicit.named(f"naiad:{name}"), "its host has ended")


def test_a_model_can_be_loaded_while_its_last_version_is_still_unloading(explicit, client, name, tmp_path):
    gate = Gate(tmp_path)
    explicit.repository.doer(name)
    client.load(name)
    running = explicit.ask(client.do, name, gate.do)
    gate.reached()
    client.unload(name)
    client.load(name)
    assert client.do(name) == f"{name} 1"
    gate.open()
    assert running.result(60) == f"{name} 1"
    until(lambda: len(explicit.named(f"naiad:{name}")) == 1, "the old host has ended")
    assert client.index()[name, "1"] == ("READY", "")
    client.unload(name)


def blocking_load(tmp_path, tag):
    """The text of an `initialize` that says it has begun and waits; and the two files."""
    begun, go_on = tmp_path / f"{tag}.begun", tmp_path / f"{tag}.go"
    text = f"pathlib.Path({str(begun)!r}).touch()\n        while not os.path.exists({str(go_on)!r}): time.sleep(0.005)"
    return text, begun, go_on


def test_loads_of_the_same_model_at_the_same_time_are_one_load(explicit, client, name, tmp_path):
    text, begun, go_on = blocking_load(tmp_path, "load")
    explicit.repository.doer(name, initialize=text)
    first = explicit.ask(client.load, name)
    until(begun.exists, "the load has begun")
    assert client.index()[name, "1"][0] == "LOADING"
    second = explicit.ask(client.load, name)
    assert not client.is_model_ready(name)
    assert not second.done()
    go_on.touch()
    first.result(60)
    second.result(60)
    assert client.do(name) == f"{name} 1"
    assert len(explicit.named(f"naiad:{name}")) == 1
    client.unload(name)


def test_a_load_of_newer_files_during_a_load_ends_with_the_newer_ones(explicit, client, name, tmp_path):
    text, begun, go_on = blocking_load(tmp_path, "load")
    explicit.repository.doer(name, initialize=text, answer="old")
    first = explicit.ask(client.load, name)
    until(begun.exists, "the load has begun")
    explicit.repository.doer(name, answer="new")
    second = explicit.ask(client.load, name)
    go_on.touch()
    second.result(60)
    first.result(60)
    assert client.do(name) == "new"
    until(lambda: len(explicit.named(f"naiad:{name}")) == 1, "the old host has ended")
    client.unload(name)


def test_an_unload_during_a_load_waits_for_it(explicit, client, name, tmp_path):
    text, begun, go_on = blocking_load(tmp_path, "load")
    explicit.repository.doer(name, initialize=text)
    loading = explicit.ask(client.load, name)
    until(begun.exists, "the load has begun")
    unloading = explicit.ask(client.unload, name)
    with pytest.raises(TimeoutError):
        unloading.result(0.2)
    go_on.touch()
    loading.result(60)
    unloading.result(60)
    assert "has no available versions" in error_of(client.do, name)
    until(lambda: client.index().get((name, "1")) == ("UNAVAILABLE", "unloaded"), "the model is unloaded")
    until(lambda: not explicit.named(f"naiad:{name}"), "its host has ended")
    client.load(name)
    assert client.do(name) == f"{name} 1"
    client.unload(name)


def test_a_library_for_a_backend_is_refused(explicit, client, name):
    folder = explicit.repository.doer(name, config='runtime: "my.so"')
    refused = f"unable to find backend library 'my.so' for model '{name}', searched: '{folder / '1'}' '{folder}' "
    assert refused in error_of(client.load, name)


def test_a_failing_new_version_leaves_the_old_one_serving(explicit, client, name):
    explicit.repository.doer(name, answer="old")
    client.load(name)
    explicit.repository.doer(name, version=2, initialize="raise ValueError('bad weights')")
    assert "bad weights" in error_of(client.load, name)
    assert client.do(name) == "old"
    index = client.index()
    assert index[name, "1"] == ("READY", "")
    state, reason = index[name, "2"]
    assert state == "UNAVAILABLE"
    assert "bad weights" in reason
    assert "bad weights" in explicit.log
    explicit.repository.doer(name, version=2, answer="better")
    client.load(name)
    assert client.do(name) == "better"
    until(lambda: client.index()[name, "1"] == ("UNAVAILABLE", "unloaded"), "the old version is unloaded")
    client.unload(name)


def test_a_failing_change_of_the_serving_version_leaves_it_serving(explicit, client, name):
    explicit.repository.doer(name, answer="old")
    client.load(name)
    explicit.repository.doer(name, initialize="raise ValueError('bad weights')")
    assert "bad weights" in error_of(client.load, name)
    assert "bad weights" in explicit.log
    assert client.do(name) == "old"
    attempts = explicit.log.count(f"failed to load '{name}' version 1")
    assert "bad weights" in error_of(client.load, name)  # tried again, and told again
    assert explicit.log.count(f"failed to load '{name}' version 1") == attempts + 1
    explicit.repository.doer(name, answer="new")
    client.load(name)
    assert client.do(name) == "new"
    client.unload(name)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["3"]),
        ("version_policy: { latest: { num_versions: 2 } }", ["2", "3"]),
        ("version_policy: { all: {} }", ["1", "2", "3"]),
        ("version_policy: { specific: { versions: [ 1, 3 ] } }", ["1", "3"]),
    ],
)
def test_version_policies(explicit, name, policy, served):
    client = explicit.http
    for version in (1, 2, 3):
        explicit.repository.doer(name, version=version, config=policy)
    client.load(name)
    ready = [version for (model, version), (state, _) in client.index().items() if model == name and state == "READY"]
    assert sorted(ready) == served
    for version in served:
        assert client.do(name, version=version) == f"{name} {version}"
    for version in {"1", "2", "3"} - set(served):
        assert f"'{name}' version {version} is not" in error_of(client.do, name, version=version)
    assert client.do(name) == f"{name} 3"
    client.unload(name)


def test_a_load_is_logged_as_triton_does(explicit, client, name):
    for version in (1, 2):
        explicit.repository.doer(name, version=version, config="version_policy: { all: {} }")

    def lines(about):
        return [line.split("] ", 1)[1] for line in explicit.log.splitlines() if f"{about}" in line and name in line]

    client.load(name)
    assert lines("load") == [f'"loading: {name}:1"', f'"loading: {name}:2"', f"\"successfully loaded '{name}'\""]
    explicit.repository.doer(name, config="version_policy: { specific: { versions: [ 7 ] } }")
    assert "at least one version" in error_of(client.load, name)
    none = f"at least one version must be available under the version policy of model '{name}'"
    assert f"\"failed to load model '{name}': {none}\"" in lines("failed")
    error_of(client.load, f"{name}_other")
    assert f"\"failed to poll model '{name}_other': model not found in any model repository.\"" in lines("failed")
    client.unload(name)
    unloaded = [f"\"successfully unloaded '{name}' version {version}\"" for version in (1, 2)]
    until(lambda: sorted(lines("successfully unloaded")) == unloaded, "both versions are unloaded")


def override(**more):
    return json.dumps(
        {
            "backend": "python",
            "input": [{"name": "DO", "data_type": "TYPE_STRING", "dims": [1]}],
            "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
            **more,
        }
    )


def test_a_configuration_in_the_load_request(explicit, client, name):
    folder = explicit.repository.doer(name)
    for changed in ("1/model.py", "config.pbtxt"):
        client.load(name, config=override(parameters={"color": {"string_value": "blue"}}))
        assert client.config(name)["parameters"]["color"]["string_value"] == "blue"
        client.load(name)  # nothing new in the repository
        assert client.config(name)["parameters"]["color"]["string_value"] == "blue"
        os.utime(folder / changed, (1, 1))
        client.load(name)
        assert "color" not in client.config(name).get("parameters", {})
    client.load(name, config=override(parameters={"color": {"string_value": "blue"}}))
    client.unload(name)
    client.load(name)
    assert "color" not in client.config(name).get("parameters", {})
    assert "failed to load" in error_of(client.load, name, config="{ no json")
    assert client.do(name) == f"{name} 1"
    client.load(name)  # what was wrong with the last request is no matter of this one
    client.unload(name)


def folders_of_requests(name):
    return [entry for entry in os.listdir("/tmp") if entry.startswith(f"naiad-{name}-")]


def test_files_in_the_load_request_come_and_go(explicit, client, name, tmp_path):
    source = Repository(tmp_path / "elsewhere").doer(name, answer="sent")
    code = (source / "1" / "model.py").read_bytes()
    client.load(name, config=override(), files={"file:1/model.py": code})
    assert client.do(name) == "sent"
    assert len(folders_of_requests(name)) == 1
    client.load(name, config=override(), files={"file:1/model.py": code.replace(b"sent", b"sent again")})
    assert client.do(name) == "sent again"
    until(lambda: len(folders_of_requests(name)) == 1, "the folder of the first load is gone")
    broken = error_of(client.load, name, config=override(), files={"file:1/model.py": b"raise ValueError('broken')"})
    assert "broken" in broken
    assert client.do(name) == "sent again"
    client.load(name, config=override(), files={"file:1/model.py": code})
    assert client.do(name) == "sent"
    until(lambda: len(folders_of_requests(name)) == 1, "the folders of the load that failed and of the one before")
    client.unload(name)
    until(lambda: not folders_of_requests(name), "the folder of the last load is gone")


def test_a_file_outside_of_the_model_is_refused(explicit, client, name):
    assert "failed to poll" in error_of(client.load, name, config=override(), files={"file:../../x": b"x"})
    assert not folders_of_requests(name)


def test_ensembles_bring_their_members_and_can_take_them_along(explicit, client, name):
    explicit.repository.doer(f"{name}_a", answer="result = 'from b'")
    explicit.repository.doer(f"{name}_b")
    explicit.repository.ensemble(name, f"{name}_a", f"{name}_b")
    client.load(name)
    assert client.do(name) == "from b"
    client.unload(f"{name}_b")
    unloaded = ("UNAVAILABLE", "unloaded")
    until(lambda: client.index()[name, "1"] == unloaded, "an ensemble without a member does not serve")
    assert f"ensemble {name} contains models that are not available or ambiguous: {name}_b" in explicit.log
    client.load(f"{name}_b")
    until(lambda: client.index()[name, "1"] == ("READY", ""), "it serves when the member is back")
    assert client.do(name) == "from b"
    client.unload(f"{name}_a")
    client.load(name)
    assert client.do(name) == "from b"
    client.unload(name, dependents=True)
    until(
        lambda: all(
            state != "READY" for (model, _), (state, _) in client.index().items() if model in (name, f"{name}_a")
        ),
        "ensemble and member are unloaded",
    )
    client.unload(f"{name}_b")


def test_ensembles_that_cannot_be(explicit, client, name):
    """Those that contain themselves, and a version of a member that is not served. Nobody waits for them."""
    a, b, old, member = (f"{name}_{it}" for it in ("a", "b", "old", "m"))
    explicit.repository.ensemble(a, b)
    explicit.repository.ensemble(b, a)
    explicit.repository.ensemble(name, name)
    explicit.repository.doer(member)
    config = explicit.repository.ensemble(old, member) / "config.pbtxt"
    put(config, config.read_text().replace("model_version: -1", "model_version: 2"))
    circle = "circular dependency between ensembles:"
    assert error_of(client.load, a) == f"load failed for model '{a}': {circle} {a} -> ... -> {b} -> {a}\n"
    assert (
        error_of(client.load, name) == f"load failed for model '{name}': {circle} {name} -> ... -> {name} -> {name}\n"
    )
    why = f"ensemble '{old}' depends on '{member}' whose required version 2 is not loaded."
    assert error_of(client.load, old) == f"load failed for model '{old}': {why}\n"


def test_a_request_in_an_ensemble_finishes_while_a_member_is_unloaded(explicit, client, name, tmp_path):
    gate = Gate(tmp_path)
    explicit.repository.doer(f"{name}_a", answer="")
    explicit.repository.doer(f"{name}_b", answer="done")
    explicit.repository.ensemble(name, f"{name}_a", f"{name}_b")
    client.load(name)
    running = explicit.ask(client.do, name, gate.do + "result = ''")
    gate.reached()
    client.unload(name, dependents=True)
    gate.open()
    assert running.result(60) == "done"
    until(lambda: not explicit.named(f"naiad:{name}"[:15]), "all hosts have ended")


def test_a_model_that_cannot_be_read_says_so(explicit, client, name):
    folder = explicit.repository.doer(name)
    (folder / "config.pbtxt").unlink()
    (folder / "config.pbtxt").mkdir()
    assert error_of(client.load, name) == f"failed to load '{name}', failed to poll from model repository"
    assert "Is a directory" in explicit.log
    assert client.index()[name, ""] == ("", "")


def test_a_linked_model_is_a_model(explicit, client, name, tmp_path):
    real = Repository(tmp_path / "elsewhere").doer("other", config='name: "other"')
    (real / "config.pbtxt").write_text(DOER_CONFIG.format(more=""))
    os.symlink(real, explicit.repository.path / name)
    client.load(name)
    assert client.do(name) == "other 1"
    client.unload(name)


def test_many_loads_and_unloads_at_the_same_time(explicit, client, name):
    names = [f"{name}_{number}" for number in range(3)]
    for each in names:
        explicit.repository.doer(each)

    def rounds(each):
        for _ in range(3):
            client.load(each)
            assert client.do(each) == f"{each} 1"
            client.unload(each)

    for done in [explicit.ask(rounds, each) for each in names]:
        done.result(120)
    until(lambda: not [pid for each in names for pid in explicit.named(f"naiad:{each}")], "all hosts have ended")


# ---------------------------------------------------------------- the start


def test_a_model_that_fails_ends_the_server_unless_told_otherwise(repository):
    repository.doer("good")
    repository.doer("bad", initialize="raise ValueError('bad weights')")
    with Server(repository) as server:
        assert server.wait() == 1
        assert "bad weights" in server.log
        assert "'bad'" in server.log
    with Server(repository, flags=("--exit-on-error=false",)).started() as server:
        assert not server.http.is_ready()
        assert server.grpc.do("good") == "good 1"
        assert not server.grpc.is_ready()
        assert "bad weights" in server.http.index()["bad", "1"][1]
        assert "explicit model load / unload is not allowed" in error_of(server.http.load, "good")


def test_without_strict_readiness_a_server_with_failed_models_is_ready(repository):
    repository.doer("bad", initialize="raise ValueError('bad weights')")
    with Server(repository, flags=("--exit-on-error=false", "--strict-readiness=false")).started() as server:
        assert server.http.is_ready()
        assert server.grpc.is_ready()


def test_a_server_is_ready_whatever_configurations_it_cannot_read(repository):
    repository.doer("good")
    repository.doer("bad")
    (repository.path / "bad" / "config.pbtxt").write_text("backend: python(")
    with Server(repository, flags=("--exit-on-error=false",)).started() as server:
        assert server.http.is_ready()
        assert server.grpc.is_ready()
        assert server.grpc.do("good") == "good 1"


def test_an_empty_repository_is_served_and_what_has_no_effect_is_said_once(repository):
    with Server(repository, flags=("--cuda-memory-pool-byte-size=0:0",)).started() as server:
        assert server.http.is_ready()
        assert server.grpc.index() == {}
        assert server.log.count("option '--cuda-memory-pool-byte-size' has no effect: ") == 1


def test_a_repository_that_does_not_exist_is_an_error(tmp_path):
    missing = Repository(tmp_path / "missing")
    missing.path.rmdir()
    with Server(missing) as server:
        assert server.wait() == 1
        assert str(missing.path) in server.log
        assert "Traceback" not in server.log


def test_a_server_that_cannot_read_a_repository_serves_the_others_but_is_not_live(repository, tmp_path):
    repository.doer("good")
    flags = (f"--model-repository={tmp_path / 'missing'}", "--exit-on-error=false", "--strict-readiness=false")
    with Server(repository, flags=flags) as server:
        server.says("| good")
        assert server.grpc.do("good") == "good 1"
        assert not server.is_live()
        assert not server.http.is_ready()
        assert not server.grpc.is_ready()


def test_a_model_in_two_repositories_is_served_from_none(repository, tmp_path):
    other = Repository(tmp_path / "other")
    for each in (repository, other):
        each.doer("twice")
    other.doer("once")
    flags = ("--model-control-mode=explicit", "--load-model=once")
    with Server(repository, other, flags=flags).started() as server:
        assert server.grpc.do("once") == "once 1"
        assert "failed to poll" in error_of(server.http.load, "twice")
        assert server.http.index()["twice", ""] == ("UNAVAILABLE", "model appears in two or more repositories")


def test_a_named_configuration(repository):
    folder = repository.doer("model")
    (folder / "configs").mkdir()
    (folder / "configs" / "large.pbtxt").write_text(
        DOER_CONFIG.format(more='parameters { key: "size" value: { string_value: "large" } }')
    )
    repository.doer("plain")
    with Server(repository, flags=("--model-config-name=large",)).started() as server:
        assert server.http.config("model")["parameters"]["size"]["string_value"] == "large"
        assert "size" not in server.http.config("plain").get("parameters", {})


# ---------------------------------------------------------------- poll


def test_polling_follows_the_repository(repository, tmp_path):
    repository.doer("changed", answer="old")
    repository.doer("versions")
    repository.doer("deleted")
    gate = Gate(tmp_path)
    with Server(repository, flags=("--model-control-mode=poll", "--repository-poll-secs=1")).started() as server:
        client = server.grpc
        running = server.ask(client.do, "deleted", gate.do)
        gate.reached()
        repository.doer("new")
        repository.doer("changed", answer="new")
        repository.doer("versions", version=2)
        os.rename(repository.path / "deleted", tmp_path / "deleted")
        until(lambda: client.is_model_ready("new"), "the new model serves")
        assert client.do("new") == "new 1"
        until(lambda: client.do("changed") == "new", "the changed model serves")
        until(lambda: client.do("versions") == "versions 2", "the new version serves")
        until(lambda: not client.is_model_ready("deleted"), "the deleted model does not")
        assert "has no available versions" in error_of(client.do, "deleted")
        gate.open()
        assert running.result(60) == "deleted 1"
        until(lambda: not server.named("naiad:deleted"), "the host of the deleted model has ended")
        assert not [each for each in client.index() if each[0] == "deleted"]

        # A version that fails leaves the old one serving; it is tried again when it changes.
        repository.doer("versions", version=3, initialize="raise ValueError('bad weights')")
        until(lambda: "bad weights" in client.index().get(("versions", "3"), ("", ""))[1], "the reason is known")
        assert client.do("versions") == "versions 2"
        repository.doer("versions", version=3)
        until(lambda: client.do("versions") == "versions 3", "the repaired version serves")

        # And back, by taking the newest away.
        os.rename(repository.path / "versions" / "3", tmp_path / "3")
        until(lambda: client.do("versions") == "versions 2", "the version before serves again")
        os.rename(tmp_path / "deleted", repository.path / "deleted")
        until(lambda: client.is_model_ready("deleted"), "the model that is back serves")
        assert client.do("deleted") == "deleted 1"


def test_a_model_that_goes_while_it_is_polled_in_is_given_up(repository, tmp_path):
    text, begun, go_on = blocking_load(tmp_path, "load")
    with Server(repository, flags=("--model-control-mode=poll", "--repository-poll-secs=1")).started() as server:
        repository.doer("gone", initialize=text)
        until(begun.exists, "the load has begun")
        shutil.rmtree(repository.path / "gone")
        repository.doer("there")
        until(lambda: server.http.is_model_ready("there"), "the repository has been read again")
        go_on.touch()
        until(lambda: not server.named("naiad:gone"), "its host has ended")
        assert "has no available versions" in error_of(server.http.do, "gone")


def test_polling_waits_until_a_model_is_written(repository, tmp_path):
    """A model that is still growing is not loaded: it would fail, and that would be in the log."""
    with Server(repository, flags=("--model-control-mode=poll", "--repository-poll-secs=1")).started() as server:
        import time

        folder = repository.path / "slow" / "1"
        folder.mkdir(parents=True)
        whole = (Repository(tmp_path / "elsewhere").doer("slow") / "1" / "model.py").read_text()
        written = 0
        end = time.monotonic() + 3
        while time.monotonic() < end:
            written += 1
            (folder / "model.py").write_text("raise ValueError('half')  # " + "x" * written)
            time.sleep(0.1)
        (folder / "model.py").write_text(whole)
        (repository.path / "slow" / "config.pbtxt").write_text(DOER_CONFIG.format(more=""))
        until(lambda: server.http.is_model_ready("slow"), "the model serves")
        assert "half" not in server.log
        assert server.http.do("slow") == "slow 1"


def test_a_model_that_is_loaded_anew_gives_no_cached_answers_of_the_old_one(repository):
    flags = ("--model-control-mode=explicit", "--cache-config=local,size=1000000")
    with Server(repository, flags=flags).started() as server:
        for answer in ("old", "new"):
            repository.doer("m", answer=answer, config="response_cache { enable: true }")
            server.http.load("m")
            assert [server.http.do("m") for _ in range(2)] == [answer] * 2
        assert server.http.statistics("m") == {"inferences": 1, "executions": 1, "failures": 0}
