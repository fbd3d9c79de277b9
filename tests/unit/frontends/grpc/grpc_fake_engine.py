"""An engine without schedulers: its models answer at once, or when a test says so."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2

from naiad.config.model_config import ModelConfig
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument, NaiadError, NotFound
from naiad.messages import InferRequest, InferResponse, ResponseSink, Tensor
from naiad.metadata import IndexEntry, ModelMetadata, TensorMetadata
from naiad.protocol.served import ServedModel
from naiad.statistics import BatchStatistics, Duration, ModelStatistics, ResponseStatistics
from tests.unit.frontends.fake_engine import ModelsInMemory


def config(name: str, datatype: str = "TYPE_FP32", decoupled: bool = False, max_batch_size: int = 0) -> ModelConfig:
    proto = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=max_batch_size)
    proto.input.add(name="INPUT0", data_type=datatype, dims=[-1])
    proto.output.add(name="OUTPUT0", data_type=datatype, dims=[-1])
    if decoupled:
        proto.model_transaction_policy.decoupled = True
    return ModelConfig(proto)


class FakeModel(ServedModel):
    def __init__(self, config: ModelConfig, run: Callable[["FakeCall"], None]) -> None:
        super().__init__(config, 1, {"OUTPUT0": ["cat", "dog"]})
        self.run = run


class FakeCall:
    def __init__(self, request: InferRequest, sink: ResponseSink) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def respond(self, *outputs: Tensor, final: bool = True, parameters: dict[str, Any] | None = None) -> None:
        response = InferResponse(self.request.model_name, 1, self.request.id, outputs, parameters or {})
        self.sink.send(response, final)

    def echo(self) -> None:
        self.respond(*(Tensor(f"OUTPUT{i}", x.datatype, x.shape, x.data) for i, x in enumerate(self.request.inputs)))


def repeat(call: FakeCall) -> None:
    """One response per element, an error for each that is negative."""
    for value in np.frombuffer(call.request.inputs[0].data, np.int32).tolist():
        if value < 0:
            call.sink.send(InvalidArgument(f"negative value {value}"), False)
        else:
            call.respond(Tensor("OUTPUT0", DataType.INT32, (1,), np.int32(value).tobytes()), final=False)
    call.sink.send(None, True)


def fail(call: FakeCall) -> None:
    call.sink.send(InvalidArgument("the model failed"), True)


class FakeEngine(ModelsInMemory[FakeModel]):
    """`identity` echoes, `held` and `held_decoupled` wait in `calls` for the test, `repeat` is decoupled, `fails` answers
    with an error and `broken` has a bug."""

    def __init__(self) -> None:
        super().__init__(
            (
                FakeModel(config("identity", max_batch_size=8), FakeCall.echo),
                FakeModel(config("held"), lambda call: self.calls.put_nowait(call)),
                FakeModel(config("held_decoupled", decoupled=True), lambda call: self.calls.put_nowait(call)),
                FakeModel(config("repeat", "TYPE_INT32", decoupled=True), repeat),
                FakeModel(config("fails"), fail),
                FakeModel(config("broken"), self._break),
            )
        )

    def _break(self, call: FakeCall) -> None:
        raise RuntimeError("a bug")

    def infer(self, request: InferRequest, sink: ResponseSink, model: object = None) -> FakeCall:
        self.requests.append(request)
        call = FakeCall(request, sink)
        model = self.models[request.model_name]
        for tensor in request.inputs:
            if tensor.datatype is not model.config.inputs["INPUT0"].datatype:
                raise InvalidArgument(f"wrong data type for '{tensor.name}'")
        if model.run is fail:
            asyncio.get_running_loop().call_soon(fail, call)
        else:
            model.run(call)
        return call

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        self.model(name, version)
        tensor = TensorMetadata("INPUT0", "FP32", (-1, 4))
        return ModelMetadata(name, ("1",), "python", (tensor,), ())

    def statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        if name and name not in self.models:
            raise InvalidArgument(f"requested model '{name}' is not available")
        statistics = ModelStatistics("identity", "1", 1234, 7, 3)
        statistics.infer.success.add(99, 3)
        statistics.batches = {4: BatchStatistics(Duration(1, 10)), 1: BatchStatistics(Duration(2, 20))}
        statistics.responses = {"0": ResponseStatistics(success=Duration(5, 50))}
        return [statistics]

    async def index(self, ready: bool = False) -> list[IndexEntry]:
        entries = [IndexEntry("identity", "1", "READY", ""), IndexEntry("unloaded")]
        return entries[:1] if ready else entries

    async def load(self, name: str, parameters: dict[str, str | bytes]) -> None:
        await asyncio.sleep(0)
        if name not in self.models:
            raise NotFound(f"failed to load '{name}', failed to poll from model repository")
        self.loaded.append((name, parameters))


class FakeSettings:
    """Trace or log settings that remember."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.updates: list[tuple[str | None, dict[str, Any]]] = []
        self.error: NaiadError | None = None

    def get(self, model: str | None = None) -> dict[str, Any]:
        return self.values

    def update(self, model: str | None, values: Any) -> dict[str, Any]:
        self.updates.append((model, dict(values)))
        return self.values | {key: value for key, value in values.items() if value is not None}
