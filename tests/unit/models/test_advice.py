"""What the log says to do about models that do not load: over real folders, with the errors as they are raised."""

import os
from pathlib import Path

import pytest

from naiad.config.read import Draft
from naiad.errors import InvalidArgument, NaiadError
from naiad.models.advice import advice
from naiad.models.sources import RepositorySources
from naiad.models.table import Source
from naiad.repository.snapshot import scan

NO_BACKEND = "unable to find backend library for backend '{}', try specifying runtime on the model configuration."
NO_MODULE = "ModuleNotFoundError: No module named 'cv2.data'\n\nAt:\n  /m/1/model.py(1): <module>\n"
ONNX = 'platform: "onnxruntime_onnx"'


async def source_of(path: Path, files: dict[str, str]) -> Source:
    (path / "m").mkdir()
    for name, content in files.items():
        file = path / "m" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    sources = RepositorySources([str(path)], config_name="", auto_complete=True, gpus=())
    return await sources.read(scan([path]).models["m"])


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "'{m}' has no config.pbtxt that names a backend, and no version folder"),
        ({"1/.keep": ""}, "no config.pbtxt names a backend, and '{m}/1' is empty"),
        (
            {"1/net.onnx": ""},
            "no config.pbtxt names a backend, and '{m}/1' has net.onnx: none is model.graphdef, model.savedmodel, ",
        ),
        (
            {"1/saved_model.pb": "", "1/variables/x": ""},
            "no config.pbtxt names a backend, and '{m}/1' is a SavedModel: move what is in it to '{m}/1/model.savedmo",
        ),
        (
            {"config.pbtxt": 'backend: "tensorflow"'},
            'with backend: "tensorflow" say platform: "tensorflow_graphdef" or "tensorflow_savedmodel"',
        ),
        (
            {"config.pbtxt": 'backend: "onnxruntime" platform: "tensorrt_plan"'},
            'with backend: "onnxruntime" say platform: "onnxruntime_onnx"',
        ),
        ({"model.onnx": "x"}, "move '{m}/model.onnx' to '{m}/1/model.onnx'"),
        ({"config.pbtxt": ONNX, "model.onnx": "x"}, "move '{m}/model.onnx' to '{m}/1/model.onnx'"),
        ({"config.pbtxt": ONNX}, "a version is a folder with a number for its name: '{m}/1/model.onnx'"),
        ({"config.pbtxt": ONNX, "1/model.onnx": "x"}, ""),
        ({"config.pbtxt": "what?"}, ""),
        ({"config.pbtxt": 'platform: "onnx"'}, "there is no platform 'onnx'; did you mean 'onnxruntime_onnx'?"),
        ({"config.pbtxt": 'platform: "caffe2"'}, "there is no platform 'caffe2'; there are tensorflow_graphdef, "),
    ],
)
async def test_of_models(tmp_path: Path, files: dict[str, str], text: str) -> None:
    source = await source_of(tmp_path, files)
    error = source.draft if isinstance(source.draft, NaiadError) else InvalidArgument("at least one version must ...")
    told = advice(source, error)
    expected = text.format(m=tmp_path / "m")
    assert told.startswith(expected)
    assert bool(told) == bool(text)


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        (
            {"config.pbtxt": 'backend: "onnx"'},
            NO_BACKEND.format("onnx"),
            "there is no backend 'onnx'; did you mean 'onnxruntime'?",
        ),
        (
            {"config.pbtxt": 'backend: "dali"'},
            NO_BACKEND.format("dali"),
            "there is no backend 'dali'; there are onnxruntime, openvino, python, pytorch, tensorflow",
        ),
        (
            {"config.pbtxt": 'platform: "tensorrt_plan"'},
            NO_BACKEND.format("tensorrt"),
            "TensorRT is not served: take the ONNX file that the engine was built from",
        ),
        (
            {"config.pbtxt": 'backend: "python" runtime: "my.so"', "1/model.py": ""},
            "unable to find backend library 'my.so' for model 'm', searched: '/m/1' '/m' '/backends/python'",
            "native libraries are not loaded: leave out 'runtime' for the backend that is here",
        ),
        (
            {"config.pbtxt": ONNX, "1/model.onnx": "x"},
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
            "no GPU is found; without one, say kind: KIND_CPU or no kind at all",
        ),
        (
            {"config.pbtxt": 'backend: "python"', "1/model.py": ""},
            NO_MODULE,
            "install what has 'cv2.data' where naiad is, or list it in '{m}/requirements.txt'",
        ),
        (
            {"config.pbtxt": 'backend: "python"', "1/model.py": "", "requirements.txt": ""},
            NO_MODULE,
            "the model's environment does not have 'cv2.data'",
        ),
        (
            {"config.pbtxt": 'backend: "python"', "1/model.py": ""},
            "AttributeError: module '1.model' has no attribute 'TritonPythonModel'",
            "'{m}/1/model.py' must have a class TritonPythonModel",
        ),
        ({"config.pbtxt": ONNX, "1/model.onnx": "x"}, "a reason that says it all", ""),
        ({"config.pbtxt": ONNX, "1/model.onnx/model.onnx": "x"}, "a reason that says it all", ""),
        ({"config.pbtxt": ONNX, "1/model.onnx": ""}, "", "'{m}/1/model.onnx' is empty"),
        (
            {"config.pbtxt": ONNX, "1/model.onnx": "xyz"},
            "onnx runtime error 7: Load model from m/1/model.onnx failed:Protobuf parsing failed.",
            "'{m}/1/model.onnx' is not ONNX, or not all of it: 3 bytes",
        ),
        ({"config.pbtxt": ONNX, "1/.keep": ""}, "", "'{m}/1' is empty"),
        (
            {"config.pbtxt": ONNX, "1/model.onnx": "x"},
            "Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE' for I/O 'output_probability', expected 'ONNX_TYPE_TENSOR'.",
            "'output_probability' is no tensor: of scikit-learn models skl2onnx makes tensors with options={{'zipmap': False}}, "
            "and so does naiad convert",
        ),
        (
            {"config.pbtxt": ONNX, "1/b.onnx": "x", "1/a.onnx": "x"},
            "",
            "'{m}/1' has a.onnx, b.onnx: rename one, or say default_model_filename",
        ),
        ({"config.pbtxt": 'backend: "pytorch" runtime: "model.py"', "1/model.py": ""}, "licence server is down", ""),
        ({"config.pbtxt": 'backend: "openvino"', "1/model.onnx": ""}, "a reason that says it all", ""),
        (
            {"config.pbtxt": 'backend: "pytorch"', "1/net.pt": ""},
            "unable to find '{m}/1/model.pt' for model instance 'm_0'",
            "'{m}/1' has net.pt: rename one, or say default_model_filename",
        ),
        (
            {"config.pbtxt": 'platform: "tensorflow_savedmodel"', "1/saved_model.pb": ""},
            "",
            "'{m}/1' is a SavedModel: move what is in it to '{m}/1/model.savedmodel'",
        ),
        (
            {"config.pbtxt": 'platform: "tensorflow_savedmodel"', "1/model.h5": ""},
            "",
            "'{m}/1/model.h5' is not served: make another format of it with naiad convert",
        ),
        (
            {"config.pbtxt": ONNX, "1/model.onnx": "version https://git-lfs.github.com/spec/v1\n"},
            "",
            "'{m}/1/model.onnx' is a pointer of Git LFS in place of the model: run git lfs pull",
        ),
        (
            {"config.pbtxt": ONNX, "1/model.onnx": "<!DOCTYPE html>\n"},
            "",
            "'{m}/1/model.onnx' is a web page in place of the model",
        ),
    ],
)
async def test_of_versions(tmp_path: Path, files: dict[str, str], error: str, text: str) -> None:
    source = await source_of(tmp_path, {"1/.keep": "", **files})
    assert isinstance(source.draft, Draft)
    assert advice(source, InvalidArgument(error.format(m=tmp_path / "m")), 1) == text.format(m=tmp_path / "m")


async def test_of_a_model_in_place_of_a_repository(tmp_path: Path) -> None:
    source = await source_of(tmp_path, {"model.onnx": "x"})
    (tmp_path / "config.pbtxt").touch()
    told = advice(source, InvalidArgument("Could not determine backend for model 'm'"))
    assert told == f"'{tmp_path}' is the folder of a model: --model-repository is the folder above it"


async def test_of_a_model_without_a_configuration_in_place_of_a_repository(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").touch()
    sources = RepositorySources([str(tmp_path)], config_name="", auto_complete=True, gpus=())
    source = await sources.read(scan([tmp_path]).models["1"])
    assert isinstance(source.draft, NaiadError)
    told = advice(source, source.draft)
    assert told == f"'{tmp_path}' is the folder of a model: --model-repository is the folder above it"


async def test_of_a_pipe(tmp_path: Path) -> None:
    source = await source_of(tmp_path, {"config.pbtxt": ONNX, "1/.keep": ""})
    os.mkfifo(tmp_path / "m" / "1" / "model.onnx")
    assert advice(source, InvalidArgument(""), 1) == ""


async def test_of_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = await source_of(tmp_path, {"config.pbtxt": ONNX, "1/model.onnx": "x"})
    path = tmp_path / "m/1/model.onnx"

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    assert advice(source, InvalidArgument(""), 1) == f"cannot read '{path}': Permission denied"
