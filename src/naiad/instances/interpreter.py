"""Which Python runs a model: the server's own, or that of another environment. Pure, but for looking whether it exists.

    --backend-config=tensorflow,version=/opt/tf-2.17             all models of the backend, in that virtual environment
    --backend-config=tensorflow,old=/opt/tf-2.17                 gives it a name, for `version=old` and for models
    parameters { key: "NAIAD_ENVIRONMENT" value { string_value: "old" } }     this model only, by name or by path

An environment is a folder with `bin/python`, or an interpreter. Naiad need not be installed in it if it is of the
server's Python version (3.11, say): what it lacks it has from the server.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from naiad.errors import InvalidArgument

ENVIRONMENT_PARAMETER = "NAIAD_ENVIRONMENT"
ENVIRONMENT_SETTING = "version"


def interpreter_of(model: str, backend: str, settings: Mapping[str, str], parameters: Mapping[str, str]) -> str:
    """The path of the interpreter for a model, which may be the server's. Raises InvalidArgument where there is none."""
    chosen = parameters.get(ENVIRONMENT_PARAMETER)
    if chosen is None:
        chosen = settings.get(ENVIRONMENT_SETTING, "")
        if backend == "tensorflow" and chosen == "1":
            raise InvalidArgument(
                "starting from 23.04, Triton no longer supports Tensorflow 1. Please switch to Tensorflow 2."
            )
        if not chosen or (backend == "tensorflow" and chosen == "2"):
            return sys.executable
    path = Path(settings.get(chosen, chosen))
    interpreter = path / "bin" / "python" if path.is_dir() else path
    if not path.is_absolute() or not interpreter.is_file():
        raise InvalidArgument(
            f"unable to load model '{model}': backend '{backend}' is to run in the Python environment '{chosen}', expected"
            f" the absolute path of a virtual environment or an interpreter, or a name that"
            f" --backend-config={backend},{chosen}=<path> gives to one"
        )
    return str(interpreter)
