"""Where models share a process (`--isolation=none`), each imports its own files, whatever others call theirs.

In a process of its own a model finds the files beside its `model.py` through `sys.path`, and `sys.modules` has them by
their plain names. Here they are submodules of the model version's package, whose name no other has, and an import
statement in one of them that would have found such a file takes the submodule. What looks modules up by text
(`importlib.import_module`, `pickle`) knows nothing of that and finds what the process has by that name.
"""

import builtins
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_import = builtins.__import__
#: The version folders, by the names of their packages.
_folders: dict[str, str] = {}
#: For what the modules of a package have imported: whether it is a file of the model.
_is_own: dict[tuple[str, str], bool] = {}


def package_name(folder: Path) -> str:
    """What the package of a version folder is called: its path, with dots that Python takes for letters."""
    return str(folder).replace(".", "\N{ONE DOT LEADER}")


def begin(package: str, folder: Path, others: Sequence[str]) -> None:
    """From now on import statements in the modules of `package` find the files that the model has now, but for `others`."""
    _folders[package] = str(folder)
    for key in [key for key in list(_is_own) if key[0] == package]:
        _is_own.pop(key, None)
    for name in others:
        _is_own[package, name] = False
    builtins.__import__ = _import_own


def _import_own(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    if level == 0 and globals is not None:
        package = str(globals.get("__name__")).partition(".")[0]
        if package in _folders:
            key = package, name.partition(".")[0]
            if key not in _is_own:
                _is_own[key] = _find_own(*key)
            if _is_own[key]:
                module = _import(f"{package}.{name}", globals, locals, fromlist, 0)
                return module if fromlist else sys.modules[".".join(key)]
    return _import(name, globals, locals, fromlist, level)


def _find_own(package: str, head: str) -> bool:
    """Whether a search that leaves out the files of other models finds one of the model's. The package has it then."""
    if head in sys.stdlib_module_names:
        return False
    folder = _folders[package]
    directory = os.path.dirname(folder)
    others = {other for other in list(_folders.values()) if other != folder}
    others |= {os.path.dirname(other) for other in others} - {directory}
    spec = PathFinder.find_spec(head, [entry for entry in sys.path if not _is_in(entry, others)])
    if spec is None:
        return False
    entry = os.path.dirname(next(iter(spec.submodule_search_locations or ()), spec.origin or ""))
    if not _is_in(entry, {directory}):
        return False
    path = sys.modules[package].__path__
    if entry not in path:
        path.append(entry)
    return True


def _is_in(entry: str, folders: Collection[str]) -> bool:
    return f"{entry}/".startswith(tuple(f"{folder}/" for folder in folders))
