"""Shared memory on GPUs over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode, aio
from grpc_fake_engine import FakeEngine
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from naiad.errors import Cancelled
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.server import GrpcFrontend
from naiad.protocol.regions import Regions
from tests.unit.fake_cuda import HANDLE, FakeCuda

REGISTER = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=HANDLE, device_id=0, byte_size=64)
UNREGISTER = pb.CudaSharedMemoryUnregisterRequest(name="c")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def stub(engine: FakeEngine, cuda: FakeCuda) -> AsyncIterator[Any]:
    """Of a server in which the region c is registered."""
    options = GrpcOptions(address="127.0.0.1", port=0)
    async with (
        GrpcFrontend(engine, options, regions=Regions()) as frontend,
        aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel,
    ):
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.CudaSharedMemoryRegister(REGISTER)
        yield stub


def ask(model: str, id: str = "") -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 2])
    return pb.ModelInferRequest(model_name=model, id=id, inputs=[tensor], raw_input_contents=[bytes(8)])


def on_gpu(model: str, offset: int = 0, id: str = "") -> Any:
    """Asks with the 8 bytes at `offset` of the region c, for an answer in the 8 bytes behind them."""
    request = ask(model, id)
    del request.raw_input_contents[:]
    request.outputs.add(name="OUTPUT0")
    for tensor, at in (request.inputs[0], offset), (request.outputs[0], offset + 8):
        tensor.parameters["shared_memory_region"].string_param = "c"
        tensor.parameters["shared_memory_offset"].int64_param = at
        tensor.parameters["shared_memory_byte_size"].int64_param = 8
    return request


async def is_refused(call: Any) -> bool:
    try:
        await call
    except aio.AioRpcError:
        return True
    return False


async def test_an_inference_from_and_into_a_region(stub: Any, cuda: FakeCuda) -> None:
    status = await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())
    assert {name: (each.device_id, each.byte_size) for name, each in status.regions.items()} == {"c": (0, 64)}
    cuda.memory[HANDLE][:8] = b"abcdefgh"
    answer = await stub.ModelInfer(on_gpu("identity"))
    assert list(answer.raw_output_contents) == [b""]
    assert bytes(cuda.memory[HANDLE][8:16]) == b"abcdefgh"
    wrong = on_gpu("identity")
    wrong.inputs[0].datatype = "INT32"
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.ModelInfer(wrong)
    refusal = (StatusCode.INVALID_ARGUMENT, "wrong data type for 'INPUT0'")
    assert (caught.value.code(), caught.value.details()) == refusal
    await stub.CudaSharedMemoryUnregister(UNREGISTER)
    assert cuda.open_handles == {}


async def test_requests_of_a_stream_begin_in_their_order(stub: Any, engine: FakeEngine, cuda: FakeCuda) -> None:
    requests = [on_gpu("held", 0, "a"), ask("held", "b"), on_gpu("held", 16, "c")]
    cuda.free.clear()

    async def exchange() -> list[str]:
        return [response.infer_response.id async for response in stub.ModelStreamInfer(iter(requests))]

    answers = asyncio.ensure_future(exchange())
    # Others are served while CUDA is at it; the stream waits.
    assert (await stub.ModelInfer(ask("identity", "other"))).id == "other"
    assert [request.id for request in engine.requests] == ["other"]
    cuda.free.set()
    calls = [await engine.calls.get() for _ in requests]
    assert [call.request.id for call in calls] == ["a", "b", "c"]
    for call in reversed(calls):
        call.echo()
    assert await answers == ["a", "b", "c"]


async def test_a_stream_that_is_left_while_its_inputs_are_copied(stub: Any, engine: FakeEngine, cuda: FakeCuda) -> None:
    cuda.free.clear()

    async def end() -> None:
        """Where the inputs were there before it was known that the client has left."""
        call = await engine.calls.get()
        await call.cancelled.wait()
        call.sink.send(Cancelled(""), True)

    ending = asyncio.ensure_future(end())

    async def requests() -> AsyncIterator[Any]:
        yield on_gpu("held")
        await asyncio.Event().wait()

    stream = stub.ModelStreamInfer(requests())
    # Registered, and about to be read.
    async with asyncio.timeout(30):
        while cuda.waiting < 1:  # noqa: ASYNC110 - another thread says so
            await asyncio.sleep(0.001)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.read()
    cuda.free.set()
    # As long as the request is under way its region is in use.
    async with asyncio.timeout(30):
        while await is_refused(stub.CudaSharedMemoryUnregister(UNREGISTER)):
            pass
    assert cuda.open_handles == {}
    ending.cancel()
