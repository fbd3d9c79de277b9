"""`make fuzz`: arbitrary bytes for what reads a client's bytes, guided by coverage (atheris, on libFuzzer).

A reader may refuse with a NaiadError; anything else it raises is a finding, as is what does not agree with itself:

    json      HTTP inference: what is taken and checked can be answered, and the answer is JSON
    generate  the generate extension, the same
    proto     gRPC inference: large messages are split by hand, and must mean what the protobuf library reads in them
    http      an HTTP/1.1 connection: how the bytes are cut into packets must not matter
    http2     an HTTP/2 connection of gRPC, from its first settings on: the same

The corpus of each is kept in a folder of its own, so that a run goes on where the last one ended. An input that fails
is written beside it. Exits with libFuzzer's status, not 0 after a finding.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["naiad.protocol", "naiad.frontends", "naiad.models.check", "hpack"]):
    from naiad.frontends.connections import OpenConnections
    from naiad.frontends.grpc import connection as http2
    from naiad.frontends.grpc import frames, head
    from naiad.frontends.grpc import stream as streams
    from naiad.frontends.http.connection import Connection, Connections, Exchange
    from naiad.models.check import RequestCheck
    from naiad.protocol import generate_codec, json_codec, outputs, proto_codec

from tritonclient.grpc import service_pb2 as pb

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.errors import NaiadError
from naiad.messages import InferRequest, InferResponse, Tensor
from naiad.protocol.json_text import dump
from naiad.protocol.regions import Regions

_TYPES = ("FP32", "INT64", "UINT8", "BOOL", "FP16", "BF16", "STRING")
_CONFIG = ModelConfig(
    parse_text(
        'name: "m" backend: "python" max_batch_size: 4 '
        + " ".join(f'input {{ name: "{t}" data_type: TYPE_{t} dims: [-1] optional: true }}' for t in _TYPES)
        + " ".join(f' output {{ name: "{t}" data_type: TYPE_{t} dims: [-1] }}' for t in _TYPES)
    )
)
_CHECK = RequestCheck(_CONFIG)
_LABELS = {"FP32": ["cat", "dog"]}
#: Texts may hold any bytes; sizes stay small.
_LIMIT = 1 << 16


def _echo(request: InferRequest) -> InferResponse:
    """What a model that returns its inputs answers."""
    checked, _, _ = _CHECK(request)
    tensors = [tensor for tensor in checked.inputs if not request.outputs or tensor.name in request.outputs]
    copies = [Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in tensors]
    return InferResponse("m", 1, request.id, tuple(copies))


def _read_json(text: bytes) -> Any:
    # As bytes of texts that are not UTF-8 go out as they came, so they are read here.
    return json.loads(text.decode("utf-8", "surrogateescape"), strict=False)


def fuzz_json(data: bytes) -> None:
    json_size = data.rfind(b"}") + 1
    plan: outputs.OutputPlan
    try:
        if json_size:
            request, plan = json_codec.decode_request(data, json_size, "m", -1, None, None, _LIMIT)
        else:
            request, plan = json_codec.decode_raw_request(data, _CONFIG, -1, None, _LIMIT)
        response = _echo(request)
    except NaiadError:
        return
    try:
        headers, body = json_codec.encode_response(response, plan, _LABELS, True, {})
    except NaiadError:
        return
    size = dict(headers).get("inference-header-content-length", len(body))
    document = _read_json(body[: int(size)])
    assert [output["name"] for output in document["outputs"]] == [tensor.name for tensor in response.outputs]


def fuzz_generate(data: bytes) -> None:
    try:
        response = _echo(generate_codec.decode_generate(data, _CONFIG, -1, None, _LIMIT))
        document = generate_codec.generate_document(response)
    except NaiadError:
        return
    _read_json(dump(document))


def fuzz_proto(data: bytes) -> None:
    proto_codec.SPLIT_BYTE_SIZE = len(data) + 1
    try:
        message, raw = proto_codec.parse_request(data)
    except NaiadError:
        message = None
    proto_codec.SPLIT_BYTE_SIZE = 0
    try:
        split, split_raw = proto_codec.parse_request(data)
    except NaiadError:
        assert message is None, "only the split message is refused"
        return
    assert message is not None, "only the whole message is refused"
    assert [bytes(part) for part in raw] == [bytes(part) for part in split_raw], "the split has other tensors"
    del message.raw_input_contents[:], split.raw_input_contents[:]
    assert message.SerializeToString(deterministic=True) == split.SerializeToString(deterministic=True)
    try:
        proto_codec.parse_version(split.model_version)
        request, reply = proto_codec.decode(split, split_raw, _CONFIG, Regions(), -1, "ipv4:127.0.0.1:1")
        response = _echo(request)
        encoded = proto_codec.encode(response, reply, _CONFIG, _LABELS)
    except NaiadError:
        return
    answer = pb.ModelInferResponse.FromString(encoded)
    assert [output.name for output in answer.outputs] == [tensor.name for tensor in response.outputs]
    assert len(answer.raw_output_contents) == len(answer.outputs)


class _Application:
    """Refuses /no before the body, answers /later in a later turn and everything else at once."""

    def __init__(self) -> None:
        self.handled: list[tuple[str, str, bytes]] = []

    def accept(self, exchange: Exchange) -> None:
        if exchange.path == "/no":
            exchange.response_bytes(403, [], b"")

    def handle(self, exchange: Exchange) -> None:
        self.handled.append((exchange.method, exchange.path, bytes(exchange.body)))
        if exchange.path == "/later":
            asyncio.get_running_loop().call_soon(exchange.response_bytes, 200, [], b"")
        else:
            exchange.response_bytes(200, [], b"")


class _Transport:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.written = b""
        self.is_closing = False
        self.is_paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        if not self.is_closing:
            self.is_closing = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def get_extra_info(self, name: str) -> Any:
        return _SOCKETS[0] if name == "socket" else None

    def abort(self) -> None:
        raise AssertionError("the client has not left")

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def _receive(connection: Connection | http2.Connection, packet: bytes) -> bytes:
    """Gives a connection what it takes at once of a packet; the rest."""
    buffer = connection.get_buffer(-1)
    count = min(len(buffer), len(packet))
    assert count, "the connection asks for no bytes"
    buffer[:count] = packet[:count]
    connection.buffer_updated(count)
    return packet[count:]


async def _serve(packets: list[bytes]) -> tuple[list[tuple[str, str, bytes]], list[bytes]]:
    """(the requests that were handled, the statuses of the answers)"""
    application = _Application()
    connection = Connection(application, Connections())
    transport = _Transport(connection)
    connection.connection_made(transport)
    for packet in packets:
        while packet and not transport.is_closing:
            if transport.is_paused:
                await asyncio.sleep(0)
                continue
            packet = _receive(connection, packet)
        await asyncio.sleep(0)
    is_answered_to_its_end = transport.is_closing or connection.eof_received()
    if not is_answered_to_its_end:
        transport.close()
    for _ in range(10_000):
        if transport.is_closing:
            break
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    statuses = re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", transport.written)
    if is_answered_to_its_end:
        assert len(application.handled) <= len(statuses), "a request was not answered"
    assert transport.is_closing, "the connection stays when all has been answered"
    return application.handled, statuses


def fuzz_http(data: bytes) -> None:
    # The first byte says how large the packets of the second run are.
    step, data = (data[0] % 64 + 1, data[1:]) if data else (1, data)
    whole = _LOOP.run_until_complete(_serve([data]))
    parts = _LOOP.run_until_complete(_serve([data[at : at + step] for at in range(0, len(data), step)]))
    assert whole == parts, f"packets of {step} bytes make {parts} of {whole}"


class _Calls(streams.Application):
    """Answers each message of /echo with itself, of /later in a later turn, and refuses all other calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def begin(self, stream: streams.Stream) -> None:
        self.seen.append((stream.id, stream.head.path, stream.head.metadata))
        if stream.head.path in ("/echo", "/later"):
            stream.receiver = _Call(self, stream)
        else:
            stream.fail(12, "")


class _Call(streams.Receiver):
    def __init__(self, calls: _Calls, stream: streams.Stream) -> None:
        self._calls = calls
        self._stream = stream

    def received(self, message: bytes | memoryview, is_compressed: bool) -> None:
        self._calls.seen.append((self._stream.id, bytes(message), is_compressed))
        if self._stream.head.path == "/later":
            asyncio.get_running_loop().call_soon(self._stream.send, bytes(message))
        else:
            self._stream.send(bytes(message))

    def ended(self) -> None:
        self._calls.seen.append((self._stream.id, "ended"))
        self._stream.finish(head.OK_TRAILERS)

    def left(self) -> None:
        self._calls.seen.append((self._stream.id, "left"))


class _GrpcTransport(_Transport):
    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        self.write(b"".join(parts))


async def _serve_grpc(packets: list[bytes]) -> list[tuple[Any, ...]]:
    """What is seen of calls, up to what ends the connection."""
    calls = _Calls()
    limits = http2.Limits(7200, 20, False, 2, 300, 2, None, None)
    connection = http2.Connection(calls, OpenConnections(), limits)
    transport = _GrpcTransport(connection)
    connection.connection_made(transport)
    for packet in packets:
        while packet and not transport.is_closing:
            packet = _receive(connection, packet)
    seen = [each for each in calls.seen if each[1] != "left"]
    await asyncio.sleep(0)
    connection.connection_lost(None)
    begun = {each[0] for each in seen}
    assert begun >= {each[0] for each in calls.seen}, "a call is left that has not begun"
    return seen


def fuzz_http2(data: bytes) -> None:
    step, data = (data[0] % 64 + 1, data[1:]) if data else (1, data)
    data = frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, b"") + data
    whole = _LOOP.run_until_complete(_serve_grpc([data]))
    parts = _LOOP.run_until_complete(_serve_grpc([data[at : at + step] for at in range(0, len(data), step)]))
    assert whole == parts, f"packets of {step} bytes make {parts} of {whole}"


_LOOP = asyncio.new_event_loop()
#: What a transport whose client is there shows as its socket, and the client's.
_SOCKETS = socket.socketpair()
_BINARY = {"name": "FP32", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
_TEXT = {"name": "STRING", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "\u00e9\n"]}


def _json_seeds() -> list[bytes]:
    wanted = [
        {"name": "STRING", "parameters": {"binary_data": True}},
        {"name": "FP32", "parameters": {"classification": 2}},
    ]
    parameters = {"sequence_id": 1, "sequence_start": True, "priority": 2, "timeout": 9, "binary_data_output": True}
    region = {"shared_memory_region": "r", "shared_memory_offset": 4, "shared_memory_byte_size": 8}
    data = {"FP32": [1.5, -2e10], "INT64": [-(2**63), 7], "UINT8": [0, 255], "BOOL": [True, 0], "FP16": [1, 2]}
    documents: list[Any] = [
        {"id": "1", "inputs": [_TEXT], "parameters": parameters},
        {"inputs": [{"name": name, "datatype": name, "shape": [1, 2], "data": data[name]} for name in data]},
        {"inputs": [{"name": "BF16", "datatype": "BF16", "shape": [2, 1], "data": [[1.0], [2.0]]}]},
        {"inputs": [{"name": "FP32", "datatype": "FP32", "shape": [1, 2], "parameters": region}]},
    ]
    binary = json.dumps({"inputs": [_BINARY, _TEXT], "outputs": wanted}).encode() + bytes(8)
    return [binary, *[json.dumps(document).encode() for document in documents]]


def _generate_seeds() -> list[bytes]:
    documents = [
        {"id": "1", "STRING": "text", "FP32": [1.5, 2], "other": 3},
        {"INT64": 5, "BOOL": True, "parameters": {"UINT8": 7, "x": "y"}},
    ]
    return [json.dumps(document).encode() for document in documents]


def _proto_seeds() -> list[bytes]:
    def tensor(name: str, datatype: str, **fields: Any) -> Any:
        return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1, 1], **fields)

    contents = pb.InferTensorContents(int64_contents=[-1])
    choice = {"classification": pb.InferParameter(int64_param=2)}
    wanted = pb.ModelInferRequest.InferRequestedOutputTensor(name="FP32", parameters=choice)
    region = {"shared_memory_region": pb.InferParameter(string_param="r")}
    control = {"sequence_id": pb.InferParameter(string_param="a"), "sequence_start": pb.InferParameter(bool_param=True)}
    requests = [
        pb.ModelInferRequest(model_name="m", id="1", inputs=[tensor("FP32", "FP32")], raw_input_contents=[bytes(4)]),
        pb.ModelInferRequest(
            model_name="m", model_version="1", inputs=[tensor("INT64", "INT64", contents=contents)], parameters=control
        ),
        pb.ModelInferRequest(
            inputs=[tensor("FP32", "FP32"), tensor("STRING", "BYTES")],
            raw_input_contents=[bytes(4), b"\1\0\0\0a"],
            outputs=[wanted],
        ),
        pb.ModelInferRequest(inputs=[tensor("FP32", "FP32", parameters=region)]),
    ]
    return [request.SerializeToString() for request in requests]


def _http_seeds() -> list[bytes]:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
    return [
        b"\0GET /a?b HTTP/1.1\r\nHost: x\r\n\r\nGET /later HTTP/1.1\r\n\r\nGET /b HTTP/1.0\r\n\r\n",
        b"\7POST /later HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhelloGET /b HTTP/1.1\r\n\r\n",
        b"\3POST /no HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloPOST /a HTTP/1.1\r\nContent-Length: 1\r\n\r\n1",
        b"\1POST /a HTTP/1.1\r\n" + chunked,
        b"\5POST /no HTTP/1.1\r\nContent-Length: 3\r\nConnection: close\r\n" + chunked,
        b"\x09GET http://host/a HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nHEAD /a HTTP/1.1\r\n\r\n",
    ]


def _http2_seeds() -> list[bytes]:
    def call(stream: int, path: bytes, *more: tuple[bytes, bytes], flags: int = frames.END_HEADERS) -> bytes:
        pairs = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"te", b"trailers"), *more]
        block = b"".join([head.literal(*pair) for pair in pairs])
        return frames.frame(frames.HEADERS, flags, stream, block)

    def message(stream: int, content: bytes, flags: int = frames.END_STREAM) -> bytes:
        return frames.frame(frames.DATA, flags, stream, frames.PREFIX.pack(0, len(content)) + content)

    number = frames.NUMBER.pack
    padded = frames.frame(
        frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\2" + frames.PREFIX.pack(1, 1) + b"x\0\0"
    )
    return [
        b"\0" + call(1, b"/echo") + message(1, b"abc") + call(3, b"/later") + message(3, b"d", 0) + message(3, b""),
        b"\7" + call(1, b"/echo", (b"grpc-timeout", b"5S"), (b"x-bin", b"AAE")) + padded,
        b"\3" + call(1, b"/none") + frames.frame(frames.PING, 0, 0, bytes(8)) + frames.frame(9, 0, 1, b""),
        b"\1" + call(1, b"/echo", flags=0) + frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b""),
        b"\5" + frames.frame(frames.WINDOW_UPDATE, 0, 0, number(9)) + call(1, b"/later") + message(1, b"x" * 99),
        b"\x09"
        + frames.frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 3))
        + call(1, b"/echo")
        + message(1, b"12345", 0)
        + frames.frame(frames.RST_STREAM, 0, 1, number(8))
        + frames.frame(frames.GOAWAY, 0, 0, bytes(8)),
    ]


_TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "json": (fuzz_json, _json_seeds),
    "generate": (fuzz_generate, _generate_seeds),
    "proto": (fuzz_proto, _proto_seeds),
    "http": (fuzz_http, _http_seeds),
    "http2": (fuzz_http2, _http2_seeds),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=_TARGETS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"), help="the folder of all corpora")
    parser.add_argument("--repeat", type=Path, help="run one input, such as one that failed, and end")
    arguments = parser.parse_args()
    target, seeds = _TARGETS[arguments.target]
    if arguments.repeat is not None:
        target(arguments.repeat.read_bytes())
        return
    corpus = arguments.corpus / arguments.target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    failed = f"{corpus}-failed-"
    print(f"to repeat a failure: {sys.executable} {sys.argv[0]} {arguments.target} --repeat={failed}...", flush=True)
    limits = [f"-max_total_time={int(60 * arguments.minutes)}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={failed}", os.fspath(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
