"""ModelStreamInfer: many inferences of any models on one bidirectional stream.

Ordinary models answer in the order of their requests, decoupled ones as their responses come. A failed request is a
message of the stream; with the metadata `triton_grpc_error: true` the first error of a model ends the stream with
its status instead. Lives on the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable
from functools import partial
from typing import Any

from naiad.datatypes import TakesLong
from naiad.errors import Cancelled, Internal, NaiadError, ResourceExhausted, Unavailable
from naiad.frontends.grpc.errors import SHUTTING_DOWN, status
from naiad.frontends.grpc.servicer import Call, LargeCall, Metadata, Servicer
from naiad.messages import InferResponse, Result
from naiad.protocol.proto_codec import Reply, encode_stream, encode_stream_end, encode_stream_error, parse_request
from naiad.protocol.regions import CopyingCall
from naiad.protocol.served import ServedModel

_LOGGER = logging.getLogger(__name__)

#: With so many responses waiting for a client that does not read them, no more of its requests are read.
_OUTBOX_LIMIT = 1024
#: With so many bytes of them the stream is ended: its client reads too slowly, or not at all.
MAX_BACKLOG = 1 << 30

Context = Any


class Stream:
    """One stream, from its first message to its status."""

    def __init__(self, servicer: Servicer, metadata: Metadata, peer: str) -> None:
        self._servicer = servicer
        self._metadata = metadata
        self._peer = peer
        self._strict = any(key == "triton_grpc_error" and value == "true" for key, value in metadata)
        self._outbox: deque[bytes | _LargeResponse] = deque()
        self._calls: set[_StreamCall] = set()
        #: Calls of ordinary models in the order of their requests; only the first one's responses go out.
        self._ordered: deque[_StreamCall] = deque()
        #: Bytes of responses that are not written yet.
        self._backlog = 0
        self._failure: NaiadError | None = None
        self._is_read = False
        self._is_stopping = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self, requests: AsyncIterable[bytes], context: Context) -> None:
        """Reads and answers until the client has sent all and got all. Cancels what runs when it leaves."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                while self._outbox:
                    message = self._outbox.popleft()
                    self._backlog -= len(message)
                    if not isinstance(message, bytes):
                        message = await self._encode(message)
                    if message:
                        await context.write(message)
                self._room.set()
                # From here to the wait nothing else runs, so no news are missed.
                if self._is_stopping:
                    reader.cancel()
                if self._failure is not None:
                    await context.abort(*status(self._failure))
                if self._is_read and not self._calls and not self._outbox:
                    if self._is_stopping:
                        await context.abort(*status(Unavailable(SHUTTING_DOWN)))
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            reader.cancel()
            if self._failure is None:
                # Nobody reads what models that do not care for cancellation still answer.
                self._failure = Cancelled("the client has left")
                self._outbox.clear()
            for call in list(self._calls):
                call.cancel()

    def stop(self) -> None:
        """Reads no more requests; the stream ends with the last of its running calls."""
        self._is_stopping = not self._is_read
        self._news.set()

    async def _read(self, requests: AsyncIterable[bytes]) -> None:
        try:
            async for data in requests:
                if (begun := self._begin(data)) is not None:
                    # The next request may be the next of the same sequence.
                    await asyncio.wait((begun,))
                while len(self._outbox) >= _OUTBOX_LIMIT:
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:
            _LOGGER.debug("a gRPC stream cannot be read any more: %s", error)
        finally:
            self._is_read = True
            self._news.set()

    def _begin(self, data: bytes) -> "asyncio.Task[None] | None":
        """Begins what a message asks for. What is returned is done when that has begun, if it takes a while."""
        call = _StreamCall(self)
        self._calls.add(call)
        # A request for an unknown model counts as one for an ordinary model: its error keeps its place.
        self._ordered.append(call)
        try:
            begun: Call
            try:
                message, raw = parse_request(data)
            except TakesLong:
                find_model = partial(self._find_model, call)
                begun = self._servicer.infer_large_in_stream(data, self._metadata, self._peer, call, find_model)
            else:
                model, version = self._find_model(call, message)
                begun = self._servicer.infer_in_stream(message, raw, model, version, self._metadata, self._peer, call)
            if not call.is_done:
                call.call = begun
            call.is_accepted = True
            if type(begun) is CopyingCall or type(begun) is LargeCall:
                return begun.begun
        except NaiadError as error:
            call.refuse(error)
        except Exception as error:
            _LOGGER.exception("a request of a gRPC stream failed")
            call.refuse(Internal(f"unexpected error: {error}"))
        return None

    def _find_model(self, call: "_StreamCall", message: Any) -> tuple[ServedModel, int]:
        """Before the next message is read."""
        call.id = message.id
        call.model_name = message.model_name
        model, version = self._servicer.model(message)
        if model.decoupled:
            self._ordered.pop()
            call.is_ordered = False
        return model, version

    async def _encode(self, response: "_LargeResponse") -> bytes:
        try:
            return await asyncio.to_thread(response.encode)
        except NaiadError as error:
            return b"" if self.fail(error) else response.call.error(error, response.final)

    def emit(self, call: "_StreamCall", message: "bytes | _LargeResponse") -> None:
        if self._failure is not None:
            return
        self._backlog += len(message)
        if self._backlog > MAX_BACKLOG:
            self._give_up()
        elif call.is_ordered and self._ordered[0] is not call:
            call.held.append(message)
        else:
            self._outbox.append(message)
            self._news.set()

    def _give_up(self) -> None:
        self._failure = ResourceExhausted("the client reads the stream too slowly; it is ended")
        self._outbox.clear()
        for call in self._calls:
            call.held.clear()
        # In a turn of its own: a scheduler is about to hand out more results of these calls.
        loop = asyncio.get_running_loop()
        for call in self._calls:
            loop.call_soon(call.cancel)
        self._news.set()

    def end(self, call: "_StreamCall") -> None:
        self._calls.discard(call)
        call.is_done = True
        # They know each other, and what the request brought: nobody shall need the garbage collector to free it.
        call.call = None
        ordered = self._ordered
        while ordered and ordered[0].is_done:
            ordered.popleft()
            if ordered:
                if self._failure is None:
                    self._outbox.extend(ordered[0].held)
                ordered[0].held.clear()
        self._news.set()

    def fail(self, error: NaiadError) -> bool:
        """Whether the stream ends with this error of a model."""
        if self._strict and self._failure is None:
            self._failure = error
            self._news.set()
        return self._strict


class _StreamCall:
    """One inference of a stream: the sink of its results."""

    __slots__ = (
        "_reply",
        "_stream",
        "call",
        "held",
        "id",
        "is_accepted",
        "is_done",
        "is_ordered",
        "model",
        "model_name",
    )

    model: ServedModel
    _reply: Reply

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.id = ""
        self.model_name = ""
        self.call: Call | None = None
        self.held: list[bytes | _LargeResponse] = []
        self.is_ordered = True
        self.is_done = False
        #: The engine has taken the request; until then an error is the request's, not the model's.
        self.is_accepted = False

    def expect(self, model: ServedModel, reply: Reply) -> None:
        self.model = model
        self._reply = reply

    def send(self, result: Result | None, final: bool) -> None:
        stream = self._stream
        if isinstance(result, InferResponse):
            try:
                message = encode_stream(result, self._reply, self.model.config, self.model.labels, final)
            except NaiadError as error:
                self._send_error(error, final)
            except TakesLong:
                stream.emit(self, _LargeResponse(self, result.owned(), final))
            else:
                stream.emit(self, message)
        elif result is not None:
            if final and (not self.is_accepted or result.refused):
                self.refuse(result)
                return
            self._send_error(result, final)
        elif self._reply.empty_final:
            stream.emit(self, encode_stream_end(self.model_name, self.id))
        if final:
            stream.end(self)

    def refuse(self, error: NaiadError) -> None:
        """Answers with an error found before the model was asked."""
        if not self.is_done:
            self._stream.emit(self, encode_stream_error(error.message, self.id))
            self._stream.end(self)

    def cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def encode(self, response: InferResponse, final: bool) -> bytes:
        """In a thread."""
        return encode_stream(response, self._reply, self.model.config, self.model.labels, final, True)

    def error(self, error: NaiadError, final: bool) -> bytes:
        return encode_stream_error(error.message, self.id, self.model_name, final)

    def _send_error(self, error: NaiadError, final: bool) -> None:
        if not self._stream.fail(error):
            self._stream.emit(self, self.error(error, final))


class _LargeResponse:
    """A response whose message takes long to write: that is done when its turn has come."""

    __slots__ = ("_response", "call", "final")

    def __init__(self, call: _StreamCall, response: InferResponse, final: bool) -> None:
        self.call = call
        self._response = response
        self.final = final

    def __len__(self) -> int:
        return sum([len(tensor.contents) for tensor in self._response.outputs])

    def encode(self) -> bytes:
        return self.call.encode(self._response, self.final)
