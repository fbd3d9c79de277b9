"""Where results go, and what becomes of a process that ends badly."""

import errno
import os
import shutil
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
    return Job(source, kind, "openvino", str(folder), "m", 8, True, 1e-3)


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
