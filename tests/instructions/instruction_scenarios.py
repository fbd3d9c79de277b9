"""The program that is counted: runs under callgrind, each hot path of server and host in one thread, without a network.

Each scenario is run until the interpreter has adapted to it and its caches are full, then counted. Counts must not
depend on the machine's load: the clock ticks by itself, the garbage collector is off, no thread is started. Fails
where a path leaves work to that collector. `instruction_counts` starts it.
"""

import asyncio
import ctypes
import gc
import importlib.machinery
import itertools
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import CoroutineType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"

# Durations decide which buckets of the statistics are counted, so each look at the clock is a microsecond later.
monotonic_ns = time.monotonic_ns = itertools.count(10**15, 1000).__next__


def sources_only(folder: str) -> Any:
    """A hook of `sys.path_hooks`: of what lies in `src`, compiled modules are not seen."""
    if not Path(folder).is_relative_to(SOURCES):
        raise ImportError
    return importlib.machinery.FileFinder(folder, (importlib.machinery.SourceFileLoader, [".py"]))


sys.path_hooks.insert(0, sources_only)
sys.path_importer_cache.clear()
sys.path.insert(0, str(SOURCES))

import hpack  # noqa: E402
import msgspec  # noqa: E402
import uvloop  # noqa: E402
from tritonclient.grpc import service_pb2 as pb  # noqa: E402

from naiad.backends.api import Array, ArrayBackend, InstanceContext, RequestBackend, Shared  # noqa: E402
from naiad.backends.python import PythonBackend  # noqa: E402
from naiad.config.model_config import ModelConfig  # noqa: E402
from naiad.config.parse import parse_text, to_dict  # noqa: E402
from naiad.datatypes import DataType  # noqa: E402
from naiad.engine import Engine  # noqa: E402
from naiad.frontends.access import logged  # noqa: E402
from naiad.frontends.grpc.frames import PREFACE  # noqa: E402
from naiad.frontends.grpc.head import OK_TRAILERS  # noqa: E402
from naiad.frontends.grpc.options import GrpcOptions  # noqa: E402
from naiad.frontends.grpc.server import GrpcFrontend  # noqa: E402
from naiad.frontends.http.app import HttpFrontend  # noqa: E402
from naiad.frontends.http.connection import Connection, Connections  # noqa: E402
from naiad.instances import arena, layout  # noqa: E402
from naiad.instances.busy_poll import AwakeLoop, BusyPoll  # noqa: E402
from naiad.instances.channel import BlockingChannel, FrameReader, encode  # noqa: E402
from naiad.instances.delivery import Batches  # noqa: E402
from naiad.instances.execution import Signature, execution  # noqa: E402
from naiad.instances.frames import Execute, Output, Results, VersionSpec  # noqa: E402
from naiad.instances.host import SocketLink, model_context  # noqa: E402
from naiad.instances.instance import ComputeTimes  # noqa: E402
from naiad.instances.process import Tenant  # noqa: E402
from naiad.instances.process_instance import Limits, ProcessInstance  # noqa: E402
from naiad.messages import InferRequest, InferResponse, ResponseSink, Tensor  # noqa: E402
from naiad.models.check import RequestCheck  # noqa: E402
from naiad.models.model import Model  # noqa: E402
from naiad.models.table import ModelTable, Record  # noqa: E402
from naiad.protocol import json_codec, proto_codec  # noqa: E402
from naiad.protocol.outputs import ALL_JSON  # noqa: E402
from naiad.protocol.regions import Regions  # noqa: E402
from naiad.scheduling.dynamic import DynamicScheduler  # noqa: E402
from naiad.scheduling.ensemble import EnsembleScheduler, members_of  # noqa: E402
from naiad.scheduling.queue import RequestQueue  # noqa: E402
from naiad.scheduling.scheduler import Call, Progress  # noqa: E402
from naiad.statistics import ModelStatistics  # noqa: E402
from naiad.telemetry.log import Log  # noqa: E402

BATCH = 32
ARENA_SIZE = 1 << 20
PROTO = parse_text(
    """
    name: "identity" backend: "python" max_batch_size: 64 dynamic_batching { }
    input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
    """
)
CONFIG = ModelConfig(PROTO)
CONFIG_DICT = to_dict(PROTO)
VALUES = ", ".join(f"{number}.5" for number in range(16))
DATA = bytes(range(64))

JSON_BODY = f'{{"inputs": [{{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [{VALUES}]}}]}}'.encode()
BINARY_HEADER = (
    b'{"inputs":[{"name":"INPUT0","shape":[1,16],"datatype":"FP32","parameters":{"binary_data_size":64}}],'
    b'"outputs":[{"name":"OUTPUT0","parameters":{"binary_data":true}}]}'
)
BINARY_BODY = BINARY_HEADER + DATA
PROTO_BODY = pb.ModelInferRequest(
    model_name="identity",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])],
    raw_input_contents=[DATA],
).SerializeToString()

REQUEST = InferRequest("identity", (Tensor("INPUT0", DataType.FP32, (1, 16), DATA),))
RESPONSE = InferResponse("identity", 1, "", (Tensor("OUTPUT0", DataType.FP32, (1, 16), DATA),))

#: Runs a scenario once; what it returns, if anything, is awaited.
Once = Callable[[], Coroutine[Any, Any, None] | object]


class Scenario(msgspec.Struct):
    name: str
    #: Requests in one run, and counted runs.
    requests: int
    runs: int
    make: Callable[[], Once]


SCENARIOS: list[Scenario] = []


def scenario(name: str, *, requests: int = 1, runs: int) -> Callable[[Callable[[], Once]], Callable[[], Once]]:
    def add(make: Callable[[], Once]) -> Callable[[], Once]:
        SCENARIOS.append(Scenario(name, requests, runs, make))
        return make

    return add


# ---- the interpreter


class _Thing:
    __slots__ = ("name", "size")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size


def _plain_python() -> int:
    things = [_Thing(f"number {number}", number * 3) for number in range(50)]
    by_name = {thing.name: thing for thing in things}
    total = 0
    for name, thing in by_name.items():
        total += len(name) + thing.size if thing.size % 2 else -1
    return sum(thing.size for thing in things) + total + len(", ".join(by_name))


@scenario("the interpreter itself", runs=200)
def interpreter() -> Once:
    """Nothing of Naiad: tells whether two interpreters can be compared."""
    return _plain_python


# ---- protocols


@scenario("JSON request of 16 floats decoded", runs=500)
def json_request() -> Once:
    return lambda: json_codec.decode_request(JSON_BODY, len(JSON_BODY), "identity")


@scenario("binary request of 16 floats decoded", runs=1000)
def binary_request() -> Once:
    return lambda: json_codec.decode_request(BINARY_BODY, len(BINARY_HEADER), "identity")


@scenario("JSON response of 16 floats encoded", runs=500)
def json_response() -> Once:
    return lambda: json_codec.encode_response(RESPONSE, ALL_JSON, {}, True, {})


@scenario("binary response of 16 floats encoded", runs=1000)
def binary_response() -> Once:
    _, plan = json_codec.decode_request(BINARY_BODY, len(BINARY_HEADER), "identity")
    return lambda: json_codec.encode_response(RESPONSE, plan, {}, True, {})


@scenario("gRPC request of 16 floats decoded", runs=500)
def proto_request() -> Once:
    regions = Regions()
    return lambda: proto_codec.decode(*proto_codec.parse_request(PROTO_BODY), CONFIG, regions)


@scenario("gRPC response of 16 floats encoded", runs=1000)
def proto_response() -> Once:
    _, reply = proto_codec.decode(*proto_codec.parse_request(PROTO_BODY), CONFIG, Regions())
    return lambda: proto_codec.encode(RESPONSE, reply, CONFIG, {})


# ---- from the request to the instance and back


@scenario("request checked", runs=1000)
def request_check() -> Once:
    check = RequestCheck(CONFIG)
    return lambda: check(REQUEST)


class _Lease:
    def __init__(self) -> None:
        self.statistics = ModelStatistics("identity", "1")

    def lease(self) -> None: ...

    def release(self) -> None: ...


class _Sink:
    def send(self, result: object, final: bool) -> None: ...


@scenario("request queued and taken", requests=BATCH, runs=12)
def queue() -> Once:
    waiting = RequestQueue(64)
    lease = _Lease()
    calls = [Call(REQUEST, 1, None, _Sink(), lease, None) for _ in range(BATCH)]  # type: ignore[arg-type]

    def once() -> None:
        for call in calls:
            waiting.put(call, call.queued_ns)
        waiting.take(monotonic_ns())
        assert not len(waiting)

    return once


class _Instance:
    """Keeps its batch until it is told to answer."""

    name = "identity_0"
    failure: str | None = None
    losses = 0
    place = ""
    on_change: Any = None

    def __init__(self) -> None:
        self.batch: Any = None

    @property
    def is_available(self) -> bool:
        return self.batch is None

    def execute(self, batch: Any) -> None:
        self.batch = batch

    def answer(self) -> None:
        batch, self.batch = self.batch, None
        for index in range(len(batch.requests)):
            batch.deliver(index, RESPONSE, True)
        batch.complete(ComputeTimes(*[monotonic_ns() for _ in range(4)]))


@scenario("request submitted, batched, delivered", requests=BATCH, runs=12)
def scheduler() -> Once:
    instance, lease, sink = _Instance(), _Lease(), _Sink()
    batcher = DynamicScheduler("identity", RequestQueue(64), [instance], lease.statistics, report=_fail)  # type: ignore[list-item]

    async def once() -> None:
        for _ in range(BATCH):
            batcher.submit(Call(REQUEST, 1, None, sink, lease, batcher))
        while instance.batch is None:
            await turn()
        instance.answer()

    return once


def _member(number: int, source: str, made: str) -> str:
    return f"""{{ model_name: "step{number}" model_version: -1
        input_map {{ key: "INPUT0" value: "{source}" }} output_map {{ key: "OUTPUT0" value: "{made}" }} }}"""


@scenario("ensemble of three steps, between its models", runs=100)
def ensemble() -> Once:
    steps = ", ".join([_member(0, "INPUT0", "first"), _member(1, "first", "second"), _member(2, "second", "OUTPUT0")])
    config = ModelConfig(
        parse_text(
            f"""
            name: "ensemble" platform: "ensemble" max_batch_size: 64 ensemble_scheduling {{ step [ {steps} ] }}
            input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
            output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
            """
        )
    )
    members = members_of(config, {f"step{number}": CONFIG for number in range(3)})
    asked: list[ResponseSink] = []
    lease = _Lease()

    def infer(request: InferRequest, sink: ResponseSink, admitted: bool, progress: Progress) -> Call:
        asked.append(sink)
        return Call(request, 1, None, sink, lease, runner)

    runner = EnsembleScheduler(config, 1, members, lease.statistics, infer, _fail)

    async def once() -> None:
        call = Call(REQUEST, 1, None, _Sink(), lease, runner)
        runner.submit(call)
        for _ in members:
            asked.pop().send(RESPONSE, True)
        assert call.ended
        await turn()

    return once


class _Execution:
    def __init__(self) -> None:
        self.requests = [REQUEST] * BATCH
        self.rows = [1] * BATCH
        self.delivered = 0

    def deliver(self, index: int, result: object, final: bool) -> None:
        self.delivered += 1

    def complete(self, times: object, succeeded: bool = True) -> None: ...


def _results() -> Results:
    """What a host that runs the Python backend answers to a batch of `BATCH`."""
    outputs = [Output("OUTPUT0", DataType.FP32.number, (BATCH, 16), 0, 64 * BATCH, None, None)]
    return Results(0, outputs, [], None, (0, 0, 0, 0), 0)


@scenario("batch laid out, sent, its results delivered", requests=BATCH, runs=12)
def frames() -> Once:
    inputs, outputs = memoryview(bytearray(ARENA_SIZE)), memoryview(bytearray(ARENA_SIZE))
    batches = Batches("identity", 1, decoupled=False)
    results = _results()
    decoder = msgspec.msgpack.Decoder(Results)
    frame = bytearray(8)

    def once() -> None:
        execution = _Execution()
        results.batch = batches.begin(execution)  # type: ignore[arg-type]
        requests = execution.requests
        laid_out = layout.lay_out(requests)
        asked = layout.asked_outputs(requests)
        details = layout.details(requests, asked)
        laid_out.write(inputs)
        encode(Execute(results.batch, laid_out.inputs, execution.rows, asked, details, 0), (), frame)
        answer = encode(results)
        batches.deliver(decoder.decode(memoryview(answer)[8:]), outputs)
        assert execution.delivered == BATCH

    return once


# ---- the whole server


class _FarHost:
    """A process instance, and in place of the process something that answers at once."""

    def __init__(self) -> None:
        host = SimpleNamespace(
            limits=Limits(arena=ARENA_SIZE),
            is_exclusive=True,
            enter=lambda tenant: 1,
            changed=lambda: None,
            kill=_fail,
            connection_lost=lambda reason: None,
            awake=AwakeLoop(asyncio.get_running_loop(), BusyPoll(0)),
        )
        spec = VersionSpec("identity", 1, "", "", "", {})
        tenant = Tenant(host, spec, takes_requests=True, timeout_s=0)  # type: ignore[arg-type]
        self.instance = ProcessInstance(tenant, InstanceContext("identity_0", "KIND_CPU"))
        fd, *_ = self.instance.connect()
        self._channel = BlockingChannel(socket.socket(fileno=fd), msgspec.msgpack.Decoder(Execute))
        self._results = _results()

    def answer(self) -> None:
        received = self._channel.receive()
        assert received is not None
        self._results.batch = received[0].batch
        self._results.times = (monotonic_ns(), monotonic_ns(), monotonic_ns(), monotonic_ns())
        self._channel.send(self._results)


class _Server:
    def __init__(self) -> None:
        self.host = _FarHost()
        statistics = ModelStatistics("identity", "1")
        instance = self.host.instance
        batcher = DynamicScheduler("identity", RequestQueue(64), [instance], statistics, report=_fail)
        instance.attach()
        model = Model(CONFIG, 1, batcher, statistics, {}, None)
        table = ModelTable()
        table.records["identity"] = Record("identity", models={1: model}, latest=model)
        self.engine = Engine(SimpleNamespace(table=table))  # type: ignore[arg-type]

    async def execute(self) -> None:
        """What has been submitted is executed and answered."""
        instance = self.host.instance
        while instance.is_available:
            await turn()
        self.host.answer()
        while not instance.is_available:
            await turn()


class _Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 12345)


def _logged(engine: Engine, protocol: str) -> tuple[Engine, Callable[[], None]]:
    """The engine with the access log around it, and what writes the lines that wait."""
    log = Log()
    log.configure(file=os.devnull)
    return logged(engine, protocol, log), log.flush


def _http(message: bytes, with_access_log: bool = False) -> Once:
    server = _Server()
    engine, flush = _logged(server.engine, "HTTP") if with_access_log else (server.engine, None)
    frontend = HttpFrontend(engine, regions=Regions())
    connections = Connections()
    open_connections = [Connection(frontend, connections) for _ in range(BATCH)]
    transports = [_Transport() for _ in open_connections]
    for connection, transport in zip(open_connections, transports, strict=True):
        connection.connection_made(transport)

    async def once() -> None:
        for connection in open_connections:
            connection.get_buffer(65536)[: len(message)] = message
            connection.buffer_updated(len(message))
        await server.execute()
        for transport in transports:
            (reply,) = transport.written
            assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
            transport.written.clear()
        if flush is not None:
            await turn()
            flush()

    return once


HEAD = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: localhost:8000\r\nContent-Type: %b\r\n%bContent-Length: %d\r\n\r\n"


@scenario("HTTP JSON, from the socket to the reply", requests=BATCH, runs=12)
def http_json() -> Once:
    return _http(HEAD % (b"application/json", b"", len(JSON_BODY)) + JSON_BODY)


_LENGTH = b"Inference-Header-Content-Length: %d\r\n" % len(BINARY_HEADER)
HTTP_BINARY = HEAD % (b"application/octet-stream", _LENGTH, len(BINARY_BODY)) + BINARY_BODY


@scenario("HTTP binary, from the socket to the reply", requests=BATCH, runs=12)
def http_binary() -> Once:
    return _http(HTTP_BINARY)


@scenario("HTTP binary with the access log", requests=BATCH, runs=12)
def http_logged() -> Once:
    return _http(HTTP_BINARY, with_access_log=True)


_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_STREAM, _END_HEADERS = 1, 4
GRPC_HEAD = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/inference.GRPCInferenceService/ModelInfer",
    ":authority": "localhost:8001",
    "te": "trailers",
    "content-type": "application/grpc",
    "user-agent": "grpc-python/1.67.1",
}


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">IBI", len(content) << 8 | kind, flags, stream) + content


@scenario("gRPC, from the socket to the reply", requests=BATCH, runs=12)
def grpc() -> Once:
    return _grpc()


@scenario("gRPC with the access log", requests=BATCH, runs=12)
def grpc_logged() -> Once:
    return _grpc(with_access_log=True)


def _grpc(with_access_log: bool = False) -> Once:
    server = _Server()
    engine, flush = _logged(server.engine, "GRPC") if with_access_log else (server.engine, None)
    frontend = GrpcFrontend(engine, GrpcOptions(), Regions())
    connection = frontend._connect()
    transport = _Transport()
    connection.connection_made(transport)
    encoder = hpack.Encoder()
    numbers = itertools.count(1, 2)
    message = struct.pack(">BI", 0, len(PROTO_BODY)) + PROTO_BODY

    def receive(data: bytes) -> None:
        connection.get_buffer(65536)[: len(data)] = data
        connection.buffer_updated(len(data))

    def call() -> bytes:
        number = next(numbers)
        return _frame(_HEADERS, _END_HEADERS, number, block) + _frame(_DATA, _END_STREAM, number, message)

    first = encoder.encode(GRPC_HEAD)
    receive(PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
    receive(_frame(_HEADERS, _END_HEADERS | _END_STREAM, next(numbers), first))

    # The same as the first one, which the table has now; from here on it stays the same.
    block = encoder.encode(GRPC_HEAD)

    async def once() -> None:
        transport.written.clear()
        receive(b"".join([call() for _ in range(BATCH)]))
        await server.execute()
        await turn()
        assert b"".join(transport.written).count(OK_TRAILERS) == BATCH
        if flush is not None:
            flush()

    return once


# ---- the host


def _no_end(error: str) -> None:
    raise AssertionError(error)


def _host(backend: ArrayBackend | RequestBackend) -> Once:
    mine, theirs = socket.socketpair()
    link = SocketLink(
        theirs, arena.create("inputs", ARENA_SIZE), arena.create("outputs", ARENA_SIZE), BusyPoll(0), _no_end
    )
    target = execution(backend, Signature("identity", "identity_0", CONFIG_DICT), link, 1 << 30)
    laid_out = layout.lay_out([REQUEST] * BATCH)
    laid_out.write(link.inputs)
    frame = Execute(0, laid_out.inputs, [1] * BATCH, (), None, 0)
    reader = FrameReader(msgspec.msgpack.Decoder(Results))
    numbers = itertools.count(1)

    def once() -> None:
        frame.batch = next(numbers)
        mine.sendall(encode(frame))
        received = link.receive()
        assert received is not None
        target.execute(*received, monotonic_ns())
        reader.receive(mine)
        answer = reader.next()
        assert answer is not None
        assert answer[0].failure is None

    return once


@scenario("host, model.py: from the batch to its results", requests=BATCH, runs=12)
def host_of_requests() -> Once:
    path = ROOT / "benchmarks/model_code/identity.py"
    folder = str(path.parent)
    model = model_context(VersionSpec("identity", 1, folder, folder, str(path), {}), CONFIG_DICT, None, Shared(), True)
    return _host(PythonBackend(model, InstanceContext("identity_0", "KIND_CPU")))


class _ArrayIdentity(ArrayBackend):
    def __init__(self) -> None: ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return {"OUTPUT0": inputs["INPUT0"]}


@scenario("host, arrays: from the batch to its results", requests=BATCH, runs=60)
def host_of_arrays() -> Once:
    return _host(_ArrayIdentity())


# ---- counting


def _fail(*what: object) -> None:
    raise AssertionError(f"{what}")


async def turn() -> None:
    """One turn of the event loop."""
    await _Yield()


class _Yield:
    def __await__(self) -> Any:
        yield


async def repeat(once: Once, times: int) -> None:
    for _ in range(times):
        result = once()
        if type(result) is CoroutineType:
            await result


#: void request(uint64_t arguments[6]): the instructions by which valgrind knows a request, on x86-64.
_REQUEST = bytes.fromhex("4889f831d248c1c70348c1c70d48c1c73d48c1c7334887db4889d0c3")
_CALLGRIND = ord("C") << 24 | ord("T") << 16
_ZERO, _DUMP, _START = 1, 3, 4


class Callgrind:
    """The counter that this process runs under."""

    def __init__(self) -> None:
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(_REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._request = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def _ask(self, request: int, text: bytes = b"") -> None:
        pointer = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0
        arguments = (ctypes.c_uint64 * 6)(_CALLGRIND + request, pointer)
        self._request(ctypes.addressof(arguments))

    def start(self) -> None:
        self._ask(_START)

    def zero(self) -> None:
        self._ask(_ZERO)

    def dump(self, text: str) -> None:
        self._ask(_DUMP, text.encode())


async def main() -> None:
    elsewhere = [
        module.__name__
        for name, module in sys.modules.items()
        if name.split(".")[0] == "naiad" and not str(module.__file__).startswith(f"{SOURCES}/")
    ]
    assert not elsewhere, f"these were to be read from {SOURCES}: {elsewhere}"
    counter = Callgrind()
    gc.collect()
    gc.freeze()
    gc.disable()
    counter.start()
    for item in SCENARIOS:
        once = item.make()
        await repeat(once, item.runs // 2 + 5)
        gc.collect()
        counter.zero()
        await repeat(once, item.runs)
        counter.dump(f"{item.runs * item.requests} {item.name}")
        garbage = gc.collect()
        assert garbage < item.runs, f"'{item.name}' leaves {garbage} objects in reference cycles"


if __name__ == "__main__":
    uvloop.run(main())
