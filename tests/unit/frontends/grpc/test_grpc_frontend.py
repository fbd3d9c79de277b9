"""The gRPC front end over real sockets with the real client library, the same through both implementations."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc_fake_engine
import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc_fake_engine import FakeCall, FakeEngine, FakeSettings, config
from tritonclient.grpc import InferInput, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.aio import InferenceServerClient

from naiad.datatypes import DataType
from naiad.errors import Cancelled, Internal, Unavailable
from naiad.frontends.grpc import inference_stream as stream_module
from naiad.frontends.grpc import servicer as servicer_module
from naiad.frontends.grpc.errors import SHUTTING_DOWN
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.server import GrpcFrontend
from naiad.messages import Tensor
from naiad.options import Restriction
from naiad.protocol.regions import Regions
from naiad.telemetry.log import Log
from naiad.telemetry.trace import TraceSettings, Values

Connect = Callable[..., AbstractAsyncContextManager["Connection"]]
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Connection:
    """A running front end and a client of it."""

    def __init__(self, engine: FakeEngine, frontend: GrpcFrontend, channel: aio.Channel) -> None:
        self.engine = engine
        self.frontend = frontend
        self.channel = channel
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def refusal(self, call: Any) -> tuple[StatusCode, str]:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        return caught.value.code(), caught.value.details()


@pytest.fixture
def connect() -> Connect:
    @asynccontextmanager
    async def connect(**given: Any) -> AsyncIterator[Connection]:
        parts = {key: given.pop(key) for key in ("regions", "trace_settings", "log_settings") if key in given}
        options = {"address": "127.0.0.1", "port": 0, "drain_s": 5.0} | given
        engine = FakeEngine()
        async with (
            GrpcFrontend(engine, GrpcOptions(**options), **parts) as frontend,
            aio.insecure_channel(f"127.0.0.1:{frontend.port}", options=UNLIMITED) as channel,
        ):
            yield Connection(engine, frontend, channel)

    return connect


def ask(model: str = "identity", data: bytes = bytes(8), datatype: str = "FP32", **fields: Any) -> Any:
    count = len(data) // 4
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype, shape=[1, count])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[data], **fields)


# ---------------------------------------------------------------- unary inference


async def test_tritons_client_infers(connect: Connect) -> None:
    async with connect() as connection, InferenceServerClient(f"127.0.0.1:{connection.frontend.port}") as client:
        values = np.arange(300_000, dtype=np.float32).reshape(1, -1)
        for array in (values[:, :16], values):
            tensor = InferInput("INPUT0", list(array.shape), "FP32")
            tensor.set_data_from_numpy(array)
            result = await client.infer("identity", [tensor], request_id="7")
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
            assert result.get_response().id == "7"


async def test_many_inferences_at_once_each_get_their_answer(connect: Connect) -> None:
    async with connect() as connection:
        numbers = [np.int32(i).tobytes() for i in range(200)]
        answers = await asyncio.gather(*(connection.stub.ModelInfer(ask(data=number)) for number in numbers))
        assert [answer.raw_output_contents[0] for answer in answers] == numbers


async def test_a_call_and_its_message_are_freed_with_the_answer_not_by_the_garbage_collector(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[FakeCall] = weakref.WeakSet()

    class CountedCall(FakeCall):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            alive.add(self)

    monkeypatch.setattr(grpc_fake_engine, "FakeCall", CountedCall)
    async with connect() as connection:
        gc.disable()
        try:
            await connection.stub.ModelInfer(ask())
            asking = asyncio.ensure_future(connection.stub.ModelInfer(ask("held")))
            call = await connection.engine.calls.get()
            call.echo()
            del call
            await asking
            assert not alive
            await exchange(connection, ask(), ask("fails"))
            assert not alive
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (ask("nonesuch"), StatusCode.NOT_FOUND, "Request for unknown model: 'nonesuch' is not found"),
        (
            ask(model_version="3"),
            StatusCode.NOT_FOUND,
            "Request for unknown model: 'identity' version 3 is not found",
        ),
        (
            ask(model_version="-1"),
            StatusCode.INVALID_ARGUMENT,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
        (
            ask("repeat"),
            StatusCode.UNIMPLEMENTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        (
            pb.ModelInferRequest(model_name="identity", inputs=[pb.ModelInferRequest.InferInputTensor(name="A")]),
            StatusCode.INVALID_ARGUMENT,
            "unable to find data for input tensor 'A' for model 'identity' in request.",
        ),
        (ask(datatype="INT32"), StatusCode.INVALID_ARGUMENT, "wrong data type for 'INPUT0'"),
        (ask("fails"), StatusCode.INVALID_ARGUMENT, "the model failed"),
        (ask("broken"), StatusCode.INTERNAL, "unexpected error: a bug"),
        (
            ask(
                outputs=[
                    pb.ModelInferRequest.InferRequestedOutputTensor(
                        name="OUTPUT0", parameters={"classification": pb.InferParameter(string_param="x")}
                    )
                ]
            ),
            StatusCode.INVALID_ARGUMENT,
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
    ],
)
async def test_inference_errors(connect: Connect, request_: Any, code: StatusCode, text: str) -> None:
    async with connect() as connection:
        assert await connection.refusal(connection.stub.ModelInfer(request_)) == (code, text)
        await connection.stub.ModelInfer(ask())  # the server is as good as before


async def test_an_output_that_cannot_be_written_is_the_answer(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(bytes(8))
    regions = Regions(directory=str(tmp_path))
    place = {
        "shared_memory_region": pb.InferParameter(string_param="r"),
        "shared_memory_byte_size": pb.InferParameter(int64_param=4),
    }
    output = pb.ModelInferRequest.InferRequestedOutputTensor(name="OUTPUT0", parameters=place)
    async with connect(regions=regions) as connection:
        await connection.stub.SystemSharedMemoryRegister(
            pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=8)
        )
        code, text = await connection.refusal(connection.stub.ModelInfer(ask(data=bytes(8), outputs=[output])))
        assert (code, text) == (
            StatusCode.INTERNAL,
            "shared memory size specified with the request for output 'OUTPUT0' (4 bytes) should be at least 8 bytes "
            "to hold the results",
        )
        answer = await connection.stub.ModelInfer(ask(data=b"abcd", outputs=[output]))
        assert list(answer.raw_output_contents) == [b""]
        assert (tmp_path / "r").read_bytes() == b"abcd\0\0\0\0"


async def test_a_client_that_cancels_or_runs_out_of_time_cancels_its_call(connect: Connect) -> None:
    async with connect() as connection:
        running = connection.stub.ModelInfer(ask("held"))
        waiting = asyncio.ensure_future(running.code())
        call = await connection.engine.calls.get()
        running.cancel()
        await asyncio.wait_for(call.cancelled.wait(), 5)
        call.sink.send(Cancelled("gone"), True)  # nobody listens; nothing breaks
        assert await waiting is StatusCode.CANCELLED
        late = asyncio.ensure_future(connection.refusal(connection.stub.ModelInfer(ask("held"), timeout=0.2)))
        call = await connection.engine.calls.get()
        assert (await late)[0] is StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(call.cancelled.wait(), 5)
        call.echo()


async def test_long_error_texts_are_cut_before_the_client_refuses_them(connect: Connect) -> None:
    async with connect() as connection:
        waiting = asyncio.ensure_future(connection.refusal(connection.stub.ModelInfer(ask("held"))))
        (await connection.engine.calls.get()).sink.send(Internal("x" * 100_000), True)
        code, text = await waiting
        assert (code, len(text)) == (StatusCode.INTERNAL, 6003)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests(connect: Connect, compression: grpc.Compression) -> None:
    request = ask(data=bytes(4000))
    async with connect() as connection:
        stream = connection.stub.ModelStreamInfer(once(request), compression=compression)
        assert (await stream.read()).infer_response.raw_output_contents[0] == bytes(4000)
        call = connection.stub.ModelInfer(request, compression=compression)
        assert (await call).raw_output_contents[0] == bytes(4000)


async def test_forwarded_metadata_become_parameters(connect: Connect) -> None:
    async with connect(forward="(x-.*|color)") as connection:
        request = ask(parameters={"a": pb.InferParameter(int64_param=1)})
        metadata = (("x-shade", "dark"), ("other", "no"), ("color", "red"), ("x-raw-bin", b"a\xff"))
        await connection.stub.ModelInfer(request, metadata=metadata)
        expected = {"a": 1, "x-shade": "dark", "color": "red", "x-raw-bin": "a\ufffd"}
        assert connection.engine.requests[-1].parameters == expected
        async for _ in connection.stub.ModelStreamInfer(once(request), metadata=metadata):
            assert connection.engine.requests[-1].parameters == expected


@pytest.mark.parametrize(
    ("pattern", "forwarded"),
    [("SHADE", {"x-shade": "dark"}), ("(?-i)SHADE", {}), ("triton_", {"triton_a": "1"}), ("^shade", {})],
)
async def test_forwarding_finds_patterns_as_re2_does(connect: Connect, pattern: str, forwarded: dict[str, str]) -> None:
    async with connect(forward=pattern) as connection:
        await connection.stub.ModelInfer(ask(), metadata=(("x-shade", "dark"), ("triton_a", "1")))
        assert connection.engine.requests[-1].parameters == forwarded


# ---------------------------------------------------------------- streams


async def once(*requests: Any) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def numbers(*values: int, **fields: Any) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="INT32", shape=[len(values)])
    data = np.array(values, np.int32).tobytes()
    return pb.ModelInferRequest(model_name="repeat", inputs=[tensor], raw_input_contents=[data], **fields)


def final(response: Any) -> bool | None:
    parameters = response.infer_response.parameters
    return bool(parameters["triton_final_response"].bool_param) if "triton_final_response" in parameters else None


def brief(response: Any) -> tuple[str, str, bytes | None, bool | None]:
    """(error, id, the first output's bytes, final)."""
    raw = response.infer_response.raw_output_contents
    return response.error_message, response.infer_response.id, raw[0] if raw else None, final(response)


async def exchange(connection: Connection, *requests: Any, **call: Any) -> list[Any]:
    return [response async for response in connection.stub.ModelStreamInfer(once(*requests), **call)]


async def test_many_models_share_a_stream(connect: Connect) -> None:
    async with connect() as connection:
        responses = await exchange(connection, ask(id="a"), numbers(7, 8, id="b"), ask(id="c"))
        one, two = np.int32(7).tobytes(), np.int32(8).tobytes()
        assert sorted(map(brief, responses), key=lambda each: each[1]) == [
            ("", "a", bytes(8), True),
            ("", "b", one, False),
            ("", "b", two, False),
            ("", "c", bytes(8), True),
        ]
        assert await exchange(connection) == []


async def test_the_empty_final_response_comes_when_asked_for(connect: Connect) -> None:
    async with connect() as connection:
        wish = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}
        (response,) = await exchange(connection, numbers(id="r", parameters=wish))
        assert brief(response) == ("", "r", None, True)
        assert (response.infer_response.model_name, response.infer_response.model_version) == ("repeat", "")
        assert await exchange(connection, numbers(id="r")) == []
        (response,) = await exchange(connection, ask(id="p", parameters=wish))
        assert brief(response) == ("", "p", bytes(8), True)


async def test_errors_are_messages_of_the_stream(connect: Connect) -> None:
    async with connect() as connection:
        responses = await exchange(connection, ask("nonesuch", id="x"), numbers(-5, 1, id="r"), ask("fails", id="f"))
        by_id: dict[str, list[Any]] = {}
        for response in responses:
            by_id.setdefault(response.infer_response.id, []).append(response)
        (unknown,) = by_id["x"]
        assert brief(unknown) == ("Request for unknown model: 'nonesuch' is not found", "x", None, None)
        assert unknown.infer_response.model_name == ""
        assert [brief(each) for each in by_id["r"]] == [
            ("negative value -5", "r", None, False),
            ("", "r", np.int32(1).tobytes(), False),
        ]
        assert by_id["r"][0].infer_response.model_name == "repeat"
        assert [brief(each) for each in by_id["f"]] == [("the model failed", "f", None, True)]


async def test_a_bug_in_one_request_leaves_the_stream_alive(connect: Connect) -> None:
    async with connect() as connection:
        responses = await exchange(connection, ask("broken", id="b"), ask(id="a"))
        assert [brief(each)[:2] for each in responses] == [("unexpected error: a bug", "b"), ("", "a")]


async def test_strict_streams_end_with_the_first_error_of_a_model(connect: Connect) -> None:
    async with connect() as connection:
        strict = (("triton_grpc_error", "true"),)
        stream = connection.stub.ModelStreamInfer(once(numbers(-3, 1, id="q")), metadata=strict)
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(stream))
        assert (caught.value.code(), caught.value.details()) == (StatusCode.INVALID_ARGUMENT, "negative value -3")
        # Errors found before a model is asked stay messages, and so do all where the metadata says false.
        (response,) = await exchange(connection, ask("nonesuch", id="x"), metadata=strict)
        assert response.error_message == "Request for unknown model: 'nonesuch' is not found"
        (response,) = await exchange(connection, numbers(-3), metadata=(("triton_grpc_error", "false"),))
        assert response.error_message == "negative value -3"


async def test_nothing_follows_the_error_that_ends_a_strict_stream(connect: Connect) -> None:
    async with connect() as connection:
        metadata = (("triton_grpc_error", "true"),)
        stream = connection.stub.ModelStreamInfer(once(ask("held"), ask(id="next")), metadata=metadata)
        first = asyncio.ensure_future(anext(aiter(stream)))
        call = await connection.engine.calls.get()
        while len(connection.engine.requests) < 2:  # noqa: ASYNC110  # the second one is answered when it is there
            await asyncio.sleep(0)
        call.sink.send(Internal("the first one failed"), True)
        with pytest.raises(aio.AioRpcError, match="the first one failed"):
            await first


async def test_ordinary_models_answer_in_the_order_of_their_requests(connect: Connect) -> None:
    async with connect() as connection:
        stream = connection.stub.ModelStreamInfer()
        for id in ("1", "2", "3"):
            await stream.write(ask("held", id=id))
        await stream.write(ask("nonesuch", id="4"))
        await stream.write(numbers(5, id="decoupled"))
        first, second, third = [await connection.engine.calls.get() for _ in range(3)]
        assert (await stream.read()).infer_response.id == "decoupled"
        third.echo()
        second.sink.send(Internal("no"), True)
        first.echo()
        await stream.done_writing()
        rest = [await stream.read() for _ in range(4)]
        assert await stream.read() is aio.EOF
        assert [(each.infer_response.id, each.error_message) for each in rest] == [
            ("1", ""),
            ("2", "no"),
            ("3", ""),
            ("4", "Request for unknown model: 'nonesuch' is not found"),
        ]


async def test_responses_of_decoupled_models_come_as_they_are_made(connect: Connect) -> None:
    async with connect() as connection:
        stream = connection.stub.ModelStreamInfer()
        await stream.write(ask("held_decoupled", id="1"))
        await stream.write(ask("held_decoupled", id="2"))
        first, second = await connection.engine.calls.get(), await connection.engine.calls.get()
        for call, value in ((second, 1), (first, 2), (second, 3)):
            call.respond(Tensor("OUTPUT0", DataType.INT8, (1,), bytes((value,))), final=value == 3)
            assert brief(await stream.read())[1:] == (call.request.id, bytes((value,)), value == 3)
        first.sink.send(None, True)
        await stream.done_writing()
        assert await stream.read() is aio.EOF
        assert await stream.code() is StatusCode.OK


async def test_leaving_a_stream_cancels_what_runs_in_it(connect: Connect) -> None:
    async with connect() as connection:
        stream = connection.stub.ModelStreamInfer()
        await stream.write(ask("held"))
        await stream.write(ask("held_decoupled"))
        calls = [await connection.engine.calls.get() for _ in range(2)]
        stream.cancel()
        for call in calls:
            await asyncio.wait_for(call.cancelled.wait(), 5)
            call.sink.send(Cancelled("gone"), True)


async def test_what_a_model_makes_for_a_client_that_has_left_is_not_kept(connect: Connect) -> None:
    async with connect() as connection:
        stream = connection.stub.ModelStreamInfer()
        await stream.write(ask("held_decoupled"))
        call = await connection.engine.calls.get()
        stream.cancel()
        await asyncio.wait_for(call.cancelled.wait(), 5)
        message = Tensor("OUTPUT0", DataType.FP32, (1, 1), bytes(4))
        call.respond(message, final=False)
        assert not call.sink._stream._outbox  # type: ignore[attr-defined]
        call.sink.send(Cancelled("gone"), True)


async def test_a_client_that_does_not_read_is_not_read_from(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("naiad.frontends.grpc.inference_stream._OUTBOX_LIMIT", 1)
    async with connect() as connection:
        responses = await exchange(connection, *(ask(id=str(i)) for i in range(50)))
        assert [each.infer_response.id for each in responses] == [str(i) for i in range(50)]


async def test_responses_that_wait_for_their_turn_hold_up_no_request(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_OUTBOX_LIMIT", 1)
    async with connect() as connection:
        stream = connection.stub.ModelStreamInfer()
        await stream.write(ask("held", id="1"))
        first = await connection.engine.calls.get()
        await stream.write(ask(id="2"))
        await stream.write(ask("held", id="3"))
        third = await connection.engine.calls.get()
        third.echo()
        first.echo()
        await stream.done_writing()
        assert [(await stream.read()).infer_response.id for _ in range(3)] == ["1", "2", "3"]
        assert await stream.read() is aio.EOF


# ---------------------------------------------------------------- everything else


async def test_health(connect: Connect) -> None:
    async with connect() as connection:
        stub, engine = connection.stub, connection.engine
        check = connection.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert await check(b"\x0a\x04name") == b"\x08\x01"
        engine.ready = False
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert await check(b"") == b"\x08\x02"
        engine.exiting = True
        assert await connection.refusal(stub.ServerLive(pb.ServerLiveRequest())) == (
            StatusCode.UNAVAILABLE,
            "Server exiting",
        )
        for name, version, ready in (("identity", "", True), ("identity", "4", False), ("nonesuch", "", False)):
            assert (await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))).ready is ready


@pytest.mark.parametrize(("request_", "code"), [({}, None), ({"name": "nonesuch"}, StatusCode.NOT_FOUND)])
async def test_tests_of_clients_may_have_answers_come_late(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, request_: dict[str, str], code: StatusCode | None
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setenv("TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC", "2")
    monkeypatch.setattr(servicer_module, "sleep", sleep)
    async with connect() as connection:
        await connection.stub.ModelInfer(ask())
        assert slept == [], "inference is not delayed"
        metadata = connection.stub.ModelMetadata(pb.ModelMetadataRequest(**{"name": "identity"} | request_))
        if code is None:
            assert (await metadata).name == "identity"
        else:
            assert (await connection.refusal(metadata))[0] is code
    assert slept == [2]


async def test_metadata_and_configuration(connect: Connect) -> None:
    async with connect() as connection:
        stub = connection.stub
        assert await stub.ServerMetadata(pb.ServerMetadataRequest()) == pb.ServerMetadataResponse(
            name="triton", version="2.51.0", extensions=["classification", "sequence"]
        )
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="identity", version="1"))
        assert (metadata.platform, list(metadata.versions), list(metadata.inputs[0].shape)) == (
            "python",
            ["1"],
            [-1, 4],
        )
        answer = await stub.ModelConfig(pb.ModelConfigRequest(name="identity"))
        assert answer.config == config("identity", max_batch_size=8).proto
        assert await connection.refusal(stub.ModelConfig(pb.ModelConfigRequest(name="x", version="last"))) == (
            StatusCode.INVALID_ARGUMENT,
            "failed to get model version from specified version string 'last' (details: stol), version should be an "
            "integral value > 0",
        )


async def test_statistics(connect: Connect) -> None:
    async with connect() as connection:
        answer = await connection.stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity"))
        (model,) = answer.model_stats
        assert (model.last_inference, model.inference_count, model.execution_count) == (1234, 7, 3)
        assert (model.inference_stats.success.count, model.inference_stats.success.ns) == (3, 99)
        assert model.inference_stats.HasField("cache_miss")
        assert [(each.batch_size, each.compute_infer.count) for each in model.batch_stats] == [(1, 0), (4, 0)]
        assert [each.compute_input.ns for each in model.batch_stats] == [20, 10]
        assert model.response_stats["0"].success.ns == 50
        assert await connection.refusal(
            connection.stub.ModelStatistics(pb.ModelStatisticsRequest(name="nonesuch"))
        ) == (StatusCode.INVALID_ARGUMENT, "requested model 'nonesuch' is not available")


async def test_the_repository(connect: Connect) -> None:
    async with connect() as connection:
        stub, engine = connection.stub, connection.engine
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [(each.name, each.version, each.state) for each in index.models] == [
            ("identity", "1", "READY"),
            ("unloaded", "", ""),
        ]
        assert len((await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models) == 1
        files = {
            "config": pb.ModelRepositoryParameter(string_param="{}"),
            "file:1/model.py": pb.ModelRepositoryParameter(bytes_param=b"pass"),
        }
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="identity", parameters=files))
        dependents = {"unload_dependents": pb.ModelRepositoryParameter(bool_param=True)}
        await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="a", parameters=dependents))
        await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="b"))
        assert engine.loaded == [("identity", {"config": "{}", "file:1/model.py": b"pass"}), ("a", True), ("b", False)]


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        (
            "RepositoryIndex",
            pb.RepositoryIndexRequest(repository_name="r"),
            StatusCode.UNIMPLEMENTED,
            "'repository_name' specification is not supported",
        ),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(model_name="nonesuch"),
            StatusCode.NOT_FOUND,
            "failed to load 'nonesuch', failed to poll from model repository",
        ),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                model_name="m", parameters={"file:1/x": pb.ModelRepositoryParameter(string_param="x")}
            ),
            StatusCode.INVALID_ARGUMENT,
            "invalid value type for load parameter 'file:1/x', expected bytes_param.",
        ),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                model_name="m", parameters={"config": pb.ModelRepositoryParameter(bytes_param=b"x")}
            ),
            StatusCode.INVALID_ARGUMENT,
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                model_name="m", parameters={"colour": pb.ModelRepositoryParameter(string_param="red")}
            ),
            StatusCode.INVALID_ARGUMENT,
            "unrecognized load parameter 'colour'.",
        ),
        (
            "RepositoryModelUnload",
            pb.RepositoryModelUnloadRequest(
                model_name="m", parameters={"unload_dependents": pb.ModelRepositoryParameter(string_param="x")}
            ),
            StatusCode.INVALID_ARGUMENT,
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
        (
            "SystemSharedMemoryStatus",
            pb.SystemSharedMemoryStatusRequest(name="ghost"),
            StatusCode.NOT_FOUND,
            "Unable to find system shared memory region: 'ghost'",
        ),
        (
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(),
            StatusCode.INTERNAL,
            "Unable to open shared memory region: ''",
        ),
        (
            "CudaSharedMemoryRegister",
            pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=b"short", byte_size=64),
            StatusCode.INVALID_ARGUMENT,
            "failed to register shared memory region: invalid args",
        ),
        ("TraceSetting", pb.TraceSettingRequest(), StatusCode.UNIMPLEMENTED, "the server does not support trace"),
        ("LogSettings", pb.LogSettingsRequest(), StatusCode.UNIMPLEMENTED, "the server does not support log settings"),
    ],
)
async def test_management_errors(connect: Connect, method: str, request_: Any, code: StatusCode, text: str) -> None:
    async with connect() as connection:
        assert await connection.refusal(getattr(connection.stub, method)(request_)) == (code, text)


async def test_a_stream_whose_client_does_not_read_is_ended(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_BACKLOG", 1 << 20)
    async with connect() as connection:
        responses = connection.stub.ModelStreamInfer(once(ask("held_decoupled")))
        call = await connection.engine.calls.get()
        output = Tensor("OUTPUT0", DataType.FP32, (1, 25_000), bytes(100_000))
        for _ in range(8):
            call.respond(output, final=False)
        assert len((await responses.read()).infer_response.raw_output_contents[0]) == 100_000
        for _ in range(200):
            call.respond(output, final=False)
        async with asyncio.timeout(10):
            await call.cancelled.wait()
        call.sink.send(Cancelled(""), True)

        async def read() -> None:
            while await responses.read() is not aio.EOF:
                pass

        assert await connection.refusal(read()) == (
            StatusCode.UNAVAILABLE,
            "the client reads the stream too slowly; it is ended",
        )


async def test_a_load_goes_on_when_its_client_leaves(connect: Connect) -> None:
    async with connect() as connection:
        begun, allowed, loaded = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def load(name: str, parameters: dict[str, str | bytes]) -> None:
            begun.set()
            await allowed.wait()
            loaded.set()

        connection.engine.load = load  # type: ignore[method-assign]
        call = connection.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="identity"))
        waiting = asyncio.ensure_future(call)
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # Whatever the server makes of the cancellation, it has made it when a later call of that client is answered.
        await connection.stub.ServerLive(pb.ServerLiveRequest())
        allowed.set()
        async with asyncio.timeout(10):
            await loaded.wait()


async def test_shared_memory(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(bytes(64))
    async with connect(regions=Regions(directory=str(tmp_path))) as connection:
        stub = connection.stub
        await stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=64))
        status = await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
        assert {name: (each.key, each.byte_size) for name, each in status.regions.items()} == {"r": ("/r", 64)}
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=""))
        assert not (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions
        assert not (await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
        await stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="ghost"))


@pytest.mark.parametrize("place", ["inputs", "outputs"])
async def test_shared_memory_in_use_is_not_unregistered(connect: Connect, tmp_path: Path, place: str) -> None:
    (tmp_path / "r").write_bytes(bytes(64))
    part = {
        "shared_memory_region": pb.InferParameter(string_param="r"),
        "shared_memory_byte_size": pb.InferParameter(int64_param=8),
    }
    async with connect(regions=Regions(directory=str(tmp_path))) as connection:
        stub = connection.stub
        await stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=64))
        for model in ("held", "held_decoupled"):
            request = ask(model, outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="OUTPUT0")])
            if place == "inputs":
                del request.raw_input_contents[:]
            for name, value in part.items():
                getattr(request, place)[0].parameters[name].CopyFrom(value)
            stream = stub.ModelStreamInfer(iter([request])) if model == "held_decoupled" else None
            answer = asyncio.ensure_future(stub.ModelInfer(request) if stream is None else stream.read())
            call = await connection.engine.calls.get()
            for name, text in (
                ("r", "Cannot unregister shared memory region 'r', it is currently in use."),
                ("", "Failed to unregister the following system shared memory regions: r ,"),
            ):
                unregister = stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name))
                assert await connection.refusal(unregister) == (StatusCode.INTERNAL, text)
            call.echo()
            await answer
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"))
        assert not (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions


async def test_trace_settings(connect: Connect) -> None:
    trace = FakeSettings(trace_level=["OFF"], trace_rate="5")
    async with connect(trace_settings=trace) as connection:
        setting = pb.TraceSettingRequest.SettingValue

        async def call(model: str = "", **settings: list[str]) -> dict[str, list[str]]:
            values = {key: setting(value=value) for key, value in settings.items()}
            answer = await connection.stub.TraceSetting(pb.TraceSettingRequest(settings=values, model_name=model))
            return {key: list(value.value) for key, value in answer.settings.items()}

        assert await call() == {"trace_level": ["OFF"], "trace_rate": ["5"]}
        levels = ["TIMESTAMPS", "TENSORS"]
        assert await call("identity", trace_level=levels, trace_rate=[]) == {"trace_level": levels, "trace_rate": ["5"]}
        assert trace.updates == [("identity", {"trace_level": levels, "trace_rate": None})]
        invalid = StatusCode.INVALID_ARGUMENT
        assert await connection.refusal(call(trace_rate=["4", "5"])) == (
            invalid,
            "expect only 1 value for 'trace_rate'",
        )
        assert await connection.refusal(call("nonesuch")) == (invalid, "Request for unknown model : nonesuch")
        await call(trace_mode=["a", "b"], colour=["a", "b"])  # clients cannot change it
    async with connect(trace_settings=TraceSettings(Values(), "", Log())) as connection:
        assert await connection.refusal(call(trace_count=["-2"])) == (
            invalid,
            "Unable to parse 'trace_count'. Expecting value >= -1, got: -2",
        )


async def test_log_settings(connect: Connect) -> None:
    log = FakeSettings(log_info=True, log_verbose_level=0, log_format="default")
    async with connect(log_settings=log) as connection:
        setting = pb.LogSettingsRequest.SettingValue

        async def call(**settings: Any) -> dict[str, Any]:
            answer = await connection.stub.LogSettings(pb.LogSettingsRequest(settings=settings))
            return {
                key: getattr(value, str(value.WhichOneof("parameter_choice"))) for key, value in answer.settings.items()
            }

        assert await call(colour=setting(string_param="x")) == log.values
        assert await call(log_verbose_level=setting(uint32_param=3)) == log.values | {"log_verbose_level": 3}
        assert log.updates == [(None, {"log_verbose_level": 3})]
        assert (await call(log_format=setting(string_param="json")))["log_format"] == "json"
        invalid = StatusCode.INVALID_ARGUMENT
        for key, value, code, text in (
            ("log_info", setting(string_param="no"), invalid, "expect boolean for 'log_info'"),
            ("log_info", setting(), invalid, "expect boolean for 'log_info'"),
            ("log_verbose_level", setting(bool_param=True), invalid, "expect int32 for 'log_verbose_level'"),
            ("log_format", setting(string_param="x"), invalid, "invalid argument for log_format, got: x"),
            (
                "log_file",
                setting(string_param="x"),
                StatusCode.UNIMPLEMENTED,
                "log file location can not be updated through network protocol",
            ),
        ):
            assert await connection.refusal(call(**{key: value})) == (code, text)


async def test_restricted_protocols(connect: Connect) -> None:
    restrictions = (
        Restriction(frozenset(("inference",)), "team", "blue"),
        Restriction(frozenset(("health",)), "Key", "open"),
    )
    async with connect(restrictions=restrictions) as connection:
        stub = connection.stub
        refused = "This protocol is restricted, expecting header 'triton-grpc-protocol-team'"
        key = (("triton-grpc-protocol-team", "blue"),)
        wrong = (("triton-grpc-protocol-team", "red"),)
        for metadata in ((), (("team", "blue"),), wrong, wrong + key):
            assert await connection.refusal(stub.ModelInfer(ask(), metadata=metadata)) == (
                StatusCode.UNAVAILABLE,
                refused,
            )
            stream = stub.ModelStreamInfer(once(ask()), metadata=metadata)
            with pytest.raises(aio.AioRpcError, match="protocol is restricted"):
                await anext(aiter(stream))
        await stub.ModelInfer(ask(), metadata=key)
        assert len(await exchange(connection, ask(), metadata=key)) == 1
        with pytest.raises(aio.AioRpcError, match="expecting header 'triton-grpc-protocol-key'"):
            await stub.ServerLive(pb.ServerLiveRequest())
        with pytest.raises(aio.AioRpcError, match="expecting header 'triton-grpc-protocol-key'"):
            await connection.channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        await stub.ServerMetadata(pb.ServerMetadataRequest())


@pytest.mark.parametrize("path", ["/inference.GRPCInferenceService/NoSuchCall", "/other.Service/Call"])
async def test_unknown_methods(connect: Connect, path: str) -> None:
    async with connect() as connection:
        assert await connection.refusal(connection.channel.unary_unary(path)(b"")) == (StatusCode.UNIMPLEMENTED, "")


async def test_malformed_messages(connect: Connect) -> None:
    async with connect() as connection:
        for method in (
            "inference.GRPCInferenceService/ModelInfer",
            "inference.GRPCInferenceService/ModelReady",
            "grpc.health.v1.Health/Check",
        ):
            call = connection.channel.unary_unary(f"/{method}")
            assert await connection.refusal(call(b"\xff\xff\xff")) == (StatusCode.INTERNAL, "Unable to parse request")


# ---------------------------------------------------------------- start and stop


async def test_stopping_lets_running_calls_finish_and_refuses_new_ones(connect: Connect) -> None:
    async with connect() as connection:
        running = connection.stub.ModelInfer(ask("held"))
        call = await connection.engine.calls.get()
        stopping = asyncio.ensure_future(connection.frontend.__aexit__(None, None, None))
        await asyncio.sleep(0)
        code, text = await connection.refusal(connection.stub.ModelInfer(ask()))
        assert (code, text) == (StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        assert not stopping.done()
        call.echo()
        assert (await running).raw_output_contents[0] == bytes(8)
        await stopping


async def test_stopping_ends_streams_with_the_last_of_their_calls(connect: Connect) -> None:
    async with connect() as connection:
        idle, busy = connection.stub.ModelStreamInfer(), connection.stub.ModelStreamInfer()
        await idle.write(ask(id="1"))
        assert (await idle.read()).infer_response.id == "1"
        await busy.write(ask("held", id="2"))
        call = await connection.engine.calls.get()
        stopping = asyncio.ensure_future(connection.frontend.__aexit__(None, None, None))
        assert await connection.refusal(idle.read()) == (StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        assert not stopping.done()
        call.echo()
        assert (await busy.read()).infer_response.id == "2"
        await asyncio.wait_for(stopping, 4)
        assert not call.cancelled.is_set()


async def test_stopping_cancels_what_does_not_finish(connect: Connect) -> None:
    async with connect(drain_s=0.05) as connection:
        running = asyncio.ensure_future(connection.refusal(connection.stub.ModelInfer(ask("held"))))
        call = await connection.engine.calls.get()
        await connection.frontend.__aexit__(None, None, None)
        await asyncio.wait_for(call.cancelled.wait(), 5)
        assert (await running)[0] in (StatusCode.CANCELLED, StatusCode.UNAVAILABLE)


async def test_an_address_in_use_is_an_error(connect: Connect, capfd: pytest.CaptureFixture[str]) -> None:
    async with connect() as connection:
        options = GrpcOptions(address="127.0.0.1", port=connection.frontend.port)
        capfd.readouterr()
        with pytest.raises(Unavailable, match="already in use"):
            async with GrpcFrontend(FakeEngine(), options):
                pytest.fail("two servers listen at one port")
        assert capfd.readouterr() == ("", "")
