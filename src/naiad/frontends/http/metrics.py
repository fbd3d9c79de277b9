"""The metrics port: a listener of its own that renders the metrics on GET. On the event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from naiad.frontends.http.connection import Exchange, Headers
from naiad.frontends.http.listener import Listener
from naiad.frontends.http.replies import PLAIN
from naiad.protocol.json_text import error_document

logger = logging.getLogger(__name__)

_HEADERS: Headers = [("content-type", "text/plain; charset=utf-8")]
_METHOD_NOT_ALLOWED = error_document("Method Not Allowed")


class MetricsFrontend:
    """Serves the text that `render` returns under /metrics, and under /metrics/all what `render_all` returns; other
    paths are empty. `port` 0 is any."""

    def __init__(
        self,
        render: Callable[[], Awaitable[bytes]],
        render_all: Callable[[], Awaitable[bytes]],
        address: str = "0.0.0.0",
        port: int = 8002,
        *,
        reuse_port: bool = False,
    ) -> None:
        self._renders = {"/metrics": render, "/metrics/all": render_all}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Listener(self, "Metrics service", address, port, reuse_port=reuse_port, grace_s=1.0)

    @property
    def bound_port(self) -> int:
        return self._listener.bound_port

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._listener.__aexit__(*exc_info)

    def accept(self, exchange: Exchange) -> None:
        if exchange.method != "GET":
            exchange.response_bytes(405, PLAIN, _METHOD_NOT_ALLOWED)
        elif exchange.path not in self._renders:
            exchange.response_empty(200, _HEADERS)

    def handle(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            text = await self._renders[exchange.path]()
        except Exception as error:
            logger.exception("cannot render the metrics")
            exchange.response_bytes(500, PLAIN, error_document(f"cannot render the metrics: {error!r}"))
        else:
            exchange.response_bytes(200, _HEADERS, text)
