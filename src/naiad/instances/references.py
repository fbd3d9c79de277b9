"""From a backend's name to its class. Runs where backends run: in zygotes, or in the server with `--isolation=none`."""

import importlib
from importlib.metadata import entry_points
from typing import Any

from naiad.errors import InvalidArgument, NaiadError

GROUP = "naiad.backends"
#: The extras of the distribution that bring a framework, where the backend's class cannot be asked.
_EXTRAS = {"tensorflow": "tensorflow", "pytorch": "torch", "torch": "torch", "openvino": "openvino"}


def load_backend(backend: str, reference: str) -> type[Any]:
    """The backend class, its `modules` imported. `reference` is "module:Class", or a name of the entry point group.

    Raises InvalidArgument for an unknown backend and where an import fails.
    """
    target = reference
    if ":" not in reference:
        found = list(entry_points(group=GROUP, name=reference))
        if not found:
            raise InvalidArgument(
                f"unable to find backend library for backend '{backend}', try specifying runtime on the model "
                "configuration."
            )
        target = found[0].value
    module_name, _, class_name = target.partition(":")
    extra = _EXTRAS.get(backend, "")
    try:
        loaded: type[Any] = getattr(importlib.import_module(module_name), class_name)
        extra = loaded.extra or extra
        for module in loaded.modules:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        advice = f": install it with pip install 'naiad[{extra}]'" if extra else ""
        raise InvalidArgument(f"backend '{backend}' needs the Python module '{error.name}'{advice}") from error
    except NaiadError:
        raise
    except Exception as error:
        raise InvalidArgument(
            f"backend '{backend}' ({target}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return loaded
