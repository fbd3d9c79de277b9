"""Backends and models in Python environments of their own."""

import ctypes
import os
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import DOER_CONFIG, Repository, Server, error_of

WHERE = "result = sys.prefix"


def purelib() -> str:
    return sysconfig.get_path("purelib")


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
    environments = tmp_path_factory.mktemp("environments")

    def chosen(value: str) -> str:
        return f'parameters [ {{ key: "NAIAD_ENVIRONMENT" value {{ string_value: "{value}" }} }} ]'

    repository.doer("default")
    repository.doer("path", config=chosen(str(other)))
    repository.doer("named", config=chosen("other"))
    repository.doer("missing", config=chosen("nowhere"))
    with Server(
        repository,
        flags=(
            f"--backend-config=python,other={other}",
            "--model-control-mode=explicit",
            f"--environment-directory={environments}",
        ),
    ) as server:
        server.repository = repository  # type: ignore[attr-defined]
        server.environments = environments  # type: ignore[attr-defined]
        yield server.started()


def test_a_model_runs_in_the_environment_it_names_beside_others(server: Server, other: Path) -> None:
    for name, prefix in [("default", sys.prefix), ("path", str(other)), ("named", str(other))]:
        server.http.load(name)
        assert server.http.do(name, WHERE) == prefix
    assert server.http.do("default", WHERE) == sys.prefix
    # What the gRPC library says of a server that forks.
    assert "fork" not in server.log


def test_an_environment_that_is_not_there_is_the_models_error(server: Server) -> None:
    assert "'missing'" in (text := error_of(server.http.load, "missing"))
    assert "Python environment 'nowhere'" in text


def test_an_environment_without_naiad_has_it_from_the_server(server: Server, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty")
    config = f'parameters [ {{ key: "NAIAD_ENVIRONMENT" value {{ string_value: "{tmp_path / "empty"}" }} }} ]'
    server.repository.doer("empty", config=config)  # type: ignore[attr-defined]
    server.http.load("empty")
    assert server.http.do("empty", WHERE) == str(tmp_path / "empty")
    # Its own packages come first, and its programs.
    (packages,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    assert (
        server.http.do("empty", f"result = sys.path.index({str(packages)!r}) < sys.path.index({purelib()!r})") == "True"
    )
    program = "import shutil; result = shutil.which('python')"
    assert server.http.do("empty", program) == str(tmp_path / "empty" / "bin" / "python")


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("false", 1), ("exit 3", 3), ("exit 0", 0), ("set -eu\nfalse", 1), ("if", 2)],
)
def test_an_environment_is_activated(server: Server, tmp_path: Path, end: str, status: int) -> None:
    venv.create(tmp_path / "active")
    script = tmp_path / "active" / "bin" / "activate"
    with script.open("a") as file:
        file.write(f'\nexport NAIAD_TEST="$# yes"; echo "said by $VIRTUAL_ENV"\n{end}\n')
    ctypes.CDLL("libm.so.6")
    (libm,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm.so" in line}
    shutil.copy(libm, tmp_path / "active" / "lib" / "libnaiad_test.so")
    config = f'parameters [ {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path / "active"}" }} }} ]'
    server.repository.doer("active", config=config)  # type: ignore[attr-defined]
    server.http.load("active")
    assert server.http.do("active", WHERE) == str(tmp_path / "active")
    assert server.http.do("active", "import os; result = os.environ['NAIAD_TEST']") == "0 yes"
    assert "libnaiad_test" in server.http.do("active", "import ctypes; result = ctypes.CDLL('libnaiad_test.so')")
    program = "import subprocess; result = subprocess.getoutput('echo $LD_LIBRARY_PATH')"
    assert server.http.do("active", program) == os.environ.get("LD_LIBRARY_PATH", "")
    assert (f"{script} failed with status {status};" in server.log) == (status != 0)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo 3.7 False",
            "that is Python 3.7, the server is Python {own} and can lend its packages to the same version",
        ),
        ("echo what is this >&2; exit 3", "is no Python that works: what is this"),
    ],
)
def test_an_environment_that_cannot_run_naiad_is_named(server: Server, tmp_path: Path, script: str, text: str) -> None:
    interpreter = tmp_path / "environment" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    config = f'parameters [ {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path / "environment"}" }} }} ]'
    server.repository.doer("wrong", config=config)  # type: ignore[attr-defined]
    said = error_of(server.http.load, "wrong")
    assert text.format(own=f"{sys.version_info.major}.{sys.version_info.minor}") in said
    assert str(interpreter) in said


def test_an_archive_beside_a_model_is_unpacked_for_it(server: Server, tmp_path: Path) -> None:
    venv.create(tmp_path / "packed")
    value = "$$TRITON_MODEL_DIRECTORY/env.tar.gz"
    config = f'parameters [ {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }} ]'
    folder = server.repository.doer("packed", config=config)  # type: ignore[attr-defined]
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "packed", ".")
    server.http.load("packed")
    assert Path(server.http.do("packed", WHERE)).parent == server.environments  # type: ignore[attr-defined]


def test_requirements_of_a_model_are_installed_for_it_alone(server: Server) -> None:
    folder = server.repository.doer("needs", initialize="import naiad_test_thing")  # type: ignore[attr-defined]
    with zipfile.ZipFile(folder / "naiad_test_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("naiad_test_thing.py", "VALUE = 7\n")
        info = "naiad_test_thing-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: naiad-test-thing\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    assert "naiad_test_thing" in error_of(server.http.load, "needs")
    (folder / "requirements.txt").write_text("./naiad_test_thing-1.0-py3-none-any.whl\n")
    server.http.load("needs")
    assert server.http.do("needs", "import naiad_test_thing; result = naiad_test_thing.VALUE") == "7"
    assert Path(server.http.do("needs", WHERE)).parent == server.environments  # type: ignore[attr-defined]
    server.http.load("default")
    assert server.http.do("default", WHERE) == sys.prefix


def test_a_backend_may_be_a_python_model_that_others_name(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models")
    backends = Repository(tmp_path / "backends")
    code = backends.doer("mine", answer="of the backend", config=None) / "1" / "model.py"
    code.rename(backends.path / "mine" / "model.py")
    folder = repository.doer("m", config=None)
    (folder / "1" / "model.py").unlink()
    (folder / "config.pbtxt").write_text(DOER_CONFIG.format(more="").replace('"python"', '"mine"'))
    with Server(repository, flags=(f"--backend-directory={backends.path}",)) as server:
        server.started()
        assert server.http.do("m") == "of the backend"
        assert server.http.config("m")["backend"] == "mine"
        assert server.http.do("m", "result = 'mine' in sys.modules") == "False"


def test_a_setting_moves_a_whole_backend(tmp_path: Path, other: Path) -> None:
    repository = Repository(tmp_path / "models")
    repository.doer("m")
    with Server(repository, flags=(f"--backend-config=python,version={other}",)) as server:
        server.started()
        assert server.http.do("m", WHERE) == str(other)
