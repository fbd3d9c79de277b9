"""Where results go, and what becomes of a process that ends badly."""

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
    ],
)
def test_the_place_of_a_version(output: str | None, source: str, place: str) -> None:
    assert run.place(output, source) == Path(place)


@pytest.mark.parametrize("output", ["r/m", "r/m/0", "r/m/one"])
def test_a_place_without_a_version(output: str) -> None:
    with pytest.raises(InvalidArgument, match="REPOSITORY/NAME/VERSION"):
        run.place(output, "x.onnx")


def test_a_version_in_the_way(tmp_path: Path) -> None:
    run.check_place(tmp_path, force=False)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(AlreadyExists):
        run.check_place(tmp_path, force=False)
    run.check_place(tmp_path, force=True)


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
