"""--rate-limit=execution_count: models that share a resource take turns; what can never run does not load."""

from served import Gate, Server, error_of

GROUP = """instance_group [ {{ count: {count} kind: KIND_CPU rate_limiter {{ resources [ {resources} ] }} }} ]"""


def resource(name: str, count: int, everywhere: bool = True) -> str:
    return f'{{ name: "{name}" count: {count} {"global: true" if everywhere else ""} }}'


def group(*resources: str, count: int = 1) -> str:
    return GROUP.format(count=count, resources=", ".join(resources))


def test_models_that_share_a_resource_take_turns(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("one", config=group(resource("R", 1)))
    repository.doer("other", config=group(resource("R", 1)))
    repository.doer("free", config=group(resource("S", 1)))
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=R:1", "--rate-limit-resource=S:1")
    with Server(repository, flags=flags).started() as server:
        held = server.ask(server.http.do, "one", gate.do)
        gate.reached()
        waiting = server.ask(server.http.do, "other", "")
        assert server.grpc.do("free") == "free 1"
        assert not waiting.done()
        gate.open()
        assert held.result() == "one 1"
        assert waiting.result() == "other 1"


def test_off_means_off(repository, tmp_path):
    gate = Gate(tmp_path)
    repository.doer("one", config=group(resource("R", 1)))
    repository.doer("other", config=group(resource("R", 1)))
    with Server(repository, flags=("--rate-limit=off", "--rate-limit-resource=S:1")).started() as server:
        held = server.ask(server.http.do, "one", gate.do)
        gate.reached()
        assert server.http.do("other") == "other 1"
        gate.open()
        assert held.result() == "one 1"


def test_what_can_never_run_does_not_load(repository):
    flags = ("--model-control-mode=explicit", "--rate-limit=execution_count", "--rate-limit-resource=R:2")
    with Server(repository, flags=flags).started() as server:
        repository.doer("big", config=group(resource("R", 3)))
        repository.doer("unlisted", config=group(resource("S", 1)))
        repository.doer("both", config=group(resource("R", 1), resource("R", 1, everywhere=False)))
        assert (
            'Resource count for "R" is limited to 2 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 3"
        ) in error_of(server.http.load, "big")
        assert 'Resource count for "S" is limited to 0' in error_of(server.http.load, "unlisted")
        assert (
            'Resource "R" is present as both global and device-specific resource in the model configuration.'
        ) in error_of(server.grpc.load, "both")
        repository.doer("big", config=group(resource("R", 2), count=2))
        server.http.load("big")
        assert server.http.do("big") == "big 1"


def test_an_instance_that_waits_survives_the_end_of_the_other(repository):
    repository.doer("one", config=group(resource("R", 1)))
    repository.doer("other", config=group(resource("R", 1)))
    with Server(repository, flags=("--rate-limit=execution_count",)).started() as server:
        dying = server.ask(server.http.do, "one", "os._exit(3)")
        assert server.http.do("other") == "other 1"
        assert "exit" in error_of(dying.result)
        assert server.http.do("other") == "other 1"
