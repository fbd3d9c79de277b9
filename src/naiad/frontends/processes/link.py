"""The engine's end of the connection to one front-end process: its requests, their answers, what it is told.

Lives on the engine's event loop. What is asked for that is not inference is answered by the objects that answer it
where there is one process (`Management`, `Servicer`), once all front ends know of all changes made before.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from naiad.datatypes import Buffer
from naiad.engine import Engine
from naiad.errors import Internal, NaiadError, Unavailable
from naiad.frontends.grpc.servicer import Metadata, Servicer
from naiad.frontends.http.connection import Exchange, Headers
from naiad.frontends.http.management import Management
from naiad.frontends.processes import frames
from naiad.frontends.processes.frames import (
    Answer,
    Answers,
    Ask,
    Asks,
    GrpcManagement,
    Hello,
    HttpManagement,
    Known,
    Managed,
    Report,
    Started,
    ToEngine,
    ToFrontend,
    Withdraw,
    failure_of,
)
from naiad.frontends.processes.regions import SharedRegions
from naiad.frontends.processes.tensors import ARENA_BYTE_SIZE, Receiver, Sender
from naiad.instances import arena
from naiad.instances.channel import LoopChannel
from naiad.instances.frames import Failure
from naiad.messages import InferRequest, InferResponse, Result, SequenceControl
from naiad.models.manager import ModelManager
from naiad.scheduling.scheduler import Call
from naiad.telemetry.log import Log
from naiad.telemetry.trace import Trace, TraceSettings

_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
#: With so many bytes on their way to a front end that does not take them, streams through it end.
_BACKLOG_LIMIT = 256 << 20
_TOO_SLOW = "the front end cannot keep up with the responses of the model; the stream is ended"


class Behind(msgspec.Struct, frozen=True):
    """What stands behind the front ends: the engine as HTTP and as gRPC see it, what answers all that is not inference,
    and what they must know of."""

    http_engine: Engine
    grpc_engine: Engine
    management: Management
    servicer: Servicer
    manager: ModelManager
    regions: SharedRegions
    traces: TraceSettings
    log: Log


class Overseer(Protocol):
    """Who looks after the process of a link, and knows of the others."""

    @property
    def change(self) -> int:
        """The number of the last change that front ends are told of."""

    def on_hello(self) -> None: ...
    def on_started(self, failure: Failure | None) -> None: ...
    def on_known(self, known: Known) -> None: ...
    def on_http_connections(self, count: int) -> None: ...
    def on_end(self, reason: str | None) -> None: ...

    async def settled(self, since: int) -> None:
        """Returns when all front ends know of all changes. Raises NaiadError where one cannot follow a change after
        `since`."""


class Link:
    """One front-end process, as long as it lives."""

    def __init__(self, behind: Behind, overseer: Overseer) -> None:
        self._behind = behind
        self._overseer = overseer
        self._loop = asyncio.get_running_loop()
        self._sender: Sender
        self._receiver: Receiver
        self._channel: LoopChannel[ToEngine] | None = None
        self._calls: dict[int, Call] = {}
        #: Calls whose trace waits to hear when their results have been sent.
        self._traces: dict[int, Trace] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: 1 for each region that is in use, by the change that made it known.
        self._used: Counter[int] = Counter()
        self._answers: list[Answer] = []
        self._is_flushing = False

    def connect(self) -> list[int]:
        """Makes socket and arenas: the descriptors for the front end, which the caller closes when it has them. Raises
        OSError, ResourceExhausted."""
        fds: list[int] = []
        try:
            fds.append(arena.create("naiad requests", ARENA_BYTE_SIZE))
            fds.append(arena.create("naiad responses", ARENA_BYTE_SIZE))
            self._receiver = Receiver(os.dup(fds[0]))
            self._sender = Sender(os.dup(fds[1]))
            mine, theirs = socket.socketpair()
        except (OSError, NaiadError):
            _close(fds)
            raise
        self._channel = LoopChannel(self._loop, mine, _decoder, self._on_frame, self._on_end)
        return [theirs.detach(), *fds]

    def tell(self, frame: ToFrontend, fds: Sequence[int] = ()) -> None:
        if self._channel is not None:
            frames.send(self._channel, frame, fds)

    def close(self) -> None:
        """Ends the connection and what was asked for through it."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        channel.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()
        for trace in self._traces.values():
            trace.lost()
        self._traces.clear()
        for change, uses in self._used.items():
            self._behind.regions.count_use(change, -uses)
        for task in self._tasks.values():
            task.cancel()
        self._answers.clear()
        # Now, as the collector comes late or never: they hold memory and descriptors.
        del self._sender, self._receiver

    def _on_end(self, reason: str | None) -> None:
        self.close()
        self._overseer.on_end(reason)

    # ---------------------------------------------------------------- frames

    def _on_frame(self, frame: ToEngine, fds: list[int]) -> None:
        try:
            if type(frame) is Asks:
                self._on_asks(frame, fds)
            else:
                self._on_other(frame, fds)
        finally:
            _close(fds)
            fds.clear()

    def _on_other(self, frame: ToEngine, fds: list[int]) -> None:
        match frame:
            case frames.Transcoded():
                self._on_frame(frames.restored(frame, ToEngine), fds)
            case frames.Sent():
                self._on_sent(frame)
            case HttpManagement() | GrpcManagement():
                work = self._manage(frame, self._receiver.get(frame.body, fds))
                task = self._tasks[frame.number] = self._loop.create_task(work)
                task.add_done_callback(lambda _: self._tasks.pop(frame.number, None))
            case Withdraw():
                if (withdrawn := self._tasks.get(frame.number)) is not None:
                    withdrawn.cancel()
            case frames.RegionUsed():
                self._count_use(frame.change, 1 if frame.used else -1)
            case Known():
                self._overseer.on_known(frame)
            case Report():
                self._behind.log.write(frame.level, frame.message, frame.file, frame.line)  # type: ignore[arg-type]
            case Hello():
                self._overseer.on_hello()
            case Started():
                self._overseer.on_started(frame.failure)
            case frames.HttpConnections():
                self._overseer.on_http_connections(frame.count)

    # ---------------------------------------------------------------- inference

    def _on_asks(self, frame: Asks, fds: list[int]) -> None:
        if frame.freed:
            self._sender.freed(frame.freed)
        for ask in frame.asks:
            self._begin(ask, fds)
        for number in frame.cancelled:
            call = self._calls.get(number)
            if call is not None:
                call.cancel()

    def _begin(self, ask: Ask, fds: list[int]) -> None:
        behind = self._behind
        sink = _Sink(self, ask.call)
        sequence = ask.sequence
        try:
            request = InferRequest(
                ask.model_name,
                self._receiver.tensors(ask.inputs, fds),
                ask.model_version,
                ask.id,
                ask.outputs,
                ask.parameters,
                None if sequence is None else SequenceControl(*sequence),
                ask.priority,
                ask.timeout_us,
            )
            engine = behind.http_engine if ask.over_http else behind.grpc_engine
            model = engine.model(ask.model_name, ask.model_version)
            if model.decoupled != ask.decoupled:
                # The kind of answer that its client expects was decided by the model that was there a moment ago.
                raise Unavailable(f"model '{ask.model_name}' has just been replaced; send the request again")
            followed = ask.followed
            if followed is not None:
                protocol = "HTTP" if ask.over_http else "GRPC"
                request = behind.traces.follow(
                    request, protocol, followed.start_ns, followed.headers.get, followed.end_ns
                )
                if isinstance(request.trace, Trace):
                    request.trace.is_sent_elsewhere = True
                    self._traces[ask.call] = sink.trace = request.trace
            call = engine.infer(request, sink, model)
        except NaiadError as error:
            self._refuse(ask, error)
        except Exception as error:
            behind.log.exception("unexpected error in an inference request", error)
            text = f"unexpected error: {error!r}" if ask.over_http else f"unexpected error: {error}"
            self._refuse(ask, Internal(text))
        else:
            if not call.ended:
                self._calls[ask.call] = call

    def _refuse(self, ask: Ask, error: NaiadError) -> None:
        self._traces.pop(ask.call, None)
        self._answer(Answer(ask.call, True, None, "", 0, "", {}, failure_of(error), True, False))

    def deliver(self, sink: "_Sink", result: Result | None, final: bool) -> None:
        """Sends a result at the end of this turn."""
        number, trace = sink.number, sink.trace
        channel = self._channel
        if channel is None or sink.is_over:
            return
        if not final and self._sender.outstanding + channel.unsent_byte_size > _BACKLOG_LIMIT:
            call = self._calls.get(number)
            if call is not None:
                call.cancel()
            result, final = Unavailable(_TOO_SLOW), True
        if final:
            sink.is_over = True
            self._calls.pop(number, None)
        traced = False
        if trace is not None:
            if result is not None:
                traced = True
                trace.sending()
            self._forget_trace(number, trace)
        if isinstance(result, InferResponse):
            try:
                outputs = self._sender.put_all(result.outputs, keep=True)
            except NaiadError as error:
                result = error
            else:
                self._answer(
                    Answer(
                        number,
                        final,
                        outputs,
                        result.model_name,
                        result.model_version,
                        result.id,
                        result.parameters,
                        None,
                        False,
                        traced,
                    )
                )
                return
        failed = None if result is None else failure_of(result)
        self._answer(Answer(number, final, None, "", 0, "", {}, failed, False, traced))

    def _answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._channel is None:
            return
        answers, self._answers = self._answers, []
        sender = self._sender
        frame = Answers(answers, self._receiver.take_freed())
        try:
            self.tell(frame, sender.fds)
        except Exception as error:
            self._behind.log.exception("responses cannot be sent to a front end", error)
            # Descriptors are in the order of the answers that they are for: without one of them all are in disorder.
            lost = [answer for answer in answers if sender.fds or not frames.can_be_sent(answer)]
            for answer in lost:
                sender.take_back(answer.outputs or ())
                answer.outputs, answer.failure = None, failure_of(Internal(f"the response cannot be sent: {error}"))
                answer.id, answer.parameters = "", {}
            self.tell(frame)
        if sender.fds:
            sender.sent()

    def _count_use(self, change: int, by: int) -> None:
        self._used[change] += by
        self._behind.regions.count_use(change, by)

    def _on_sent(self, frame: frames.Sent) -> None:
        trace = self._traces.get(frame.call)
        if trace is not None:
            trace.sent(frame.start_ns, frame.end_ns)
            self._forget_trace(frame.call, trace)

    def _forget_trace(self, number: int, trace: Trace) -> None:
        """Once its call has ended and all results have been sent."""
        if number not in self._calls and not trace.unsent:
            self._traces.pop(number, None)

    # ---------------------------------------------------------------- everything else

    async def _manage(self, frame: HttpManagement | GrpcManagement, body: Buffer) -> None:
        behind = self._behind
        change = self._overseer.change
        answer = Managed(frame.number, 0, [], b"", None)
        try:
            if isinstance(frame, HttpManagement):
                exchange = _Exchange(frame.method, body, frame.client)
                handler = getattr(behind.management, frame.name)
                await handler(cast(Exchange, exchange), *frame.arguments)
                answer.status, answer.headers, answer.body = exchange.reply
            else:
                method = behind.servicer.methods[frame.path]
                answer.body = await method(bytes(body), _metadata(frame.metadata), frame.peer)
        except NaiadError as error:
            answer.failure = failure_of(error)
        except Exception as error:
            what = frame.name if isinstance(frame, HttpManagement) else frame.path
            behind.log.exception(f"unexpected error in {what}", error)
            text = f"unexpected error: {error!r}" if isinstance(frame, HttpManagement) else f"unexpected error: {error}"
            answer.failure = Failure("Internal", text)
        try:
            # Whoever hears of a change finds it at every front end.
            await self._overseer.settled(change)
        except NaiadError as error:
            answer = Managed(frame.number, 0, [], b"", failure_of(error))
        self.tell(answer)


class _Sink:
    """Where the results of a call go."""

    __slots__ = ("_link", "is_over", "number", "trace")

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self.number = number
        self.trace: Trace | None = None
        self.is_over = False

    def send(self, result: Result | None, final: bool) -> None:
        self._link.deliver(self, result, final)


class _Exchange:
    """What `Management` reads and writes of an `Exchange`."""

    def __init__(self, method: str, body: Buffer, client: str) -> None:
        self.method = method
        self.body = body
        self.client = client
        self.reply: tuple[int, Headers, bytes] = (0, [], b"")

    def response_bytes(self, status: int, headers: Headers, body: bytes) -> None:
        self.reply = (status, headers, body)

    def response_empty(self, status: int, headers: Headers) -> None:
        self.reply = (status, headers, b"")


def _metadata(pairs: list[tuple[str, bytes]]) -> Metadata:
    return [(key, value if key.endswith("-bin") else value.decode()) for key, value in pairs]


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
