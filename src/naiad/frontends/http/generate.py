"""POST .../generate and .../generate_stream: one JSON object, or server-sent events. On the event loop."""

import asyncio
import time
from collections import deque

from naiad.errors import InvalidArgument, NaiadError
from naiad.frontends.http.connection import Exchange, Stream
from naiad.frontends.http.inference import HeaderForwarding, InferenceEngine, ServedModel
from naiad.frontends.http.replies import EVENTS, JSON
from naiad.messages import InferResponse, Result
from naiad.protocol.generate_codec import decode_generate, generate_document
from naiad.protocol.json_codec import DEFAULT_MAX_INPUT_SIZE
from naiad.protocol.json_text import dump, error_document
from naiad.telemetry.trace import TraceSettings, off

#: A stream whose client reads so slowly that this much has gathered is ended.
_MAX_BACKLOG = 64 << 20
_NOT_ONE = error_document(
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class _Responses:
    """The responses of a call as JSON texts, in order."""

    __slots__ = ("_keep_all", "_wake", "backlog", "count", "final", "status", "texts")

    def __init__(self, keep_all: bool) -> None:
        self._keep_all = keep_all
        self._wake = asyncio.Event()
        self.texts: deque[bytes] = deque()
        self.backlog = 0
        self.count = 0
        #: HTTP status: the first response decides it. Triton calls every kind of error a bad request here.
        self.status = 200
        self.final = False

    def send(self, result: Result | None, final: bool) -> None:
        if result is not None:
            if self._keep_all or self.count == 0:
                self._add(result)
            self.count += 1
        self.final = final
        self._wake.set()

    def _add(self, result: Result) -> None:
        status = 200
        try:
            if isinstance(result, InferResponse):
                text = dump(generate_document(result))
            else:
                raise result
        except NaiadError as error:
            text = error_document(error.message)
            status = 400
        if self.count == 0:
            self.status = status
        self.texts.append(text)
        self.backlog += len(text)

    async def more(self) -> None:
        """Returns when there is something new since the last time."""
        await self._wake.wait()
        self._wake.clear()

    def take(self) -> bytes:
        """All the texts that have gathered, as events."""
        events = b"".join([b"data: %b\n\n" % text for text in self.texts])
        self.texts.clear()
        self.backlog = 0
        return events


class Generation:
    """The handlers of the generate extension."""

    def __init__(
        self,
        engine: InferenceEngine,
        forwarding: HeaderForwarding,
        max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
        traces: TraceSettings | None = None,
    ) -> None:
        self._traces = off() if traces is None else traces
        self._engine = engine
        self._forwarding = forwarding
        self._max_input_size = max_input_size

    async def generate(self, exchange: Exchange, name: str, version: int) -> None:
        await self._run(exchange, name, version, stream=False)

    async def generate_stream(self, exchange: Exchange, name: str, version: int) -> None:
        await self._run(exchange, name, version, stream=True)

    async def _run(self, exchange: Exchange, name: str, version: int, stream: bool) -> None:
        model: ServedModel = self._engine.model(name, version)
        headers = exchange.headers
        encoding = headers.get("content-encoding")
        if encoding is not None and encoding != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        body = exchange.body
        forwarded = self._forwarding(headers)
        start_ns = time.monotonic_ns() if self._traces.active else 0
        request = decode_generate(body, model.config, version, forwarded, self._max_input_size)
        if start_ns:
            request = self._traces.follow(request, "HTTP", start_ns, headers.get)
        responses = _Responses(keep_all=stream)
        call = self._engine.infer(request, responses)
        exchange.on_disconnect = call.cancel
        try:
            if stream:
                await _stream(exchange, responses)
            else:
                await _single(exchange, responses)
        finally:
            if not responses.final:
                # The client has gone, or reads too slowly.
                call.cancel()


async def _single(exchange: Exchange, responses: _Responses) -> None:
    while not responses.final:
        await responses.more()
    text = responses.texts[0] if responses.count == 1 else _NOT_ONE
    # In chunks, as Triton answers here.
    transport = exchange.response_stream(responses.status, JSON)
    await transport.send_bytes(text)


async def _stream(exchange: Exchange, responses: _Responses) -> None:
    transport: Stream | None = None
    while True:
        if responses.texts or responses.final:
            if transport is None:
                transport = exchange.response_stream(responses.status, EVENTS)
            if responses.backlog > _MAX_BACKLOG:
                responses.texts.clear()
                responses.texts.append(error_document("the client reads the stream too slowly; it is ended"))
                await transport.send_bytes(responses.take())
                return
            if responses.texts:
                await transport.send_bytes(responses.take())
                continue
            if responses.final:
                return
        await responses.more()
