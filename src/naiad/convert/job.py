"""What the command says to the process that converts, and what comes back. Nothing else."""

from typing import Any

import msgspec

#: The environment variable with the number of the pipe that reports go to.
REPORTS_FD = "NAIAD_CONVERT_REPORTS"


class Shape(msgspec.Struct, frozen=True):
    """An input as the command line describes it: `NAME:TYPE:DIMS`. -1 for dynamic extents."""

    name: str
    datatype: str
    dims: tuple[int, ...]


class Job(msgspec.Struct, frozen=True):
    """One conversion. `source` may be `file.py:Name` or `module:Name`."""

    source: str
    kind: str
    target: str
    #: Where the model's file goes; exists, empty, and is named like the version.
    folder: str
    #: The temporary folder that `folder` lies in, for other temporary files, too. It goes with the command.
    scratch: str
    model: str
    max_batch_size: int
    batching: bool
    tolerance: float
    shapes: tuple[Shape, ...] = ()
    #: Names of the layers whose outputs are the model's; empty for its own.
    layers: tuple[str, ...] = ()
    weights: str | None = None
    #: A file of numpy, .npz, with arrays by the inputs' names.
    arrays: str | None = None


class Step(msgspec.Struct, frozen=True, tag=True):
    """A step begins, `number` of `count`."""

    number: int
    count: int
    text: str


class Difference(msgspec.Struct, frozen=True):
    """How far an output is from the source's: the largest absolute difference, the largest value, and what the tolerance
    is a part of."""

    output: str
    inputs: str
    largest: float
    scale: float
    unit: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """The model is in the folder; `config` is its configuration in JSON form."""

    config: dict[str, Any]
    differences: list[Difference]
    remarks: list[str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why not, in words for the user."""

    text: str


Report = Step | Done | Failed
