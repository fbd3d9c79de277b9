"""`is_ready` of Python models: what clients are told that ask for readiness; inference does not ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Client, Gate, Repository, Server, error_of

STATE = "open(os.path.join(os.path.dirname(__file__), 'state')).read()"
BODIES = {
    "plain": f"    def is_ready(self):\n        return eval({STATE})\n",
    "coroutine": f"    async def is_ready(self):\n        return eval({STATE})\n",
}


@pytest.fixture(scope="module", params=BODIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    folder = repository.doer("m", config="instance_group [ { count: 2 kind: KIND_CPU } ]") / "1"
    code = folder / "model.py"
    code.write_text(code.read_text().rstrip("#") + "\n" + BODIES[request.param])
    (folder / "state").write_text("True")
    repository.doer("other")
    with Server(repository).started() as server:
        yield server, folder / "state"


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, served: tuple[Server, Path]) -> Client:
    return served[0].client(request.param)


def test_the_model_decides(served: tuple[Server, Path], client: Client) -> None:
    _, state = served
    state.write_text("True")
    assert client.is_model_ready("m")
    assert client.is_ready()
    state.write_text("False")
    assert not client.is_model_ready("m")
    assert not client.is_ready()
    assert client.is_model_ready("other")
    assert client.do("m") == "m 1"


@pytest.mark.parametrize(
    ("value", "text"), [("1", "is_ready() must return a boolean value"), ("1 / 0", "division by zero")]
)
def test_a_model_that_cannot_say_is_not_ready(served: tuple[Server, Path], value: str, text: str) -> None:
    server, state = served
    state.write_text(value)
    assert text in error_of(server.grpc.is_model_ready, "m")
    assert not server.http.is_model_ready("m")
    assert not server.grpc.is_ready()


def test_a_model_is_asked_while_it_executes(served: tuple[Server, Path], tmp_path: Path) -> None:
    server, state = served
    state.write_text("True")
    gate = Gate(tmp_path)
    busy = [server.ask(server.http.do, "m", gate.do) for _ in range(2)]
    gate.reached()
    assert server.http.is_model_ready("m")
    gate.open()
    assert [each.result() for each in busy] == ["m 1"] * 2


def test_a_model_that_does_not_answer_is_not_ready(served: tuple[Server, Path]) -> None:
    server, state = served
    state.write_text("time.sleep(7)")
    assert "Timed out waiting for user-defined is_ready() response" in error_of(server.grpc.is_model_ready, "m")
    state.write_text("True")
    assert server.grpc.is_model_ready("other")
