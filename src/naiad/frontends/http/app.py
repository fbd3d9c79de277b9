"""The HTTP front end: every request comes in here, and every error goes out here. On the event loop."""

import logging
from typing import Self

from granian._granian import RSGIProtocolClosed, RSGIProtocolError

from naiad.errors import Internal, NaiadError
from naiad.frontends.http.disconnects import Disconnects
from naiad.frontends.http.generate import Generation
from naiad.frontends.http.inference import HeaderForwarding, Inference
from naiad.frontends.http.listener import Listener
from naiad.frontends.http.management import Management, Settings
from naiad.frontends.http.replies import PLAIN, HttpProtocol, Scope, reply_error
from naiad.frontends.http.routes import Routes
from naiad.frontends.http.surface import Engine
from naiad.options import Restriction
from naiad.protocol.json_codec import DEFAULT_MAX_INPUT_SIZE
from naiad.protocol.json_text import error_document
from naiad.protocol.regions import Regions

logger = logging.getLogger(__name__)

_NOT_FOUND = error_document("Not Found")
_METHOD_NOT_ALLOWED = error_document("Method Not Allowed")


class HttpFrontend:
    """Serves an engine over HTTP; entered = listening, left = requests finished or `grace_s` over.

    `port` 0 is any, `bound_port` the one taken. `thread_count` is accepted for Triton's sake: one loop serves all.
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
        trace_settings: Settings | None = None,
        log_settings: Settings | None = None,
        grace_s: float = 30.0,
    ) -> None:
        self._disconnects = Disconnects()
        forwarding = HeaderForwarding(header_forward_pattern)
        self._routes = Routes(
            Inference(engine, self._disconnects, regions, forwarding, max_input_size),
            Generation(engine, self._disconnects, forwarding, max_input_size),
            Management(engine, regions, trace_settings, log_settings),
            restricted_apis,
        )
        self._listener = Listener(self._answer, "HTTP service", address, port, reuse_port=reuse_port, grace_s=grace_s)

    @property
    def bound_port(self) -> int:
        return self._listener.bound_port

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._listener.__aexit__(*exc_info)
        self._disconnects.close()

    async def _answer(self, scope: Scope, proto: HttpProtocol) -> None:
        route = self._routes.find(scope.path)
        if route is None:
            proto.response_bytes(404, PLAIN, _NOT_FOUND)
            return
        restriction = route.restriction
        if restriction is not None and scope.headers.get(restriction.key.lower()) != restriction.value:
            proto.response_bytes(
                403, PLAIN, error_document(f"This API is restricted, expecting header '{restriction.key}'")
            )
            return
        if scope.method not in route.methods:
            proto.response_bytes(405, route.error_headers, _METHOD_NOT_ALLOWED)
            return
        try:
            await route.handler(scope, proto, *route.arguments)
        except NaiadError as error:
            reply_error(proto, error, route.error_headers)
        except (RSGIProtocolClosed, RSGIProtocolError):
            pass  # the client left while its request was read or its stream was written
        except Exception as error:
            logger.exception("unexpected error in %s %s", scope.method, scope.path)
            reply_error(proto, Internal(f"unexpected error: {error!r}"), route.error_headers)
