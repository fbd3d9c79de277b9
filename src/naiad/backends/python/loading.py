"""Finding and importing a model's Python file, the way models have come to rely on."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from naiad.backends.python import own_modules, pb_utils
from naiad.errors import Internal

#: The names under which models import `pb_utils`; the second is the compiled part of Triton's.
NAMES = ("triton_python_backend_utils", "c_python_backend_utils")

_IMPORTABLE = str(Path(__file__).with_name("importable"))


def model_class(path: Path, is_alone: bool = True) -> Any:
    """`TritonPythonModel` of the file `path`, imported anew.

    The module is named `<folder>.<file>`, for example `1.model`, so that relative imports work; where it is not alone in
    the process, other models are called that too, and the package has a name of its own. The folder and its
    parent go to the end of `sys.path`, and stay there for later imports of the model; the folder in which the server
    was started comes first, as in Triton. The file of a Python-based backend, whose folder has the backend's name, is a
    module by itself: its folder would hide the library of that name. Raises what the file raises, and Internal for a
    file that cannot be a model.
    """
    if not path.is_file():
        raise Internal(f"Python model file not found in '{path}'")
    if path.suffix != ".py":
        raise Internal(f"Model name must end with '.py'. Model name is \"{path.name}\".")
    for name in NAMES:
        sys.modules[name] = pb_utils
    if "" not in sys.path:
        sys.path.insert(0, "")
    folder = path.parent
    if not folder.name.isdigit():
        return _single_module(path).TritonPythonModel
    for entry in (str(folder), str(folder.parent), _IMPORTABLE):
        if entry not in sys.path:
            sys.path.append(entry)
    name = folder.name if is_alone else own_modules.package_name(folder)
    _forget(name)
    sys.modules[name] = package = _package(name, folder)
    if not is_alone:
        own_modules.begin(name, folder, NAMES)
    if package.__spec__ is not None and package.__spec__.loader is not None and package.__file__:
        package.__spec__.loader.exec_module(package)
    return __import__(f"{name}.{path.stem}", fromlist=["TritonPythonModel"]).TritonPythonModel


def _single_module(path: Path) -> ModuleType:
    for entry in (str(path.parent), _IMPORTABLE):
        if entry not in sys.path:
            sys.path.append(entry)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _forget(package: str) -> None:
    """Removes what another model, or an earlier instance of this one, has imported from a folder of that name."""
    for name in [name for name in list(sys.modules) if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _package(name: str, folder: Path) -> ModuleType:
    """The version folder as a package of its own: a search would find the "1" of any model on `sys.path`."""
    init = folder / "__init__.py"
    if init.is_file():
        spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    else:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    assert spec is not None
    return importlib.util.module_from_spec(spec)
