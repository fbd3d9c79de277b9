"""The example model repository that `naiad init --example` writes: a classifier of handwritten digits in ONNX,
and a Python model that turns PNG files into its input.

`naiad.examples.digits` has the images to try it with; it needs scikit-learn, this module needs nothing.
"""

import shutil
from pathlib import Path

from naiad.errors import AlreadyExists

_REPOSITORY = Path(__file__).parent / "repository"

#: The models of the example.
MODELS = tuple(sorted(folder.name for folder in _REPOSITORY.iterdir() if folder.is_dir()))


def write_example(directory: Path) -> list[Path]:
    """Writes the models into the model repository `directory`, which is made if needed; returns their folders.

    Raises AlreadyExists, and writes nothing, if a model of that name is there.
    """
    targets = [directory / name for name in MODELS]
    for target in targets:
        if target.exists():
            raise AlreadyExists(f"'{target}' exists; choose a new directory, or remove the model first")
    directory.mkdir(parents=True, exist_ok=True)
    for target in targets:
        shutil.copytree(_REPOSITORY / target.name, target, ignore=shutil.ignore_patterns("__pycache__"))
    return targets
