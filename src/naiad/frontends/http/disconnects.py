"""Cancels the calls of clients that have gone. On the event loop.

Asking the connection of every request would cost more than most requests do. So requests are asked only when they have
been waiting for a while.
"""

import asyncio
from typing import Protocol

from naiad.frontends.http.replies import HttpProtocol

INTERVAL_S = 0.1


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Waiting:
    """One request that waits for its model."""

    __slots__ = ("call", "proto", "seen", "watch")

    def __init__(self, proto: HttpProtocol, call: Cancellable) -> None:
        self.proto = proto
        self.call = call
        self.seen = False
        self.watch: asyncio.Task[None] | None = None


class Disconnects:
    """The waiting requests, looked through every `INTERVAL_S` while there are any."""

    def __init__(self) -> None:
        self._waiting: set[Waiting] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, proto: HttpProtocol, call: Cancellable) -> Waiting:
        waiting = Waiting(proto, call)
        self._waiting.add(waiting)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)
        return waiting

    def remove(self, waiting: Waiting) -> None:
        self._waiting.discard(waiting)
        if waiting.watch is not None:
            waiting.watch.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        for waiting in self._waiting:
            if waiting.seen and waiting.watch is None:
                waiting.watch = asyncio.create_task(_cancel_when_gone(waiting))
            waiting.seen = True
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)


async def _cancel_when_gone(waiting: Waiting) -> None:
    await waiting.proto.client_disconnect()
    waiting.call.cancel()
