"""infer_stream through a real socket: messages in order, errors, the last message, clients that leave."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from http_fake_engine import FakeEngine
from http_raw_client import Answer, Client, read_answer, request_bytes

from naiad.errors import InvalidArgument
from naiad.frontends.http import streaming
from naiad.frontends.http.app import HttpFrontend
from naiad.protocol.regions import Regions

WORDS = "/v2/models/gen_decoupled/infer_stream"
HELD = "/v2/models/held/infer_stream"
FINAL = {"triton_final_response": True}
LINES = {"Accept": "application/x-ndjson"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    async with HttpFrontend(engine, address="127.0.0.1", port=0, regions=Regions(), grace_s=5) as front_end:
        yield Client(front_end.bound_port)


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [value]}], **more}


INTS = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [1]}]}


def message(model: str, outputs: list[tuple[str, str, list[Any]]], **more: Any) -> dict[str, Any]:
    tensors = [{"name": n, "datatype": t, "shape": [len(data)], "data": data} for n, t, data in outputs]
    return {"model_name": model, "model_version": "1", **more, "outputs": tensors}


def word(value: str, **more: Any) -> dict[str, Any]:
    outputs = [("text_output", "BYTES", [value.upper()]), ("length", "INT32", [len(value)])]
    return message("gen_decoupled", outputs, **more)


def events(answer: Answer) -> list[Any]:
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert answer.body.endswith(b"\n\n")
    return [json.loads(part.removeprefix(b"data: ")) for part in answer.body.split(b"\n\n")[:-1]]


def lines(answer: Answer) -> list[Any]:
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_responses_of_a_decoupled_model(client: Client) -> None:
    wanted = [word("one"), {"error": "asked to fail"}, word("two"), message("gen_decoupled", [], parameters=FINAL)]
    assert events(await client.post(WORDS, text("one fail two"))) == wanted
    assert lines(await client.post(WORDS, text("one fail two"), LINES)) == wanted
    several = {"Accept": "text/html, application/x-ndjson;q=0.9"}
    assert lines(await client.post(WORDS, text("one fail two"), several)) == wanted


async def test_the_one_response_of_another_model_is_the_last_message(client: Client) -> None:
    outputs = [("text_output", "BYTES", ["ONE"]), ("length", "INT32", [3])]
    answer = await client.post("/v2/models/gen_plain/versions/1/infer_stream", text("one", id="7"))
    assert events(answer) == [{"id": "7"} | message("gen_plain", outputs, parameters=FINAL)]


async def test_a_model_without_a_response_ends_the_stream(client: Client) -> None:
    answer = await client.post(WORDS, text("", id="8"))
    assert events(answer) == [{"id": "8"} | message("gen_decoupled", [], parameters=FINAL)]


async def test_messages_come_as_they_are_made(client: Client, engine: FakeEngine) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(request_bytes("POST", HELD, json.dumps(INTS).encode(), {}))
    call = await engine.calls.get()
    for number in range(3):
        call.send({"OUTPUT0": np.array([number], np.int32)}, False)
        assert b'"data":[%d]' % number in await reader.readuntil(b"\n\n")
    call.send({"OUTPUT0": np.array([9], np.int32)}, True)
    assert b'"triton_final_response":true' in await reader.readuntil(b"\n\n")
    assert await reader.readuntil(b"0\r\n\r\n") == b"\r\n0\r\n\r\n"
    writer.close()


async def test_large_and_small_messages_keep_their_order(client: Client, engine: FakeEngine) -> None:
    answer = asyncio.create_task(client.post(HELD, INTS, LINES))
    call = await engine.calls.get()
    sizes = [400_000, 1, 300_000, 2]
    for number, size in enumerate(sizes):
        call.send({"OUTPUT0": np.full([size], number, np.int32)}, False)
    call.send(None, True)
    got = lines(await answer)
    assert [output["outputs"][0]["data"] for output in got[:-1]] == [[n] * size for n, size in enumerate(sizes)]
    assert got[-1]["parameters"] == FINAL


async def test_an_error_before_any_response_is_a_status(client: Client) -> None:
    answer = await client.post("/v2/models/fails/infer_stream", INTS)
    assert answer.error == (500, "application/json", "the model failed")


async def test_a_last_error_ends_the_stream(client: Client, engine: FakeEngine) -> None:
    answer = asyncio.create_task(client.post(HELD, INTS))
    call = await engine.calls.get()
    call.send({"OUTPUT0": np.array([1], np.int32)}, False)
    call.send(InvalidArgument("no more"), True)
    assert events(await answer) == [
        message("held", [("OUTPUT0", "INT32", [1])]),
        {"error": "no more", "parameters": FINAL},
    ]


async def test_what_json_cannot_say_is_an_error_in_the_stream(client: Client) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP16", "shape": [1, 1], "parameters": {"binary_data_size": 2}}
    answer = await client.post_binary("/v2/models/ident_fp16/infer_stream", {"inputs": [tensor]}, b"\0\0")
    (only,) = events(answer)
    assert only["error"].startswith("sending FP16 data via JSON is not supported")
    assert only["parameters"] == FINAL


@pytest.mark.parametrize(
    ("path", "body", "headers", "wanted"),
    [
        ("/v2/models/nonesuch/infer_stream", INTS, {}, (404, "Request for unknown model: 'nonesuch' is not found")),
        (HELD, b"{", {}, (500, "failed to parse the request JSON buffer: Missing a name for object member. at 1")),
        (HELD, {"inputs": []}, {}, (400, "expected 1 inputs but got 0 inputs for model 'held'")),
        (HELD, INTS | {"parameters": {"binary_data_output": True}}, {}, (400, "infer_stream sends text")),
        (HELD, INTS, {"Content-Encoding": "br"}, (501, "Unsupported compression type")),
    ],
)
async def test_refused_requests_have_a_status(
    client: Client, path: str, body: Any, headers: dict[str, str], wanted: tuple[int, str]
) -> None:
    answer = await client.post(path, body, headers)
    assert answer.status == wanted[0]
    assert wanted[1] in answer.json["error"]


async def test_requests_are_read_as_those_of_infer(client: Client, engine: FakeEngine) -> None:
    body = gzip.compress(json.dumps(INTS | {"id": "z", "parameters": {"a": 1}}).encode())
    path = "/v2/models/reveal/infer_stream"
    (only,) = events(await client.post(path, body, {"Content-Encoding": "gzip"}))
    assert only["outputs"][0]["data"][0].startswith("z {'a': 1}")
    # One input as nothing but bytes: the outputs are text all the same.
    raw = {"Inference-Header-Content-Length": "0"}
    (only,) = events(await client.post(path, np.array([4], np.int32).tobytes(), raw))
    assert only["parameters"] == FINAL


async def test_a_client_that_leaves_cancels_its_call(client: Client, engine: FakeEngine) -> None:
    for begun in (False, True):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_bytes("POST", HELD, json.dumps(INTS).encode(), {}))
        call = await engine.calls.get()
        if begun:
            call.send({"OUTPUT0": np.array([1], np.int32)}, False)
            await reader.readuntil(b"\n\n")
        writer.close()
        await asyncio.wait_for(call.cancelled.wait(), 10)


@pytest.mark.parametrize("path", [HELD, "/v2/models/held/generate_stream"])
async def test_what_a_model_makes_for_a_client_that_has_left_is_not_kept(
    client: Client, engine: FakeEngine, path: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    body = INTS if path == HELD else {"INPUT0": [1]}
    writer.write(request_bytes("POST", path, json.dumps(body).encode(), {}))
    call = await engine.calls.get()
    call.send({"OUTPUT0": np.array([1], np.int32)}, False)
    await reader.readuntil(b"\n\n")
    writer.close()
    await asyncio.wait_for(call.cancelled.wait(), 10)
    call.cancelled.clear()
    call.send({"OUTPUT0": np.array([2], np.int32)}, False)
    # Where the response is sent it shows that nobody is there.
    await asyncio.wait_for(call.cancelled.wait(), 10)
    call.send({"OUTPUT0": np.array([3], np.int32)}, False)
    assert not call.sink.messages.waiting  # type: ignore[attr-defined]


async def test_a_client_that_does_not_read_is_not_waited_for(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MAX_BACKLOG", 1 << 20)
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(request_bytes("POST", HELD, json.dumps(INTS).encode(), LINES))
    call = await engine.calls.get()
    values = np.arange(100_000, dtype=np.int32)
    for _ in range(60):
        # More than what sockets and streams keep for a reader.
        call.send({"OUTPUT0": values}, False)
        await asyncio.sleep(0)
    *_, last = lines(await read_answer(reader))
    assert last == {"error": "the client reads the stream too slowly; it is ended", "parameters": FINAL}
    await asyncio.wait_for(call.cancelled.wait(), 10)
    writer.close()


async def test_an_old_client_gets_the_stream_without_chunks(client: Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    request = request_bytes("POST", WORDS, json.dumps(text("one")).encode(), {"Connection": "keep-alive"} | LINES)
    writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await asyncio.wait_for(reader.read(-1), 10)).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert [json.loads(line) for line in body.splitlines()] == [
        word("one"),
        message("gen_decoupled", [], parameters=FINAL),
    ]
    writer.close()
