"""An HTTP service: an application that brings its listener. On the event loop; knows nothing of routes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, cast

from naiad.frontends.http.connection import Application, Connection, Connections
from naiad.frontends.listener import Listener


class Service:
    """An application that brings its listener: entered = listening, left = requests finished, or dropped in the end."""

    def __init__(self, what: str, address: str, port: int, **options: Any) -> None:
        self._connections = Connections()
        self._listener = Listener(self._connect, self._connections, what, address, port, **options)
        #: Answers under way that could not be given at once.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def bound_port(self) -> int:
        return self._listener.bound_port

    @property
    def connection_count(self) -> int:
        return len(self._connections.open)

    def _connect(self) -> Connection:
        return Connection(cast(Application, self), self._connections)

    async def refuse(self) -> None:
        """Takes no new connections; those that there are go on."""
        self._listener.refuse()

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._listener.__aexit__(*exc_info)

    def answer_later(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
