"""Drives a backend class by itself, without host, server or scheduler. For tests of backends only."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from naiad.backends.api import (
    Array,
    ArrayBackend,
    BackendResponse,
    ConfigDict,
    InstanceContext,
    ModelContext,
    RequestBackend,
)
from naiad.errors import NaiadError, Unsupported
from naiad.messages import ParameterValue

BackendClass = type[ArrayBackend] | type[RequestBackend]


def backend_class(name: str) -> BackendClass:
    """The class of the backend `name`, found as the server finds it."""
    (entry,) = importlib.metadata.entry_points(group="naiad.backends", name=name)
    loaded: BackendClass = entry.load()
    return loaded


@dataclass
class FakeServices:
    """Keeps what was logged; there is no server to call."""

    lines: list[str] = field(default_factory=list)

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self.lines.append(f"{level}: {message}")

    def call(self, method: str, arguments: Any) -> Any:
        raise Unsupported(f"no server to call '{method}'")


def context(
    directory: Path, config: ConfigDict, filename: str, settings: Mapping[str, str] | None = None, version: int = 1
) -> ModelContext:
    """The version `version` of the model in `directory`, whose folder is made."""
    version_directory = directory / str(version)
    version_directory.mkdir(parents=True, exist_ok=True)
    return ModelContext(
        name=directory.name,
        version=version,
        directory=directory,
        version_directory=version_directory,
        path=version_directory / (config.get("default_model_filename") or filename),
        config={"name": directory.name, **config},
        settings=settings or {},
        services=FakeServices(),
    )


@dataclass
class FakeRequest:
    """A request of one; keeps what it was answered."""

    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    id: str = ""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    trace: int = 0
    trace_context: str | None = None
    results: list[BackendResponse | NaiadError | None] = field(default_factory=list)
    final: bool = False

    def send(self, result: BackendResponse | NaiadError | None, final: bool) -> None:
        assert not self.final, "answered after its end"
        if isinstance(result, BackendResponse):  # the arrays are the backend's, and may change after this
            result = BackendResponse({name: array.copy() for name, array in result.outputs.items()}, result.parameters)
        self.results.append(result)
        self.final = final

    def is_cancelled(self) -> bool:
        return False


class Loaded:
    """One instance of a model; `run` is the same for both kinds of backend. A context manager that closes it."""

    def __init__(self, model: ModelContext, index: int = 0) -> None:
        kind = backend_class(model.config["backend"])
        self._backend = kind(model, InstanceContext(f"{model.name}_0_{index}", "KIND_CPU"))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if isinstance(self._backend, ArrayBackend):
            return self._backend.run(inputs, outputs)
        request = FakeRequest(inputs, outputs)
        for result in self._backend.execute([request]) or ():
            request.send(result, True)
        assert request.final, "not answered"
        (result,) = request.results
        if isinstance(result, NaiadError):
            raise result
        assert result is not None
        return result.outputs

    def __enter__(self) -> "Loaded":
        return self

    def __exit__(self, *exception: object) -> None:
        self._backend.close()
