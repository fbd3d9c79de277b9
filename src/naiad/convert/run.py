"""Starts the process that converts, follows it, and puts its result in its place. No framework is imported here."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import text_format

from naiad.config.parse import from_dict
from naiad.convert.job import REPORTS_FD, Done, Failed, Job, Report, Step
from naiad.errors import AlreadyExists, InvalidArgument, NaiadError

#: How much of what a framework wrote is shown when it failed.
_SHOWN_LINES = 15


def place(output: str | None, source: str) -> Path:
    """The folder of the version: REPOSITORY/NAME/VERSION. Raises InvalidArgument."""
    if output is None:
        stem = Path(source.rpartition(":")[2] if ":" in source else source).stem
        return Path("models") / stem / "1"
    path = Path(os.path.normpath(output))
    if not path.name.isdigit() or int(path.name) < 1 or not model_name(path):
        raise InvalidArgument(f"--output {output} is not REPOSITORY/NAME/VERSION, with a number above 0 as VERSION")
    return path


def model_name(version: Path) -> str:
    """The name of the model whose version lies in `version`; empty where that has no folder above it."""
    return Path(os.path.abspath(version)).parent.name


def check_place(version: Path, force: bool) -> None:
    """Raises AlreadyExists where something is in the way."""
    for folder in (version, *version.parents):
        if folder.exists() and not folder.is_dir():
            raise AlreadyExists(f"{folder} is in the way: it is no folder")
    if force:
        return
    if version.is_symlink() and not version.exists():
        raise AlreadyExists(f"{version} is a link to nothing; --force replaces it")
    if version.exists() and any(version.iterdir()):
        raise AlreadyExists(f"{version} has a model already; --force replaces it")


def convert(job: Job, on_step: Callable[[Step], None]) -> Done:
    """Runs the job in a process of its own. Raises NaiadError with what it said in the end."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "naiad.convert.process"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(write,),
            env={**os.environ, REPORTS_FD: str(write), "TF_CPP_MIN_LOG_LEVEL": "2", "TMPDIR": job.scratch},
            process_group=0,
        )
        os.close(write)
        assert process.stdin is not None
        try:
            # A process that ends before it has read says why, or its status does.
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(job) + b"\n")
                process.stdin.flush()
            last = _follow(read, on_step)
            status = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()
        if isinstance(last, Done):
            return last
        output.seek(0)
        lines = output.read().decode(errors="replace").rstrip().splitlines()[-_SHOWN_LINES:]
    if isinstance(last, Failed):
        raise NaiadError(last.text)
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with {status}"
    raise NaiadError("\n".join([f"the process that converts {how}; its last words:", *lines]))


def _follow(pipe: int, on_step: Callable[[Step], None]) -> Report | None:
    last: Report | None = None
    with os.fdopen(pipe, "rb") as reports:
        for line in reports:
            last = msgspec.json.decode(line, type=Report)
            if isinstance(last, Step):
                on_step(last)
    return last


def install(job: Job, done: Done, version: Path, replace_config: bool) -> tuple[Path, bool]:
    """Moves the model to `version` and writes config.pbtxt beside it, unless there is one. The path of the
    configuration, and whether it was written. Raises NaiadError, and leaves nothing behind, where it cannot."""
    config = version.parent / "config.pbtxt"
    writes = replace_config or not config.exists()
    # Each is moved to its place in one step, so that a server that watches the repository never sees half of it.
    half, half_config = version.parent / f".{version.name}.half", version.parent / ".config.pbtxt.half"
    old = version.parent / f".{version.name}.old"
    made = [folder for folder in version.parents if not folder.exists()]
    try:
        version.parent.mkdir(parents=True, exist_ok=True)
        _remove(half)
        _remove(old)
        shutil.copytree(job.folder, half)
        if writes:
            half_config.write_text(config_text(done.config))
        try:
            if os.path.lexists(version):
                version.rename(old)
            half.replace(version)
            if writes:
                half_config.replace(config)
        except BaseException:
            if not half.exists():
                _remove(version)
            if os.path.lexists(old):
                old.rename(version)
            raise
    except BaseException as error:
        with suppress(OSError):
            _remove(half)
            half_config.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
        if isinstance(error, shutil.Error):
            _, place, why = error.args[0][0]  # of each file that was not copied
            raise NaiadError(f"cannot write {place}: {why}") from error
        if isinstance(error, OSError):
            raise NaiadError(f"cannot write {error.filename or version}: {error.strerror or error}") from error
        raise
    with suppress(OSError):
        _remove(old)
    return config, writes


def _remove(folder: Path) -> None:
    """A folder with all in it, or a link to one without what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def config_text(config: dict[str, Any]) -> str:
    """The configuration as config.pbtxt has it."""
    return str(text_format.MessageToString(from_dict(config), use_short_repeated_primitives=True))
