"""Where results go, and what becomes of a process that ends badly."""

import errno
import os
import selectors
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from naiad.config.parse import parse_text
from naiad.convert import run
from naiad.convert.job import Done, Job, Step
from naiad.errors import AlreadyExists, InvalidArgument, NaiadError

CONFIG = {
    "name": "m",
    "backend": "onnxruntime",
    "max_batch_size": 8,
    "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [3, 4]}],
    "output": [{"name": "b", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}}],
    "dynamic_batching": {},
}


def job(folder: Path, source: str = "nothing.onnx", kind: str = "onnx") -> Job:
    return Job(source, kind, "openvino", str(folder), str(folder), "m", 8, True, 1e-3)


@pytest.mark.parametrize(
    ("output", "source", "place"),
    [
        ("r/m/3", "x.onnx", "r/m/3"),
        (None, "/some/digits.keras", "models/digits/1"),
        (None, "net.py:Net", "models/Net/1"),
        ("r/n/../m/3/", "x.onnx", "r/m/3"),
    ],
)
def test_the_place_of_a_version(output: str | None, source: str, place: str) -> None:
    assert run.place(output, source) == Path(place)


def test_the_name_of_a_model_outside_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "digits" / "sources"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert run.model_name(run.place("../2", "x.onnx")) == "digits"


@pytest.mark.parametrize("output", ["r/m", "r/m/0", "r/m/one", "/1"])
def test_a_place_without_a_version(output: str) -> None:
    with pytest.raises(InvalidArgument, match="REPOSITORY/NAME/VERSION"):
        run.place(output, "x.onnx")


def test_a_version_in_the_way(tmp_path: Path) -> None:
    run.check_place(tmp_path, force=False)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(AlreadyExists):
        run.check_place(tmp_path, force=False)
    run.check_place(tmp_path, force=True)


@pytest.mark.parametrize("place", ["file/m/1", "file/1", "file"])
def test_a_file_in_the_way(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AlreadyExists, match="file is in the way: it is no folder"):
        run.check_place(tmp_path / place, force=True)


@pytest.mark.parametrize("there", [True, False])
def test_what_cannot_be_written_leaves_nothing_behind(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half of the new version, nor less of the old one."""
    made, version = tmp_path / "made", tmp_path / "r" / "m" / "1"
    made.mkdir()
    (made / "model.xml").write_text("new")
    if there:
        version.mkdir(parents=True)
        (version / "model.xml").write_text("old")
        (version.parent / "config.pbtxt").write_text("old")
    copytree = shutil.copytree

    def full(source: str, target: Path) -> None:
        copytree(source, target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target / "model.xml"))

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(NaiadError, match=r"cannot write .*model.xml: No space left on device"):
        run.install(job(made), Done(CONFIG, [], []), version, replace_config=True)
    if there:
        assert (version / "model.xml").read_text() == (version.parent / "config.pbtxt").read_text() == "old"
        assert sorted(it.name for it in version.parent.iterdir()) == ["1", "config.pbtxt"]
    else:
        assert list(tmp_path.iterdir()) == [made]


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A new model, and the place of a version in a repository."""
    made, version = tmp_path / "made", tmp_path / "r" / "m" / "1"
    made.mkdir()
    (made / "model.xml").write_text("new")
    version.parent.mkdir(parents=True)
    return made, version


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    made, version = folders(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.xml").write_text("old")
    version.symlink_to(elsewhere)
    run.install(job(made), Done(CONFIG, [], []), version, replace_config=True)
    assert not version.is_symlink()
    assert (version / "model.xml").read_text() == "new"
    assert (elsewhere / "model.xml").read_text() == "old"
    assert sorted(it.name for it in version.parent.iterdir()) == ["1", "config.pbtxt"]


def test_a_link_to_nothing_is_in_the_way(tmp_path: Path) -> None:
    made, version = folders(tmp_path)
    version.symlink_to(tmp_path / "nothing")
    with pytest.raises(AlreadyExists, match="is a link to nothing; --force replaces it"):
        run.check_place(version, force=False)
    run.check_place(version, force=True)
    run.install(job(made), Done(CONFIG, [], []), version, replace_config=True)
    assert (version / "model.xml").read_text() == "new"


@pytest.mark.parametrize("there", [True, False])
def test_a_configuration_that_cannot_be_replaced_leaves_the_old_version(there: bool, tmp_path: Path) -> None:
    made, version = folders(tmp_path)
    if there:
        version.mkdir()
        (version / "model.xml").write_text("old")
    (version.parent / "config.pbtxt").mkdir()
    with pytest.raises(NaiadError, match=r"cannot write .*config\.pbtxt"):
        run.install(job(made), Done(CONFIG, [], []), version, replace_config=True)
    assert sorted(it.name for it in version.parent.iterdir()) == [*(["1"] if there else []), "config.pbtxt"]
    assert not there or (version / "model.xml").read_text() == "old"


def test_files_that_cannot_be_copied_are_told_in_words(tmp_path: Path) -> None:
    made, version = folders(tmp_path)
    (made / "model.bin").symlink_to("nothing")
    with pytest.raises(NaiadError, match=r"cannot write /.*/\.1\.half/model\.bin: \[Errno 2\] No such file"):
        run.install(job(made), Done(CONFIG, [], []), version, replace_config=True)
    assert list(version.parent.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Neither the process that converts, nor what that has written."""
    pytest.importorskip("torch")
    scratch, told = tmp_path / "scratch", tmp_path / "told"
    scratch.mkdir()
    os.mkfifo(told)
    (tmp_path / "net.py").write_text(
        "import os, pathlib, tempfile, threading\n"
        "pathlib.Path(tempfile.mkdtemp(), 'weights').write_text('large')\n"
        f"pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "threading.Event().wait()\n"
    )
    program = [sys.executable, "-m", "naiad", "convert", "net.py:Net", "--to", "pt2", "--output", "models/m/1"]
    command = subprocess.Popen(
        program,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    converting = os.pidfd_open(int(told.read_text()))
    assert list(scratch.iterdir()) != []
    command.send_signal(number)
    assert command.wait() == (-number if number is signal.SIGKILL else 128 + number)
    with selectors.DefaultSelector() as selector:
        selector.register(converting, selectors.EVENT_READ)
        assert selector.select(60)
    os.close(converting)
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "models").exists()


def test_the_configuration_can_be_read_again() -> None:
    text = run.config_text(CONFIG)
    assert "dims: [3, 4]" in text
    read = parse_text(text)
    assert read.max_batch_size == 8
    assert read.output[0].HasField("reshape")


@pytest.mark.parametrize(("force", "kept"), [(False, True), (True, False)])
def test_a_configuration_that_is_there_is_kept(force: bool, kept: bool, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "model.xml").write_text("new")
    version = tmp_path / "r" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_text("old")
    config = version.parent / "config.pbtxt"
    config.write_text("mine")
    assert run.install(job(made), Done(CONFIG, [], []), version, force) == (config, not kept)
    assert [path.name for path in version.iterdir()] == ["model.xml"]
    assert (config.read_text() == "mine") is kept
    assert sorted(path.name for path in version.parent.iterdir()) == ["1", "config.pbtxt"]


def test_what_the_process_says_is_the_error(tmp_path: Path) -> None:
    steps: list[Step] = []
    with pytest.raises(NaiadError, match=r"unable to find .*nothing\.onnx"):
        run.convert(job(tmp_path), steps.append)
    assert [step.number for step in steps] == [1]


def test_a_process_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    source = tmp_path / "dying.py"
    source.write_text("import os, sys\nprint('no memory left', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)\n")
    pytest.importorskip("torch")
    with pytest.raises(NaiadError, match=r"(?s)ended by SIGKILL.*no memory left"):
        run.convert(job(tmp_path, f"{source}:Net", "module"), lambda step: None)


def test_a_process_that_ends_before_it_has_read_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.sys, "executable", "/bin/false")
    more_than_a_pipe_holds = job(tmp_path, "x" * (1 << 20))
    with pytest.raises(NaiadError, match="the process that converts has ended with 1"):
        run.convert(more_than_a_pipe_holds, lambda step: None)
