"""For all tests: property tests without a clock, so that a busy machine fails none of them; the server's event loop."""

import asyncio
from collections.abc import Callable

import uvloop
from hypothesis import settings

settings.register_profile("naiad", deadline=None)
settings.load_profile("naiad")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
