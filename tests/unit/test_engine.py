"""The engine over fakes: what becomes of leases when a scheduler fails."""

from types import SimpleNamespace
from typing import Any

import pytest

from naiad.engine import Engine
from naiad.errors import Unavailable
from naiad.messages import InferRequest
from naiad.statistics import ModelStatistics


class Refusing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def submit(self, call: object) -> None:
        raise self.error


@pytest.mark.parametrize("error", [Unavailable("queue full"), ValueError("a bug")])
def test_a_request_that_is_not_taken_holds_no_lease(error: Exception) -> None:
    leases: list[int] = []
    model = SimpleNamespace(
        version=1,
        statistics=ModelStatistics("m", "1"),
        scheduler=Refusing(error),
        check=lambda request: (request, 1, None),
        lease=lambda: leases.append(1),
        release=lambda: leases.append(-1),
    )
    manager: Any = SimpleNamespace(table=SimpleNamespace(lookup=lambda name, version: model))
    with pytest.raises(type(error)):
        Engine(manager).infer(InferRequest("m", ()), SimpleNamespace())  # type: ignore[arg-type]
    assert leases == [1, -1]
    # Triton counts what was never queued nowhere.
    assert model.statistics.refused == 1
    assert not any(model.statistics.failures.values())
    assert model.statistics.infer.fail.count == 0
