"""What takes long to read or to write over gRPC is read and written in a thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc_fake_engine import FakeEngine
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from naiad.datatypes import LARGE, DataType
from naiad.frontends.grpc import calls, servicer
from naiad.frontends.grpc import inference_stream as stream
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.server import GrpcFrontend
from naiad.messages import Tensor

VALUES = np.arange(LARGE // 4 + 1, dtype=np.float32)
LAST = len(VALUES) - 1
TOP = f"{LAST}.000000:{LAST}".encode()
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def stub(engine: FakeEngine) -> AsyncIterator[Any]:
    options = GrpcOptions(address="127.0.0.1", port=0)
    async with (
        GrpcFrontend(engine, options) as frontend,
        aio.insecure_channel(f"127.0.0.1:{frontend.port}", options=UNLIMITED) as channel,
    ):
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """Of each call that reads or writes a message, whether it ended on the event loop's thread."""
    on_loop: dict[str, list[bool]] = {"decode": [], "encode": []}

    def note(module: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def noted(*given: Any) -> Any:
            result = function(*given)
            on_loop[what].append(threading.current_thread() is threading.main_thread())
            return result

        monkeypatch.setattr(module, name, noted)

    note(servicer, "decode", "decode")
    note(calls, "encode", "encode")
    note(stream, "encode_stream", "encode")
    return on_loop


def typed(model: str = "identity", id: str = "", values: Any = VALUES) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, len(values)])
    tensor.contents.fp32_contents.extend(values)
    return pb.ModelInferRequest(model_name=model, id=id, inputs=[tensor])


def raw(id: str = "", classes: int = 0) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, len(VALUES)])
    request = pb.ModelInferRequest(model_name="identity", id=id, inputs=[tensor], raw_input_contents=[VALUES.tobytes()])
    if classes:
        output = request.outputs.add(name="OUTPUT0")
        output.parameters["classification"].int64_param = classes
    return request


async def refusal(call: Any) -> tuple[StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def exchange(stub: Any, *requests: Any, **call: Any) -> list[Any]:
    async def ask() -> AsyncIterator[Any]:
        for request in requests:
            yield request

    return [response async for response in stub.ModelStreamInfer(ask(), **call)]


async def test_typed_contents(stub: Any, threads: dict[str, list[bool]]) -> None:
    answer = await stub.ModelInfer(typed())
    assert answer.raw_output_contents[0] == VALUES.tobytes()
    await stub.ModelInfer(typed(values=VALUES[:9]))
    await stub.ModelInfer(raw("1"))
    assert threads == {"decode": [False, True, True], "encode": [True, True, True]}


async def test_what_is_wrong_with_a_large_request(stub: Any) -> None:
    assert await refusal(stub.ModelInfer(typed("nonesuch"))) == (
        StatusCode.NOT_FOUND,
        "Request for unknown model: 'nonesuch' is not found",
    )
    assert await refusal(stub.ModelInfer(typed("repeat"))) == (
        StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )
    wrong = typed()
    wrong.inputs[0].datatype = "INT32"
    code, text = await refusal(stub.ModelInfer(wrong))
    assert (code, "of type 'FP32', expected datatype 'INT32'" in text) == (StatusCode.INVALID_ARGUMENT, True)
    assert await refusal(stub.ModelInfer(typed("fails"))) == (StatusCode.INVALID_ARGUMENT, "the model failed")
    code, text = await refusal(stub.ModelInfer(typed("broken")))
    assert (code, text) == (StatusCode.INTERNAL, "unexpected error: a bug")


async def test_a_model_that_is_replaced_by_one_of_another_kind_meanwhile(
    stub: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = servicer.decode

    def replace(*given: Any) -> Any:
        engine.models["identity"] = engine.models["repeat"]
        return decode(*given)

    monkeypatch.setattr(servicer, "decode", replace)
    assert await refusal(stub.ModelInfer(typed())) == (
        StatusCode.UNAVAILABLE,
        "model 'identity' has just been replaced; send the request again",
    )


async def test_a_large_request_whose_client_has_left_is_not_run(
    stub: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, may_go_on, refused = threading.Event(), threading.Event(), asyncio.Event()
    decode = servicer.decode
    loop = asyncio.get_running_loop()

    def wait(*given: Any) -> Any:
        reading.set()
        may_go_on.wait(10)
        return decode(*given)

    class NotedCall(servicer.LargeCall):
        async def _begin(self, *given: Any) -> None:
            await super()._begin(*given)
            refused.set()

        def cancel(self) -> None:
            super().cancel()
            loop.call_soon(may_go_on.set)

    monkeypatch.setattr(servicer, "decode", wait)
    monkeypatch.setattr(servicer, "LargeCall", NotedCall)
    asking = stub.ModelInfer(typed())
    waiting = asyncio.ensure_future(asking.code())
    await asyncio.to_thread(reading.wait, 10)
    asking.cancel()
    assert await waiting is StatusCode.CANCELLED
    await refused.wait()
    assert engine.requests == []


async def test_in_a_stream(stub: Any, threads: dict[str, list[bool]]) -> None:
    small = typed(id="small", values=VALUES[:1])
    answers = await exchange(stub, typed(id="large"), small, typed("nonesuch", "unknown"), typed("fails", "fails"))
    assert [answer.infer_response.id for answer in answers] == ["large", "small", "unknown", "fails"]
    assert answers[0].infer_response.raw_output_contents[0] == VALUES.tobytes()
    assert [answer.error_message for answer in answers] == [
        "",
        "",
        "Request for unknown model: 'nonesuch' is not found",
        "the model failed",
    ]
    assert threads["decode"] == [False, True, False]


async def test_classes(stub: Any, threads: dict[str, list[bool]]) -> None:
    answer = await stub.ModelInfer(raw(classes=1))
    assert answer.raw_output_contents[0][4:] == TOP
    assert threads["encode"] == [False]


async def test_classes_in_a_stream(stub: Any, threads: dict[str, list[bool]]) -> None:
    answers = await exchange(stub, raw("a", 1), raw("b"), raw("c", 2))
    assert [answer.infer_response.id for answer in answers] == ["a", "b", "c"]
    first, second, third = [answer.infer_response.raw_output_contents[0] for answer in answers]
    assert (first[4:], second) == (TOP, VALUES.tobytes())
    assert third.startswith(first)
    assert sorted(threads["encode"]) == [False, False, True]


async def test_what_cannot_be_classified(stub: Any, engine: FakeEngine) -> None:
    asked = raw("a", 1)
    asked.model_name = "held"
    text = "class result not available for output due to unsupported type 'BYTES'"

    async def answer_with_bytes() -> None:
        call = await engine.calls.get()
        call.respond(Tensor("OUTPUT0", DataType.BYTES, (1, 1), bytes(LARGE)))

    asking = asyncio.ensure_future(refusal(stub.ModelInfer(asked)))
    await answer_with_bytes()
    assert await asking == (StatusCode.INVALID_ARGUMENT, text)
    asking = asyncio.ensure_future(exchange(stub, asked))
    await answer_with_bytes()
    (answer,) = await asking
    assert (answer.error_message, answer.infer_response.id) == (text, "a")
    asking = asyncio.ensure_future(exchange(stub, asked, metadata=(("triton_grpc_error", "true"),)))
    await answer_with_bytes()
    assert await refusal(asking) == (StatusCode.INVALID_ARGUMENT, text)
