"""Where models are looked at."""

from pathlib import Path
from typing import Any

import pytest

from naiad.backends.api import InstanceContext, ModelContext
from naiad.backends.placement import first_instance


@pytest.mark.parametrize(
    ("groups", "kind", "device"),
    [
        ([], "KIND_CPU", 0),
        ([{"kind": "KIND_CPU", "gpus": []}, {"kind": "KIND_GPU", "gpus": [1]}], "KIND_CPU", 0),
        ([{"kind": "KIND_GPU", "gpus": [3, 1]}], "KIND_GPU", 3),
        ([{"kind": "KIND_MODEL", "gpus": []}], "KIND_MODEL", 0),
    ],
)
def test_the_first_instance(groups: list[dict[str, Any]], kind: Any, device: int) -> None:
    here = Path()
    services: Any = None
    model = ModelContext("m", 1, here, here, here, {"instance_group": groups}, {}, services)
    assert first_instance(model) == InstanceContext("m", kind, device)
