"""`naiad init`: something to start from: the example repository, or the folder of one new model."""

import re
import shlex
from pathlib import Path

import click

from naiad.errors import NaiadError
from naiad.examples import FRAMEWORKS, installed, write_example

#: Backend -> the file of a model that the user has to bring.
_FILES = {
    "onnxruntime": "model.onnx",
    "openvino": "model.xml",
    "pytorch": "model.pt",
    "tensorflow": "model.savedmodel",
}

_PYTHON_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: 8

input [
  {{ name: "INPUT", data_type: TYPE_FP32, dims: [ -1 ] }}
]
output [
  {{ name: "OUTPUT", data_type: TYPE_FP32, dims: [ -1 ] }}
]

dynamic_batching {{ }}
"""

_PYTHON_MODEL = '''\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Called once, when the model is loaded. args["model_config"] is the configuration as JSON."""

    def execute(self, requests):
        """Returns one response for each request, in the same order."""
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)]))
        return responses

    def finalize(self):
        """Called once, when the model is unloaded."""
'''

_FILE_CONFIG = """\
name: "{name}"
backend: "{backend}"

# Put the model at 1/{file}. What is not said here (inputs, outputs, the largest batch) is read from it where the
# file tells; add a line for what should be different.
dynamic_batching {{ }}
"""


def write_model(directory: Path, backend: str) -> list[Path]:
    """Writes the folder of a model, which must not exist, and returns its files. The folder's name is the model's."""
    if not re.fullmatch(r"[^\s/]+", directory.name):
        raise click.ClickException(f"'{directory.name}' cannot be the name of a model")
    if directory.exists():
        raise click.ClickException(f"{directory} exists already")
    version = directory / "1"
    version.mkdir(parents=True)
    config = directory / "config.pbtxt"
    if backend == "python":
        config.write_text(_PYTHON_CONFIG.format(name=directory.name))
        model = version / "model.py"
        model.write_text(_PYTHON_MODEL)
        return [config, model]
    config.write_text(_FILE_CONFIG.format(name=directory.name, backend=backend, file=_FILES[backend]))
    return [config]


def chosen(frameworks: str) -> list[str]:
    """The frameworks that `--with` names, each once. Raises UsageError for a name that is none."""
    names = list(dict.fromkeys(name.strip() for name in frameworks.split(",") if name.strip()))
    if names == ["installed"]:
        return installed()
    for name in names:
        if name not in FRAMEWORKS:
            raise click.UsageError(f"--with={name}: there are {', '.join(FRAMEWORKS)} and installed")
    return names


@click.command("init")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--example", is_flag=True, help="Write the example model repository into DIR.")
@click.option(
    "--backend",
    type=click.Choice(["python", *_FILES]),
    help="Write a model for this backend: DIR is <repository>/<model>.",
)
@click.option(
    "--with",
    "frameworks",
    metavar="FRAMEWORK,...",
    help="With --example: the classifier also as models of tensorflow, torch, openvino, which have to be installed;"
    " 'installed' for all that are.",
)
def command(directory: Path, example: bool, backend: str | None, frameworks: str | None) -> None:
    """Write the example model repository, or the folder of one new model, to start from."""
    if example == (backend is not None):
        raise click.UsageError("say one of --example and --backend=<backend>")
    if frameworks is not None and not example:
        raise click.UsageError("--with goes with --example")
    try:
        repository = _write(directory, backend, frameworks or "")
    except NaiadError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from error
    click.echo(f"serve it with: naiad serve --model-repository={shlex.quote(str(repository))}")


def _write(directory: Path, backend: str | None, frameworks: str) -> Path:
    """Writes a model for the backend, or the example, says what, and returns the repository it is in."""
    if backend is None:
        write_example(directory, chosen(frameworks))
        click.echo(f"wrote the example model repository {directory}")
        return directory
    for path in write_model(directory, backend):
        click.echo(f"wrote {path}")
    if backend != "python":
        click.echo(f"now put the model at {directory / '1' / _FILES[backend]}")
    return directory.parent
