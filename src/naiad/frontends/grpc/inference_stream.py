"""ModelStreamInfer: many inferences of any models on one bidirectional stream.

Ordinary models answer in the order of their requests, decoupled ones as their responses come. A failed request is a
message of the stream; with the metadata `triton_grpc_error: true` the first error of a model ends the stream with
its status instead. Lives on the event loop.
"""

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any, Final

from naiad.datatypes import TakesLong
from naiad.errors import Cancelled, Internal, NaiadError, ResourceExhausted, Unavailable
from naiad.frontends.grpc.calls import Tasks, fail
from naiad.frontends.grpc.compression import LARGE, LARGE_COMPRESSED, compress, decompress
from naiad.frontends.grpc.errors import SHUTTING_DOWN
from naiad.frontends.grpc.head import OK_TRAILERS
from naiad.frontends.grpc.servicer import Call, LargeCall, Servicer
from naiad.frontends.grpc.stream import Message, Receiver, Stream
from naiad.messages import InferResponse, Result
from naiad.protocol.proto_codec import Reply, encode_stream, encode_stream_end, encode_stream_error, parse_request
from naiad.protocol.regions import CopyingCall
from naiad.protocol.served import ServedModel

_LOGGER: Final = logging.getLogger(__name__)

#: With so many bytes of responses waiting for a client that does not read them, no more of its requests are begun.
_OUTBOX_LIMIT: Final = 1 << 20
#: With so many the stream is ended: its client reads too slowly, or not at all.
MAX_BACKLOG: Final = 1 << 30
_REFUSED_AFTER_S: Final = 0.1


class InferenceStream(Receiver):
    """One stream, from its first message to its status. It keeps itself in `streams` until then."""

    def __init__(self, servicer: Servicer, tasks: Tasks, stream: Stream, streams: "set[InferenceStream]") -> None:
        self._servicer = servicer
        self._tasks = tasks
        self._stream = stream
        self._streams = streams
        self._metadata = stream.head.metadata
        self._peer = stream.connection.peer
        self._strict = any(key == "triton_grpc_error" and value == "true" for key, value in self._metadata)
        #: Requests that wait for one before them to have begun, or for the client to read.
        self._inbox: deque[tuple[Message, bool]] = deque()
        self._is_beginning = False
        self._calls: set[_StreamCall] = set()
        #: Calls of ordinary models in the order of their requests; only the first one's responses go out.
        self._ordered: deque[_StreamCall] = deque()
        #: Responses of which a thread writes the first, and their bytes; those of what waits for its turn.
        self._outbox: deque[bytes | _LargeResponse] = deque()
        self._outbox_size = 0
        self._held_size = 0
        self._failure: NaiadError | None = None
        self._is_read = False
        self._is_stopping = False
        self._is_over = False
        stream.is_taken_in_turn = True
        streams.add(self)

    # ---------------------------------------------------------------- of the client

    def received(self, message: Message, is_compressed: bool) -> None:
        if self._failure is None and not self._is_stopping:
            self._inbox.append((message, is_compressed))
            self.room()

    def ended(self) -> None:
        self._is_read = True
        self._end_if_done()

    def left(self) -> None:
        # Nobody reads what models that do not care for cancellation still answer.
        self._failure = Cancelled("the client has left")
        self._outbox.clear()
        self._over()
        self._cancel_calls()

    def room(self) -> None:
        """Begins the requests that wait, as far as the client reads."""
        while self._inbox and not self._is_beginning and self._unsent() <= _OUTBOX_LIMIT:
            message, is_compressed = self._inbox.popleft()
            self._stream.release(message)
            if not is_compressed:
                self._begin(message)
            elif len(message) < LARGE_COMPRESSED:
                try:
                    plain = decompress(message, self._stream.head.encoding)
                except NaiadError as error:
                    self._fail(error)
                else:
                    self._begin(plain)
            else:
                self._is_beginning = True
                self._tasks.run(self._stream, partial(self._decompress, message))
        self._end_if_done()

    async def _decompress(self, message: Message) -> None:
        try:
            plain = await asyncio.to_thread(decompress, message, self._stream.head.encoding)
        except NaiadError as error:
            self._fail(error)
        else:
            self._is_beginning = False
            if self._failure is None:
                self._begin(plain)
            self.room()

    def _begin(self, data: Message) -> None:
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
                # The next request may be the next of the same sequence.
                self._is_beginning = True
                begun.begun.add_done_callback(self._has_begun)
        except NaiadError as error:
            call.refuse(error)
        except Exception as error:
            _LOGGER.exception("a request of a gRPC stream failed")
            call.refuse(Internal(f"unexpected error: {error}"))

    def _has_begun(self, begun: Any) -> None:
        self._is_beginning = False
        self.room()

    def _find_model(self, call: "_StreamCall", message: Any) -> tuple[ServedModel, int]:
        """Before the next message is read."""
        call.id = message.id
        call.model_name = message.model_name
        model, version = self._servicer.model(message)
        if model.decoupled:
            self._ordered.pop()
            call.is_ordered = False
        return model, version

    # ---------------------------------------------------------------- of the calls

    def emit(self, call: "_StreamCall", message: "bytes | _LargeResponse") -> None:
        if self._failure is not None:
            return
        if call.is_ordered and self._ordered[0] is not call:
            call.held.append(message)
            self._held_size += len(message)
        else:
            self._put(message)
        if self._unsent() + self._held_size > MAX_BACKLOG:
            self._outbox.clear()
            for each in self._calls:
                each.held.clear()
            self._outbox_size = self._held_size = 0
            self._stream.drop_waiting()
            self._fail(ResourceExhausted("the client reads the stream too slowly; it is ended"))

    def end(self, call: "_StreamCall") -> None:
        self._calls.discard(call)
        call.is_done = True
        # They know each other, and what the request brought: nobody shall need the garbage collector to free it.
        call.call = None
        ordered = self._ordered
        while ordered and ordered[0].is_done:
            ordered.popleft()
            if ordered:
                held = ordered[0].held
                ordered[0].held = []
                for message in held:
                    self._held_size -= len(message)
                    if self._failure is None:
                        self._put(message)
        self._end_if_done()

    def fail(self, error: NaiadError) -> bool:
        """Whether the stream ends with this error of a model."""
        if self._strict:
            self._fail(error)
        return self._strict

    def _unsent(self) -> int:
        """Bytes of responses that could go out if the client read them."""
        return self._outbox_size + self._stream.waiting_bytes

    # ---------------------------------------------------------------- of the answer

    def _put(self, message: "bytes | _LargeResponse") -> None:
        encoding = self._stream.encoding
        if not self._outbox and isinstance(message, bytes) and (not encoding or len(message) < LARGE):
            if encoding:
                packed = compress(message, encoding)
                self._stream.send(packed, packed is not message)
            else:
                self._stream.send(message)
            return
        self._outbox.append(message)
        self._outbox_size += len(message)
        if len(self._outbox) == 1:
            self._tasks.run(self._stream, self._write_outbox)

    async def _write_outbox(self) -> None:
        while self._outbox:
            message = self._outbox[0]
            size = len(message)
            data = message if isinstance(message, bytes) else await self._encode(message)
            packed = data
            if self._stream.encoding:
                packed = await asyncio.to_thread(compress, data, self._stream.encoding)
            if not self._outbox:
                return  # it has been given up meanwhile
            self._outbox.popleft()
            self._outbox_size -= size
            if data:
                self._stream.send(packed, packed is not data)
        self.room()

    async def _encode(self, response: "_LargeResponse") -> bytes:
        try:
            return await asyncio.to_thread(response.encode)
        except NaiadError as error:
            return b"" if self.fail(error) else response.call.error(error, response.final)
        except Exception as error:
            _LOGGER.exception("a response of a gRPC stream cannot be written")
            return response.call.error(Internal(f"unexpected error: {error}"), response.final)

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Begins no more requests; the stream ends with the last of its running calls."""
        self._is_stopping = not self._is_read
        self._inbox.clear()
        self._end_if_done()

    def _fail(self, error: NaiadError) -> None:
        if self._failure is None:
            self._failure = error
            self._inbox.clear()
            # In a turn of its own: a scheduler may be about to hand out more results of these calls.
            asyncio.get_running_loop().call_soon(self._cancel_calls)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_over or self._outbox:
            return
        if self._failure is not None:
            self._over()
            fail(self._stream, self._failure)
        elif self._calls or self._inbox or self._is_beginning:
            return
        elif self._is_stopping:
            self._over()
            fail(self._stream, Unavailable(SHUTTING_DOWN))
        elif self._is_read:
            self._over()
            self._stream.finish(OK_TRAILERS)

    def _over(self) -> None:
        self._is_over = True
        self._inbox.clear()
        self._streams.discard(self)

    def _cancel_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()


class RefusedStream(Receiver):
    """A stream that ends with an error when its first message is there: clients of `grpc.aio` that are told before they
    have sent it have an error of their own. Those that send nothing need not wait for long."""

    def __init__(self, stream: Stream, error: NaiadError) -> None:
        self._stream = stream
        self._error = error
        asyncio.get_running_loop().call_later(_REFUSED_AFTER_S, self.ended)

    def received(self, message: Message, is_compressed: bool) -> None:
        self.ended()

    def ended(self) -> None:
        fail(self._stream, self._error)

    def left(self) -> None:
        pass


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

    def __init__(self, stream: InferenceStream) -> None:
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
