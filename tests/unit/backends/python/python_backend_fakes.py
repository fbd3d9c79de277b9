"""A host and a server as the Python backend sees them."""

import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from naiad.backends.api import BackendResponse, InstanceContext, ModelContext
from naiad.backends.python import PythonBackend
from naiad.errors import NaiadError


class FakeServices:
    """Notes what is logged and asked; answers by `answers[method](argument)`."""

    def __init__(self, **answers: Callable[[Any], Any]) -> None:
        self.answers = answers
        self.logged: list[tuple[str, str, str, int]] = []
        self.asked: list[tuple[str, Any]] = []

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self.logged.append((level, message, file, line))

    def call(self, method: str, arguments: Any, kind: Any) -> Any:
        self.asked.append((method, arguments))
        return self.answers[method](arguments)


class FakeRequest:
    """Notes what is sent; `ended` is set with the final answer."""

    def __init__(self, outputs: Sequence[str] = (), id: str = "", **inputs: Any) -> None:
        self.id = id
        self.inputs: Mapping[str, Any] = {name: np.asarray(value) for name, value in inputs.items()}
        self.outputs = outputs
        self.parameters: dict[str, Any] = {}
        self.correlation_id: int | str = 0
        self.flags = 0
        self.priority = 0
        self.timeout_us = 0
        self.trace = 0
        self.trace_context: str | None = None
        self.sent: list[tuple[BackendResponse | NaiadError | None, bool]] = []
        self.ended = threading.Event()
        self.cancelled = False
        #: Raised by the next `send`.
        self.refusal: NaiadError | None = None

    def send(self, result: BackendResponse | NaiadError | None, final: bool) -> None:
        assert not self.ended.is_set(), f"answered after its end with {result}"
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        self.sent.append((result, final))
        if final:
            self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def answer(self) -> BackendResponse | NaiadError | None:
        """The one answer of a request that is not decoupled."""
        ((result, final),) = self.sent
        assert final
        return result

    @property
    def values(self) -> dict[str, Any]:
        """The outputs of the one answer, as lists."""
        assert isinstance(self.answer, BackendResponse), self.answer
        return {name: array.tolist() for name, array in self.answer.outputs.items()}

    @property
    def error(self) -> str:
        assert isinstance(self.answer, NaiadError), self.answer
        return self.answer.message


def context(path: Path, services: FakeServices | None = None, is_alone: bool = True, **config: Any) -> ModelContext:
    """The model of the file `path`, which lies in its version directory."""
    directory = path.parent.parent
    return ModelContext(
        name=directory.name,
        version=int(path.parent.name),
        directory=directory,
        version_directory=path.parent,
        path=path,
        config={"name": directory.name, "max_batch_size": 0, "input": [], "output": [], **config},
        settings={},
        services=services or FakeServices(),
        is_alone=is_alone,
    )


def load(path: Path, services: FakeServices | None = None, is_alone: bool = True, **config: Any) -> PythonBackend:
    model = context(path, services, is_alone, **config)
    return _Hosted(model, InstanceContext(f"{model.name}_0_0", "KIND_CPU"))


class _Hosted(PythonBackend):
    """Takes what comes of an execution as a host does: returned answers, or a failure after which all are answered."""

    def execute(self, requests: Sequence[Any]) -> None:
        with suppress(NaiadError):
            results = super().execute(requests)
            for request, result in zip(requests, results or (), strict=results is not None):
                request.send(result, True)
            return
        assert all(request.sent for request in requests), "an execution failed and left requests unanswered"


def write(folder: Path, source: str, name: str = "m", version: int = 1) -> Path:
    """A model file of `source`, which sees numpy as np and the utilities as pb_utils."""
    path = folder / name / str(version) / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("import numpy as np\nimport triton_python_backend_utils as pb_utils\n" + textwrap.dedent(source))
    return path
