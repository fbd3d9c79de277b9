"""The metrics port: a listener of its own that renders the metrics on GET. On the event loop."""

import logging
from collections.abc import Awaitable, Callable

from naiad.frontends.http.connection import Exchange, Headers
from naiad.frontends.http.replies import PLAIN
from naiad.frontends.http.service import Service
from naiad.protocol.json_text import error_document
from naiad.telemetry.exposition import CONTENT_TYPE

logger = logging.getLogger(__name__)

_HEADERS: Headers = [("content-type", CONTENT_TYPE)]
_METHOD_NOT_ALLOWED = error_document("Method Not Allowed")


class MetricsFrontend(Service):
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
        super().__init__("Metrics service", address, port, reuse_port=reuse_port, grace_s=1.0)
        self._renders = {"/metrics": render, "/metrics/": render, "/metrics/all": render_all}

    def accept(self, exchange: Exchange) -> None:
        if exchange.method != "GET":
            exchange.response_bytes(405, PLAIN, _METHOD_NOT_ALLOWED)
        elif exchange.path not in self._renders:
            exchange.response_empty(200, _HEADERS)

    def handle(self, exchange: Exchange) -> None:
        self.answer_later(self._answer(exchange))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            text = await self._renders[exchange.path]()
        except Exception as error:
            logger.exception("cannot render the metrics")
            exchange.response_bytes(500, PLAIN, error_document(f"cannot render the metrics: {error!r}"))
        else:
            exchange.response_bytes(200, _HEADERS, text)
