"""Loads the four kinds of files into one thing to call: a `Program`. Runs in hosts.

Which kind a model is, is read from its file, not from its platform: TorchScript archives, archives of torch.export,
AOTInductor packages, and Python files with an nn.Module, whose weights lie beside them.
"""

import importlib.util
import inspect
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from naiad.backends.api import ModelContext
from naiad.backends.pytorch.arguments import (
    Forward,
    Tree,
    datatype_of,
    forward_of_module,
    forward_of_script,
)
from naiad.backends.pytorch.settings import Settings, log
from naiad.backends.pytorch.structures import UNKNOWN, Declared
from naiad.backends.pytorch.tensors import Device
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable

#: How files of weights end that people save, and that are not looked for.
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")

# Code of AOTInductor takes inputs of any shape and type at their word unless it is told to look; it reads this once.
os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")


@dataclass(frozen=True, slots=True)
class Program:
    """`outputs` is what the call returns, with a `Declared` for each tensor, where the file says."""

    call: Callable[..., Any]
    forward: Forward | Tree
    outputs: Any = None
    #: The module, of which instances may share the weights; None for a compiled package.
    module: Any = None


def find(model: ModelContext) -> Path:
    """The file to load. Raises Unavailable when there is none."""
    folder = model.version_directory
    beside = folder / "model.py"
    if model.config.get("runtime") == "model.py" and beside.is_file() and model.path.suffix != ".py":
        return beside
    if model.path.is_file():
        # Weights alone are no model, but those of one that lies beside them.
        if model.path.suffix == ".pt" and not _is_script(model.path):
            module = model.path.with_suffix(".py")
            if module.is_file():
                return module
        return model.path
    if not model.config.get("default_model_filename") or model.path.name == "model.pt":
        for name in ("model.pt", "model.pt2", "model.py"):
            if (folder / name).is_file():
                return folder / name
    raise Unavailable(f"unable to find '{model.path}' for model instance '{model.name}'")


def load(model: ModelContext, device: Device, settings: Settings) -> Program:
    """Raises NaiadError, with PyTorch's own words where it is PyTorch that cannot load."""
    path = find(model)
    try:
        with device.entered(), warnings.catch_warnings():
            # What PyTorch thinks of its own serialisation is no matter of who serves the model.
            warnings.simplefilter("ignore")
            for library in model.config.get("model_operations", {}).get("op_library_filename", ()):
                in_model = model.directory / library
                torch.ops.load_library(str(in_model if in_model.is_file() else library))
            if path.suffix == ".py":
                return _module(model, path, device, settings)
            names = _entries(path)
            if any("/data/aotinductor/" in f"/{name}" for name in names):
                return _package(model, path, device)
            if path.suffix == ".pt2" or any(name.endswith("archive_format") for name in names):
                return _exported(model, path, device)
            return _script(model, path, device, names)
    except NaiadError:
        raise
    except Exception as error:
        raise Internal(f"failed to load model '{model.name}': {error}") from error


def _entries(path: Path) -> Sequence[str]:
    if not zipfile.is_zipfile(path):
        return ()
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def _is_script(path: Path) -> bool:
    return any(name.endswith("/constants.pkl") for name in _entries(path))


# --- TorchScript ------------------------------------------------------------------------------------------------------


def _script(model: ModelContext, path: Path, device: Device, names: Sequence[str]) -> Program:
    if any(name.endswith("/data.pkl") for name in names) and not _is_script(path):
        raise InvalidArgument(
            f"failed to load model '{model.name}': {path.name} was written by torch.save and holds weights or a pickled"
            f" object, no program. Save the module with torch.jit.script(...).save(...) or torch.export.save(...), or put"
            f" a {path.with_suffix('.py').name} with its nn.Module beside it"
        )
    module = torch.jit.load(str(path), map_location=device.device)
    module.eval()
    return Program(module, forward_of_script(module), module=module)


# --- torch.export -----------------------------------------------------------------------------------------------------


def _exported(model: ModelContext, path: Path, device: Device) -> Program:
    program = torch.export.load(path)
    if device.device is not None:
        # Loading has put the weights where they were when they were saved.
        program = move_to_device_pass(program, device.device)
        device.clean_cache()
    signature = program.graph_signature
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = tuple(_declared(values.get(name)) for name in signature.user_inputs)
    results = [_declared(values.get(name)) if isinstance(name, str) else name for name in signature.user_outputs]
    module_signature = program.module_call_graph[0].signature
    names = tuple((module_signature.forward_arg_names if module_signature else None) or ())
    tree = Tree(program.call_spec.in_spec, inputs, names)
    module = program.module()
    return Program(module, tree, pytree.tree_unflatten(results, program.call_spec.out_spec), module)


def _declared(value: Any) -> Declared:
    if not isinstance(value, torch.Tensor):
        return UNKNOWN
    shape = tuple(extent if isinstance(extent, int) else -1 for extent in value.shape)
    return Declared(datatype_of(value.dtype), shape)


# --- AOTInductor ------------------------------------------------------------------------------------------------------


def _package(model: ModelContext, path: Path, device: Device) -> Program:
    index = -1
    if device.is_cuda and device.device is not None:
        index = device.device.index
    package = torch._inductor.aoti_load_package(str(path), device_index=index)
    loader: Any = package.loader
    built_for = loader.get_metadata().get("AOTI_DEVICE_KEY", "cpu")
    wanted = built_for if device.device is None else device.device.type
    if built_for != wanted:
        raise InvalidArgument(
            f"unable to load model '{model.name}': {path.name} was compiled for {built_for}, and the instance runs on {wanted};"
            f" choose the instance_group's kind, or compile it for {wanted}"
        )
    in_spec, out_spec = map(pytree.treespec_loads, loader.get_call_spec())
    outputs = pytree.tree_unflatten([UNKNOWN] * out_spec.num_leaves, out_spec)
    return Program(package, Tree(in_spec, (UNKNOWN,) * in_spec.num_leaves), outputs)


# --- model.py ---------------------------------------------------------------------------------------------------------


def _module(model: ModelContext, path: Path, device: Device, settings: Settings) -> Program:
    kind = _module_class(model, _imported(model, path))
    module: torch.nn.Module = kind()
    weights = path.with_suffix(".pt")
    if weights.is_file():
        module.load_state_dict(_state(weights))
    else:
        others = sorted(file.name for file in path.parent.iterdir() if file.suffix in _WEIGHTS)
        told = f": weights are read from {weights.name}, not from {', '.join(others)}" if others else ""
        log(model, "WARNING" if others else "INFO", f"Model parameter file not found for '{model.name}'{told}")
    if device.device is not None:
        module.to(device.device)
    module.eval()
    forward = forward_of_module(module)
    call: Callable[..., Any] = module
    if settings.compile_options is not None and settings.optimized_execution:
        call = torch.compile(module, **settings.compile_options)
    return Program(call, forward, module=module)


def _imported(model: ModelContext, path: Path) -> Any:
    name = f"naiad_model_{model.name}_{model.version}".replace(".", "_")
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


#: Whose files can be imported now, if any model's.
_folder = ""


def _make_importable(folder: Path) -> None:
    """The files beside a model's model.py can be imported by it. Those of another model in this process, or what they
    were before this one was loaded anew, cannot any more; who has imported them keeps them."""
    global _folder
    if _folder:
        sys.path.remove(_folder)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{_folder}{os.sep}"):
                del sys.modules[name]
    _folder = str(folder)
    sys.path.insert(0, _folder)


def _module_class(model: ModelContext, module: Any) -> type[torch.nn.Module]:
    """The first nn.Module, by name, that the file defines, or imports if it defines none, and needs no arguments."""
    kinds = [
        value
        for _, value in sorted(vars(module).items())
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value is not torch.nn.Module
    ]
    own = [kind for kind in kinds if kind.__module__ == module.__name__] or kinds
    if not own:
        raise InvalidArgument(f"Cannot find a subclass of torch.nn.Module in {module.__file__}")
    free = [kind for kind in own if not _needs_arguments(kind)]
    if not free:
        raise InvalidArgument(
            f"{module.__file__}: {', '.join(kind.__name__ for kind in own)} cannot be made without arguments; give those of"
            " the constructor defaults"
        )
    if len(free) > 1:
        others = ", ".join(kind.__name__ for kind in free[1:])
        text = (
            f"model '{model.name}' is the class {free[0].__name__} of {module.__file__}, the first by name ({others})"
        )
        log(model, "INFO", text)
    return free[0]


def _needs_arguments(kind: type) -> bool:
    return any(
        parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(kind).parameters.values()
    )


def _state(path: Path) -> Any:
    if _is_script(path):
        return torch.jit.load(str(path), map_location="cpu").state_dict()
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            return state[key]
    return state
