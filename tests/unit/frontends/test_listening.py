"""Front ends that are left together."""

import asyncio
from typing import Any

import pytest

from naiad.frontends import listening
from naiad.frontends.listening import Listening
from naiad.options import ServerOptions


class Frontend:
    """Stops when `may_stop` is set, by raising `error` if there is one."""

    def __init__(self, may_stop: asyncio.Event, stops: asyncio.Event, error: Exception | None = None) -> None:
        self._may_stop = may_stop
        self._stops = stops
        self._error = error
        self.has_stopped = False

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._may_stop.wait()
        self._stops.set()
        if self._error is not None:
            raise self._error
        self.has_stopped = True


async def test_one_that_fails_to_stop_is_told_of_when_the_others_have_stopped() -> None:
    now, has_failed = asyncio.Event(), asyncio.Event()
    now.set()
    failing = Frontend(now, has_failed, OSError("no"))
    slow = Frontend(has_failed, asyncio.Event())
    listening = Listening()
    await listening.enter(failing)
    await listening.enter(slow)
    with pytest.raises(ExceptionGroup, match="front ends failed to stop") as raised:
        await listening.__aexit__(None, None, None)
    assert raised.value.exceptions == (failing._error,)
    assert slow.has_stopped


async def test_one_that_does_not_stop_in_time_is_cancelled() -> None:
    stuck = Frontend(asyncio.Event(), asyncio.Event())
    listening = Listening()
    await listening.enter(stuck)
    listening.grace_s = 0
    async with asyncio.timeout(30):
        await listening.__aexit__(None, None, None)
    assert not stuck.has_stopped


@pytest.mark.parametrize(
    ("cores", "asked", "frontends", "processes"),
    [
        (1, -1, 1, 0),
        (2, -1, 1, 2),
        (64, -1, 1, 4),
        (64, -1, 2, 0),
        (64, 0, 1, 0),
        (1, 3, 1, 3),
        (64, 8, 2, 8),
    ],
)
def test_how_many_processes_read_large_json(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: int, frontends: int, processes: int
) -> None:
    monkeypatch.setattr(listening, "available_cores", lambda: cores)
    options = ServerOptions(model_repository=("models",), json_processes=asked, frontends=frontends)
    assert listening._text_processes(options) == processes
