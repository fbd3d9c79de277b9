"""Models that come with a load request: the parameters of the request, and the folder made of them.

A load may bring a configuration (JSON) and files. With files the repository is not consulted: the model is a folder
of its own, made here and removed when the model goes. Writing and removing block.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from naiad.errors import Internal, InvalidArgument

_FILE = "file:"


@dataclass(frozen=True, slots=True)
class LoadOverride:
    """What a load request brings: a configuration as JSON text, and file contents by path inside the model folder."""

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def check_model_name(name: str) -> None:
    """Raises InvalidArgument if a load request may not name a model so."""
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if ".." in name or "/" in name or "\0" in name:
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")


def parse_override(parameters: Mapping[str, str | bytes]) -> LoadOverride:
    """The parameters `config` and `file:<path>` of a load request. Raises InvalidArgument for all others.

    What is wrong with their values is found later, by `check_override`: to Triton's clients that is a model which
    could not be polled, not a wrong request.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config" and isinstance(value, str):
            config = value
        elif key.startswith(_FILE):
            # As Triton joins paths: below the model folder all the same.
            files[key.removeprefix(_FILE).lstrip("/")] = value.encode() if isinstance(value, str) else value
        else:
            kind = "string" if isinstance(value, str) else "bytes"
            raise InvalidArgument(f"Unrecognized load parameter '{key}' with type '{kind}'")
    return LoadOverride(config, files)


def check_override(model: str, override: LoadOverride) -> None:
    """Raises InvalidArgument if files come without a configuration, or with a path that is not inside the model."""
    if not override.files:
        return
    if not override.config:
        raise InvalidArgument("Load parameter 'config' must be specified for model file override")
    for path in override.files:
        if not is_inside(path):
            raise InvalidArgument(f"model '{model}': override file path '{path}' escapes the model directory")


def is_inside(path: str) -> bool:
    """Whether a relative path names something inside its folder: `1/model.py` does, `../x`, `/x` and `` do not.

    Nothing is resolved: a path that leaves the folder and comes back is not inside.
    """
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/") and "\0" not in path


def write_override(model: str, override: LoadOverride, parent: Path | None = None) -> Path:
    """Writes the files into a new folder, readable by this user only, and returns it. Blocks.

    The folder is `<temporary>/<model>`, so that its name is the model's; `remove_override` takes it. Raises what
    `check_override` raises, and Internal if writing fails; then nothing is left behind.
    """
    check_override(model, override)
    prefix = re.sub(r"[^A-Za-z0-9_.-]", "_", model)
    try:
        top = Path(tempfile.mkdtemp(prefix=f"naiad-{prefix}-", dir=parent))
    except OSError as error:
        raise Internal(f"failed to create a folder for the files of model '{model}': {error}") from error
    directory = top / model
    try:
        directory.mkdir()
        for path, content in override.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except OSError as error:
        shutil.rmtree(top, ignore_errors=True)
        raise Internal(f"failed to write override file for model '{model}': {error}") from error
    return directory


def remove_override(directory: Path) -> None:
    """Removes what `write_override` made. Blocks; doing it twice does no harm."""
    top = directory.parent
    if not os.path.basename(top).startswith("naiad-"):
        raise AssertionError(f"{directory} was not made by write_override. This is a bug.")
    shutil.rmtree(top, ignore_errors=True)
