"""The example model repository that `naiad init --example` writes: classifiers of handwritten digits, a Python model that
turns PNG files into their input, an ensemble, a model that asks other models, one that streams and one with a state.
With `frameworks`, the classifier also as models of TensorFlow, PyTorch and OpenVINO: `naiad.examples.frameworks`.

`naiad.examples.digits` has the images to try it with; it needs scikit-learn, this module needs nothing.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from naiad.errors import AlreadyExists, NaiadError, Unavailable

_FOLDER = Path(__file__).parent


def _models(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))


#: The models of the example.
MODELS = _models(_FOLDER / "repository")
#: Framework, which is also the name of its extra and of its package -> its models.
FRAMEWORKS = {name: _models(_FOLDER / "variants" / name) for name in _models(_FOLDER / "variants")}


def installed() -> list[str]:
    """The frameworks that models can be written for here."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name)]


def write_example(directory: Path, frameworks: Collection[str] = ()) -> list[Path]:
    """Writes the models, and those of `frameworks`, into the model repository `directory`, which is made if needed.

    Returns their folders. Writes nothing if it raises: AlreadyExists if a model of that name is there, Unavailable if a
    framework is not installed, NaiadError if a framework fails.
    """
    missing = [name for name in frameworks if name not in installed()]
    if missing:
        raise Unavailable(f"not installed: {', '.join(missing)}; try: pip install 'naiad[{','.join(missing)}]'")
    names = [*MODELS, *(model for framework in frameworks for model in FRAMEWORKS[framework])]
    targets = [directory / name for name in names]
    for target in targets:
        if target.exists():
            raise AlreadyExists(f"'{target}' exists; choose a new directory, or remove the model first")
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary)
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda framework: _run(framework, written), frameworks):
                pass
        shutil.copytree(
            _FOLDER / "repository", written, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
        directory.mkdir(parents=True, exist_ok=True)
        for target in targets:
            # An ensemble is its configuration; git and wheels keep no empty folders.
            (written / target.name / "1").mkdir(exist_ok=True)
            shutil.copytree(written / target.name, target)
    return targets


def _run(framework: str, repository: Path) -> None:
    """Has a process of its own write the models of a framework."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "naiad.examples.frameworks", framework, str(repository)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NaiadError(f"the models of {framework} could not be written:\n{done.stderr.strip()}")
