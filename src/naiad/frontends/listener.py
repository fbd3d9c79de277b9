"""A listening socket and the connections it has accepted, of whatever protocol. On the event loop."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from naiad.frontends.addresses import bound, cannot_listen
from naiad.frontends.connections import OpenConnections

_BACKLOG = 1024
#: A client that owes a part of a request and makes no progress for so long is cut off.
STALLED_S = 60.0
_LOOK_S = 5.0


class Listener:
    """Accepts on an address; entered = listening, left = no new connections, requests finished.

    `connect` makes the protocol of a new one, which keeps itself in `connections`. `what` names the listener in errors.
    `port` 0 is any; `bound_port` is the one taken. Requests that are not done `grace_s` after the end began are dropped.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        connections: OpenConnections,
        what: str,
        address: str,
        port: int,
        *,
        reuse_port: bool = False,
        grace_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect = connect
        self._what = what
        self._address = address
        self._port = port
        self._reuse_port = reuse_port
        self._grace_s = grace_s
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.connections = connections
        self.bound_port = 0

    async def __aenter__(self) -> Self:
        bound = self._bind()
        self.bound_port = bound.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, sock=bound, backlog=_BACKLOG, ssl=self._tls)
        self._look()
        return self

    def refuse(self) -> None:
        """Takes no new connections; those that there are go on."""
        assert self._server is not None
        self._server.close()

    async def __aexit__(self, *exc_info: object) -> None:
        self.refuse()
        for connection in list(self.connections.open):
            connection.finish()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await self.connections.gone()
        finally:
            for connection in list(self.connections.open):
                connection.abort()
            if self._timer is not None:
                self._timer.cancel()

    def _look(self) -> None:
        """Cuts off clients that have stalled in the middle of a request."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_S, self._look)
        limit = loop.time() - STALLED_S
        for connection in list(self.connections.open):
            if 0 < connection.waiting_since < limit:
                connection.abort()

    def _bind(self) -> socket.socket:
        try:
            made = bound(self._address, self._port, self._reuse_port)
            try:
                made.listen(_BACKLOG)
            except OSError:
                made.close()
                raise
        except OSError as error:
            raise cannot_listen(self._what, self._address, self._port, error) from error
        made.setblocking(False)
        return made
