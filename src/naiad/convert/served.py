"""Models as Naiad's own backends load and complete them: what is compared is what will be served."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from naiad.backends.api import Array, ArrayBackend, ConfigDict, InstanceContext, ModelContext
from naiad.convert.compare import Input
from naiad.datatypes import BY_CONFIG_NAME
from naiad.errors import NaiadError, Unsupported
from naiad.instances.references import load_backend

T = TypeVar("T")


class _Services:
    """What backends log is of no interest here; there is no server to call."""

    def log(self, level: Literal["ERROR", "WARNING", "INFO", "VERBOSE"], message: str, file: str, line: int) -> None:
        pass

    def call(self, method: str, arguments: Any, kind: type[T]) -> T:
        raise Unsupported("there is no server to call")


class Served:
    """A model file, loaded by the backend that serves such files."""

    def __init__(self, backend: str, path: Path, model: str, config: ConfigDict) -> None:
        """`config` is completed from the file; its max_batch_size is kept. Raises NaiadError where the backend does."""
        kind = load_backend(backend, backend)
        if not issubclass(kind, ArrayBackend):
            raise Unsupported(f"the backend {backend} has no models to convert")
        group = {"name": model, "kind": "KIND_CPU", "count": 1}
        given = {"name": model, "backend": backend, **config}
        completed = kind.autocomplete(self._context(path, model, {**given, "instance_group": [group]})) or given
        self.config: ConfigDict = {**completed, "max_batch_size": given.get("max_batch_size", 0)}
        if self.batching:
            self.config.setdefault("dynamic_batching", {})
        else:
            self.config.pop("dynamic_batching", None)
        context = self._context(path, model, {**self.config, "instance_group": [group]})
        self._backend = kind(context, InstanceContext(f"{model}_0_0", "KIND_CPU"))
        self.config.pop("instance_group", None)

    def _context(self, path: Path, model: str, config: ConfigDict) -> ModelContext:
        # By default, a batch size is not made up: it is given, or there is none.
        settings = {"default-max-batch-size": "0"}
        return ModelContext(model, 1, path.parent.parent, path.parent, path, config, settings, _Services())

    @property
    def batching(self) -> bool:
        return int(self.config.get("max_batch_size", 0)) > 0

    @property
    def inputs(self) -> tuple[Input, ...]:
        first = (-1,) if self.batching else ()
        return tuple(
            Input(it["name"], BY_CONFIG_NAME[it["data_type"]], (*first, *_dims(it))) for it in self.config["input"]
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(it["name"] for it in self.config["output"])

    def leave_out_all_but(self, names: Sequence[str]) -> list[str]:
        """Takes all outputs but these out of the configuration, and says which those were."""
        left_out = [name for name in self.outputs if name not in names]
        self.config["output"] = [it for it in self.config["output"] if it["name"] in names]
        return left_out

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs, in the order of the configuration. Inputs by the names of it."""
        feeds = {name: np.array(array) for name, array in arrays.items()}
        results = self._backend.run(feeds, self.outputs)
        return {name: np.array(results[name]) for name in self.outputs}


def _dims(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    shape = tensor["reshape"]["shape"] if "reshape" in tensor else tensor["dims"]
    return tuple(int(dim) for dim in shape)


def load(backend: str, path: Path, model: str, config: ConfigDict, sizes: Sequence[int]) -> tuple[Served, list[str]]:
    """With the first of the batch sizes `sizes` that works, and what was wrong with those before. The dims of
    `config` have the batch dimension."""
    problems: list[str] = []
    for size in sizes:
        try:
            return Served(backend, path, model, _of_size(config, size)), problems
        except NaiadError as error:
            if size == sizes[-1]:
                raise
            problems.append(f"it does not batch: {error.message}")
    raise AssertionError("no sizes")


def _of_size(config: ConfigDict, size: int) -> ConfigDict:
    first = 1 if size else 0
    sized: ConfigDict = {**config, "max_batch_size": size}
    if "input" in config:
        sized["input"] = [{**it, "dims": it["dims"][first:] or [1]} for it in config["input"]]
    return sized
