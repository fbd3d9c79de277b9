"""Python environments that models bring along: packed ones are unpacked, requirements installed, each once.

    parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
        an archive as conda-pack makes it, or a folder: an unpacked one, or any virtual environment
    requirements.txt, in the model's or its version's folder
        what the server's own environment does not have goes into a virtual environment, with pip as it is configured

What is made lies in a folder of its own under the cache directory, named by the hash of what it is made from, files that
requirements name included, so it serves all models and servers that ask for the same; `.complete` beside it says that it is whole, a lock file keeps
two servers from making it at once. Nothing is removed from there: deleting the directory is safe when no server runs.

In the server; what takes time is in threads.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import msgspec

from naiad.errors import Internal, InvalidArgument, Unavailable

PARAMETER = "EXECUTION_ENV_PATH"
#: Stands for the model's folder in `EXECUTION_ENV_PATH`.
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
#: The environment of all models of a Python-based backend, beside its model.py.
BACKEND_ARCHIVE = "pb_exec_env_model.py.tar.gz"
REQUIREMENTS = "requirements.txt"
_LINES_SHOWN = 15


def default_directory() -> Path:
    """Where environments are kept if nothing else is said: in the user's cache. A user without a home, as containers have
    them, has it in the root folder, if at all."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache").removeprefix("~")
    return Path(cache, "naiad", "environments")


def interpreter_in(folder: Path, model: str) -> Path:
    """The interpreter of an environment. Raises InvalidArgument where there is none."""
    for name in ("python", "python3"):
        if (interpreter := folder / "bin" / name).is_file():
            return interpreter
    raise InvalidArgument(
        f"unable to load model '{model}': '{folder}' is no Python environment, expected bin/python in it ({PARAMETER})"
    )


class Environments:
    """Finds or makes the environments of models. On the event loop."""

    def __init__(self, directory: Path, *, install: bool, info: Callable[[str], None]) -> None:
        """`install`: whether requirements of models are installed, or left alone."""
        self._directory = directory
        self._install = install
        self._info = info
        self._making: dict[object, asyncio.Task[str]] = {}

    async def interpreter(
        self, model: str, directory: Path, version_directory: Path, code: Path, parameters: Mapping[str, str]
    ) -> str | None:
        """The path of the interpreter that a Python model wants; None if it says nothing, or has all it asks for.

        `code` is the folder of its model.py. Raises InvalidArgument and Unavailable.
        """
        chosen = parameters.get(PARAMETER, "").replace(MODEL_DIRECTORY, str(directory))
        if not chosen and (code / BACKEND_ARCHIVE).is_file():
            chosen = str(code / BACKEND_ARCHIVE)
        if chosen:
            return await self._once(chosen, self._unpacked, Path(chosen), model)
        if self._install:
            for folder in (version_directory, directory):
                if (path := folder / REQUIREMENTS).is_file():
                    return await self._once(path, self._installed, path, model) or None
        return None

    async def _once(self, key: object, make: Callable[[Path, str], str], path: Path, model: str) -> str:
        """Several versions and models that want the same at the same time wait for one thread."""
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(asyncio.to_thread(make, path, model))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(task)

    # ---------------------------------------------------------------- in threads

    def _unpacked(self, path: Path, model: str) -> str:
        if path.is_dir():
            return str(interpreter_in(path, model))
        if not path.is_file():
            raise Internal(
                f"Failed to get the canonical path for {path}. There is no such file ({PARAMETER} of model '{model}')"
            )
        with open(path, "rb") as archive:
            digest = hashlib.file_digest(archive, "sha256").hexdigest()
        folder = self._directory / digest[:32]
        with self._making_of(folder) as is_due:
            if is_due:
                self._info(f"unpacking the Python environment '{path}' of model '{model}'")
                _unpack(path, folder, model)
        return str(interpreter_in(folder, model))

    def _installed(self, path: Path, model: str) -> str:
        """Empty where the server's own environment has all that is required."""
        own = _run([sys.executable, *_PIP, "--dry-run", "--no-index", "--report=-", "-r", path.name], path.parent)
        if own.returncode == 0 and not msgspec.json.decode(own.stdout)["install"]:
            return ""
        try:
            folder = self._directory / environment_of(path)
        except OSError as error:
            raise Unavailable(
                f"unable to load model '{model}': cannot read '{error.filename}', which '{path}' names: {error.strerror}"
            ) from error
        interpreter = folder / "bin" / "python"
        with self._making_of(folder) as is_due:
            if is_due:
                self._info(f"installing '{path}' for model '{model}' in '{folder}'")
                for command in (
                    [sys.executable, "-m", "venv", str(folder)],
                    [str(interpreter), *_PIP, "-r", path.name],
                ):
                    done = _run(command, path.parent)
                    if done.returncode != 0:
                        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LINES_SHOWN:])
                        raise Unavailable(
                            f"unable to load model '{model}': its '{path}' cannot be installed; {' '.join(command)} says:\n"
                            f"{said}"
                        )
        return str(interpreter)

    @contextmanager
    def _making_of(self, folder: Path) -> Iterator[bool]:
        """Whether `folder` is to be made; it is whole afterwards, unless an exception leaves the block."""
        complete = folder.with_name(folder.name + ".complete")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = open(folder.with_name(folder.name + ".lock"), "w")  # noqa: SIM115
        except OSError as error:
            raise Unavailable(
                f"cannot keep Python environments in '{folder.parent}': {error.strerror} (--environment-directory)"
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_due = not complete.exists()
            if is_due:
                # What somebody began and did not end.
                shutil.rmtree(folder, ignore_errors=True)
            yield is_due
            if is_due:
                complete.touch()


_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")


#: What stands between paths in requirements, and before them in the same word. Paths may have spaces: see _words.
_BETWEEN = re.compile(r"""[\s"';@\[\]]+|(?<![=<>!~])=(?!=)""")
_BEFORE = re.compile(r"""^(-[rcef]|--[a-z-]+[\s=])?[\s"']*((\w+\+)?file:(//(localhost)?)?)?""")
_COMMENT = re.compile(r"(^|\s)#.*")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_ARCHIVES = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz")


def _words(text: str) -> set[str]:
    """What may be a path in requirements, whatever it is there for: one too many is one environment more at worst."""
    words = set()
    for line in map(str.strip, _COMMENT.sub("", text).splitlines()):
        for word in (line, *_BETWEEN.split(line)):
            path = unquote(_BEFORE.sub("", word).partition("#")[0]).strip("\"' ")
            # A number is a version, though there is a folder of this name.
            if path and not path.isdecimal():
                words.add(path)
    return words


def environment_of(requirements: Path) -> str:
    """A name for what the server's interpreter and pip make of `requirements`: a digest of these, and of the files and
    folders that they name, where other requirements, constraints and packages are, and that those name.

    Raises OSError for a file that cannot be read."""
    digest = hashlib.sha256(f"{sys.executable} {sys.version}\n".encode())
    texts = [requirements]
    for file in texts:  # grows
        text = _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), os.fsdecode(file.read_bytes()))
        digest.update(os.fsencode(text))
        bases = {file.parent, requirements.parent}
        for path in sorted({os.path.join(base, word) for base in bases for word in _words(text)}):
            if os.path.isdir(path):
                digest.update(os.fsencode(f"\n{path}\n"))  # what is installed with -e stays there
                for name in _source_files(path):
                    _add(os.path.join(path, name), name, digest)
            elif path.endswith(_ARCHIVES) and os.path.isfile(path):
                _add(path, os.path.basename(path), digest)
            elif os.path.isfile(path) and not any(os.path.samefile(path, known) for known in texts):
                texts.append(Path(path))
    return digest.hexdigest()[:32]


def _source_files(folder: str) -> list[str]:
    """The files in and below `folder`, without what building a package leaves there."""
    found = []
    for root, folders, files in os.walk(folder):
        left = {"__pycache__", "build"} if root == folder else {"__pycache__"}
        folders[:] = [name for name in folders if name not in left and not name.endswith(".egg-info")]
        found += [os.path.relpath(os.path.join(root, name), folder) for name in files]
    return sorted(found)


def _add(path: str, name: str, digest: "hashlib._Hash") -> None:
    if os.path.isfile(path):  # and not a pipe, or a link to nowhere
        with open(path, "rb") as file:
            digest.update(os.fsencode(name) + hashlib.file_digest(file, "sha256").digest())


def _run(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a program in `folder`, which requirements may refer to."""
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )


def _unpack(path: Path, folder: Path, model: str) -> None:
    try:
        with tarfile.open(path) as archive:
            # Links as they are, which environments have; but nothing outside of the folder.
            archive.extractall(folder, filter="tar")
    except (OSError, tarfile.TarError, EOFError) as error:
        raise InvalidArgument(
            f"unable to load model '{model}': cannot unpack the Python environment '{path}': {error}"
        ) from error
    # conda-pack: paths in the environment are those of where it was packed until this has run.
    if (script := folder / "bin" / "conda-unpack").is_file():
        done = _run([str(interpreter_in(folder, model)), str(script)], folder)
        if done.returncode != 0:
            raise InvalidArgument(
                f"unable to load model '{model}': conda-unpack of the Python environment '{path}' failed: {done.stderr}"
            )
