"""Calls of one message and one answer. Lives on the event loop.

An inference needs neither a task nor a future: it is begun when its message is there, and its sink answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from naiad.datatypes import TakesLong
from naiad.errors import Internal, NaiadError
from naiad.frontends.grpc.compression import LARGE, LARGE_COMPRESSED, compress, decompress
from naiad.frontends.grpc.errors import MessageTooLarge, status
from naiad.frontends.grpc.head import OK_TRAILERS
from naiad.frontends.grpc.servicer import Call, Method, Servicer
from naiad.frontends.grpc.stream import MAX_MESSAGE, Message, Receiver, Stream
from naiad.messages import InferResponse, Result
from naiad.protocol.proto_codec import Reply, encode
from naiad.protocol.served import ServedModel

_LOGGER: Final = logging.getLogger(__name__)


class Tasks:
    """What cannot be done at once; an error of it ends its call."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, stream: Stream, make: Callable[[], Awaitable[bytes]]) -> None:
        """Answers with what `make` makes."""
        self.run(stream, partial(_respond_with, self, stream, make))

    def run(self, stream: Stream, act: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(_run(stream, act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


async def _run(stream: Stream, act: Callable[[], Awaitable[None]]) -> None:
    try:
        await act()
    except NaiadError as error:
        fail(stream, error)
    except Exception as error:
        fail_unexpectedly(stream, error)


async def _respond_with(tasks: Tasks, stream: Stream, make: Callable[[], Awaitable[bytes]]) -> None:
    respond(tasks, stream, await make())


def fail(stream: Stream, error: NaiadError) -> None:
    code, details = status(error)
    stream.fail(code, details)


def fail_unexpectedly(stream: Stream, error: Exception) -> None:
    _LOGGER.error("a gRPC call failed unexpectedly", exc_info=error)
    fail(stream, Internal(f"unexpected error: {error}"))


def respond(tasks: Tasks, stream: Stream, data: bytes) -> None:
    """Answers with one message."""
    if len(data) > MAX_MESSAGE:
        text = f"the response has {len(data)} bytes, more than the {MAX_MESSAGE} of a gRPC message"
        fail(stream, MessageTooLarge(text))
    elif not stream.encoding:
        stream.respond(data)
    elif len(data) < LARGE:
        _respond_compressed(stream, data, compress(data, stream.encoding))
    else:
        tasks.run(stream, partial(_compress_and_respond, stream, data))


async def _compress_and_respond(stream: Stream, data: bytes) -> None:
    _respond_compressed(stream, data, await asyncio.to_thread(compress, data, stream.encoding))


def _respond_compressed(stream: Stream, data: bytes, packed: bytes) -> None:
    stream.send(packed, packed is not data)
    stream.finish(OK_TRAILERS)


class UnaryCall(Receiver):
    """A call that is begun when its message is there."""

    def __init__(self, tasks: Tasks, stream: Stream) -> None:
        self.tasks = tasks
        self.stream = stream
        self.is_begun = False

    def begin(self, data: Message) -> None:
        raise NotImplementedError

    def received(self, message: Message, is_compressed: bool) -> None:
        if self.is_begun:
            return  # there is one only
        self.is_begun = True
        if not is_compressed:
            self.begin(message)
        elif len(message) < LARGE_COMPRESSED:
            try:
                plain = decompress(message, self.stream.head.encoding)
            except NaiadError as error:
                fail(self.stream, error)
            else:
                self.begin(plain)
        else:
            self.tasks.run(self.stream, partial(self._decompress_and_begin, message))

    async def _decompress_and_begin(self, message: Message) -> None:
        plain = await asyncio.to_thread(decompress, message, self.stream.head.encoding)
        if self.stream.is_open:
            self.begin(plain)

    def ended(self) -> None:
        if not self.is_begun:
            fail(self.stream, Internal("the call has no message"))


class ManagementCall(UnaryCall):
    """A call that is no inference. It goes on when its client leaves: half a load is of use to nobody."""

    def __init__(self, tasks: Tasks, stream: Stream, method: Method) -> None:
        super().__init__(tasks, stream)
        self._method = method

    def begin(self, data: Message) -> None:
        stream = self.stream
        self.tasks.answer(stream, partial(self._method, bytes(data), stream.head.metadata, stream.connection.peer))

    def left(self) -> None:
        pass


class UnaryInference(UnaryCall):
    """The sink of a unary inference."""

    _model: ServedModel
    _reply: Reply

    def __init__(self, tasks: Tasks, stream: Stream, servicer: Servicer) -> None:
        super().__init__(tasks, stream)
        self._servicer = servicer
        self._is_answered = False
        self.call: Call | None = None

    def begin(self, data: Message) -> None:
        stream = self.stream
        try:
            call = self._servicer.infer(data, stream.head.metadata, stream.connection.peer, self)
        except NaiadError as error:
            fail(stream, error)
        except Exception as error:
            fail_unexpectedly(stream, error)
        else:
            # A call knows its sink: if the sink kept it when all is said, both, and the message of the request, would
            # wait for the garbage collector.
            if not self._is_answered:
                self.call = call

    def expect(self, model: ServedModel, reply: Reply) -> None:
        self._model = model
        self._reply = reply

    def send(self, result: Result | None, final: bool) -> None:
        stream = self.stream
        if isinstance(result, InferResponse):
            model, reply = self._model, self._reply
            try:
                data = encode(result, reply, model.config, model.labels)
            except NaiadError as error:
                fail(stream, error)
            except TakesLong:
                make = partial(asyncio.to_thread, encode, result.owned(), reply, model.config, model.labels, b"", True)
                self.tasks.answer(stream, make)
            else:
                respond(self.tasks, stream, data)
        else:
            assert result is not None, "a call of an ordinary model ended without a result; this is a bug"
            fail(stream, result)
        self._is_answered = True
        self.call = None

    def left(self) -> None:
        if self.call is not None:
            self.call.cancel()
