"""The two ends of the connection between the engine's process and a front end, in one loop, with an engine that does
what the test says."""

import asyncio
import errno
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from naiad.config.model_config import ModelConfig
from naiad.datatypes import DataType
from naiad.errors import Cancelled, Internal, InvalidArgument, NaiadError, NotFound, Unavailable
from naiad.frontends.processes import frames, link
from naiad.frontends.processes.client import EngineClient, EngineConnection, ForwardedMethod, ReportingLog, management
from naiad.frontends.processes.frames import Known, ModelChange, Tracing, Version
from naiad.frontends.processes.link import Behind, Link
from naiad.frontends.processes.regions import SharedRegions
from naiad.messages import InferRequest, InferResponse, Result, SequenceControl, Tensor
from naiad.protocol.regions import RegionUse
from naiad.protocol.served import ServedModel
from naiad.telemetry.log import Log
from naiad.telemetry.trace import TraceSettings, Values
from tests.unit.fake_cuda import HANDLE, FakeCuda


class Sink:
    """Keeps copies of what comes."""

    def __init__(self) -> None:
        self.results: list[tuple[Result | None, bool]] = []
        self.ended = asyncio.Event()

    def send(self, result: Result | None, final: bool) -> None:
        self.results.append((result.owned() if isinstance(result, InferResponse) else result, final))
        if final:
            self.ended.set()

    async def all(self) -> list[tuple[Result | None, bool]]:
        async with asyncio.timeout(30):
            await self.ended.wait()
        return self.results


class Call:
    def __init__(self) -> None:
        self.ended = False
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Engine:
    """`act(request, sink)` is what it does with a request."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.requests: list[InferRequest] = []
        self.calls: list[Call] = []
        self.begun = asyncio.Event()
        self.act: Callable[[InferRequest, Any], None] = lambda request, sink: None

    def model(self, name: str, version: int = -1) -> Any:
        return ServedModel(self.config, version, {})

    def infer(self, request: InferRequest, sink: Any, model: Any) -> Call:
        self.requests.append(request)
        call = Call()
        self.calls.append(call)
        if request.trace is not None:
            sink = request.trace.begin(request, 1, sink)
        self.act(request, sink)
        self.begun.set()
        return call


class Overseer:
    """Counts changes; all are known at once, as there is one front end."""

    def __init__(self) -> None:
        self.change = 0
        self.news = asyncio.Event()
        self.known: list[Known] = []
        self.ended = asyncio.Event()

    def next_change(self) -> int:
        self.change += 1
        return self.change

    def on_hello(self) -> None: ...

    def on_started(self, failure: Any) -> None: ...

    def on_http_connections(self, count: int) -> None: ...

    def on_known(self, known: Known) -> None:
        self.known.append(known)
        self.news.set()

    def on_end(self, reason: str | None) -> None:
        self.ended.set()

    async def settled(self, since: int) -> None:
        async with asyncio.timeout(30):
            while self.change and not any(known.change == self.change for known in self.known):
                self.news.clear()
                await self.news.wait()


class Both:
    """Both ends: `link` of the engine, `front` of the front end."""

    def __init__(self) -> None:
        proto = model_config_pb2.ModelConfig(name="model")
        self.engine = Engine(ModelConfig(proto))
        self.regions = SharedRegions("local")
        self.traces = TraceSettings(Values(("TIMESTAMPS",), rate=1), "", Log())
        self.overseer = Overseer()
        engine: Any = self.engine
        self.management: Any = SimpleNamespace()
        self.servicer: Any = SimpleNamespace(methods={})
        log = Log()
        manager: Any = None
        behind = Behind(engine, engine, self.management, self.servicer, manager, self.regions, self.traces, log)
        self.link = Link(behind, self.overseer)
        sock, *fds = self.link.connect()
        self.connection = EngineConnection(socket.socket(fileno=sock), *fds)
        self.front = EngineClient(self.connection, over_http=True)
        self.regions.next_change = self.overseer.next_change
        self.regions.tell = self.link.tell

    async def tell(self, frame: Any) -> None:
        self.link.tell(frame)
        await self.overseer.settled(0)

    async def tell_model(self, *, decoupled: bool = False, versions: tuple[int, ...] = (1,)) -> None:
        proto = model_config_pb2.ModelConfig(name="model")
        proto.model_transaction_policy.decoupled = decoupled
        data = proto.SerializeToString()
        told = [Version(number, data, {"OUT": ["label"]}) for number in versions]
        await self.tell(ModelChange(self.overseer.next_change(), "model", True, [1, 2, 3], told))

    async def begun(self) -> None:
        async with asyncio.timeout(30):
            await self.engine.begun.wait()


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    both = Both()
    await both.tell_model()
    yield both
    both.link.close()
    async with asyncio.timeout(30):
        await both.connection.stop.wait()


def request(data: bytes = b"\1\2\3", **more: Any) -> InferRequest:
    return InferRequest("model", (Tensor("IN", DataType.UINT8, (len(data),), data),), **more)


def echo(request: InferRequest, sink: Any) -> None:
    memory = bytearray(request.inputs[0].data)
    output = Tensor("OUT", DataType.UINT8, request.inputs[0].shape, memoryview(memory))
    sink.send(InferResponse("model", 1, request.id, (output,), {"more": 1.5}), True)
    memory[:] = bytes(len(memory))  # as an instance that uses its memory again


# ---------------------------------------------------------------- look-ups


@pytest.mark.parametrize(
    ("name", "version", "kind", "text"),
    [
        ("other", -1, NotFound, "Request for unknown model: 'other' is not found"),
        ("model", 3, Unavailable, "Request for unknown model: 'model' version 3 is not at ready state"),
        ("model", 4, NotFound, "Request for unknown model: 'model' version 4 is not found"),
    ],
)
async def test_what_is_not_there_has_its_error(both: Both, name: str, version: int, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        both.front.model(name, version)


async def test_look_ups_follow_what_is_told(both: Both) -> None:
    await both.tell_model(versions=(1, 2))
    assert (both.front.model("model").version, both.front.model("model", 1).version) == (2, 1)
    assert both.front.model("model").labels == {"OUT": ["label"]}
    await both.tell_model(versions=())
    with pytest.raises(NotFound, match="has no available versions"):
        both.front.model("model")
    await both.tell(ModelChange(both.overseer.next_change(), "model", False, [], []))
    with pytest.raises(NotFound, match="is not found"):
        both.front.model("model")


# ---------------------------------------------------------------- inference


@pytest.mark.parametrize("size", [3, 100_000])
async def test_a_request_is_asked_and_answered_as_it_is(both: Both, size: int) -> None:
    both.engine.act = echo
    asked = request(
        os.urandom(size),
        id="id",
        outputs=("OUT",),
        parameters={"a": True, "b": 2**63, "c": "x", "d": 0.5},
        sequence=SequenceControl("s", True, False),
        priority=3,
        timeout_us=4,
    )
    sink = Sink()
    both.front.infer(asked, sink)
    ((response, final),) = await sink.all()
    assert final
    assert isinstance(response, InferResponse)
    assert response.outputs == (Tensor("OUT", DataType.UINT8, (size,), asked.inputs[0].data),)
    assert (response.id, response.parameters) == ("id", {"more": 1.5})
    (got,) = both.engine.requests
    assert got.inputs[0].data == asked.inputs[0].data
    assert (got.id, got.outputs, got.parameters, got.sequence, got.priority, got.timeout_us, got.trace) == (
        *("id", ("OUT",), {"a": True, "b": 2**63, "c": "x", "d": 0.5}),
        *(SequenceControl("s", True, False), 3, 4, None),
    )


async def test_large_tensors_give_their_places_back(both: Both) -> None:
    both.engine.act = echo
    for _ in range(300):  # 30 MB each way would not do
        sink = Sink()
        both.front.infer(request(bytes(1_000_000)), sink)
        await sink.all()
        both.engine.requests.clear()
        del sink
    assert both.connection._sender.outstanding <= 2_000_000
    assert both.link._sender.outstanding <= 2_000_000


async def test_requests_of_one_turn_share_a_frame(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    inner = both.link._on_asks
    monkeypatch.setattr(both.link, "_on_asks", lambda frame, fds: (sizes.append(len(frame.asks)), inner(frame, fds)))
    both.engine.act = echo
    sinks = [Sink() for _ in range(5)]
    for sink in sinks:
        both.front.infer(request(), sink)
    for sink in sinks:
        await sink.all()
    assert sizes == [5]


def refuse(error: Exception) -> Callable[[InferRequest, Any], None]:
    def act(request: InferRequest, sink: Any) -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [(InvalidArgument("wrong \udcff"), InvalidArgument, "wrong \udcff"), (KeyError("x"), Internal, "unexpected error")],
    ids=["refused", "bug"],
)
async def test_what_the_engine_refuses_is_known_as_refused(
    both: Both, error: Exception, kind: type, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    both.engine.act = refuse(error)
    sink = Sink()
    both.front.infer(request(), sink)
    ((result, final),) = await sink.all()
    assert type(result) is kind
    assert isinstance(result, NaiadError)
    assert result.message.startswith(text)
    assert (result.refused, final) == (True, True)
    assert ("Traceback" in capfd.readouterr().err) == (kind is Internal)


@pytest.mark.parametrize("size", [3, 100_000])
async def test_a_response_that_cannot_be_sent_is_an_error_of_its_request_only(
    both: Both, size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def act(request: InferRequest, sink: Any) -> None:
        parameters = {"number": 2**70 if request.id == "bad" else 1}
        sink.send(InferResponse("model", 1, request.id, request.inputs, parameters), True)

    both.engine.act = act
    sinks = {id: Sink() for id in ("good", "bad", "fine")}
    for id, sink in sinks.items():
        both.front.infer(request(bytes(size), id=id), sink)
    results = {id: (await sink.all())[0][0] for id, sink in sinks.items()}
    assert [type(results[id]) for id in ("good", "bad", "fine")] == [InferResponse, Internal, InferResponse]
    assert "responses cannot be sent" in capfd.readouterr().err
    both.engine.requests.clear()
    assert both.link._sender.outstanding <= 2 * size


async def test_what_the_model_answers_is_not_refused(both: Both) -> None:
    both.engine.act = lambda request, sink: sink.send(Cancelled("gone"), True)
    sink = Sink()
    both.front.infer(request(), sink)
    ((result, _),) = await sink.all()
    assert isinstance(result, Cancelled)
    assert not result.refused


async def test_a_stream_of_responses_arrives_in_order_and_ends(both: Both) -> None:
    def act(request: InferRequest, sink: Any) -> None:
        for number in range(3):
            sink.send(InferResponse("model", 1, str(number), ()), False)
        sink.send(None, True)

    both.engine.act = act
    sink = Sink()
    both.front.infer(request(), sink)
    results = await sink.all()
    assert [result.id for result, _ in results[:-1] if isinstance(result, InferResponse)] == ["0", "1", "2"]
    assert results[-1] == (None, True)


async def test_a_stream_that_a_front_end_cannot_keep_up_with_ends(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_BACKLOG_LIMIT", 100_000)
    await both.tell_model(decoupled=True)
    both.engine.config = both.front.model("model").config
    both.engine.act = lambda request, sink: both_sinks.append(sink)
    both_sinks: list[Any] = []
    sink = Sink()
    both.front.infer(request(), sink)
    await both.begun()
    for _ in range(4):
        output = Tensor("OUT", DataType.UINT8, (60_000,), bytes(60_000))
        both_sinks[0].send(InferResponse("model", 1, "", (output,)), False)
    both_sinks[0].send(None, True)
    results = await sink.all()
    assert len(results) == 3
    assert isinstance(results[-1][0], Unavailable)
    assert both.engine.calls[0].cancelled.is_set()


async def test_a_client_that_leaves_cancels_its_call(both: Both) -> None:
    sink = Sink()
    call = both.front.infer(request(), sink)
    await both.begun()
    call.cancel()
    async with asyncio.timeout(30):
        await both.engine.calls[0].cancelled.wait()


async def test_a_model_of_another_kind_than_thought_is_refused(both: Both) -> None:
    proto = model_config_pb2.ModelConfig(name="model")
    proto.model_transaction_policy.decoupled = True
    both.engine.config = ModelConfig(proto)
    sink = Sink()
    both.front.infer(request(), sink)
    ((result, _),) = await sink.all()
    assert isinstance(result, Unavailable)
    assert "send the request again" in result.message


# ---------------------------------------------------------------- ends


async def test_the_end_of_a_front_end_cancels_what_came_through_it() -> None:
    both = Both()
    await both.tell_model()
    both.front.infer(request(), Sink())
    await both.begun()
    both.connection._channel.close()
    async with asyncio.timeout(30):
        await both.engine.calls[0].cancelled.wait()
    assert both.overseer.ended.is_set()


async def test_memory_and_descriptors_go_with_a_front_end() -> None:
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        both = Both()
        await both.tell_model()
        both.engine.act = echo
        sink = Sink()
        both.front.infer(request(bytes(100_000)), sink)
        await sink.all()
        both.engine.requests.clear()
        both.connection._channel.close()
        async with asyncio.timeout(30):
            await both.overseer.ended.wait()
        del both.connection._sender, both.connection._receiver
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


async def test_a_connection_that_cannot_be_made_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    unmade: Any = None
    gc.collect()  # what other tests left would be collected in between
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(link.os, "dup", fail)
    with pytest.raises(OSError, match="Too many open files"):
        Link(unmade, Overseer()).connect()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_end_of_the_engine_fails_what_waits_for_it() -> None:
    both = Both()
    await both.tell_model()
    sink = Sink()
    both.front.infer(request(), sink)
    await both.begun()

    async def never(exchange: Any) -> None:
        await asyncio.Event().wait()

    both.management.live = never
    exchange: Any = SimpleNamespace(method="GET", body=b"", client="")
    waiting = asyncio.ensure_future(management(both.connection).live(exchange))
    await asyncio.sleep(0)
    both.link.close()
    ((result, final),) = await sink.all()
    assert isinstance(result, Unavailable)
    assert final
    with pytest.raises(Unavailable, match="ended"):
        await waiting
    async with asyncio.timeout(30):
        await both.connection.stop.wait()
    assert both.connection.is_lost
    with pytest.raises(Unavailable, match="ended"):
        both.front.infer(request(), Sink())


# ---------------------------------------------------------------- everything else


@pytest.mark.parametrize("size", [2, 100_000])
async def test_what_is_not_inference_is_answered_by_the_engines_process(both: Both, size: int) -> None:
    replies = []
    body = os.urandom(size)

    async def load(exchange: Any, name: str) -> None:
        assert (exchange.method, exchange.client, bytes(exchange.body)) == ("POST", "127.0.0.1:1", body)
        exchange.response_bytes(200, [("a", "b")], name.encode())

    both.management.load = load
    exchange: Any = SimpleNamespace(
        method="POST", body=body, client="127.0.0.1:1", response_bytes=lambda *reply: replies.append(reply)
    )
    await management(both.connection).load(exchange, "model")
    assert replies == [(200, [("a", "b")], b"model")]


async def test_an_error_of_it_keeps_its_kind(both: Both, capfd: pytest.CaptureFixture[str]) -> None:
    both.management.load = lambda exchange, name: _raise(NotFound("no such thing"))
    both.management.live = lambda exchange: _raise(KeyError("bug"))
    exchange: Any = SimpleNamespace(method="POST", body=b"", client="")
    with pytest.raises(NotFound, match="no such thing"):
        await management(both.connection).load(exchange, "model")
    with pytest.raises(Internal, match="unexpected error: KeyError"):
        await management(both.connection).live(exchange)
    assert "Traceback" in capfd.readouterr().err


async def _raise(error: Exception) -> None:
    raise error


async def test_rpcs_go_the_same_way_and_can_be_withdrawn(both: Both) -> None:
    waits = asyncio.Event()
    cancelled = asyncio.Event()

    async def act(data: bytes, metadata: Any, peer: str) -> bytes:
        if data == b"wait":
            waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return repr((data, metadata, peer)).encode()

    both.servicer.methods["/x"] = act
    method = ForwardedMethod(both.connection, "/x")
    pairs: list[tuple[str, str | bytes]] = [("key", "value"), ("raw-bin", b"\xff")]
    assert await method(b"data", pairs, "ipv4:1") == repr((b"data", pairs, "ipv4:1")).encode()
    task = asyncio.ensure_future(method(b"wait", [], ""))
    async with asyncio.timeout(30):
        await waits.wait()
        task.cancel()
        await cancelled.wait()


async def test_lines_of_the_log_are_written_by_the_engines_process(
    both: Both, capfd: pytest.CaptureFixture[str]
) -> None:
    ReportingLog(both.connection).write("ERROR", "something \udcff", "file.py", 7)
    both.management.live = lambda exchange: _raise(NotFound(""))
    with pytest.raises(NotFound):  # whose answer comes after it
        await management(both.connection).live(SimpleNamespace(method="GET", body=b"", client=""))  # type: ignore[arg-type]
    assert "file.py:7" in capfd.readouterr().err


# ---------------------------------------------------------------- regions


@pytest.fixture
def shm() -> Any:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    memory.unlink()


async def test_a_region_is_there_at_the_front_end_and_in_use_for_both(both: Both, shm: Any) -> None:
    shm.buf[:4] = b"data"
    both.regions.register_system("region", shm.name, 0, 64)
    await both.overseer.settled(0)
    use = RegionUse(both.connection.regions, local=True)
    assert use.input("region", 0, 4) == b"data"
    output = use.output("OUT", "region", 8, 4)
    sink = Sink()
    use.during(both.front.infer, request(), sink)
    await both.begun()
    with pytest.raises(Internal, match="currently in use"):
        both.regions.unregister_system("region")
    output.write(Tensor("OUT", DataType.UINT8, (4,), b"more"))
    assert bytes(shm.buf[8:12]) == b"more"
    both.engine.act = echo
    both.link._answer(frames.Answer(1, True, None, "", 0, "", {}, None, False, False))
    await sink.all()
    # The end of the use is told in the turn in which the result was passed on.
    again = Sink()
    both.front.infer(request(), again)
    await again.all()
    both.regions.unregister_system("region")
    await both.overseer.settled(0)
    with pytest.raises(NotFound):
        RegionUse(both.connection.regions, local=True).input("region", 0, 4)


async def test_the_uses_of_a_front_end_end_with_it(shm: Any) -> None:
    both = Both()
    await both.tell_model()
    both.regions.register_system("region", shm.name, 0, 64)
    await both.overseer.settled(0)
    use = RegionUse(both.connection.regions, local=True)
    use.input("region", 0, 4)
    use.during(both.front.infer, request(), Sink())
    await both.begun()
    both.connection._channel.close()
    async with asyncio.timeout(30):
        await both.engine.calls[0].cancelled.wait()
    both.regions.unregister_system("region")
    assert not both.regions.names


async def test_memory_on_a_gpu_is_open_at_the_front_end_when_that_says_so(both: Both, cuda: FakeCuda) -> None:
    await both.regions.register_cuda("region", HANDLE, 0, 64)
    await both.overseer.settled(0)
    assert cuda.calls == ["open", "open"]
    cuda.memory[HANDLE][:4] = b"data"
    use = RegionUse(both.connection.regions, local=True)
    both.engine.act = echo
    sink = Sink()
    use.output("OUT", "region", 8, 4)
    tensor = Tensor("IN", DataType.UINT8, (4,), use.input("region", 0, 4))
    use.during(both.front.infer, InferRequest("model", (tensor,)), sink)
    await sink.all()
    assert bytes(cuda.memory[HANDLE][8:12]) == b"data"
    # The end of the use is told in the turn in which the result was passed on.
    again = Sink()
    both.front.infer(request(), again)
    await again.all()
    await both.regions.unregister_cuda("region")
    await both.overseer.settled(0)
    assert cuda.calls.count("close") == 2


async def test_memory_on_a_gpu_that_a_front_end_cannot_open_is_refused(both: Both, cuda: FakeCuda) -> None:
    await both.regions.register_cuda("region", HANDLE, 0, 64)
    cuda.error = OSError(2, "out of memory")
    await both.overseer.settled(0)
    (known,) = [known for known in both.overseer.known if known.failure is not None]
    assert known.failure is not None
    assert known.failure.message == "failed to register shared memory region: invalid args"
    both.regions.refused(known.change)
    assert not both.regions.names
    await both.overseer.settled(0)
    assert not both.connection.regions.names


# ---------------------------------------------------------------- traces


async def test_a_traced_request_has_the_times_of_its_front_end(both: Both) -> None:
    entries = []

    class Export:
        def parent(self, header: Callable[[str], str | None]) -> Any:
            return header("traceparent")

        def began(self, trace: Any, parent: Any) -> None:
            entries.append(("parent", parent))

        def ended(self, journey: Any) -> None:
            (trace,) = journey.followed
            entries.append(("events", [name for name, _ in sorted(trace.events, key=lambda event: event[1])]))

        def close(self) -> None: ...

    export: Any = Export()
    both.traces._export = export
    await both.tell(Tracing(both.overseer.next_change(), True))
    traces = both.connection.traces
    assert traces.active
    both.engine.act = echo
    followed = traces.follow(request(), "HTTP", 5, {"traceparent": "00-x"}.get)
    sink = Sink()
    both.front.infer(followed, sink)
    await sink.all()
    assert entries == [("parent", "00-x")], "the result has not been sent yet, as far as the engine knows"
    again = Sink()
    both.front.infer(request(), again)
    await again.all()
    names = ["HTTP_RECV_START", "HTTP_RECV_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert entries[1:] == [("events", names)]
