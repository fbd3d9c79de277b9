"""Backends and models in Python environments of their own."""

import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Repository, Server, error_of

WHERE = "result = sys.prefix"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has what this one has."""
    path = tmp_path_factory.mktemp("environment")
    venv.create(path)
    (site_packages,) = path.glob("lib/python*/site-packages")
    # `addsitedir` also reads the .pth files there, for what is installed editable.
    (site_packages / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, other: Path) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))

    def chosen(value: str) -> str:
        return f'parameters [ {{ key: "NAIAD_ENVIRONMENT" value {{ string_value: "{value}" }} }} ]'

    repository.doer("default")
    repository.doer("path", config=chosen(str(other)))
    repository.doer("named", config=chosen("other"))
    repository.doer("missing", config=chosen("nowhere"))
    with Server(
        repository, flags=(f"--backend-config=python,other={other}", "--model-control-mode=explicit")
    ) as server:
        server.repository = repository  # type: ignore[attr-defined]
        yield server.started()


def test_a_model_runs_in_the_environment_it_names_beside_others(server: Server, other: Path) -> None:
    for name, prefix in [("default", sys.prefix), ("path", str(other)), ("named", str(other))]:
        server.http.load(name)
        assert server.http.do(name, WHERE) == prefix
    assert server.http.do("default", WHERE) == sys.prefix


def test_an_environment_that_is_not_there_is_the_models_error(server: Server) -> None:
    assert "'missing'" in (text := error_of(server.http.load, "missing"))
    assert "Python environment 'nowhere'" in text


def test_an_environment_without_naiad_is_named(server: Server, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty")
    config = f'parameters [ {{ key: "NAIAD_ENVIRONMENT" value {{ string_value: "{tmp_path / "empty"}" }} }} ]'
    server.repository.doer("empty", config=config)  # type: ignore[attr-defined]
    text = error_of(server.http.load, "empty")
    assert f"{tmp_path / 'empty'}/bin/python, in which naiad must be installed" in text


def test_a_setting_moves_a_whole_backend(tmp_path: Path, other: Path) -> None:
    repository = Repository(tmp_path / "models")
    repository.doer("m")
    with Server(repository, flags=(f"--backend-config=python,version={other}",)) as server:
        server.started()
        assert server.http.do("m", WHERE) == str(other)
