"""The one table of platforms, backends and default model files, and what it says about a model's files.

Pure: the caller brings the names found in the version directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from naiad.errors import InvalidArgument

ENSEMBLE = "ensemble"


@dataclass(frozen=True, slots=True)
class Platform:
    """A row of the table. `platform` is empty where a backend has none.

    `entry` says what the file may be for the backend to be recognised by it: a file, a directory, or either.
    """

    platform: str
    backend: str
    filename: str
    entry: str = "any"


#: In the order in which a model's files are tried.
PLATFORMS = (
    Platform("tensorflow_graphdef", "tensorflow", "model.graphdef", "file"),
    Platform("tensorflow_savedmodel", "tensorflow", "model.savedmodel", "directory"),
    Platform("tensorrt_plan", "tensorrt", "model.plan", "file"),
    Platform("onnxruntime_onnx", "onnxruntime", "model.onnx"),
    Platform("", "openvino", "model.xml"),
    Platform("pytorch_libtorch", "pytorch", "model.pt", "file"),
    Platform("torch_aoti", "pytorch", "model.pt2", "file"),
    Platform("", "python", "model.py"),
)

#: Platforms that name a backend but are refused once it is known, as Triton does.
_ALIASES = {"libtorch": "pytorch"}

TENSORRT_PLATFORM = "tensorrt_plan"

#: Backends of which one CPU instance leaves a machine idle; the others get one.
TWO_CPU_INSTANCES = frozenset({"tensorflow", "onnxruntime"})

#: Backends whose platform must be one of the table's.
CHECKED_BACKENDS = frozenset({"tensorflow", "tensorrt", "onnxruntime", "pytorch"})

_PLATFORM_ROW = {row.platform: row for row in PLATFORMS if row.platform}


def is_pair(platform: str, backend: str) -> bool:
    """Whether `platform` and `backend` may stand together in a configuration."""
    if backend not in CHECKED_BACKENDS:
        return True
    row = _PLATFORM_ROW.get(platform)
    return row is not None and row.backend == backend


def is_runtime(backend: str, runtime: str) -> bool:
    """Whether `runtime`, the library that a configuration wants, is what the backend is here. What backends of others
    make of it is up to them."""
    own = any(row.backend == backend for row in PLATFORMS)
    return not own or runtime in ("", f"libtriton_{backend}.so", "model.py")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a model runs on. Each is empty where nothing says."""

    platform: str
    backend: str
    filename: str


def infer(name: str, given: Choice, entries: Mapping[str, bool] | None) -> Choice:
    """Completes `given` (from the configuration) for the model `name`.

    `entries` are the names in the first version directory, with whether each is a directory; None if there is
    no version directory. Raises InvalidArgument when nothing at all says what the backend is.
    """
    if given.platform == ENSEMBLE:
        return given
    backend = given.backend or _backend_of(given, entries)
    if not backend:
        if given.platform or given.filename:
            return given  # refused by validation, which says why
        _, dot, custom = name.partition(".")
        if not dot:
            raise InvalidArgument(
                f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
                "configuration. Expected model name of the form 'model.<backend_name>'."
            )
        return Choice("", custom, f"model.{custom}")
    return _fill(Choice(given.platform, backend, given.filename), entries)


def _backend_of(given: Choice, entries: Mapping[str, bool] | None) -> str:
    if given.platform:
        row = _PLATFORM_ROW.get(given.platform)
        if row is not None:
            return row.backend
        if given.platform in _ALIASES:
            return _ALIASES[given.platform]
    if given.filename:
        # TensorFlow is known by its platform where there is one, however that is spelt.
        rows = (row for row in PLATFORMS if not (given.platform and row.backend == "tensorflow"))
        return next((row.backend for row in rows if row.filename == given.filename), "")
    if given.platform:
        return ""
    row = _row_of_entries(PLATFORMS, entries)
    return "" if row is None else row.backend


def _row_of_entries(rows: tuple[Platform, ...], entries: Mapping[str, bool] | None) -> Platform | None:
    for row in rows:
        is_directory = None if entries is None else entries.get(row.filename)
        if is_directory is not None and (row.entry == "any" or (row.entry == "directory") == is_directory):
            return row
    return None


def _fill(choice: Choice, entries: Mapping[str, bool] | None) -> Choice:
    """`choice` with the platform and file name that belong to its backend."""
    rows = tuple(row for row in PLATFORMS if row.backend == choice.backend)
    if not rows:
        return choice
    row = _PLATFORM_ROW.get(choice.platform)
    if row is not None and row.backend == choice.backend:
        return Choice(row.platform, row.backend, choice.filename or row.filename)
    if choice.platform:
        # A platform that does not belong to the backend: validation refuses it where that matters.
        return choice if choice.filename else Choice(choice.platform, choice.backend, rows[0].filename)
    chosen = next((row for row in rows if row.filename == choice.filename), None)
    if chosen is None and not choice.filename:
        chosen = _row_of_entries(rows, entries)
    if chosen is None:
        if choice.backend == "tensorflow":
            return choice  # nothing tells a SavedModel from a GraphDef; validation asks for the platform
        chosen = rows[0]
    return Choice(chosen.platform, choice.backend, choice.filename or chosen.filename)
