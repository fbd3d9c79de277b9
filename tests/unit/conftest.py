"""Fixtures of several folders."""

import gc
from collections.abc import AsyncIterator

import pytest

from naiad.protocol import cuda_memory
from naiad.protocol.cuda_memory import cuda_thread
from tests.unit.fake_cuda import FakeCuda


@pytest.fixture
async def cuda(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(cuda_memory, "cuda_runtime", lambda: fake)
    yield fake
    fake.free.set()
    gc.collect()
    await cuda_thread.settled()
