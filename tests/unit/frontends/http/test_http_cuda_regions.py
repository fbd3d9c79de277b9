"""Shared memory on GPUs over HTTP."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_fake_engine import FakeEngine
from http_raw_client import Client

from naiad.frontends.http.app import HttpFrontend
from naiad.protocol.regions import Regions
from tests.unit.fake_cuda import HANDLE, OTHER, FakeCuda

ONE_TO_FOUR = b"".join(number.to_bytes(4, "little") for number in (1, 2, 3, 4))


@pytest.fixture
async def client(cuda: FakeCuda) -> AsyncIterator[Client]:
    async with HttpFrontend(FakeEngine(), address="127.0.0.1", port=0, regions=Regions(), grace_s=5) as front_end:
        yield Client(front_end.bound_port)


async def register(client: Client, handle: bytes = HANDLE, **region: int) -> Any:
    region = {"device_id": 0, "byte_size": 64} | region
    document = {"raw_handle": {"b64": base64.b64encode(handle).decode()}, **region}
    return await client.post("/v2/cudasharedmemory/region/c/register", document)


def part(offset: int, region: str = "c") -> Any:
    return {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": 16,
    }


def document(**second: Any) -> Any:
    """OUTPUT0, INPUT0 + INPUT1, goes behind INPUT0; OUTPUT1, INPUT0 - INPUT1, comes in the answer."""
    first = {"name": "INPUT0", "datatype": "INT32", "shape": [4], "parameters": part(0)}
    return {
        "inputs": [first, {"name": "INPUT1", "datatype": "INT32", "shape": [4], "data": [1, 1, 1, 1], **second}],
        "outputs": [{"name": "OUTPUT0", "parameters": part(16)}, {"name": "OUTPUT1"}],
    }


@pytest.mark.parametrize("path", ["infer", "infer_stream"])
async def test_an_inference_from_and_into_a_region(client: Client, cuda: FakeCuda, path: str) -> None:
    assert (await register(client)).status == 200
    status = [{"name": "c", "device_id": 0, "byte_size": 64}]
    assert (await client.get("/v2/cudasharedmemory/status")).json == status
    cuda.memory[HANDLE][:16] = ONE_TO_FOUR
    cuda.free.clear()
    asking = asyncio.ensure_future(client.post(f"/v2/models/add_sub/{path}", document()))
    # Others are served while CUDA is at it.
    while not cuda.waiting:
        assert (await client.get("/v2/health/live")).status == 200
    assert not asking.done()
    cuda.free.set()
    answer = await asking
    assert answer.status == 200
    outputs = json.loads(answer.body.removeprefix(b"data: "))["outputs"]
    assert [output.get("data") for output in outputs] == [None, [0, 1, 2, 3]]
    assert bytes(cuda.memory[HANDLE][16:32:4]) == bytes([2, 3, 4, 5])
    assert (await client.post("/v2/cudasharedmemory/region/c/unregister")).status == 200
    assert cuda.open_handles == {}


async def test_errors_have_the_form_they_have_elsewhere(client: Client, cuda: FakeCuda) -> None:
    await register(client)
    answer = await client.post("/v2/models/add_sub/infer", document(parameters=part(0, "ghost"), data=None))
    assert answer.status == 400
    wrong = document()
    wrong["inputs"][0]["datatype"] = "FP32"
    plain = {
        **wrong,
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}, wrong["inputs"][1]],
    }
    assert (await client.post("/v2/models/add_sub/infer", wrong)).error == (
        await client.post("/v2/models/add_sub/infer", plain)
    ).error
    cuda.error = OSError(700, "an illegal memory access was encountered")
    assert (await client.post("/v2/models/add_sub/infer", document())).error == (
        500,
        "application/json",
        "failed to copy data from CUDA shared memory: an illegal memory access was encountered",
    )
    cuda.error = None
    assert (await client.post("/v2/cudasharedmemory/unregister")).status == 200


@pytest.mark.parametrize(
    ("handle", "region", "error"),
    [
        (b"short", {}, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        (b"", {}, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        (b"x" * 64, {}, "failed to register shared memory region: invalid args"),
        (OTHER, {"byte_size": 65}, "failed to register shared memory region 'c': invalid args"),
    ],
)
async def test_what_cannot_be_registered(client: Client, handle: bytes, region: Any, error: str) -> None:
    assert (await register(client, handle, **region)).error == (400, "application/json", error)


async def test_a_client_that_leaves_while_its_inputs_are_copied(client: Client, cuda: FakeCuda) -> None:
    await register(client)
    cuda.free.clear()
    asking = asyncio.ensure_future(client.post("/v2/models/add_sub/infer", document()))
    while not cuda.waiting:
        assert (await client.get("/v2/health/live")).status == 200
    asking.cancel()
    cuda.free.set()
    async with asyncio.timeout(30):
        while (await client.post("/v2/cudasharedmemory/unregister")).status != 200:
            pass
    assert cuda.open_handles == {}
