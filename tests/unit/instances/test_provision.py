"""Environments that models bring along: found, unpacked and installed once, and what is said when they cannot be."""

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from naiad.errors import Internal, InvalidArgument, Unavailable
from naiad.instances.provision import Environments, default_directory, environment_of


class Lab:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "models" / "m"
        self.version = self.model / "1"
        self.version.mkdir(parents=True)
        self.said: list[str] = []
        self.environments = self.fresh()

    def fresh(self, install: bool = True) -> Environments:
        return Environments(self.root / "cache", install=install, info=self.said.append)

    async def interpreter(self, value: str = "", code: Path | None = None, name: str = "m") -> str | None:
        parameters = {"EXECUTION_ENV_PATH": value} if value else {}
        return await self.environments.interpreter(name, self.model, self.version, code or self.version, parameters)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def archive(path: Path, **files: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in {"bin/python": "#!/bin/sh\n", **{k.replace("__", "/"): v for k, v in files.items()}}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def is_file(path: Path) -> bool:
    return path.is_file()


def interrupt(cache: Path, interpreter: Path) -> Path:
    """As if the only environment had been left half made; something that is in its way."""
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    interpreter.unlink()
    folder.with_name(folder.name + ".complete").unlink()
    (folder / "rest").touch()
    return folder / "rest"


def output_of(interpreter: str, code: str) -> str:
    return subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout


def test_where_environments_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "naiad" / "environments"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # nobody knows this user
    assert default_directory() == Path("/.cache/naiad/environments")


async def test_most_models_bring_nothing(lab: Lab) -> None:
    assert await lab.interpreter() is None


async def test_a_folder_is_taken_as_it_is(lab: Lab) -> None:
    folder = lab.model / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").touch()
    assert await lab.interpreter("$$TRITON_MODEL_DIRECTORY/environment") == str(folder / "bin" / "python3")
    (folder / "bin" / "python").touch()
    assert await lab.interpreter(str(folder)) == str(folder / "bin" / "python")
    assert not (lab.root / "cache").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            "/nowhere/env.tar.gz",
            "Failed to get the canonical path for /nowhere/env.tar.gz. There is no such file (EXECUTION_ENV_PATH of model 'm')",
        ),
        ("$$TRITON_MODEL_DIRECTORY/1", "is no Python environment, expected bin/python in it"),
        ("$$TRITON_MODEL_DIRECTORY/broken.tar.gz", "cannot unpack the Python environment"),
    ],
)
async def test_what_is_no_environment_is_said(lab: Lab, value: str, text: str) -> None:
    (lab.model / "broken.tar.gz").write_bytes(b"broken")
    for _ in range(2):
        with pytest.raises((InvalidArgument, Internal)) as caught:
            await lab.interpreter(value)
        assert text in caught.value.message


async def test_an_archive_is_unpacked_once_for_all_who_have_it(lab: Lab) -> None:
    archive(lab.model / "env.tar.gz")
    value = "$$TRITON_MODEL_DIRECTORY/env.tar.gz"
    found = set(await asyncio.gather(*[lab.interpreter(value) for _ in range(3)]))
    lab.environments = lab.fresh()
    found.add(await lab.interpreter(value))
    (interpreter,) = found
    assert is_file(Path(str(interpreter)))
    assert Path(str(interpreter)).parents[2] == lab.root / "cache"
    assert len(lab.said) == 1


async def test_an_archive_half_unpacked_is_unpacked_again(lab: Lab) -> None:
    archive(lab.model / "env.tar.gz")
    interpreter = Path(str(await lab.interpreter(str(lab.model / "env.tar.gz"))))
    rest = interrupt(lab.root / "cache", interpreter)
    assert await lab.interpreter(str(lab.model / "env.tar.gz")) == str(interpreter)
    assert is_file(interpreter)
    assert not is_file(rest)


async def test_another_archive_of_the_same_name_is_another_environment(lab: Lab) -> None:
    path = str(archive(lab.model / "env.tar.gz"))
    first = await lab.interpreter(path)
    archive(lab.model / "env.tar.gz", lib__more="x")
    assert await lab.interpreter(path) != first


async def test_nothing_is_unpacked_outside(lab: Lab) -> None:
    archive(lab.model / "env.tar.gz", **{"..__..__out": "x"})
    with pytest.raises(InvalidArgument, match="cannot unpack"):
        await lab.interpreter(str(lab.model / "env.tar.gz"))
    assert not (lab.root / "out").exists()


async def test_conda_unpack_is_run(lab: Lab) -> None:
    path = archive(lab.model / "env.tar.gz", bin__python='#!/bin/sh\nexec /bin/sh "$@"\n')
    # The archive's own interpreter, a shell here, runs it.
    with tarfile.open(path, "w:gz") as tar:
        for name, text in [
            ("bin/python", '#!/bin/sh\nexec /bin/sh "$@"\n'),
            ("bin/conda-unpack", "echo done > unpacked\n"),
        ]:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    interpreter = Path(str(await lab.interpreter(str(path))))
    assert (interpreter.parents[1] / "unpacked").read_text() == "done\n"


async def test_the_archive_of_a_backend_is_for_its_models(lab: Lab) -> None:
    backend = lab.root / "backends" / "own"
    backend.mkdir(parents=True)
    archive(backend / "pb_exec_env_model.py.tar.gz")
    assert await lab.interpreter(code=backend) is not None
    (lab.model / "env" / "bin").mkdir(parents=True)
    (lab.model / "env" / "bin" / "python").touch()
    assert await lab.interpreter(str(lab.model / "env"), code=backend) == str(lab.model / "env" / "bin" / "python")


# ---------------------------------------------------------------- requirements.txt; nothing is fetched from anywhere


def wheel(folder: Path, value: int = 7) -> Path:
    path = folder / "naiad_test_thing-1.0-py3-none-any.whl"
    info = "naiad_test_thing-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("naiad_test_thing.py", f"VALUE = {value}\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: naiad-test-thing\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


async def test_what_the_server_has_needs_no_environment(lab: Lab) -> None:
    (lab.model / "requirements.txt").write_text("numpy\nmsgspec  # both are here\n")
    assert await lab.interpreter() is None
    assert lab.said == []


async def test_what_it_lacks_is_installed_once(lab: Lab) -> None:
    wheel(lab.version)
    (lab.version / "requirements.txt").write_text("./naiad_test_thing-1.0-py3-none-any.whl\n")
    interpreter = await lab.interpreter()
    assert interpreter is not None
    assert output_of(interpreter, "import naiad_test_thing; print(naiad_test_thing.VALUE)") == "7\n"
    assert len(lab.said) == 1
    lab.environments = lab.fresh()
    assert await lab.interpreter(name="other") == interpreter
    assert len(lab.said) == 1
    lab.environments = lab.fresh(install=False)
    assert await lab.interpreter() is None


def package(folder: Path, value: int) -> Path:
    """The source of one that needs nothing to be built with, and leaves traces of that beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "naiad_test_thing.py").write_text(f"VALUE = {value}\n")
    for name in ("naiad_test_thing.egg-info", "build"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "trace").write_text(os.urandom(8).hex())
    return folder


@pytest.mark.parametrize(
    ("requirements", "named"),
    [
        ("-r more.txt", "more.txt"),
        ("-rmore.txt", "more.txt"),
        ("--requirement=more.txt  # and so on", "more.txt"),
        ("-r 'my more.txt'", "my more.txt"),
        ("numpy\n-c sub/constraints.txt", "sub/constraints.txt"),
        ("-r sub/more.txt", "sub/least.txt"),
        ("./thing-1.0-py3-none-any.whl", "thing-1.0-py3-none-any.whl"),
        ("thing[extra] @ file://{m}/my%20wheels/thing.whl ; python_version > '3'", "my wheels/thing.whl"),
        ("${{THINGS}}/thing.tar.gz#egg=thing", "things/thing.tar.gz"),
        ("--find-links wheels\nthing", "wheels/thing-1.0-py3-none-any.whl"),
        ("-e ./pkg[extra]", "pkg/src/thing/code.py"),
        ("./my pkg", "my pkg/setup.py"),
    ],
)
def test_an_environment_is_that_of_all_files_that_requirements_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirements: str, named: str
) -> None:
    monkeypatch.setenv("THINGS", str(tmp_path / "things"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.txt").write_text("-r least.txt\n-r ../requirements.txt")
    path = tmp_path / "requirements.txt"
    path.write_text(requirements.format(m=tmp_path))
    file = tmp_path / named
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("thing==1.0")
    first = environment_of(path)
    assert environment_of(path) == first
    file.write_text("thing==2.0")
    assert environment_of(path) != first


def test_an_environment_is_not_that_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m" / "requirements.txt"
    for text in ("thing >= 1  # not /\n", "-e ./pkg\n"):
        package(tmp_path / "m" / "pkg", 7)
        (tmp_path / "m" / "1").mkdir(exist_ok=True)
        path.write_text(text)
        first = environment_of(path)
        (tmp_path / "m" / "1" / "model.py").write_text(text)
        package(tmp_path / "m" / "pkg", 7)
        assert environment_of(path) == first


def test_models_that_bring_the_same_files_have_one_environment(tmp_path: Path) -> None:
    names = set()
    for name, pin in [("a", "1"), ("b", "1"), ("c", "2")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "requirements.txt").write_text("-r more.txt\n")
        (tmp_path / name / "more.txt").write_text(f"thing=={pin}")
        names.add(environment_of(tmp_path / name / "requirements.txt"))
    assert len(names) == 2


async def test_what_requirements_name_is_installed_anew_when_it_changes(lab: Lab) -> None:
    (lab.model / "requirements.txt").write_text("-r more.txt\n")
    (lab.model / "more.txt").write_text("./a/naiad_test_thing-1.0-py3-none-any.whl\n")
    found = []
    for value in (7, 8):
        (lab.model / "a").mkdir(exist_ok=True)
        wheel(lab.model / "a", value)
        interpreter = await lab.interpreter()
        assert interpreter is not None
        found.append(output_of(interpreter, "import naiad_test_thing; print(naiad_test_thing.VALUE)"))
    assert found == ["7\n", "8\n"]


async def test_what_cannot_be_installed_is_said_with_pip_s_words(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (lab.model / "requirements.txt").write_text("naiad-test-nothing\n")
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await lab.interpreter()
        assert caught.value.message.startswith("unable to load model 'm': its ")
        assert "No matching distribution found for naiad-test-nothing" in caught.value.message


async def test_what_requirements_name_and_cannot_be_read_is_said(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, name: str) -> None:
        raise PermissionError(13, "Permission denied", "/m/thing.whl")

    monkeypatch.setattr("hashlib.file_digest", refuse)
    (lab.model / "thing.whl").touch()
    (lab.model / "requirements.txt").write_text("./thing.whl\n")
    with pytest.raises(
        Unavailable, match=r"cannot read '/m/thing.whl', which '.*requirements.txt' names: Permission denied"
    ):
        await lab.interpreter()


async def test_a_directory_that_cannot_be_written(lab: Lab) -> None:
    (lab.root / "cache").touch()
    archive(lab.model / "env.tar.gz")
    with pytest.raises(Unavailable, match="--environment-directory"):
        await lab.interpreter(str(lab.model / "env.tar.gz"))


def test_the_interpreter_of_these_tests_has_pip() -> None:
    assert subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
