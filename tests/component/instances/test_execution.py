"""Batches through real host processes, and through threads: the same answers."""

import numpy as np
import pytest
from conftest import Batch, available, config, parameters, request, run, tensor


@pytest.fixture(params=["model", "none"])
async def both(request, make_lab):
    async with make_lab(isolation=request.param) as lab:
        yield lab


async def test_a_request_comes_back(both):
    model = await both.load("Identity", config())
    (instance,) = model.instances
    [[response]] = await run(instance, request(np.arange(16, dtype=np.float32), id="7"))
    assert response.outputs["OUTPUT0"].tolist() == list(range(16))
    assert response.id == "7"
