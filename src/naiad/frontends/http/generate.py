"""POST .../generate and .../generate_stream: one JSON object, or server-sent events. On the event loop."""

import asyncio
import time

from naiad.datatypes import LARGE
from naiad.errors import InvalidArgument, NaiadError
from naiad.frontends.http.connection import Exchange
from naiad.frontends.http.inference import HeaderForwarding, InferenceEngine
from naiad.frontends.http.replies import EVENTS, JSON
from naiad.frontends.http.streaming import Message, Messages, send_all
from naiad.messages import InferResponse, Result
from naiad.protocol.generate_codec import decode_generate, generate_document
from naiad.protocol.json_arrays import DEFAULT_MAX_INPUT_SIZE
from naiad.protocol.json_text import dump, error_document
from naiad.protocol.served import ServedModel
from naiad.telemetry.trace import TraceSettings, off

_TOO_SLOW = error_document("the client reads the stream too slowly; it is ended")
_NOT_ONE = error_document(
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class _Responses:
    """The responses of a call as JSON texts, in order."""

    __slots__ = ("_keep_all", "count", "messages", "refusal", "status")

    def __init__(self, keep_all: bool) -> None:
        self._keep_all = keep_all
        self.messages = Messages()
        self.count = 0
        #: HTTP status: the first response decides it. Triton calls every kind of error a bad request here.
        self.status = 200
        #: The engine did not take the request.
        self.refusal: NaiadError | None = None

    def send(self, result: Result | None, final: bool) -> None:
        if self.messages.is_abandoned:
            return
        if isinstance(result, NaiadError) and result.refused:
            self.refusal = result
        elif result is not None:
            if self._keep_all or self.count == 0:
                self._add(result)
            self.count += 1
        self.messages.wake(final)

    def _add(self, result: Result) -> None:
        is_first = self.count == 0
        if (
            isinstance(result, InferResponse)
            and (size := sum([len(tensor.data) for tensor in result.outputs])) >= LARGE
        ):
            owned = result.owned()
            self.messages.add(Message(make=lambda: self._text(owned, is_first), size=size))
        else:
            self.messages.add(Message(self._text(result, is_first)))

    def _text(self, result: Result, is_first: bool) -> bytes:
        try:
            if isinstance(result, NaiadError):
                raise result
            return dump(generate_document(result))
        except NaiadError as error:
            if is_first:
                self.status = 400
            return error_document(error.message)


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
        if len(body) < LARGE:
            request = decode_generate(body, model.config, version, forwarded, self._max_input_size)
        else:
            request = await asyncio.to_thread(
                decode_generate, body, model.config, version, forwarded, self._max_input_size
            )
            exchange.require_client()
        if start_ns:
            request = self._traces.follow(request, "HTTP", start_ns, headers.get)
        responses = _Responses(keep_all=stream)
        call = self._engine.infer(request, responses)
        exchange.on_disconnect = call.cancel
        messages = responses.messages
        try:
            await messages.more()
            if responses.refusal is not None:
                raise responses.refusal
            if stream:
                await send_all(exchange, messages, lambda: responses.status, EVENTS, b"data: %b\n\n", _TOO_SLOW)
            else:
                await _single(exchange, responses)
        finally:
            if not messages.final:
                messages.abandon()
                call.cancel()


async def _single(exchange: Exchange, responses: _Responses) -> None:
    while not responses.messages.final:
        await responses.messages.more()
    text = await responses.messages.take(b"%b") if responses.count == 1 else _NOT_ONE
    # In chunks, as Triton answers here.
    transport = exchange.response_stream(responses.status, JSON)
    await transport.send_bytes(text)
