"""The HTTP front end through a real socket, with an engine whose models are in memory."""

import asyncio
import base64
import gzip
import json
import random
import socket
import struct
import threading
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_fake_engine import FakeEngine, FakeSettings
from http_raw_client import Client, read_answer, request_bytes

from naiad.errors import InvalidArgument, Unavailable
from naiad.frontends.http import compression, generate, inference, management
from naiad.frontends.http.app import HttpFrontend
from naiad.frontends.http.head import RequestHeaders
from naiad.frontends.http.metrics import MetricsFrontend
from naiad.messages import SequenceControl
from naiad.options import Restriction
from naiad.protocol.regions import Regions

INFER = "/v2/models/add_sub/infer"
UNKNOWN = "Request for unknown model: 'nonesuch' is not found"
RAW_TWO = (
    "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in "
    "'add_sub' model configuration"
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    async with HttpFrontend(engine, address="127.0.0.1", port=0, regions=Regions(), grace_s=5) as front_end:
        yield Client(front_end.bound_port)


def ints(name: str, values: list[int], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": "INT32", "shape": shape or [len(values)], "data": values}


def binary(name: str, shape: list[int], byte_size: int, datatype: str = "INT32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": byte_size}}


ADD_SUB = {"inputs": [ints("INPUT0", [1, 2, 3, 4]), ints("INPUT1", [10, 20, 30, 40])]}
ADD_SUB_ANSWER = {
    "model_name": "add_sub",
    "model_version": "1",
    "outputs": [
        {"name": "OUTPUT0", "datatype": "INT32", "shape": [4], "data": [11, 22, 33, 44]},
        {"name": "OUTPUT1", "datatype": "INT32", "shape": [4], "data": [-9, -18, -27, -36]},
    ],
}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A shared memory object with the numbers of `ADD_SUB` and room for two outputs."""
    path = Path(f"/dev/shm/naiad_test_{uuid.uuid4().hex}")
    path.write_bytes(struct.pack("<16i", 1, 2, 3, 4, 10, 20, 30, 40, *[0] * 8))
    yield path
    path.unlink()


def read(path: Path) -> bytes:
    return path.read_bytes()


class TestInfer:
    async def test_json(self, client: Client) -> None:
        answer = await client.post(INFER, ADD_SUB)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.json == ADD_SUB_ANSWER

    async def test_version_and_query(self, client: Client) -> None:
        assert (await client.post("/v2/models/add_sub/versions/1/infer?x=1", ADD_SUB)).json == ADD_SUB_ANSWER

    async def test_id_and_one_output(self, client: Client) -> None:
        answer = await client.post(INFER, ADD_SUB | {"id": "r1", "outputs": [{"name": "OUTPUT1"}]})
        assert answer.json == {"id": "r1", **ADD_SUB_ANSWER, "outputs": ADD_SUB_ANSWER["outputs"][1:]}

    async def test_binary_in_and_out(self, client: Client) -> None:
        document = {
            "inputs": [binary("INPUT0", [4], 16), ints("INPUT1", [1, 1, 1, 1])],
            "outputs": [{"name": "OUTPUT1"}, {"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        }
        answer = await client.post_binary(INFER, document, struct.pack("<4i", 1, 2, 3, 4))
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.tail == struct.pack("<4i", 2, 3, 4, 5)
        head = json.loads(answer.body[: -len(answer.tail)])
        assert [output.get("data") for output in head["outputs"]] == [None, [0, 1, 2, 3]]
        assert head["outputs"][0]["parameters"] == {"binary_data_size": 16}

    async def test_buffers_may_change_after_send(self, client: Client) -> None:
        answer = await client.post(INFER, ADD_SUB | {"parameters": {"binary_data_output": True}})
        assert answer.tail == struct.pack("<8i", 11, 22, 33, 44, -9, -18, -27, -36)

    async def test_raw_request(self, client: Client) -> None:
        data = struct.pack("<3i", 7, 8, 9)
        answer = await client.post("/v2/models/ident_i32/infer", data, {"Inference-Header-Content-Length": "0"})
        assert answer.tail == data
        assert b'"shape":[1,3]' in answer.body

    @pytest.mark.parametrize(
        ("path", "body", "headers", "error"),
        [
            ("/v2/models/nonesuch/infer", ADD_SUB, {}, (404, "text/plain", UNKNOWN)),
            (
                "/v2/models/add_sub/versions/2/infer",
                ADD_SUB,
                {},
                (404, "text/plain", "Request for unknown model: 'add_sub' version 2 is not found"),
            ),
            (
                INFER,
                b'{"inputs": [',
                {},
                (500, "application/json", "failed to parse the request JSON buffer: Invalid value. at 12"),
            ),
            (INFER, b"", {}, (400, "application/json", RAW_TWO)),
            (INFER, ADD_SUB, {"Inference-Header-Content-Length": "ten"}, (400, "application/json", RAW_TWO)),
            (
                INFER,
                b"{}",
                {"Inference-Header-Content-Length": "99999999999999999999"},
                (
                    400,
                    "text/plain",
                    "inference header size should be in range (0, 2), got: 99999999999999999999",
                ),
            ),
            (INFER, ADD_SUB, {"Content-Encoding": "br"}, (501, "text/plain", "Unsupported compression type")),
            (INFER, ADD_SUB, {"Content-Encoding": "gzip"}, (400, "application/json", RAW_TWO)),
            (INFER, b"", {"Content-Encoding": "gzip"}, (400, "text/plain", "nothing to be decompressed")),
            (
                INFER,
                ADD_SUB | {"outputs": [{"name": "NOPE"}]},
                {},
                (400, "application/json", "unexpected inference output 'NOPE' for model 'add_sub'"),
            ),
            (
                "/v2/models/gen_decoupled/infer",
                {},
                {},
                (501, "text/plain", "HTTP end point doesn't support models with decoupled transaction policy"),
            ),
            (
                "/v2/models/fails/infer",
                {"inputs": [ints("INPUT0", [1])]},
                {},
                (500, "text/plain", "the model failed"),
            ),
            (
                "/v2/models/ident_fp16/infer",
                {"inputs": [{"name": "INPUT0", "datatype": "FP16", "shape": [1, 1], "data": [1]}]},
                {},
                (
                    400,
                    "application/json",
                    "receiving FP16 data via JSON is not supported. Please use the binary data format for input INPUT0",
                ),
            ),
            *(
                (
                    f"/v2/models/add_sub/versions/{version}/infer",
                    ADD_SUB,
                    {},
                    (
                        400,
                        "text/plain",
                        f"failed to get model version from specified version string '{version}' (details: stol), "
                        "version should be an integral value > 0",
                    ),
                )
                for version in (f"{2**63}", "9" * 19, "9" * 5000)
            ),
            (
                f"/v2/models/add_sub/versions/{'0' * 5000}2/infer",
                ADD_SUB,
                {},
                (404, "text/plain", "Request for unknown model: 'add_sub' version 2 is not found"),
            ),
        ],
    )
    async def test_errors(
        self, client: Client, path: str, body: Any, headers: dict[str, str], error: tuple[int, str, str]
    ) -> None:
        assert (await client.post(path, body, headers)).error == error

    async def test_unknown_encoding_names_the_known_ones(self, client: Client) -> None:
        answer = await client.post(INFER, ADD_SUB, {"Content-Encoding": "br"})
        assert answer.headers["accept-encoding"] == "gzip, deflate"

    async def test_fp16_output_as_json_is_refused(self, client: Client) -> None:
        answer = await client.post_binary(
            "/v2/models/ident_fp16/infer", {"inputs": [binary("INPUT0", [1, 1], 2, "FP16")]}, b"\0\0"
        )
        assert answer.error == (
            400,
            "text/plain",
            "sending FP16 data via JSON is not supported. Please use the binary data format for output",
        )

    async def test_classification(self, client: Client) -> None:
        scores = {"name": "SCORES", "datatype": "FP32", "shape": [1, 4], "data": [0.1, 0.7, 0.2, 0.4]}
        wanted = {"name": "LABELLED", "parameters": {"classification": 3}}
        answer = await client.post("/v2/models/classify/infer", {"inputs": [scores], "outputs": [wanted]})
        assert answer.json["outputs"] == [
            {
                "name": "LABELLED",
                "datatype": "BYTES",
                "shape": [1, 3],
                "data": ["0.700000:1:dog", "0.400000:3", "0.200000:2:fox"],
            }
        ]

    async def test_bytes_that_are_not_utf8_come_back_as_they_are(self, client: Client) -> None:
        body = b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1,1],"data":["\xff\xfe"]}]}'
        answer = await client.post("/v2/models/ident_bytes/infer", body)
        assert b'"data":["\xff\xfe"]' in answer.body

    async def test_large_json_goes_through_a_thread(self, client: Client) -> None:
        values = np.arange(200_000, dtype=np.float32) / 3
        document = {
            "inputs": [
                {"name": "INPUT0", "datatype": "FP32", "shape": [1, len(values)], "data": values.astype(float).tolist()}
            ]
        }
        answer = await client.post("/v2/models/ident_fp32/infer", document)
        assert np.array_equal(np.array(answer.json["outputs"][0]["data"], np.float32), values)

    async def test_a_model_that_becomes_decoupled_while_a_large_request_is_read(
        self, client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decode_request = inference.decode_request

        def replace(*given: Any) -> Any:
            engine.models["add_sub"] = engine.models["gen_decoupled"]
            return decode_request(*given)

        monkeypatch.setattr(inference, "decode_request", replace)
        answer = await client.post(INFER, json.dumps(ADD_SUB).encode() + b" " * (1 << 20))
        text = "HTTP end point doesn't support models with decoupled transaction policy"
        assert answer.error == (501, "application/json", text)

    @pytest.mark.parametrize("binary", [False, True])
    async def test_classes_of_large_outputs_are_found_in_a_thread(
        self, client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, binary: bool
    ) -> None:
        threads = note_threads(monkeypatch, inference, "encode_response")
        wish = {"name": "OUTPUT0", "parameters": {"classification": 1, "binary_data": binary}}
        document = {"inputs": [ints("INPUT0", [1])], "outputs": [wish]}
        for count in (2, 300_000):
            asking = asyncio.ensure_future(client.post("/v2/models/held/infer", document))
            (await engine.calls.get()).send({"OUTPUT0": np.arange(count, dtype=np.int32)}, True)
            assert b"%d:%d" % (count - 1, count - 1) in (await asking).body
        assert threads == [True, False]

    async def test_a_large_response_that_cannot_be_written_is_answered(
        self, client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*given: Any) -> Any:
            raise MemoryError("no room")

        monkeypatch.setattr(inference, "encode_response", fail)
        asking = asyncio.ensure_future(client.post("/v2/models/held/infer", {"inputs": [ints("INPUT0", [1])]}))
        (await engine.calls.get()).send({"OUTPUT0": np.zeros(300_000, np.int32)}, True)
        answer = await asyncio.wait_for(asking, 20)
        assert answer.error == (500, "text/plain", "unexpected error: MemoryError('no room')")

    async def test_large_body_in_chunks(self, client: Client) -> None:
        body = json.dumps(ADD_SUB).encode()
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 50]), body[i : i + 50]) for i in range(0, len(body), 50))
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        writer.write(chunks + b"0\r\n\r\n")
        assert (await read_answer(reader)).json == ADD_SUB_ANSWER
        writer.close()

    async def test_connection_is_kept(self, client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for _ in range(3):
            writer.write(request_bytes("POST", INFER, json.dumps(ADD_SUB).encode(), {}))
            assert (await read_answer(reader)).json == ADD_SUB_ANSWER
        writer.close()

    async def test_expect_continue(self, client: Client) -> None:
        body = json.dumps(ADD_SUB).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(
            f"POST {INFER} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        await reader.readline()
        writer.write(body)
        assert (await read_answer(reader)).json == ADD_SUB_ANSWER
        writer.close()

    async def test_parameters_reach_the_engine(self, client: Client, engine: FakeEngine) -> None:
        parameters = {
            "sequence_id": 9,
            "sequence_start": True,
            "priority": 3,
            "timeout": 5,
            "a": "b",
            "n": -3,
            "f": 0.5,
        }
        await client.post("/v2/models/reveal/infer", {"parameters": parameters, "inputs": [ints("INPUT0", [1])]})
        (request,) = engine.requests
        assert request.sequence == SequenceControl(9, True, False)
        assert (request.priority, request.timeout_us) == (3, 5)
        assert request.parameters == {"a": "b", "n": -3, "f": 0.5}


class TestCompression:
    async def test_what_is_large_decompressed_is_decompressed_in_a_thread(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: dict[bool, int] = {}
        decompress = inference.decompress

        def noted(body: bytes, max_size: int) -> bytes:
            sizes[threading.current_thread() is threading.main_thread()] = max_size
            return decompress(body, max_size)

        monkeypatch.setattr(inference, "decompress", noted)
        body = json.dumps(ADD_SUB).encode() + b" " * (8 << 20)
        answer = await client.post(INFER, gzip.compress(body), {"Content-Encoding": "gzip"})
        assert answer.json == ADD_SUB_ANSWER
        assert sizes == {True: 1 << 20, False: 64 << 20}

    @pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    async def test_request(self, client: Client, encoding: str, compress: Any) -> None:
        body = compress(json.dumps(ADD_SUB).encode())
        assert (await client.post(INFER, body, {"Content-Encoding": encoding})).json == ADD_SUB_ANSWER

    @pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    async def test_what_is_damaged_is_refused_and_what_is_cut_short_is_read(
        self, client: Client, encoding: str, compress: Any
    ) -> None:
        body = compress(json.dumps(ADD_SUB).encode())
        headers = {"Content-Encoding": encoding}
        for damaged in (body[:-4] + bytes(4), body[:8] + b"\xff" * 40 + body[48:]):
            answer = await client.post(INFER, damaged, headers)
            assert answer.status == 400
            assert b"the request's body cannot be decompressed, it is damaged: " in answer.body
        assert (await client.post(INFER, body[:-4], headers)).json == ADD_SUB_ANSWER

    @pytest.mark.parametrize(
        ("accepted", "encoding"),
        [
            ("gzip", "gzip"),
            ("deflate", "deflate"),
            ("identity", None),
            ("br", None),
            ("br, gzip;q=0.5, deflate;q=0.9", "deflate"),
            ("gzip;q=0, deflate", "deflate"),
            ("identity, gzip", None),
        ],
    )
    async def test_response(self, client: Client, accepted: str, encoding: str | None) -> None:
        answer = await client.post(INFER, ADD_SUB, {"Accept-Encoding": accepted})
        assert answer.headers.get("content-encoding") == encoding
        body = answer.body if encoding is None else zlib.decompress(answer.body, zlib.MAX_WBITS | 32)
        assert json.loads(body) == ADD_SUB_ANSWER

    async def test_errors_are_not_compressed(self, client: Client) -> None:
        answer = await client.post(INFER, {"inputs": []}, {"Accept-Encoding": "gzip"})
        assert "content-encoding" not in answer.headers
        assert answer.status == 400

    async def test_metadata_is_not_compressed(self, client: Client) -> None:
        answer = await client.get("/v2/models/add_sub", {"Accept-Encoding": "gzip"})
        assert answer.json["name"] == "add_sub"

    async def test_a_large_body_is_not_copied_at_each_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken = 0

        class Counted:
            """A decompressor that says how much it has been given."""

            def __init__(self, *given: Any) -> None:
                self._stream = decompressor(*given)

            def decompress(self, data: bytes, most: int = 0) -> bytes:
                nonlocal taken
                taken += len(data)
                return self._stream.decompress(data, most)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._stream, name)

        decompressor = zlib.decompressobj
        monkeypatch.setattr(zlib, "decompressobj", Counted)
        plain = random.Random(1).randbytes(4 << 20) + bytes(4 << 20)
        body = zlib.compress(plain, 1)
        assert compression.decompress(memoryview(body), len(plain)) == plain
        assert taken < 2 * len(body)
        with pytest.raises(InvalidArgument):
            compression.decompress(body, len(plain) - 1)

    async def test_bomb(self, engine: FakeEngine) -> None:
        async with HttpFrontend(engine, address="127.0.0.1", port=0, max_input_size=1000) as front_end:
            answer = await Client(front_end.bound_port).post(
                INFER, gzip.compress(b" " * 100_000), {"Content-Encoding": "gzip"}
            )
        assert answer.status == 400
        assert "--http-max-input-size" in answer.json["error"]


class TestCancellation:
    async def test_client_that_leaves_cancels_its_call(self, client: Client, engine: FakeEngine) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps({"inputs": [ints("INPUT0", [1])]}).encode()
        writer.write(request_bytes("POST", "/v2/models/held/infer", body, {}))
        call = await engine.calls.get()
        writer.close()
        await asyncio.wait_for(call.cancelled.wait(), 10)

    @pytest.mark.parametrize(
        ("action", "module", "decode"),
        [
            ("infer", inference, "decode_request"),
            ("infer_stream", inference, "decode_request"),
            ("generate", generate, "decode_generate"),
        ],
    )
    async def test_a_request_whose_client_leaves_while_it_is_read_is_not_run(
        self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, action: str, module: Any, decode: str
    ) -> None:
        decoded, begun, go_on = getattr(module, decode), threading.Event(), threading.Event()

        def slow(*given: Any) -> Any:
            begun.set()
            assert go_on.wait(20)
            return decoded(*given)

        monkeypatch.setattr(module, decode, slow)
        async with HttpFrontend(engine, address="127.0.0.1", port=0, grace_s=10) as front_end:
            document = {"INPUT0": [1]} if action == "generate" else {"inputs": [ints("INPUT0", [1])]}
            body = json.dumps(document).encode() + b" " * (1 << 20)
            _, writer = await asyncio.open_connection("127.0.0.1", front_end.bound_port)
            writer.write(request_bytes("POST", f"/v2/models/held/{action}", body, {}))
            assert await asyncio.to_thread(begun.wait, 20)
            writer.close()
            await asyncio.wait_for(front_end._listener.connections.gone(), 20)
            go_on.set()
            await asyncio.wait_for(asyncio.gather(*front_end._tasks), 20)
        assert engine.calls.empty()

    async def test_stream_that_is_left_cancels_its_call(self, client: Client, engine: FakeEngine) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_bytes("POST", "/v2/models/held/generate_stream", b'{"INPUT0":[1]}', {}))
        call = await engine.calls.get()
        writer.close()
        await asyncio.wait_for(call.cancelled.wait(), 10)


async def test_clients_on_this_machine_are_known_by_either_family(engine: FakeEngine, memory: Path) -> None:
    for address in ("127.0.0.1", "::1"):
        async with HttpFrontend(engine, address=address, port=0, regions=Regions(), grace_s=1) as front_end:
            reader, writer = await asyncio.open_connection(address, front_end.bound_port)
            body = json.dumps({"key": f"/{memory.name}", "byte_size": 64}).encode()
            writer.write(request_bytes("POST", "/v2/systemsharedmemory/region/r/register", body, {}))
            assert (await read_answer(reader)).status == 200
            writer.close()


class TestLifecycle:
    async def test_requests_in_flight_are_finished(self, engine: FakeEngine) -> None:
        async with HttpFrontend(engine, address="127.0.0.1", port=0, grace_s=10) as front_end:
            client = Client(front_end.bound_port)
            answer = asyncio.create_task(client.post("/v2/models/held/infer", {"inputs": [ints("INPUT0", [1])]}))
            call = await engine.calls.get()
            asyncio.get_running_loop().call_later(0.2, call.send, {"OUTPUT0": np.array([5], np.int32)}, True)
        assert (await answer).json["outputs"][0]["data"] == [5]
        with pytest.raises(OSError, match=r"."):
            await client.get("/v2/health/live")

    async def test_leaving_ends_at_the_deadline(self, engine: FakeEngine) -> None:
        async with (
            asyncio.timeout(10),  # nobody answers the request: without the deadline this would never end
            HttpFrontend(engine, address="127.0.0.1", port=0, grace_s=0.1) as front_end,
        ):
            client = Client(front_end.bound_port)
            answer = asyncio.create_task(client.post("/v2/models/held/infer", {"inputs": [ints("INPUT0", [1])]}))
            await engine.calls.get()
        answer.cancel()

    async def test_port_in_use(self, engine: FakeEngine) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            front_end = HttpFrontend(engine, address="127.0.0.1", port=port)
            with pytest.raises(
                Unavailable,
                match=rf"^failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use",
            ):
                await front_end.__aenter__()

    async def test_port_shared_on_request(self, engine: FakeEngine) -> None:
        async with HttpFrontend(engine, address="127.0.0.1", port=0, reuse_port=True, grace_s=1) as first:
            second = HttpFrontend(engine, address="127.0.0.1", port=first.bound_port, reuse_port=True, grace_s=1)
            async with second:
                assert (await Client(first.bound_port).get("/v2/health/live")).status == 200

    async def test_bad_header_pattern(self, engine: FakeEngine) -> None:
        with pytest.raises(InvalidArgument, match="invalid header forward pattern"):
            HttpFrontend(engine, header_forward_pattern="(")


class TestRoutes:
    @pytest.mark.parametrize(
        ("method", "path", "error"),
        [
            ("GET", INFER, (405, "text/plain", "Method Not Allowed")),
            ("OPTIONS", INFER, (405, "text/plain", "Method Not Allowed")),
            ("GET", "/v2/models/add_sub/generate_stream", (405, "application/json", "Method Not Allowed")),
            ("POST", "/v2/health/live", (405, "text/plain", "Method Not Allowed")),
            ("PUT", "/v2/models/add_sub", (405, "application/json", "Method Not Allowed")),
            ("GET", "/v2/repository/index", (405, "application/json", "Method Not Allowed")),
            ("PUT", "/v2/trace/setting", (405, "application/json", "Method Not Allowed")),
            ("POST", "/v2/systemsharedmemory/status", (405, "application/json", "Method Not Allowed")),
            ("GET", "/v2/systemsharedmemory/region/r/register", (405, "application/json", "Method Not Allowed")),
            ("GET", "/v2/", (404, "text/plain", "Not Found")),
            ("GET", "/v2/models", (404, "text/plain", "Not Found")),
            ("GET", "/V2/health/live", (404, "text/plain", "Not Found")),
            ("GET", "/v2//health/live", (404, "text/plain", "Not Found")),
            ("POST", INFER + "/", (404, "text/plain", "Not Found")),
            ("GET", "/v2/models/add_sub/versions//ready", (404, "text/plain", "Not Found")),
            ("GET", "/v2/models/add_sub/versions/one/ready", (404, "text/plain", "Not Found")),
            ("GET", "/v2/models/add_sub/versions/abc/config", (404, "text/plain", "Not Found")),
            ("GET", "/v2/models/add_sub/versions/1/trace/setting", (404, "text/plain", "Not Found")),
            ("POST", "/v2/repository/models/add_sub", (404, "text/plain", "Not Found")),
            (
                "GET",
                "/v2/models/add%2Fsub",
                (404, "application/json", "Request for unknown model: 'add%2Fsub' is not found"),
            ),
            (
                "GET",
                "/v2/models/a%20b/config",
                (404, "application/json", "Request for unknown model: 'a%20b' is not found"),
            ),
            (
                "POST",
                "/v2/repository/myrepo/models/x/load",
                (501, "application/json", "'repository_name' specification is not supported"),
            ),
        ],
    )
    async def test_refused(self, client: Client, method: str, path: str, error: tuple[int, str, str]) -> None:
        assert (await client.send(method, path)).error == error

    async def test_restricted(self, engine: FakeEngine) -> None:
        restricted = (Restriction(frozenset(("inference", "logging")), "Team", "blue"),)
        async with HttpFrontend(
            engine, address="127.0.0.1", port=0, restricted_apis=restricted, log_settings=FakeSettings(), grace_s=1
        ) as front_end:
            client = Client(front_end.bound_port)
            refused = (403, "text/plain", "This API is restricted, expecting header 'Team'")
            for method, path in [
                ("POST", INFER),
                ("GET", INFER),
                ("POST", "/v2/models/nonesuch/infer"),
                ("POST", "/v2/models/add_sub/generate"),
                ("GET", "/v2/logging"),
            ]:
                assert (await client.send(method, path)).error == refused
            assert (await client.post(INFER, ADD_SUB, {"TEAM": "red"})).error == refused
            assert (await client.post(INFER, ADD_SUB, {"TEAM": "blue"})).status == 200
            assert (await client.get("/v2/health/live")).status == 200
            assert (await client.get("/v2/unknown")).status == 404

    async def test_forwarded_headers(self, engine: FakeEngine) -> None:
        async with HttpFrontend(
            engine, address="127.0.0.1", port=0, header_forward_pattern="(X-.*|color)", grace_s=1
        ) as front_end:
            await Client(front_end.bound_port).post(
                "/v2/models/reveal/infer",
                {"inputs": [ints("INPUT0", [1])]},
                {"X-Color": "red", "Other": "no", "X-Utf-8": "\xe9"},
            )
        assert engine.requests[0].parameters == {"X-Color": "red", "X-Utf-8": "\xe9"}

    def test_values_that_are_not_utf8_are_latin1(self) -> None:
        headers = RequestHeaders()
        headers.add(b"X-Latin-1", b"\xe9")
        assert inference.HeaderForwarding("X-")(headers) == {"X-Latin-1": "\xe9"}


class TestManagement:
    async def test_health(self, client: Client, engine: FakeEngine) -> None:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/add_sub/ready"):
            answer = await client.get(path)
            assert (answer.status, answer.headers["content-type"], answer.body) == (200, "text/plain", b"")
        engine.ready = False
        answer = await client.get("/v2/health/ready")
        assert (answer.status, answer.body) == (400, b"")
        assert (await client.get("/v2/models/nonesuch/ready")).error == (400, "text/plain", "Model version not ready")
        engine.exiting = True
        assert (await client.get("/v2/health/live")).error == (503, "text/plain", "Server exiting")

    async def test_metadata(self, client: Client) -> None:
        assert (await client.get("/v2")).json == {
            "name": "triton",
            "version": "2.51.0",
            "extensions": ["classification", "sequence"],
        }
        answer = await client.get("/v2/models/ident_i32/versions/1")
        assert answer.json["inputs"] == [{"name": "INPUT0", "datatype": "INT32", "shape": [-1, -1]}]
        assert (await client.get("/v2/models/add_sub/config")).json["backend"] == "python"
        assert (await client.get("/v2/models/nonesuch")).error == (404, "application/json", UNKNOWN)

    async def test_statistics(self, client: Client) -> None:
        assert (await client.get("/v2/models/stats")).json["model_stats"][0]["name"] == "all"
        assert (await client.get("/v2/models/add_sub/stats")).json["model_stats"][0]["name"] == "add_sub"
        assert (await client.get("/v2/models/nonesuch/stats")).error == (
            400,
            "application/json",
            "requested model 'nonesuch' is not available",
        )

    async def test_index(self, client: Client) -> None:
        everything = [
            {"name": "add_sub", "version": "1", "state": "READY"},
            {"name": "never"},
            {"name": "x", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"},
        ]
        assert (await client.post("/v2/repository/index")).json == everything
        assert (await client.post("/v2/repository/named/index", {"ready": True})).json == everything[:1]
        assert (await client.post("/v2/repository/index", {"ready": 1})).status == 500

    async def test_load_and_unload(self, client: Client, engine: FakeEngine) -> None:
        answer = await client.post("/v2/repository/models/m/load")
        assert (answer.status, answer.headers["content-type"], answer.body) == (200, "application/json", b"")
        await client.post("/v2/repository/models/m/load", {"parameters": {"config": "{}", "file:1/model.py": "YWJj"}})
        await client.post("/v2/repository/models/m/load", {"parameters": {"file:1/model.py": "Y%WI"}})
        await client.post("/v2/repository/models/m/unload", {"parameters": {"unload_dependents": True}})
        assert engine.loaded == [
            ("m", {}),
            ("m", {"config": "{}", "file:1/model.py": b"abc"}),
            ("m", {"file:1/model.py": b"ab"}),
            ("m", True),
        ]

    @pytest.mark.parametrize("body", [b"{", b"[]", {"parameters": 1}, {"parameters": {"unload_dependents": 1}}])
    async def test_unloading_does_without_a_body_that_cannot_be_read(
        self, client: Client, engine: FakeEngine, body: Any
    ) -> None:
        assert (await client.post("/v2/repository/models/m/unload", body)).status == 200
        assert engine.loaded == [("m", False)]

    async def test_large_files_of_a_load_are_read_in_a_thread(
        self, client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = note_threads(monkeypatch, management, "parse")
        content = bytes(1 << 20)
        file = base64.b64encode(content).decode()
        await client.post("/v2/repository/models/m/load", {"parameters": {"file:1/model.onnx": file}})
        assert engine.loaded == [("m", {"file:1/model.onnx": content})]
        assert threads == [False]

    @pytest.mark.parametrize(
        ("body", "error"),
        [
            (b"{", "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
            ({"parameters": [1]}, "attempt to get members for non-object"),
            ({"parameters": {"colour": "red"}}, "unexpected error on creating Triton parameter"),
            ({"parameters": {"colour": 5}}, "attempt to access JSON non-string as string"),
            ({"parameters": {"config": 5}}, "attempt to access JSON non-string as string"),
        ],
    )
    async def test_load_errors(self, client: Client, body: Any, error: str) -> None:
        assert (await client.post("/v2/repository/models/m/load", body)).error == (500, "application/json", error)

    async def test_settings(self, engine: FakeEngine) -> None:
        trace, log = FakeSettings(), FakeSettings()
        async with HttpFrontend(
            engine, address="127.0.0.1", port=0, trace_settings=trace, log_settings=log, grace_s=1
        ) as front_end:
            client = Client(front_end.bound_port)
            assert (await client.get("/v2/logging")).json == {"level": 0}
            assert (await client.post("/v2/logging", {"level": 2})).json == {"level": 2}
            await client.get("/v2/trace/setting")
            await client.post("/v2/models/add_sub/trace/setting", {})
            assert trace.models == [None, "add_sub"]
            assert (await client.get("/v2/models/nonesuch/trace/setting")).error == (
                400,
                "application/json",
                "Request for unknown model : nonesuch",
            )

    @pytest.mark.parametrize(
        "path",
        [
            "/v2/logging",
            "/v2/trace/setting",
            "/v2/models/add_sub/trace/setting",
            "/v2/repository/index",
            "/v2/systemsharedmemory/region/r/register",
            "/v2/cudasharedmemory/region/r/register",
        ],
    )
    async def test_what_is_read_on_the_loop_may_not_be_large(self, engine: FakeEngine, path: str) -> None:
        settings: Any = {"trace_settings": FakeSettings(), "log_settings": FakeSettings()}
        async with HttpFrontend(engine, address="127.0.0.1", port=0, regions=Regions(), **settings) as front_end:
            answer = await Client(front_end.bound_port).post(path, b"{}" + b" " * (1 << 20))
        assert answer.error == (
            400,
            "application/json",
            "the body of this request may not be larger than 1048576 bytes, got: 1048578",
        )

    async def test_regions(self, client: Client, memory: Path) -> None:
        key = f"/{memory.name}"
        part = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
        document = {
            "inputs": [
                {"name": "INPUT0", "datatype": "INT32", "shape": [4], "parameters": part},
                {
                    "name": "INPUT1",
                    "datatype": "INT32",
                    "shape": [4],
                    "parameters": part | {"shared_memory_offset": 16},
                },
            ],
            "outputs": [
                {"name": "OUTPUT0", "parameters": part | {"shared_memory_offset": 32}},
                {"name": "OUTPUT1"},
            ],
        }
        answer = await client.post(
            "/v2/systemsharedmemory/region/r/register", {"key": key, "offset": 0, "byte_size": 64}
        )
        assert (answer.status, answer.body) == (200, b"")
        status = [{"name": "r", "key": key, "offset": 0, "byte_size": 64}]
        assert (await client.get("/v2/systemsharedmemory/status")).json == status
        assert (await client.get("/v2/systemsharedmemory/region/r/status")).json == status
        outputs = (await client.post(INFER, document)).json["outputs"]
        assert outputs == [{"name": "OUTPUT0", "datatype": "INT32", "shape": [4]}, ADD_SUB_ANSWER["outputs"][1]]
        assert read(memory)[32:48] == struct.pack("<4i", 11, 22, 33, 44)
        too_small = {"name": "OUTPUT0", "parameters": part | {"shared_memory_byte_size": 8}}
        answer = await client.post(INFER, document | {"outputs": [too_small]})
        assert answer.error[:2] == (500, "text/plain")
        assert (await client.post("/v2/systemsharedmemory/unregister")).status == 200
        assert (await client.get("/v2/systemsharedmemory/status")).json == []
        assert (await client.post(INFER, document)).error == (
            404,
            "application/json",
            "Unable to find shared memory region: 'r'",
        )

    @pytest.mark.parametrize("path", ["infer", "infer_stream"])
    @pytest.mark.parametrize("place", ["inputs", "outputs"])
    async def test_regions_in_use_are_not_unregistered(
        self, client: Client, engine: FakeEngine, memory: Path, path: str, place: str
    ) -> None:
        part = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}
        document: dict[str, Any] = {"inputs": [ints("INPUT0", [1, 2, 3, 4])], "outputs": [{"name": "OUTPUT0"}]}
        if place == "inputs":
            del document["inputs"][0]["data"]
        document[place][0] |= part
        region = {"key": f"/{memory.name}", "offset": 0, "byte_size": 64}
        await client.post("/v2/systemsharedmemory/region/r/register", region)
        answer = asyncio.create_task(client.post(f"/v2/models/held/{path}", document))
        call = await engine.calls.get()
        assert (await client.post("/v2/systemsharedmemory/region/r/unregister")).error == (
            500,
            "application/json",
            "Cannot unregister shared memory region 'r', it is currently in use.",
        )
        assert (await client.post("/v2/systemsharedmemory/unregister")).error == (
            500,
            "application/json",
            "Failed to unregister the following system shared memory regions: r ,",
        )
        call.send({"OUTPUT0": np.array([5, 6, 7, 8], np.int32)}, True)
        assert (await answer).status == 200
        assert (await client.post("/v2/systemsharedmemory/region/r/unregister")).status == 200
        assert (await client.get("/v2/systemsharedmemory/status")).json == []

    @pytest.mark.parametrize(
        ("path", "body", "status", "error"),
        [
            ("system", {"offset": 0, "byte_size": 64}, 400, "Shared memory register request has no 'key' field"),
            ("system", {"key": "/k"}, 400, "Shared memory register request has no 'byte_size' field"),
            ("system", {"key": 5, "byte_size": 64}, 500, "attempt to access JSON non-string as string"),
            (
                "system",
                {"key": "/k", "byte_size": -1},
                500,
                "attempt to access JSON non-unsigned-integer as unsigned-integer",
            ),
            ("cuda", {"device_id": 0}, 400, "Shared memory register request has no 'raw_handle' field"),
            (
                "cuda",
                {"raw_handle": {"b64": ""}, "byte_size": 1},
                500,
                "attempt to access non-existing object member 'device_id'",
            ),
        ],
    )
    async def test_register_errors(self, client: Client, path: str, body: Any, status: int, error: str) -> None:
        answer = await client.post(f"/v2/{path}sharedmemory/region/r/register", body)
        assert answer.error == (status, "application/json", error)

    @pytest.mark.parametrize("kind", ["system", "cuda"])
    async def test_registering_needs_a_name(self, client: Client, kind: str) -> None:
        assert (await client.post(f"/v2/{kind}sharedmemory/register", b"no JSON")).error == (
            400,
            "application/json",
            f"'region name' is necessary to register {kind} shared memory region",
        )

    async def test_cuda_status(self, client: Client) -> None:
        assert (await client.get("/v2/cudasharedmemory/status")).json == []
        assert (await client.post("/v2/cudasharedmemory/unregister")).status == 200


def events(body: bytes) -> list[Any]:
    assert body.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n")[:-1]]


def words(*texts: str) -> list[dict[str, Any]]:
    return [
        {"model_name": "gen_decoupled", "model_version": "1", "text_output": text.upper(), "length": len(text)}
        for text in texts
    ]


def note_threads(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bool]:
    """Of each call of a function, whether it was made on the event loop's thread."""
    function = getattr(module, name)
    on_loop: list[bool] = []

    def noted(*given: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return function(*given)

    monkeypatch.setattr(module, name, noted)
    return on_loop


class TestGenerate:
    async def test_one(self, client: Client) -> None:
        answer = await client.post("/v2/models/gen_plain/generate", {"text_input": "hello", "id": "x"})
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.headers["content-type"] == "application/json"
        assert answer.json == {
            "id": "x",
            "model_name": "gen_plain",
            "model_version": "1",
            "text_output": "HELLO",
            "length": 5,
        }

    async def test_decoupled(self, client: Client) -> None:
        assert (await client.post("/v2/models/gen_decoupled/generate", {"text_input": "one"})).json == words("one")[0]
        answer = await client.post("/v2/models/gen_decoupled/generate", {"text_input": "one two"})
        assert answer.status == 200
        assert answer.json["error"].startswith("generate expects model to produce exactly 1 response")

    async def test_large_requests_are_read_in_a_thread(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = note_threads(monkeypatch, generate, "decode_generate")
        for size in (10, 1 << 20):
            answer = await client.post("/v2/models/gen_plain/generate", {"text_input": "x" * size})
            assert answer.json["length"] == size
        assert threads == [True, False]

    @pytest.mark.parametrize("action", ["generate", "generate_stream"])
    async def test_large_responses_are_written_in_a_thread(
        self, client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, action: str
    ) -> None:
        threads = note_threads(monkeypatch, generate, "generate_document")
        large = np.arange(300_000, dtype=np.int32)
        for values, status in (
            (large[:2], 200),
            (large, 200),
            # Cannot be JSON, which Triton calls a bad request.
            (np.zeros(600_000, np.float16), 400),
        ):
            asking = asyncio.ensure_future(client.post(f"/v2/models/held/{action}", {"INPUT0": [1]}))
            (await engine.calls.get()).send({"OUTPUT0": values}, True)
            answer = await asking
            document = events(answer.body)[0] if action == "generate_stream" else answer.json
            assert answer.status == status
            assert status == 400 or document["OUTPUT0"] == values.tolist()
        assert threads == [True, False, False]

    async def test_no_response(self, client: Client) -> None:
        assert (await client.post("/v2/models/gen_decoupled/generate", {"text_input": ""})).status == 200
        answer = await client.post("/v2/models/gen_decoupled/generate_stream", {"text_input": ""})
        assert (answer.status, answer.body) == (200, b"")

    async def test_stream(self, client: Client) -> None:
        answer = await client.post("/v2/models/gen_decoupled/generate_stream", {"text_input": "one fail two"})
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        one, two = words("one", "two")
        assert events(answer.body) == [one, {"error": "asked to fail"}, two]

    async def test_events_come_as_they_are_made(self, client: Client, engine: FakeEngine) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_bytes("POST", "/v2/models/held/generate_stream", b'{"INPUT0":[1]}', {}))
        call = await engine.calls.get()
        for number in range(3):
            call.send({"OUTPUT0": np.array([number], np.int32)}, False)
            assert b'"OUTPUT0":%d' % number in await reader.readuntil(b"\n\n")
        call.send(None, True)
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
        writer.close()

    async def test_first_error_decides_the_status(self, client: Client) -> None:
        answer = await client.post("/v2/models/gen_plain/generate_stream", {"text_input": "fail"})
        assert (answer.status, events(answer.body)) == (400, [{"error": "asked to fail"}])
        answer = await client.post("/v2/models/gen_plain/generate", {"text_input": "fail"})
        assert answer.error == (400, "application/json", "asked to fail")

    async def test_types(self, client: Client) -> None:
        answer = await client.post("/v2/models/gen_types/generate", {"floats": [1.5, 2], "flag": True})
        assert answer.json == {
            "model_name": "gen_types",
            "model_version": "1",
            "out_floats": [1.5, 2.0],
            "out_flag": True,
        }

    async def test_empty_list(self, client: Client, engine: FakeEngine) -> None:
        answer = await client.post("/v2/models/gen_types/generate", {"floats": []})
        assert answer.json["out_floats"] == []
        assert engine.requests[0].inputs[0].shape == (0,)

    async def test_parameters(self, client: Client, engine: FakeEngine) -> None:
        await client.post(
            "/v2/models/reveal/generate", {"INPUT0": 1, "sequence_id": 5, "parameters": {"a": "x", "n": 2}}
        )
        (request,) = engine.requests
        assert request.parameters == {"sequence_id": 5, "a": "x", "n": 2}
        assert request.sequence is None
        assert request.inputs[0].shape == (1,)

    @pytest.mark.parametrize(
        ("model", "body", "headers", "status", "error"),
        [
            ("nonesuch", {}, {}, 404, UNKNOWN),
            ("gen_plain", b'{"text_input":', {}, 500, "failed to parse the request JSON buffer: Invalid value. at 14"),
            (
                "gen_plain",
                {},
                {"Content-Encoding": "gzip"},
                400,
                "Unsupported content-encoding, only 'identity' is supported.",
            ),
            (
                "gen_plain",
                {"text_input": 5},
                {},
                500,
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
            ),
            (
                "gen_plain",
                {"text_input": "x", "id": 5},
                {},
                500,
                "Unable to parse 'id': attempt to access JSON non-string as string",
            ),
            (
                "gen_types",
                {"floats": "no"},
                {},
                500,
                "Unable to parse 'data': attempt to access JSON non-number as double",
            ),
            (
                "reveal",
                {"INPUT0": [1], "box": {"a": 1}},
                {},
                400,
                "parameter 'box' has invalid type. It should be either 'int', 'bool', or 'string'.",
            ),
            (
                "gen_plain",
                {"text_input": ["a", "b"]},
                {},
                400,
                "The schema can not convert input 'text_input' to tensor with proper shape",
            ),
        ],
    )
    async def test_errors(
        self, client: Client, model: str, body: Any, headers: dict[str, str], status: int, error: str
    ) -> None:
        for action in ("generate", "generate_stream"):
            answer = await client.post(f"/v2/models/{model}/{action}", body, headers)
            assert answer.error == (status, "application/json", error)


async def test_metrics() -> None:
    async def render() -> bytes:
        return b"nv 1\n"

    async def render_all() -> bytes:
        return b"nv 1\nnaiad 2\n"

    async with MetricsFrontend(render, render_all, "127.0.0.1", 0) as front_end:
        client = Client(front_end.bound_port)
        answer = await client.get("/metrics?x=1")
        assert (answer.status, answer.headers["content-type"], answer.body) == (
            200,
            "text/plain; charset=utf-8",
            b"nv 1\n",
        )
        assert (await client.get("/metrics/")).body == b"nv 1\n"
        assert (await client.get("/metrics/all")).body == b"nv 1\nnaiad 2\n"
        assert (await client.get("/other")).body == b""
        assert (await client.post("/metrics")).error == (405, "text/plain", "Method Not Allowed")
