"""The choice of the Python environment of a model."""

import sys
from pathlib import Path

import pytest

from naiad.errors import InvalidArgument
from naiad.instances.hosts import Hosts, ModelSpec
from naiad.instances.interpreter import interpreter_of


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    interpreter = tmp_path / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    return tmp_path / "venv"


@pytest.mark.parametrize(
    ("backend", "settings"),
    [("tensorflow", {}), ("tensorflow", {"version": "2"}), ("python", {"shm-region-prefix-name": "x"})],
)
def test_the_server_s_own_python_is_the_default(backend: str, settings: dict[str, str]) -> None:
    assert interpreter_of("m", backend, settings, {}) == sys.executable


def test_a_setting_chooses_for_all_models_of_a_backend_by_path_or_by_name(venv: Path) -> None:
    python = str(venv / "bin" / "python")
    assert interpreter_of("m", "tensorflow", {"version": str(venv)}, {}) == python
    assert interpreter_of("m", "tensorflow", {"version": python}, {}) == python
    assert interpreter_of("m", "tensorflow", {"version": "old", "old": str(venv)}, {}) == python


def test_a_parameter_chooses_for_one_model(venv: Path) -> None:
    python = str(venv / "bin" / "python")
    settings = {"version": "2", "old": str(venv)}
    assert interpreter_of("m", "tensorflow", settings, {"NAIAD_ENVIRONMENT": "old"}) == python
    assert interpreter_of("m", "tensorflow", settings, {"NAIAD_ENVIRONMENT": str(venv)}) == python
    assert interpreter_of("m", "tensorflow", settings, {}) == sys.executable


def test_tensorflow_1_is_refused_as_triton_does() -> None:
    with pytest.raises(InvalidArgument) as refused:
        interpreter_of("m", "tensorflow", {"version": "1"}, {})
    assert refused.value.message == (
        "starting from 23.04, Triton no longer supports Tensorflow 1. Please switch to Tensorflow 2."
    )


@pytest.mark.parametrize("chosen", ["old", "3", "relative/venv", "/no/such/venv"])
def test_an_environment_that_is_not_there_is_named(chosen: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'m': backend 'tensorflow'.*'{chosen}'"):
        interpreter_of("m", "tensorflow", {"version": chosen}, {})


async def test_threads_of_the_server_have_no_environment_of_their_own(venv: Path) -> None:
    def no_calls(*arguments: object) -> None:
        raise AssertionError("unexpected call")

    spec = ModelSpec("m", 1, "python", venv, venv, venv, interpreter=str(venv / "bin" / "python"))
    async with Hosts(isolation="none", on_log=lambda *line: None, on_call=no_calls) as hosts:
        with pytest.raises(InvalidArgument, match="without --isolation=none"):
            await hosts.open(spec)
