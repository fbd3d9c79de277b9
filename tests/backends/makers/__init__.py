"""What a backend adds to the contract suite: one file here, `makers/<backend>.py`, with a class that writes models.

    class OpenVinoMaker(Maker):
        backend = "openvino"              # its name in config.pbtxt, and its entry point in naiad.backends
        requires = ("openvino",)          # importable modules without which its tests are skipped
        filename = "model.xml"            # the default name of a model's file, or folder, in the version's folder

        def add_sub(self, path, batching): ...
        def identity(self, path, datatype, dims): ...
        def failing(self, path): ...

The suite finds every subclass of Maker in this folder. `path` is where the model is to be written: the version's
folder exists, with `filename` joined to it. What a framework cannot do is said by attributes (`datatypes`,
`has_scalars`, `completes`, ...), never by a test that looks at the backend's name. Import the framework inside the
methods: these files are imported where it is missing.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from naiad.datatypes import DataType

ALL = frozenset(DataType)


class Maker:
    """Writes the models of one backend. The first dimension of a batching model is dynamic."""

    backend: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    filename: ClassVar[str]
    #: Tensor names, for frameworks that prescribe them ("INPUT__0").
    inputs: ClassVar[tuple[str, str]] = ("INPUT0", "INPUT1")
    outputs: ClassVar[tuple[str, str]] = ("OUTPUT0", "OUTPUT1")
    datatypes: ClassVar[frozenset[DataType]] = ALL
    #: Strings must be UTF-8.
    text_only: ClassVar[bool] = False
    #: Whether `autocomplete` finds inputs and outputs of these models by itself.
    completes: ClassVar[bool] = True
    #: Whether `autocomplete` turns batching on where every first dimension is dynamic.
    completes_batching: ClassVar[bool] = True
    #: Whether it also turns on dynamic batching where inputs, outputs and a batch size above 1 are all configured.
    turns_on_batching: ClassVar[bool] = False
    #: Whether a configuration that contradicts the model's files is refused when the model is loaded.
    checks_signature: ClassVar[bool] = True
    #: Whether a data type of the configuration that is not the model's is converted, not refused.
    converts_datatypes: ClassVar[bool] = False
    #: Whether there are tensors of rank 0; then `scalar` is implemented.
    has_scalars: ClassVar[bool] = True
    #: Added to every configuration.
    config: ClassVar[dict[str, Any]] = {}

    def add_sub(self, path: Path, batching: bool) -> None:
        """Two FP32 inputs of [4] (behind a batch dimension, if `batching`): their sum and their difference."""
        raise NotImplementedError

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        """The first input, of `dims` behind a batch dimension, as the first output. -1 in `dims` is dynamic."""
        raise NotImplementedError

    def scalar(self, path: Path) -> None:
        """One FP32 number without dimensions, doubled. Only where `has_scalars`."""
        raise NotImplementedError

    def failing(self, path: Path) -> None:
        """One FP32 input of [-1] without a batch, reshaped to [2, 3]: six elements work, others are an error."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.backend


def makers() -> Iterator[Maker]:
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Maker) and value is not Maker:
                yield value()
