"""Fixtures of the instance tests; the rest is in instance_lab.py."""

import contextlib
import sys

import pytest
from instance_lab import HERE, Lab

from naiad.instances.hosts import Hosts


@pytest.fixture
def make_lab(monkeypatch):
    """Makes a pool as an async context manager; keywords go to Hosts."""
    monkeypatch.setattr(sys, "path", [*sys.path, HERE] if HERE not in sys.path else sys.path)

    @contextlib.asynccontextmanager
    async def make(on_call=None, **options):
        logs = []

        def no_calls(caller, method, arguments, reply):
            raise AssertionError("unexpected call")

        async with Hosts(on_log=lambda *line: logs.append(line), on_call=on_call or no_calls, **options) as hosts:
            yield Lab(hosts, logs)

    return make


@pytest.fixture
async def lab(make_lab):
    async with make_lab() as lab:
        yield lab


@pytest.fixture(params=["model", "none"])
async def both(request, make_lab):
    """A pool of processes, and one of threads: to a client they are the same."""
    async with make_lab(isolation=request.param) as lab:
        yield lab
