"""The HTTP front end: every request comes in here, and every error goes out here. On the event loop."""

import logging
import ssl
from collections.abc import Coroutine
from typing import Any, Final

from naiad.errors import Internal, NaiadError
from naiad.frontends.http.connection import ConnectionClosed, Exchange
from naiad.frontends.http.generate import Generation
from naiad.frontends.http.inference import HeaderForwarding, Inference
from naiad.frontends.http.management import Management, Settings
from naiad.frontends.http.replies import PLAIN, reply_error
from naiad.frontends.http.routes import Route, Routes
from naiad.frontends.http.service import Service
from naiad.frontends.http.streaming import Streaming
from naiad.frontends.http.surface import Engine
from naiad.frontends.http.text_processes import TextProcesses
from naiad.options import Restriction
from naiad.protocol.json_arrays import DEFAULT_MAX_INPUT_SIZE
from naiad.protocol.json_text import error_document
from naiad.protocol.regions import Regions
from naiad.telemetry.trace import TraceSettings

logger = logging.getLogger(__name__)

_NOT_FOUND: Final = error_document("Not Found")
_METHOD_NOT_ALLOWED: Final = error_document("Method Not Allowed")


class HttpFrontend(Service):
    """Serves an engine over HTTP; entered = listening, left = requests finished or `grace_s` over.

    `port` 0 is any, `bound_port` the one taken. `thread_count` is accepted for Triton's sake: one loop serves all.
    `management` answers what is not inference, where that is not the engine here. `text_processes` is how many
    processes may read and write large JSON.
    Raises Unavailable on entering where the address cannot be bound.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        address: str = "0.0.0.0",
        port: int = 8000,
        reuse_port: bool = False,
        thread_count: int = 8,
        max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
        header_forward_pattern: str = "",
        restricted_apis: tuple[Restriction, ...] = (),
        regions: Regions | None = None,
        trace_settings: TraceSettings | None = None,
        log_settings: Settings | None = None,
        grace_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
        management: Management | None = None,
        text_processes: int = 0,
    ) -> None:
        super().__init__("HTTP service", address, port, reuse_port=reuse_port, grace_s=grace_s, tls=tls)
        forwarding = HeaderForwarding(header_forward_pattern)
        self._texts = TextProcesses(text_processes)
        inference = Inference(engine, regions, forwarding, max_input_size, trace_settings, self._texts)
        self._routes = Routes(
            inference,
            Streaming(inference),
            Generation(engine, forwarding, max_input_size, trace_settings),
            management or Management(engine, regions, trace_settings, log_settings),
            restricted_apis,
        )

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await super().__aexit__(*exc_info)
        finally:
            await self._texts.close()

    def accept(self, exchange: Exchange) -> None:
        """Refuses what has no route, no key, or the wrong method, before its body is read."""
        head = exchange.head
        if head.memo is not None:
            return
        route = self._routes.find(head.path)
        if route is None:
            exchange.response_bytes(404, PLAIN, _NOT_FOUND)
            return
        restriction = route.restriction
        if restriction is not None and head.headers.get(restriction.key.lower()) != restriction.value:
            text = f"This API is restricted, expecting header '{restriction.key}'"
            exchange.response_bytes(403, PLAIN, error_document(text))
        elif head.method not in route.methods:
            exchange.response_bytes(405, route.error_headers, _METHOD_NOT_ALLOWED)
        else:
            # All of this depends on the head alone, which will come again.
            head.memo = route

    def handle(self, exchange: Exchange) -> None:
        route: Route = exchange.head.memo
        try:
            later = route.handler(exchange, *route.arguments)
        except NaiadError as error:
            reply_error(exchange, error, route.error_headers)
        except Exception as error:
            _fail(exchange, route, error)
        else:
            if later is not None:
                self.answer_later(_finish(exchange, route, later))


async def _finish(exchange: Exchange, route: Route, answer: Coroutine[Any, Any, None]) -> None:
    """Answers what cannot be answered at once."""
    try:
        await answer
    except NaiadError as error:
        if not exchange.is_answered:
            reply_error(exchange, error, route.error_headers)
    except ConnectionClosed:
        return
    except Exception as error:
        _fail(exchange, route, error)
    if exchange.is_streaming:
        exchange.end_stream()


def _fail(exchange: Exchange, route: Route, error: Exception) -> None:
    logger.exception("unexpected error in %s %s", exchange.method, exchange.path)
    if not exchange.is_answered:
        reply_error(exchange, Internal(f"unexpected error: {error!r}"), route.error_headers)
