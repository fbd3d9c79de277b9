"""Which source can become what, as tables."""

import zipfile
from pathlib import Path

import pytest

from naiad.convert.plan import SOURCES, TARGETS, check, check_options, kind_of, missing
from naiad.errors import InvalidArgument


def archive(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.keras", "keras"),
        ("m.h5", "keras"),
        ("m.onnx", "onnx"),
        ("m.pt2", "pt2"),
        ("m.pkl", "sklearn"),
        ("m.joblib", "sklearn"),
        ("m.pt", "module"),
    ],
)
def test_a_source_is_known_by_its_suffix(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert kind_of(str(tmp_path / name)) == kind


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        (("m/data.pkl", "m/constants.pkl"), "torchscript"),
        (("m/data.pkl",), "module"),
        (("m/archive_format",), "pt2"),
    ],
)
def test_files_of_pytorch_are_told_apart_by_what_is_in_them(
    entries: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    archive(tmp_path / "m.pt", *entries)
    assert kind_of(str(tmp_path / "m.pt")) == kind


def test_a_saved_model_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"without saved_model\.pb"):
        kind_of(str(tmp_path))
    (tmp_path / "saved_model.pb").touch()
    assert kind_of(str(tmp_path)) == "savedmodel"


def test_a_module_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").touch()
    assert kind_of(f"{tmp_path}/net.py:Net") == "module"
    assert kind_of("package.models:build") == "module"
    with pytest.raises(InvalidArgument, match="which class or function"):
        kind_of(f"{tmp_path}/net.py")


@pytest.mark.parametrize("source", ["nothing.keras", "nothing.py:Net", "a:b c"])
def test_what_is_not_there(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="does not exist"):
        kind_of(source)


def test_what_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / "m.bin").touch()
    with pytest.raises(InvalidArgument, match="cannot tell what"):
        kind_of(str(tmp_path / "m.bin"))


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_way_is_there_or_the_ways_are_named(kind: str, target: str) -> None:
    _, targets = SOURCES[kind]
    if target in targets:
        check("m", kind, target)
        assert missing(kind, target, lambda module: True) == []
    else:
        with pytest.raises(InvalidArgument, match=f"can become {', '.join(targets)}, not {target}"):
            check("m", kind, target)


@pytest.mark.parametrize(
    ("kind", "target", "installed", "wanted"),
    [
        ("keras", "savedmodel", [], ["naiad[tensorflow]"]),
        ("keras", "onnx", ["tensorflow"], ["onnx", "tf2onnx"]),
        ("savedmodel", "openvino", ["tensorflow"], ["naiad[openvino]"]),
        ("onnx", "openvino", [], ["naiad[openvino]"]),
        ("module", "onnx", ["onnx"], ["naiad[torch]", "onnxscript"]),
        ("sklearn", "onnx", ["sklearn", "joblib", "onnx"], ["skl2onnx"]),
    ],
)
def test_missing_packages_are_named_as_pip_knows_them(
    kind: str, target: str, installed: list[str], wanted: list[str]
) -> None:
    assert missing(kind, target, installed.__contains__) == wanted


@pytest.mark.parametrize(
    ("source", "kind", "option", "text"),
    [
        ("m.onnx", "onnx", "--shape", "--shape is for a PyTorch module, a TorchScript model, a scikit-learn model"),
        ("net.py:Net", "module", "--layers", "--layers is for a Keras model; net.py:Net is a PyTorch module"),
        ("m.pt2", "pt2", "--weights", "--weights is for a PyTorch module; m.pt2 is a torch.export archive"),
        ("whole.pt", "module", "--weights", "--weights is for file.py:Name; whole.pt has weights of its own"),
    ],
)
def test_options_without_an_effect_are_refused(
    source: str, kind: str, option: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.pt").touch()
    check_options("net.py:Net", "module", ["--shape", "--weights"])
    with pytest.raises(InvalidArgument, match=text):
        check_options(source, kind, [option])
