"""The servicer behind `pygrpc_native`, whose HTTP/2 work runs in Rust threads: the fast way for unary calls.

Calls arrive as events, several at a time, and are answered by id: a unary inference needs neither a task nor a
future. Bidirectional streams, reflection and unknown methods go to a `grpc.aio` server on a Unix socket behind it,
where clients are seen as the socket. Lives on the event loop; one thread only waits for events.
"""

import asyncio
import logging
import tempfile
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from grpc import StatusCode
from pygrpc_native import EVENT_CANCEL, NativeGrpcFront

from naiad.datatypes import TakesLong
from naiad.errors import NaiadError, Unavailable
from naiad.frontends.grpc.errors import SHUTTING_DOWN, status
from naiad.frontends.grpc.grpcio import GrpcioServer
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.servicer import SERVICE, Call, Method, Servicer
from naiad.messages import InferResponse, Result
from naiad.protocol.proto_codec import Reply, encode
from naiad.protocol.served import ServedModel

_LOGGER = logging.getLogger(__name__)

_EVENTS_AT_ONCE = 64
#: gRPC's own limit; a longer message would be cut off by its length field.
_MESSAGE_LIMIT = 2**31 - 1
#: How long the last replies get to leave.
_FLUSH_S = 0.2
#: Answers from this size on are looked after: so soon after the last one, then after twice that, and so on.
_LARGE = 1 << 20
_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 64.0


class NativeServer:
    """A `pygrpc_native` server, with a `grpc.aio` server behind it."""

    def __init__(self, servicer: Servicer, options: GrpcOptions) -> None:
        self._servicer = servicer
        self._options = options
        self._infer = servicer.infer
        self._methods: list[Method] = list(servicer.methods.values())
        self._front: NativeGrpcFront
        self._loop: asyncio.AbstractEventLoop
        self._behind: GrpcioServer
        self._directory: tempfile.TemporaryDirectory[str]
        self._calls: dict[int, _UnaryCall] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._look: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._idle = asyncio.Event()
        self.port = 0

    async def start(self) -> None:
        """Listens. Raises OSError where the address cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._directory = tempfile.TemporaryDirectory(prefix="naiad-grpc-")
        socket = f"{self._directory.name}/streams.sock"
        self._behind = GrpcioServer(self._servicer, self._options, f"unix:{socket}", unary=False)
        try:
            await self._behind.start()
            self._front = self._listen()
        except BaseException:
            await self._behind.stop(0)
            self._directory.cleanup()
            raise
        self._front.set_fallback(socket)
        self._front.start()
        self.port = self._front.bound_port
        self._events_thread = threading.Thread(target=self._wait_for_events, name="naiad-grpc-events", daemon=True)
        self._events_thread.start()

    def _listen(self) -> NativeGrpcFront:
        options = self._options
        paths = [f"/{SERVICE}/ModelInfer", *self._servicer.methods]
        return NativeGrpcFront(
            options.target,
            [(path, False) for path in paths],
            call_details=True,
            keepalive_time_ms=max(options.keepalive_time_ms, 1),
            keepalive_timeout_ms=max(options.keepalive_timeout_ms, 1),
            keepalive_permit_without_calls=options.keepalive_permit_without_calls,
            reuse_port=options.reuse_port,
        )

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` for those that run, then cancels them."""
        self._is_stopping = True
        await asyncio.gather(self._behind.stop(grace_s), self._drain(grace_s))
        # Closing drops replies that are still on their way to the socket, and the library does not say when they are out.
        await asyncio.sleep(_FLUSH_S)
        if self._look is not None:
            self._look.cancel()
        await self._loop.run_in_executor(None, self._front.close)
        await self._loop.run_in_executor(None, self._events_thread.join)
        self._directory.cleanup()

    async def _drain(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                while self._calls or self._tasks:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            for call in list(self._calls.values()):
                call.cancel()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_for_events(self) -> None:
        front, loop = self._front, self._loop
        while (events := front.recv_batch_details(_EVENTS_AT_ONCE)) is not None:
            try:
                loop.call_soon_threadsafe(self._on_events, events)
            except RuntimeError:
                front.close()  # the loop is closed: nobody will answer
                return
            del events  # or the messages of the last calls would stay until the next one

    def _on_events(self, events: list[Any]) -> None:
        calls = self._calls
        for kind, call_id, method, data, _, details in events:
            if kind == EVENT_CANCEL:
                # What is not inference goes on: half a load is of use to nobody.
                if call_id in calls:
                    calls[call_id].cancel()
            elif self._is_stopping:
                self.fail(call_id, Unavailable(SHUTTING_DOWN))
            elif method == 0:
                call = _UnaryCall(self, call_id)
                calls[call_id] = call
                try:
                    call.began(self._infer(data, details[0], details[1], call))
                except NaiadError as error:
                    self.ended(call_id)
                    self.fail(call_id, error)
                except Exception as error:
                    self.ended(call_id)
                    self._fail_unexpected(call_id, error)
            else:
                self._answer_later(call_id, partial(self._methods[method - 1], data, *details[:2]))

    def respond_slowly(self, call_id: int, response: InferResponse, reply: Reply, model: ServedModel) -> None:
        """Has a thread write the response."""
        self._answer_later(
            call_id, partial(asyncio.to_thread, encode, response, reply, model.config, model.labels, b"", True)
        )

    def _answer_later(self, call_id: int, make: Callable[[], Awaitable[bytes]]) -> None:
        self._tasks[call_id] = self._loop.create_task(self._answer(call_id, make))

    async def _answer(self, call_id: int, make: Callable[[], Awaitable[bytes]]) -> None:
        try:
            self.respond(call_id, await make())
        except NaiadError as error:
            self.fail(call_id, error)
        except Exception as error:
            self._fail_unexpected(call_id, error)
        finally:
            del self._tasks[call_id]
            self._note_idle()

    def fail(self, call_id: int, error: NaiadError) -> None:
        code, details = status(error)
        self._front.fail(call_id, code.value[0], details)

    def _fail_unexpected(self, call_id: int, error: Exception) -> None:
        _LOGGER.error("a gRPC call failed unexpectedly", exc_info=error)
        self._front.fail(call_id, StatusCode.INTERNAL.value[0], f"unexpected error: {error}")

    def respond(self, call_id: int, data: bytes) -> None:
        if len(data) > _MESSAGE_LIMIT:
            details = f"the response has {len(data)} bytes, more than the {_MESSAGE_LIMIT} of a gRPC message"
            self._front.fail(call_id, StatusCode.RESOURCE_EXHAUSTED.value[0], details)
        else:
            self._front.respond(call_id, data)
            if len(data) >= _LARGE:
                if self._look is not None:
                    self._look.cancel()
                self._look_later(_FIRST_LOOK_S)

    def _look_later(self, delay_s: float) -> None:
        self._look = self._loop.call_later(delay_s, self._let_go, delay_s)

    def _let_go(self, delay_s: float) -> None:
        """Its threads cannot free what they have sent: that happens when the library is called, whatever for."""
        _ = self._front.bound_port
        if delay_s < _LAST_LOOK_S:
            self._look_later(2 * delay_s)

    def ended(self, call_id: int) -> None:
        """Forgets an inference that is answered, or that nobody waits for any more."""
        self._calls.pop(call_id, None)
        if self._is_stopping:
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._calls and not self._tasks:
            self._idle.set()


class _UnaryCall:
    """The sink of a unary inference."""

    __slots__ = ("_id", "_is_answered", "_model", "_reply", "_server", "call")

    _model: ServedModel
    _reply: Reply

    def __init__(self, server: NativeServer, id: int) -> None:
        self._server = server
        self._id = id
        self._is_answered = False
        self.call: Call | None = None

    def expect(self, model: ServedModel, reply: Reply) -> None:
        self._model = model
        self._reply = reply

    def send(self, result: Result | None, final: bool) -> None:
        server = self._server
        if isinstance(result, InferResponse):
            try:
                data = encode(result, self._reply, self._model.config, self._model.labels)
            except NaiadError as error:
                server.fail(self._id, error)
            except TakesLong:
                server.respond_slowly(self._id, result.owned(), self._reply, self._model)
            else:
                server.respond(self._id, data)
        else:
            assert result is not None, "a call of an ordinary model ended without a result; this is a bug"
            server.fail(self._id, result)
        server.ended(self._id)
        self._is_answered = True
        self.call = None

    def began(self, call: Call) -> None:
        # A call knows its sink: if the sink kept it when all is said, both, and the message of the request, would wait
        # for the garbage collector.
        if not self._is_answered:
            self.call = call

    def cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()
