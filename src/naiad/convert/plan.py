"""Which source can become what, and with which packages. Pure, but for a look at the source's first bytes."""

import importlib.util
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from naiad.errors import InvalidArgument

#: Target -> (backend, file of the model).
TARGETS = {
    "savedmodel": ("tensorflow", "model.savedmodel"),
    "graphdef": ("tensorflow", "model.graphdef"),
    "onnx": ("onnxruntime", "model.onnx"),
    "openvino": ("openvino", "model.xml"),
    "torchscript": ("pytorch", "model.pt"),
    "pt2": ("pytorch", "model.pt2"),
}

#: Kind of source -> (what people call it, what it can become).
SOURCES = {
    "keras": ("a Keras model", ("savedmodel", "graphdef", "onnx", "openvino")),
    "savedmodel": ("a SavedModel", ("onnx", "openvino")),
    "onnx": ("an ONNX model", ("openvino",)),
    "module": ("a PyTorch module", ("torchscript", "pt2", "onnx", "openvino")),
    "torchscript": ("a TorchScript model", ("torchscript", "pt2", "onnx", "openvino")),
    "pt2": ("a torch.export archive", ("torchscript", "pt2", "onnx", "openvino")),
    "sklearn": ("a scikit-learn model", ("onnx",)),
}

#: Option -> the kinds of sources that it says something about.
_OPTIONS = {
    "--layers": ("keras",),
    "--weights": ("module",),
    "--shape": ("module", "torchscript", "sklearn"),
}

_TENSORFLOW = ("tensorflow", "naiad[tensorflow]")
_TORCH = ("torch", "naiad[torch]")
_OPENVINO = ("openvino", "naiad[openvino]")
_ONNX = ("onnx", "onnx")
#: Module -> what to give to pip install for it.
_OF_SOURCE = {
    "keras": (_TENSORFLOW,),
    "savedmodel": (_TENSORFLOW,),
    "onnx": (),
    "module": (_TORCH,),
    "torchscript": (_TORCH,),
    "pt2": (_TORCH,),
    "sklearn": (("sklearn", "scikit-learn"), ("joblib", "joblib")),
}
_OF_TARGET = {
    "savedmodel": (_TENSORFLOW,),
    "graphdef": (_TENSORFLOW,),
    "onnx": (_ONNX,),
    "openvino": (_OPENVINO,),
    "torchscript": (_TORCH,),
    "pt2": (_TORCH,),
}
_OF_BOTH = {
    ("keras", "onnx"): (("tf2onnx", "tf2onnx"),),
    ("savedmodel", "onnx"): (("tf2onnx", "tf2onnx"),),
    ("module", "onnx"): (("onnxscript", "onnxscript"),),
    ("torchscript", "onnx"): (("onnxscript", "onnxscript"),),
    ("pt2", "onnx"): (("onnxscript", "onnxscript"),),
    ("sklearn", "onnx"): (("skl2onnx", "skl2onnx"),),
}

_SUFFIXES = {".keras": "keras", ".h5": "keras", ".hdf5": "keras", ".onnx": "onnx", ".pt2": "pt2"}
_PICKLES = (".pkl", ".pickle", ".joblib")
_TORCH_SUFFIXES = (".pt", ".pth", ".ts", ".torchscript")


def kind_of(source: str) -> str:
    """What SOURCE is. Raises InvalidArgument where that cannot be told."""
    path = Path(source)
    if path.is_dir():
        if (path / "saved_model.pb").is_file():
            return "savedmodel"
        raise InvalidArgument(f"{source} is a folder without saved_model.pb: no SavedModel")
    if not path.exists():
        module, colon, name = source.rpartition(":")
        if colon and name.isidentifier() and (not module.endswith(".py") or Path(module).is_file()):
            return "module"
        raise InvalidArgument(f"{source} does not exist")
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    if path.suffix in _PICKLES:
        return "sklearn"
    if path.suffix in _TORCH_SUFFIXES:
        return _kind_of_torch(path)
    if path.suffix == ".py":
        raise InvalidArgument(f"say which class or function of {source} makes the module: {source}:<Name>")
    raise InvalidArgument(
        f"cannot tell what {source} is by its name; known are .keras, .h5, folders of SavedModels, .onnx, .pt, .pth,"
        " .pt2, file.py:Name, .pkl and .joblib"
    )


def _kind_of_torch(path: Path) -> str:
    if not zipfile.is_zipfile(path):
        return "module"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in names):
        return "torchscript"
    if any(name.endswith("archive_format") for name in names):
        return "pt2"
    return "module"


def check(source: str, kind: str, target: str) -> None:
    """Raises InvalidArgument where there is no way from `kind` to `target`."""
    name, targets = SOURCES[kind]
    if target not in targets:
        raise InvalidArgument(f"{source} is {name}, which can become {', '.join(targets)}, not {target}")


def check_options(source: str, kind: str, given: Sequence[str]) -> None:
    """Raises InvalidArgument where one of the options `given` would have no effect."""
    name, _ = SOURCES[kind]
    for option in given:
        if kind not in _OPTIONS.get(option, (kind,)):
            of = ", ".join(SOURCES[other][0] for other in _OPTIONS[option])
            raise InvalidArgument(f"{option} is for {of}; {source} is {name}")
        if option == "--weights" and Path(source).exists():
            raise InvalidArgument(f"--weights is for file.py:Name; {source} has weights of its own")


def missing(
    kind: str,
    target: str,
    is_there: Callable[[str], bool] = lambda module: importlib.util.find_spec(module) is not None,
) -> list[str]:
    """What to `pip install` for the way from `kind` to `target`."""
    needed = (*_OF_SOURCE[kind], *_OF_TARGET[target], *_OF_BOTH.get((kind, target), ()))
    return list(dict.fromkeys(package for module, package in needed if not is_there(module)))
