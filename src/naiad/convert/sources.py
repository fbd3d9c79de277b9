"""Opens what is to be converted: what it takes, and how to run it as its framework would. In the converting process."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from naiad.backends.api import Array
from naiad.convert.compare import Input, read_arrays
from naiad.convert.job import Job
from naiad.convert.plan import SOURCES
from naiad.convert.served import Served
from naiad.datatypes import BY_NAME, DataType, from_numpy
from naiad.errors import InvalidArgument, NaiadError


@dataclass(frozen=True, slots=True)
class Source:
    """An opened model. `run` takes arrays by the inputs' names and answers arrays by the outputs'."""

    inputs: tuple[Input, ...]
    run: Callable[[Mapping[str, Array]], dict[str, Array]]
    #: The framework's object, or the path where converters want that.
    model: Any

    @property
    def batchable(self) -> bool:
        return all(it.dims[:1] == (-1,) for it in self.inputs)


def open_source(job: Job) -> Source:
    """Raises NaiadError where it cannot be opened, or does not say enough about its inputs."""
    try:
        source = _OPENERS[job.kind](job)
    except NaiadError:
        raise
    except Exception as error:
        # What is no model is found out deep inside of a reader of another format.
        name, _ = SOURCES[job.kind]
        raise InvalidArgument(f"cannot open {job.source} as {name}: {_described_error(job, error)}") from error
    if not source.inputs:
        raise InvalidArgument(f"{job.source} has no inputs")
    return source


def _described_error(job: Job, error: Exception) -> str:
    """With the line of the user's file that it comes from."""
    text = f"{type(error).__name__}: {error}"
    file = Path(job.source.rpartition(":")[0]).absolute()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f"{text} ({file.name}, line {lines[-1]})" if lines else text


# --- files that a backend serves as they are --------------------------------------------------------------------------


def _saved_model(job: Job) -> Source:
    return _served(job, "tensorflow", {"platform": "tensorflow_savedmodel"})


def _onnx(job: Job) -> Source:
    return _served(job, "onnxruntime", {})


def _served(job: Job, backend: str, config: dict[str, Any]) -> Source:
    served = Served(backend, Path(job.source).absolute(), job.model, config)
    return Source(served.inputs, served.run, Path(job.source).absolute())


# --- Keras --------------------------------------------------------------------------------------------------------


def _keras(job: Job) -> Source:
    import keras

    model = keras.models.load_model(job.source, compile=False)
    if job.layers:
        try:
            chosen = [model.get_layer(name).output for name in job.layers]
        except ValueError:
            names = ", ".join(layer.name for layer in model.layers)
            raise InvalidArgument(f"{job.source} has the layers {names}, not all of {', '.join(job.layers)}") from None
        # A dictionary, so that outputs are called as the layers are.
        model = keras.Model(keras_input(model), dict(zip(job.layers, chosen, strict=True)))
    if not getattr(model, "inputs", None):
        raise InvalidArgument(
            f"{job.source} does not say what it takes: call the model once, or build it, before saving"
        )
    inputs = tuple(
        Input(it.name, _datatype(it.name, it.dtype), tuple(-1 if dim is None else int(dim) for dim in it.shape))
        for it in model.inputs
    )

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        result = model(
            keras.tree.map_structure(lambda it: keras.ops.convert_to_tensor(arrays[it.name]), keras_input(model))
        )
        found = result if isinstance(result, dict) else dict(_numbered(keras.tree.flatten(result)))
        return {name: np.asarray(value) for name, value in found.items()}

    return Source(inputs, run, model)


def keras_input(model: Any) -> Any:
    """The inputs in the structure in which the model takes them."""
    # A Sequential has no `input` before it is called.
    return model.inputs[0] if len(model.inputs) == 1 and type(model).__name__ == "Sequential" else model.input


def _numbered(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """As the export to a SavedModel calls them."""
    return [(f"output_{at}", value) for at, value in enumerate(values)]


def _datatype(name: str, dtype: Any) -> DataType:
    text = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    datatype = DataType.BYTES if text == "string" else DataType.BF16 if text == "bfloat16" else from_numpy(text)
    if datatype is None:
        raise InvalidArgument(f"input '{name}' has the type {text}, which no backend takes")
    return datatype


# --- PyTorch ------------------------------------------------------------------------------------------------------


def _torch(job: Job) -> Source:
    import torch

    from naiad.backends.pytorch.arguments import forward_of_module, forward_of_script

    if job.kind == "pt2":
        served = Served("pytorch", Path(job.source).absolute(), job.model, {})
        module = torch.export.load(job.source).module()
        return Source(served.inputs, _torch_run(module, [it.name for it in served.inputs]), module)
    module = torch.jit.load(job.source, map_location="cpu") if job.kind == "torchscript" else _module(job)
    module.eval()
    forward = forward_of_script(module) if job.kind == "torchscript" else forward_of_module(module)
    names = [argument.name for argument in forward.arguments if argument.required]
    inputs = _described(job, [argument.name for argument in forward.arguments], names)
    return Source(inputs, _torch_run(module, [it.name for it in inputs]), module)


def _torch_run(module: Any, names: Sequence[str]) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    import torch

    from naiad.backends.pytorch.structures import leaf_names, leaves

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        with torch.no_grad():
            result = module(*(torch.from_numpy(np.array(arrays[name])) for name in names))
        found = leaves(result)
        names_out = leaf_names([path for path, _ in found])
        return {
            name: leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
            for name, (_, leaf) in zip(names_out, found, strict=True)
            if not isinstance(leaf, list)  # strings, or empty: no format has these
        }

    return run


def _module(job: Job) -> Any:
    """An nn.Module: made by a class or function of a file or module, or as torch.save wrote it."""
    import torch

    if Path(job.source).exists():
        _find_code_beside(job)
        loaded = torch.load(job.source, map_location="cpu", weights_only=False)
        if not isinstance(loaded, torch.nn.Module):
            raise InvalidArgument(
                f"{job.source} holds a {type(loaded).__name__}, no module. Weights need their module: convert"
                f" file.py:Name with --weights {job.source}"
            )
        return loaded
    place, _, name = job.source.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).absolute().parent))
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        code = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = code
        spec.loader.exec_module(code)
    else:
        sys.path.insert(0, "")
        code = importlib.import_module(place)
    made = getattr(code, name, None)
    if made is None:
        raise InvalidArgument(f"{place} has no {name}")
    module = made if isinstance(made, torch.nn.Module) else made()
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(f"{job.source} makes a {type(module).__name__}, no nn.Module")
    if job.weights is not None:
        if job.weights.endswith(".safetensors"):
            from safetensors.torch import load_file

            module.load_state_dict(load_file(job.weights))
        else:
            module.load_state_dict(torch.load(job.weights, map_location="cpu", weights_only=True))
    return module


def _find_code_beside(job: Job) -> None:
    """A pickle names the modules its classes are in: they may be here, or beside it."""
    sys.path[:0] = ["", str(Path(job.source).absolute().parent)]


def _described(job: Job, names: Sequence[str], required: Sequence[str]) -> tuple[Input, ...]:
    """Inputs in the order of forward(), from --shape or from the file of inputs."""
    if job.shapes:
        given = {it.name: Input(it.name, BY_NAME[it.datatype], it.dims) for it in job.shapes}
        if len(given) < len(job.shapes):
            raise InvalidArgument(f"--shape is given twice for one input: {', '.join(it.name for it in job.shapes)}")
    elif job.arrays is not None:
        given = {}
        for name, array in read_arrays(job.arrays).items():
            dims = (-1, *array.shape[1:]) if job.batching and array.ndim else array.shape
            given[name] = Input(name, _datatype(name, array.dtype), dims)
    else:
        example = " ".join(f"--shape {name}:FP32:-1,3,224,224" for name in required)
        raise InvalidArgument(f"{job.source} does not say what it takes; give each input, like: {example}")
    unknown = [name for name in given if name not in names]
    absent = [name for name in required if name not in given]
    if unknown or absent:
        raise InvalidArgument(f"forward() takes {', '.join(names)}; given are {', '.join(given)}")
    return tuple(given[name] for name in names if name in given)


# --- scikit-learn ---------------------------------------------------------------------------------------------------


def _sklearn(job: Job) -> Source:
    import joblib
    from sklearn.base import is_classifier, is_clusterer, is_outlier_detector, is_regressor

    _find_code_beside(job)
    model = joblib.load(job.source)
    if not hasattr(model, "predict") and not hasattr(model, "transform"):
        raise InvalidArgument(
            f"{job.source} holds a {type(model).__name__}, which has neither predict() nor transform(): it says nothing of"
            " new rows"
        )
    if job.shapes:
        inputs = tuple(Input(it.name, BY_NAME[it.datatype], it.dims) for it in job.shapes)
        if len(inputs) != 1:
            raise InvalidArgument("a scikit-learn model takes one matrix: give one --shape")
    elif hasattr(model, "n_features_in_"):
        inputs = (Input("X", DataType.FP32, (-1, int(model.n_features_in_))),)
    else:
        raise InvalidArgument(
            f"{job.source} does not say how many features it takes; give --shape X:FP32:-1,<features>"
        )
    name = inputs[0].name

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        x = arrays[name]
        if x.dtype.kind == "f":
            x = x.astype(np.float64)  # as it was trained; some models take nothing else
        if is_classifier(model):
            results = {"label": model.predict(x)}
            # Some only decide; and those of several targets at once are a list.
            if hasattr(model, "predict_proba") and results["label"].ndim == 1:
                results["probabilities"] = model.predict_proba(x)
            return results
        if is_clusterer(model):
            return {
                "label": model.predict(x),
                **({"scores": model.transform(x)} if hasattr(model, "transform") else {}),
            }
        if is_outlier_detector(model):
            return {"label": model.predict(x).reshape(-1, 1), "scores": model.decision_function(x).reshape(-1, 1)}
        found = model.predict(x) if is_regressor(model) else model.transform(x)
        found = np.asarray(found.toarray() if hasattr(found, "toarray") else found)
        return {"variable": found.reshape(len(x), -1)}

    return Source(inputs, run, model)


_OPENERS: dict[str, Callable[[Job], Source]] = {
    "keras": _keras,
    "savedmodel": _saved_model,
    "onnx": _onnx,
    "module": _torch,
    "torchscript": _torch,
    "pt2": _torch,
    "sklearn": _sklearn,
}
