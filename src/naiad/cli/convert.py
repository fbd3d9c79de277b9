"""`naiad convert`: a model of one framework becomes a model of the repository, with its configuration."""

import shlex
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from naiad.convert.job import Done, Job, Shape, Step
from naiad.convert.plan import SOURCES, TARGETS, check, check_options, kind_of, missing
from naiad.convert.run import check_place, convert, install, model_name, place
from naiad.datatypes import BY_NAME
from naiad.errors import NaiadError


class _ShapeType(click.ParamType):  # type: ignore[type-arg]  # has none in older versions
    name = "NAME:TYPE:DIMS"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Shape:
        name, _, rest = value.partition(":")
        datatype, _, dims = rest.partition(":")
        try:
            extents = tuple(int(dim) for dim in dims.split(",") if dim.strip())
        except ValueError:
            extents = (0,)
        if not name or datatype not in BY_NAME or any(dim < -1 or dim == 0 for dim in extents):
            self.fail(f"{value!r} is not like x:FP32:-1,3,224,224; types are {', '.join(BY_NAME)}", param, ctx)
        return Shape(name, datatype, extents)


@click.command("convert")
@click.argument("source")
@click.option("--to", "target", required=True, type=click.Choice(list(TARGETS)), help="What it becomes.")
@click.option(
    "--output", metavar="REPOSITORY/NAME/VERSION", help="The folder of the version. Default: models/<source's name>/1."
)
@click.option(
    "--shape",
    "shapes",
    type=_ShapeType(),
    multiple=True,
    help="An input of a model that does not say what it takes; -1 for extents that change. Once for each.",
)
@click.option(
    "--inputs",
    "arrays",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of numpy (.npz) with an array for each input: the result is compared with the source on it, too.",
)
@click.option("--layers", metavar="NAME,...", help="Keras: the layers whose outputs the model is to have.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="PyTorch: the state_dict for file.py:Name (.pt, .pth or .safetensors).",
)
@click.option("--max-batch-size", type=click.IntRange(1), default=8, show_default=True, help="Where the model batches.")
@click.option("--no-batch", is_flag=True, help="The first dimension is no batch.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=1e-3,
    show_default=True,
    help="How far outputs may be from the source's, as a part of their largest value.",
)
@click.option("--force", is_flag=True, help="Replace a version and a configuration that are there.")
def command(
    source: str,
    target: str,
    output: str | None,
    shapes: tuple[Shape, ...],
    arrays: Path | None,
    layers: str | None,
    weights: Path | None,
    max_batch_size: int,
    no_batch: bool,
    tolerance: float,
    force: bool,
) -> None:
    """Convert a model and put it into a model repository.

    SOURCE is a Keras model (.keras, .h5), the folder of a SavedModel, an ONNX file, a PyTorch module (file.py:Name,
    module:Name, or what torch.save wrote), a TorchScript or torch.export file, or a pickled scikit-learn model. Loading
    a model can run code that is in it: convert what you trust.
    """
    console = Console(stderr=True)
    try:
        version = place(output, source)
        kind = kind_of(source)
        check(source, kind, target)
        given = {"--shape": shapes, "--layers": layers, "--weights": weights}
        check_options(source, kind, [option for option, value in given.items() if value])
        check_place(version, force)
        if packages := missing(kind, target):
            wanted = " ".join(f"'{package}'" for package in packages)
            name, _ = SOURCES[kind]
            raise NaiadError(f"from {name} to {target} needs more packages: pip install {wanted}")
        with _ended_by_exceptions(), tempfile.TemporaryDirectory(prefix="naiad-convert-") as folder:
            job = Job(
                source=source,
                kind=kind,
                target=target,
                folder=str(_folder(folder, version)),
                scratch=folder,
                model=model_name(version),
                max_batch_size=0 if no_batch else max_batch_size,
                batching=not no_batch,
                tolerance=tolerance,
                shapes=shapes,
                layers=tuple(name.strip() for name in layers.split(",")) if layers else (),
                weights=None if weights is None else str(weights),
                arrays=None if arrays is None else str(arrays),
            )
            done = _with_progress(job, console)
            config, written = install(job, done, version, force)
    except NaiadError as error:
        raise click.ClickException(error.message) from error
    _show(done, console)
    click.echo(f"wrote {version / TARGETS[target][1]}")
    click.echo(f"wrote {config}" if written else f"kept {config}; --force replaces it")
    click.echo(f"serve it with: naiad serve --model-repository={shlex.quote(str(version.parent.parent))}")


@contextmanager
def _ended_by_exceptions() -> Iterator[None]:
    """Signals that end the command let it put away what it has begun, as Ctrl-C does. For nohup, one is ignored."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    taken = [it for it in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(it) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _folder(root: str, version: Path) -> Path:
    folder = Path(root) / model_name(version) / version.name
    folder.mkdir(parents=True)
    return folder


def _with_progress(job: Job, console: Console) -> Done:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Start", total=None)

        def on_step(step: Step) -> None:
            progress.update(task, description=step.text, completed=step.number - 1, total=step.count)
            if not console.is_terminal:
                console.print(f"{step.number}/{step.count} {step.text}", markup=False, highlight=False, soft_wrap=True)

        return convert(job, on_step)


def _show(done: Done, console: Console) -> None:
    table = Table("Output", "Compared on", "Max difference", "Largest value")
    for it in done.differences:
        table.add_row(it.output, it.inputs, f"{it.largest:.3g}", f"{it.scale:.3g}")
    Console().print(table)
    for remark in done.remarks:
        console.print(f"Note: {remark}", markup=False, highlight=False, soft_wrap=True)
