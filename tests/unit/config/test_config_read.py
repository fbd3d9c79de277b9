"""The stages from a model directory to a configuration, on directories made here."""

from pathlib import Path
from typing import Any

import pytest

from naiad.config.read import Draft, config_path, finish, prepare, read_draft, read_labels
from naiad.config.validate import InvalidConfig
from naiad.errors import Internal, InvalidArgument, NaiadError, NotFound, Unsupported

IO = 'input { name: "X" data_type: TYPE_FP32 dims: 2 } output { name: "Y" data_type: TYPE_FP32 dims: 2 }'
BAD_IO = 'input { name: "X" dims: 2 }'


def _model(folder: Path, config: str | None, *files: str) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def _read(folder: Path, **options: Any) -> Draft:
    return read_draft(folder, folder.name, **options)


def test_a_model_without_a_configuration(tmp_path: Path) -> None:
    draft = _read(_model(tmp_path / "m", None, "1/model.onnx"))
    assert (draft.name, draft.backend, draft.provided, draft.source) == ("m", "onnxruntime", False, "")
    config = finish(draft, {"max_batch_size": 4, "input": [], "output": [], "dynamic_batching": {}})
    assert (config.name, config.platform, config.proto.default_model_filename) == (
        "m",
        "onnxruntime_onnx",
        "model.onnx",
    )
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_sizes == (4,)
    assert [(group.name, group.count) for group in config.instance_groups] == [("m", 2)]


def test_somebody_must_bring_a_configuration_except_for_python(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="model configuration is not provided for model 'm'"):
        finish(_read(_model(tmp_path / "m", None, "1/model.onnx")))
    assert finish(_read(_model(tmp_path / "p", None, "1/model.py"))).inputs == {}
    assert finish(_read(_model(tmp_path / "q", "", "1/model.onnx"))).inputs == {}


def test_without_completion_the_file_must_exist_and_say_everything(tmp_path: Path) -> None:
    with pytest.raises(Internal) as missing:
        _read(_model(tmp_path / "m", None, "1/model.py"), auto_complete=False)
    assert missing.value.message == (
        f"failed to open text file for read {tmp_path}/m/config.pbtxt: No such file or directory"
    )
    with pytest.raises(InvalidArgument, match="model input 'X' must specify 'data_type' for n"):
        _read(_model(tmp_path / "n", BAD_IO, "1/model.py"), auto_complete=False)
    # what follows from the files is filled in all the same
    assert _read(_model(tmp_path / "o", IO, "1/model.py"), auto_complete=False).backend == "python"


def test_with_completion_inputs_and_outputs_are_checked_at_the_end(tmp_path: Path) -> None:
    draft = _read(_model(tmp_path / "m", BAD_IO, "1/model.py"))
    with pytest.raises(InvalidArgument, match="model input 'X' must specify 'data_type' for m"):
        finish(draft)
    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": [2]}
    assert list(finish(draft, {"input": [tensor]}).inputs) == ["X"]
    assert list(draft.proto.input[0].dims) == [2]
    assert draft.proto.input[0].data_type == 0  # the draft is for every version


def test_all_problems_of_a_file_are_reported(tmp_path: Path) -> None:
    text = 'name: "other" backend: "python" max_batch_size: -1 dynamic_batching { preferred_batch_size: 0 }'
    with pytest.raises(InvalidConfig) as caught:
        _read(_model(tmp_path / "m", text, "1/model.py"))
    assert caught.value.problems == (
        "'max_batch_size' must be non-negative value for other",
        "dynamic batching preferred size must be positive for other",
        "unexpected directory name 'm' for model 'other', directory name must equal model name",
    )


def test_the_first_version_in_the_order_of_the_alphabet_tells_the_backend(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", None, ".cache/model.plan", "10/model.onnx", "2/model.py", "configs/x.pbtxt")
    assert _read(folder).backend == "onnxruntime"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", None, "1/model.py")
    (folder / "1" / "model.plan").mkdir()
    (folder / "1" / "model.savedmodel").mkdir()
    assert _read(folder).backend == "tensorflow"


def test_a_model_without_versions_can_be_read(tmp_path: Path) -> None:
    assert _read(_model(tmp_path / "m", 'backend: "python"')).backend == "python"


def test_custom_configuration_names(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", 'backend: "a"', "1/model.py", "configs/gpu.pbtxt")
    (folder / "configs" / "gpu.pbtxt").write_text('backend: "b"')
    assert _read(folder).backend == "a"
    assert _read(folder, config_name="gpu").backend == "b"
    assert _read(folder, config_name="cpu").backend == "a"
    assert config_path(folder, "gpu") == folder / "configs" / "gpu.pbtxt"


def test_an_override_replaces_the_file(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", "nonsense", "1/model.py")
    draft = _read(folder, override='{"max_batch_size": 3}')
    assert (draft.proto.max_batch_size, draft.backend, draft.source, draft.provided) == (3, "python", "override", True)


@pytest.mark.parametrize("override", ["", "max_batch_size: 2", '{"colour": "red"}', b"[]"])
def test_overrides_that_are_not_configurations(tmp_path: Path, override: str | bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"^Invalid config override: "):
        _read(_model(tmp_path / "m", None, "1/model.py"), override=override)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Internal, match=r"failed to read .*/absent: No such file or directory"):
        _read(tmp_path / "absent", override='{"backend": "python"}')


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbfname: "m"\r\nbackend: "python"\r\n',  # as editors on Windows write it
        b'# Gr\xfc\xdfe\nname: "m"\nbackend: "python" # \xc4\xe3\xba\xc3',
    ],
)
def test_other_encodings(tmp_path: Path, content: bytes) -> None:
    folder = _model(tmp_path / "m", None, "1/model.py")
    (folder / "config.pbtxt").write_bytes(content)
    assert (_read(folder).proto.name, _read(folder).backend) == ("m", "python")


def test_the_backend_sees_the_instance_groups(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", "instance_group { } instance_group { kind: KIND_CPU }", "1/model.py")
    groups = prepare(_read(folder, gpus=(0, 1)))["instance_group"]
    assert [(group["name"], group["kind"], group["gpus"]) for group in groups] == [
        ("m_0", "KIND_GPU", [0, 1]),
        ("m_1", "KIND_CPU", []),
    ]


@pytest.mark.parametrize("stage", [prepare, finish])
def test_instance_groups_are_checked_before_the_backend_is_asked(tmp_path: Path, stage: Any) -> None:
    draft = _read(_model(tmp_path / "m", f"instance_group {{ kind: KIND_GPU }} {BAD_IO}", "1/model.py"))
    with pytest.raises(InvalidArgument) as caught:
        stage(draft)
    assert caught.value.message == "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"


def test_what_the_backend_proposed_is_checked(tmp_path: Path) -> None:
    draft = _read(_model(tmp_path / "m", "response_cache { enable: true }", "1/model.py"))
    with pytest.raises(InvalidArgument, match="with 'decoupled' transaction policy"):
        finish(draft, {"model_transaction_policy": {"decoupled": True}})


def test_ensembles(tmp_path: Path) -> None:
    step = '{ model_name: "a" input_map { key: "A" value: "X" } output_map { key: "B" value: "Y" } }'
    text = f'platform: "ensemble" {IO} ensemble_scheduling {{ step {step} }}'
    draft = _read(_model(tmp_path / "e", text, "1/.keep"))
    assert draft.is_ensemble
    assert draft.members == ("a",)
    config = finish(draft)
    assert config.instance_groups == ()
    assert config.scheduling == "ensemble"


def test_drafts_are_equal_when_their_configurations_are(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", IO, "1/model.py")
    assert _read(folder) == _read(folder)
    assert _read(folder) != _read(folder, override="{}")


def _labelled(tmp_path: Path, filename: str) -> tuple[Path, Draft]:
    text = IO.replace('"Y"', f'"Y" label_filename: "{filename}"')
    folder = _model(tmp_path / "m", text, "1/model.py")
    return folder, _read(folder)


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"", []),
        (b"a\nb", ["a", "b"]),
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        ("\u00e4".encode(), ["\u00e4"]),
    ],
)
def test_labels(tmp_path: Path, content: bytes, labels: list[str]) -> None:
    folder, draft = _labelled(tmp_path, "labels.txt")
    (folder / "labels.txt").write_bytes(content)
    assert read_labels(folder, finish(draft)) == {"Y": labels}


@pytest.mark.parametrize(
    ("filename", "kind", "message"),
    [
        ("none.txt", Internal, "failed to open text file for read {m}/none.txt: No such file or directory"),
        (
            "../other.txt",
            Unsupported,
            "label file path '{m}/../other.txt' for output 'Y' in model 'm' is outside model directory",
        ),
    ],
)
def test_label_files_that_cannot_be_used(tmp_path: Path, filename: str, kind: type[NaiadError], message: str) -> None:
    folder, draft = _labelled(tmp_path, filename)
    with pytest.raises(kind) as caught:
        read_labels(folder, finish(draft))
    assert caught.value.message == message.format(m=folder)
