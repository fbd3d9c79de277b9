"""Granian's RSGI server on the running event loop, behind a socket of our own.

Owns the socket, so that an address in use is an error at start and SO_REUSEPORT is a choice. Knows nothing of routes.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server

from naiad.errors import Unavailable

Application = Callable[[Any, Any], Awaitable[None]]

_BACKLOG = 1024
#: Granian configures `logging` when it is made; an incremental configuration leaves the handlers of others alone.
_NO_LOGGING = {"incremental": True, "handlers": {}, "loggers": {}}


class _Server(Server):
    def __init__(self, descriptor: int, application: Application) -> None:
        super().__init__(
            application,
            interface=Interfaces.RSGI,
            http=HTTPModes.http1,
            websockets=False,
            runtime_threads=1,
            backlog=_BACKLOG,
            log_enabled=False,
            log_dictconfig=_NO_LOGGING,
        )
        self._descriptor = descriptor

    def _init_shared_socket(self) -> None:
        # Granian would bind with SO_REUSEPORT, which hides that the port is taken.
        self._ssp: Any = None
        self._shd: Any = SocketHolder(self._descriptor, False, _BACKLOG)  # type: ignore[call-arg]


class Listener:
    """Serves `application` on an address; entered = listening, left = no new connections, requests finished.

    `what` names the listener in errors. `port` 0 is any; `bound_port` is the one taken. Requests that are not done
    `grace_s` after the end began are dropped.
    """

    def __init__(
        self,
        application: Application,
        what: str,
        address: str,
        port: int,
        *,
        reuse_port: bool = False,
        grace_s: float = 30.0,
    ) -> None:
        self._application = application
        self._what = what
        self._address = address
        self._port = port
        self._reuse_port = reuse_port
        self._grace_s = grace_s
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.bound_port = 0

    async def __aenter__(self) -> Self:
        bound = self._bind()
        self.bound_port = bound.getsockname()[1]
        # Granian closes the descriptor when it ends.
        self._server = _Server(bound.detach(), self._application)
        self._serving = asyncio.create_task(self._server.serve())
        # One turn of the loop starts the workers; the socket has been listening before.
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        assert self._serving is not None
        self._server.stop()  # type: ignore[no-untyped-call]
        try:
            await asyncio.wait_for(asyncio.shield(self._serving), self._grace_s)
        except TimeoutError:
            self._serving.cancel()

    def _bind(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(self._address, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            bound = socket.socket(family[0], family[1])
        except OSError as error:
            raise self._refused(error) from error
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._reuse_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(family[4])
            bound.listen(_BACKLOG)
            bound.setblocking(False)
        except OSError as error:
            bound.close()
            raise self._refused(error) from error
        return bound

    def _refused(self, error: OSError) -> Unavailable:
        return Unavailable(
            f"failed to start {self._what} at {self._address}:{self._port}: {error.strerror or error}. "
            "Choose another address or port, or end what uses it."
        )
