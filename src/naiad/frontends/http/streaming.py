"""POST .../infer_stream: the responses of any model as they come, as server-sent events or lines of JSON. On the loop.

A message is the document that .../infer answers, or {"error": ...}. The last one, and only it, has the parameter
`triton_final_response`, which is true, so that a stream that was cut off can be told from one that has ended.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from naiad.datatypes import LARGE
from naiad.errors import InvalidArgument, NaiadError, Unsupported
from naiad.frontends.http.compression import ENCODINGS
from naiad.frontends.http.connection import Exchange, Headers
from naiad.frontends.http.inference import UNKNOWN_ENCODING, Inference, output_regions
from naiad.frontends.http.replies import EVENTS, JSON, LINES, reply_error
from naiad.messages import InferResponse, Result
from naiad.protocol.json_codec import encode_response
from naiad.protocol.json_text import dump, error_document
from naiad.protocol.outputs import ALL_JSON
from naiad.protocol.served import ServedModel

#: A stream whose client reads so slowly that this much has gathered is ended.
MAX_BACKLOG = 64 << 20
_TOO_SLOW = "the client reads the stream too slowly; it is ended"
_NO_BYTES = "infer_stream sends text: outputs cannot be 'binary_data'; ask for JSON, or use gRPC's ModelStreamInfer"
_NDJSON = "application/x-ndjson"
_FINAL = {"triton_final_response": True}


class Message:
    """A message to send: its text, or what makes it, where that takes so long that the loop should not wait for it."""

    __slots__ = ("make", "size", "text")

    def __init__(self, text: bytes = b"", make: Callable[[], bytes] | None = None, size: int = 0) -> None:
        self.text = text
        self.make = make
        self.size = size or len(text)


class Messages:
    """What waits to be sent to one client, in order."""

    __slots__ = ("_wake", "backlog", "final", "is_abandoned", "waiting")

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self.waiting: deque[Message] = deque()
        self.backlog = 0
        #: No more will come.
        self.final = False
        #: Nobody sends what comes.
        self.is_abandoned = False

    def add(self, message: Message) -> None:
        self.waiting.append(message)
        self.backlog += message.size

    def wake(self, final: bool) -> None:
        self.final = final
        self._wake.set()

    async def more(self) -> None:
        """Returns when there is something new since the last time."""
        await self._wake.wait()
        self._wake.clear()

    def abandon(self) -> None:
        """The client has gone, or reads too slowly: what its model still makes is dropped."""
        self.is_abandoned = True
        self.waiting.clear()

    async def take(self, frame: bytes) -> bytes:
        """The messages that have gathered, each in `frame`."""
        texts: list[bytes] = []
        while self.waiting:
            message = self.waiting.popleft()
            self.backlog -= message.size
            text = message.text if message.make is None else await asyncio.to_thread(message.make)
            texts.append(frame % text)
        return b"".join(texts)


async def send_all(
    exchange: Exchange, messages: Messages, status: Callable[[], int], headers: Headers, frame: bytes, too_slow: bytes
) -> None:
    """Sends messages until the last one is out; ends with `too_slow` where the client does not read them.

    The head is sent with the first one: `status` is asked then. Raises ConnectionClosed when the client has left.
    """
    while not messages.waiting and not messages.final:
        await messages.more()
    # Writing the first one may be what decides the status.
    first = await messages.take(frame)
    stream = exchange.response_stream(status(), headers)
    if first:
        await stream.send_bytes(first)
    while True:
        if messages.backlog > MAX_BACKLOG:
            await stream.send_bytes(frame % too_slow)
            return
        if messages.waiting:
            await stream.send_bytes(await messages.take(frame))
        elif messages.final:
            return
        else:
            await messages.more()


class _Reply:
    """Turns the results of a call into messages."""

    __slots__ = ("_encode", "_model", "_request_id", "begun", "error", "messages")

    def __init__(self, model: ServedModel, request_id: str, encode: Callable[[InferResponse], bytes]) -> None:
        self._model = model
        self._request_id = request_id
        self._encode = encode
        self.messages = Messages()
        self.begun = False
        #: The request failed before it had any response: there is no stream.
        self.error: NaiadError | None = None

    def send(self, result: Result | None, final: bool) -> None:
        if self.messages.is_abandoned:
            return
        if isinstance(result, NaiadError):
            if final and not self.begun:
                self.error = result
            else:
                self.messages.add(Message(failure(result.message, final)))
        elif result is not None or final:
            self._add(result, final)
        self.begun = True
        self.messages.wake(final)

    def _add(self, response: InferResponse | None, final: bool) -> None:
        if response is None:
            response = InferResponse(self._model.name, self._model.version, self._request_id, ())
        if final:
            parameters = {**response.parameters, **_FINAL}
            response = InferResponse(
                response.model_name, response.model_version, response.id, response.outputs, parameters
            )
        size = sum([len(tensor.contents) for tensor in response.outputs])
        if size < LARGE:
            self.messages.add(Message(self._text(response, final)))
        else:
            owned = response.owned()
            self.messages.add(Message(make=lambda: self._text(owned, final), size=size))

    def _text(self, response: InferResponse, final: bool) -> bytes:
        try:
            return self._encode(response)
        except NaiadError as error:
            return failure(error.message, final)


def failure(text: str, final: bool) -> bytes:
    """The message of an error."""
    return dump({"error": text, "parameters": _FINAL}) if final else error_document(text)


class Streaming:
    """The handler of streams of inference responses."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def infer_stream(self, exchange: Exchange, name: str, version: int) -> None:
        inference = self._inference
        model: ServedModel = inference.engine.model(name, version)
        encoding = exchange.headers.get("content-encoding", "identity")
        if encoding != "identity" and encoding not in ENCODINGS:
            reply_error(exchange, Unsupported("Unsupported compression type"), UNKNOWN_ENCODING)
            return
        start_ns = time.monotonic_ns() if inference.traces.active else 0
        request, plan, use = await inference.read(exchange, model, version)
        exchange.require_client()
        if exchange.headers.get("inference-header-content-length") == "0":
            # Bytes alone cannot say how they want to be answered.
            plan = ALL_JSON
        elif plan.binary_default or any(spec.binary for spec in plan.outputs.values()):
            raise InvalidArgument(_NO_BYTES)
        regions = output_regions(plan, use)
        batched = model.batching
        reply = _Reply(
            model, request.id, lambda response: encode_response(response, plan, model.labels, batched, regions)[1]
        )
        if start_ns:
            request = inference.traces.follow(request, "HTTP", start_ns, exchange.headers.get)
        infer = inference.engine.infer
        call = infer(request, reply) if use is None else use.during(infer, request, reply)
        messages = reply.messages
        exchange.on_disconnect = call.cancel
        try:
            await messages.more()
            if reply.error is not None:
                reply_error(exchange, reply.error, JSON)
                return
            accepted = exchange.headers.get("accept")
            lines = accepted is not None and _NDJSON in accepted
            headers, frame = (LINES, b"%b\n") if lines else (EVENTS, b"data: %b\n\n")
            await send_all(exchange, messages, lambda: 200, headers, frame, failure(_TOO_SLOW, final=True))
        finally:
            if not messages.final:
                messages.abandon()
                call.cancel()
