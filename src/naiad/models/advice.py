"""What to do about a model that does not load, for the log. Reads folders: for a thread.

Clients are told what Triton tells them, which is often not much. Nothing here decides anything, and where nothing is
known, nothing is said.
"""

import difflib
import re
from importlib.metadata import entry_points
from pathlib import Path

from naiad.config.platforms import PLATFORMS
from naiad.config.read import Draft
from naiad.errors import NaiadError
from naiad.instances.references import GROUP
from naiad.models.table import Source
from naiad.repository.snapshot import model_in_place_of_repository

#: What is no model, by its first bytes.
_NO_MODELS = {
    b"version https://git-lfs": "is a pointer of Git LFS in place of the model: run git lfs pull",
    b"<!doctype html": "is a web page in place of the model",
    b"<html": "is a web page in place of the model",
}
_MODULE = re.compile(r"No module named '([\w.]+)'")
_SEQUENCE = re.compile(r"Unsupported ONNX Type 'ONNX_TYPE_(?:SEQUENCE|MAP)' for I/O '(.*?)'")
#: Files that `naiad convert` reads, and no backend.
_CONVERTED = (".keras", ".h5", ".pkl", ".joblib")
#: Backends that take a file of another name, too; where there is none, they are "unable to find" their own.
_TAKE_OTHERS = ("openvino", "pytorch")
_FILES = tuple(row.filename for row in PLATFORMS)


def advice(source: Source, error: NaiadError, version: int | None = None) -> str:
    """What helps against `error`, of one version or of the model as a whole; "" where nothing is known."""
    try:
        return _advice(source, error, version)
    except OSError as problem:
        return f"cannot read '{problem.filename}': {problem.strerror}"


def _advice(source: Source, error: NaiadError, version: int | None) -> str:
    draft, directory = source.draft, Path(source.directory.directory)
    if (directory.parent / "config.pbtxt").is_file():
        return model_in_place_of_repository(directory.parent)
    text = error.message
    if not isinstance(draft, Draft):
        if "Could not determine backend" in text:
            return _misplaced(directory) or _unknown(source)
        if found := re.search("'platform' and 'backend' pair, got:.*, (.*)", text):
            platforms = [f'"{row.platform}"' for row in PLATFORMS if row.backend == found[1]]
            return f'with backend: "{found[1]}" say platform: {" or ".join(platforms)}'
        if found := re.search("unexpected platform type '(.*)'", text):
            platforms = [row.platform for row in PLATFORMS if row.platform]
            return _choose("platform", found[1], [*platforms, "ensemble"])
        return ""
    filename = draft.proto.default_model_filename
    if version is None:
        if source.directory.versions:
            return ""
        a_version = f"a version is a folder with a number for its name: '{directory / '1' / filename}'"
        return _misplaced(directory) or a_version
    if "unable to find backend library" in text:
        if draft.backend == "tensorrt":
            return "TensorRT is not served: take the ONNX file that the engine was built from"
        if draft.proto.runtime:
            return "native libraries are not loaded: leave out 'runtime' for the backend that is here"
        return _choose("backend", draft.backend, sorted(entry_points(group=GROUP).names))
    if "no GPUs are available" in text or ("unsupported gpu id" in text and not draft.gpus):
        return "no GPU is found; without one, say kind: KIND_CPU or no kind at all"
    if draft.backend == "python" and (found := _MODULE.search(text)):
        return _without_module(directory, draft, found[1])
    if draft.backend == "python" and "has no attribute 'TritonPythonModel'" in text:
        return f"'{source.directory.versions[version].directory / filename}' must have a class TritonPythonModel"
    if not filename:
        return ""
    if found := _SEQUENCE.search(text):
        return (
            f"'{found[1]}' is no tensor: of scikit-learn models skl2onnx makes tensors with options={{'zipmap': False}}, and so"
            " does naiad convert"
        )
    path = source.directory.versions[version].directory / filename
    if not path.exists():
        if draft.backend in _TAKE_OTHERS and f"unable to find '{path}'" not in text:
            return ""
        told = _other_files(path.parent, "rename one, or say default_model_filename")
        return told or f"'{path.parent}' is empty"
    told = _of_file(path)
    if not told and "Protobuf parsing failed" in text and path.is_file():
        return f"'{path}' is not ONNX, or not all of it: {path.stat().st_size} bytes"
    return told


def _choose(what: str, word: str, names: list[str]) -> str:
    close = [name for name in names if word in name] or difflib.get_close_matches(word, names, 1)
    meant = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(names)}"
    return f"there is no {what} '{word}'; {meant}"


def _misplaced(directory: Path) -> str:
    """The file of a model that lies in the model's folder, where no version is; or is one, of a model in place of the
    repository."""
    for name in _FILES:
        if (directory / name).exists():
            if directory.name.isdecimal():
                return model_in_place_of_repository(directory.parent)
            return f"move '{directory / name}' to '{directory / '1' / name}'"
    return ""


def _unknown(source: Source) -> str:
    """What is missing where nothing says which backend a model has."""
    for version in source.directory.versions.values():
        if told := _other_files(version.directory, f"none is {', '.join(_FILES)}"):
            return f"no config.pbtxt names a backend, and {told}"
        return f"no config.pbtxt names a backend, and '{version.directory}' is empty"
    return f"'{source.directory.directory}' has no config.pbtxt that names a backend, and no version folder"


def _other_files(folder: Path, otherwise: str) -> str:
    """What to do with what is in the folder of a version, which lacks what should be there; "" if that is nothing."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith((".", "__")))
    if "saved_model.pb" in names:
        return f"'{folder}' is a SavedModel: move what is in it to '{folder / 'model.savedmodel'}'"
    for name in names:
        if name.endswith(_CONVERTED):
            return f"'{folder / name}' is not served: make another format of it with naiad convert"
    return f"'{folder}' has {', '.join(names[:5])}: {otherwise}" if names else ""


def _without_module(directory: Path, draft: Draft, module: str) -> str:
    requirements = directory / "requirements.txt"
    if "EXECUTION_ENV_PATH" in draft.proto.parameters or requirements.exists():
        return f"the model's environment does not have '{module}'"
    return f"install what has '{module}' where naiad is, or list it in '{requirements}'"


def _of_file(path: Path) -> str:
    """What is wrong with the file of a version, where that can be seen without its framework."""
    if not path.is_file():
        return ""  # a folder, or what cannot be read without waiting
    with path.open("rb") as file:
        begin = file.read(64).lower()
    if not begin:
        return f"'{path}' is empty"
    return next((f"'{path}' {what}" for start, what in _NO_MODELS.items() if begin.startswith(start)), "")
