"""An engine without schedulers and processes: a few models in memory that answer at once, later, or never."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.datatypes import DataType, from_numpy
from naiad.errors import Internal, InvalidArgument, NaiadError
from naiad.messages import InferRequest, InferResponse, ResponseSink, Result, Tensor
from naiad.metadata import IndexEntry, ModelMetadata, TensorMetadata
from naiad.models.check import RequestCheck
from naiad.packed import pack_bytes, unpack_bytes
from naiad.protocol.served import ServedModel
from naiad.statistics import ModelStatistics
from tests.unit.frontends.fake_engine import ModelsInMemory

Arrays = dict[str, Any]
#: What a model answers: one result, several of a decoupled model, or None for an answer that the test gives.
Answer = Arrays | NaiadError | list[Arrays | NaiadError] | None
Run = Callable[[InferRequest, Arrays], Answer]


def config(text: str) -> ModelConfig:
    return ModelConfig(parse_text(text))


def to_array(tensor: Tensor) -> Any:
    if tensor.datatype is DataType.BYTES:
        return unpack_bytes(tensor.data, tensor.shape)
    return np.frombuffer(tensor.data, tensor.datatype.numpy).reshape(tensor.shape)


def to_tensor(name: str, array: Any) -> Tensor:
    datatype = from_numpy(array.dtype)
    assert datatype is not None
    if datatype is DataType.BYTES:
        return Tensor(name, datatype, array.shape, pack_bytes(array.ravel().tolist()))
    # A view of a buffer that will change, as the engine's are.
    return Tensor(name, datatype, array.shape, memoryview(bytearray(array.tobytes())))


class FakeModel(ServedModel):
    def __init__(self, config: ModelConfig, run: Run, labels: dict[str, list[str]] | None = None) -> None:
        super().__init__(config, 1, labels or {})
        self.run = run
        self.check = RequestCheck(config)


class FakeCall:
    def __init__(self, request: InferRequest, sink: ResponseSink) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = asyncio.Event()
        self.sent = 0

    def cancel(self) -> None:
        self.cancelled.set()

    def send(self, answer: Arrays | NaiadError | None, final: bool) -> None:
        self.sent += 1
        result: Result | None
        if isinstance(answer, dict):
            outputs = tuple(
                to_tensor(name, array)
                for name, array in answer.items()
                if not self.request.outputs or name in self.request.outputs
            )
            result = InferResponse(self.request.model_name, 1, self.request.id, outputs)
            self.sink.send(result, final)
            for tensor in outputs:
                if isinstance(tensor.data, memoryview):
                    tensor.data[:] = b"\xee" * tensor.data.nbytes
        else:
            self.sink.send(answer, final)


def tensor_text(name: str, data_type: str, dims: str, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] {more} }}'


def model_text(name: str, inputs: list[str], outputs: list[str], batch: int = 0, more: str = "") -> str:
    return (
        f'name: "{name}" backend: "python" max_batch_size: {batch} '
        f"input [ {', '.join(inputs)} ] output [ {', '.join(outputs)} ] {more}"
    )


def identity(request: InferRequest, arrays: Arrays) -> Answer:
    return {"OUTPUT0": arrays["INPUT0"]}


def _identity(name: str, data_type: str, dims: str = "-1", batch: int = 8) -> FakeModel:
    text = model_text(name, [tensor_text("INPUT0", data_type, dims)], [tensor_text("OUTPUT0", data_type, dims)], batch)
    return FakeModel(config(text), identity)


def _add_sub(request: InferRequest, arrays: Arrays) -> Answer:
    return {"OUTPUT0": arrays["INPUT0"] + arrays["INPUT1"], "OUTPUT1": arrays["INPUT0"] - arrays["INPUT1"]}


def _classify(request: InferRequest, arrays: Arrays) -> Answer:
    return {"LABELLED": arrays["SCORES"], "PLAIN": arrays["SCORES"] * 2}


def _words(request: InferRequest, arrays: Arrays) -> list[Arrays | NaiadError]:
    answers: list[Arrays | NaiadError] = []
    for word in arrays["text_input"].ravel()[0].decode().split():
        if word == "fail":
            answers.append(InvalidArgument("asked to fail"))
        else:
            answers.append({"text_output": np.array([word.upper()], object), "length": np.array([len(word)], np.int32)})
    return answers


def _upper(request: InferRequest, arrays: Arrays) -> Answer:
    text = arrays["text_input"].ravel()[0].decode()
    if text == "fail":
        return InvalidArgument("asked to fail")
    return {"text_output": np.array([text.upper()], object), "length": np.array([len(text)], np.int32)}


def _reveal(request: InferRequest, arrays: Arrays) -> Answer:
    seen = f"{request.id} {request.parameters} {request.sequence} {request.priority} {request.timeout_us}"
    return {"SEEN": np.array([seen], object)}


def _types(request: InferRequest, arrays: Arrays) -> Answer:
    return {f"out_{name}": array for name, array in arrays.items()}


_TEXT_OUT = [tensor_text("text_output", "STRING", "1"), tensor_text("length", "INT32", "1")]
_TEXT_IN = [tensor_text("text_input", "STRING", "1")]


def _models() -> list[FakeModel]:
    pair = [tensor_text("INPUT0", "INT32", "4"), tensor_text("INPUT1", "INT32", "4")]
    pair_out = [tensor_text("OUTPUT0", "INT32", "4"), tensor_text("OUTPUT1", "INT32", "4")]
    return [
        _identity("ident_fp32", "FP32"),
        _identity("ident_fp16", "FP16"),
        _identity("ident_i32", "INT32"),
        _identity("ident_bytes", "STRING"),
        _identity("ident_2d", "FP32", "-1, -1", 0),
        FakeModel(config(model_text("add_sub", pair, pair_out)), _add_sub),
        FakeModel(
            config(
                model_text(
                    "classify",
                    [tensor_text("SCORES", "FP32", "4")],
                    [tensor_text("LABELLED", "FP32", "4"), tensor_text("PLAIN", "FP32", "4")],
                    4,
                )
            ),
            _classify,
            {"LABELLED": ["cat", "dog", "fox"]},
        ),
        FakeModel(
            config(model_text("reveal", [tensor_text("INPUT0", "INT32", "-1")], [tensor_text("SEEN", "STRING", "1")])),
            _reveal,
        ),
        FakeModel(config(model_text("gen_plain", _TEXT_IN, _TEXT_OUT)), _upper),
        FakeModel(
            config(
                model_text("gen_decoupled", _TEXT_IN, _TEXT_OUT, more="model_transaction_policy { decoupled: true }")
            ),
            _words,
        ),
        FakeModel(
            config(
                model_text(
                    "gen_types",
                    [
                        tensor_text("floats", "FP32", "-1", "optional: true"),
                        tensor_text("flag", "BOOL", "1", "optional: true"),
                    ],
                    [tensor_text("out_floats", "FP32", "-1"), tensor_text("out_flag", "BOOL", "1")],
                )
            ),
            _types,
        ),
        FakeModel(
            config(
                model_text("fails", [tensor_text("INPUT0", "INT32", "-1")], [tensor_text("OUTPUT0", "INT32", "-1")])
            ),
            lambda request, arrays: Internal("the model failed"),
        ),
        FakeModel(
            config(model_text("held", [tensor_text("INPUT0", "INT32", "-1")], [tensor_text("OUTPUT0", "INT32", "-1")])),
            lambda request, arrays: None,
        ),
    ]


class FakeEngine(ModelsInMemory[FakeModel]):
    def __init__(self) -> None:
        super().__init__(_models())

    def infer(self, request: InferRequest, sink: ResponseSink, model: object = None) -> FakeCall:
        model = self.models[request.model_name]
        checked, _, _ = model.check(request, in_thread=True)
        self.requests.append(checked)
        call = FakeCall(checked, sink)
        answer = model.run(checked, {tensor.name: to_array(tensor) for tensor in checked.inputs})
        if answer is None:
            self.calls.put_nowait(call)
        elif isinstance(answer, list):
            for item in answer:
                call.send(item, False)
            call.send(None, True)
        else:
            asyncio.get_running_loop().call_soon(call.send, answer, True)
        return call

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        config = self.model(name, version).config
        return ModelMetadata(
            name,
            ("1",),
            "python",
            tuple(TensorMetadata(item.name, item.datatype.name, item.shape) for item in config.inputs.values()),
            tuple(TensorMetadata(item.name, item.datatype.name, item.shape) for item in config.outputs.values()),
        )

    def statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        if name and name not in self.models:
            raise InvalidArgument(f"requested model '{name}' is not available")
        return [ModelStatistics(name or "all", "1")]

    async def index(self, ready: bool = False) -> list[IndexEntry]:
        entries = [
            IndexEntry("add_sub", "1", "READY", ""),
            IndexEntry("never"),
            IndexEntry("x", "2", "UNAVAILABLE", "unloaded"),
        ]
        return entries[:1] if ready else entries

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        self.loaded.append((name, dict(parameters)))


class FakeSettings:
    """Trace or log settings that remember what they were asked."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"level": 0}
        self.models: list[str | None] = []

    def get(self, model: str | None) -> Mapping[str, Any]:
        self.models.append(model)
        return self.values

    def update(self, model: str | None, values: Mapping[str, Any]) -> Mapping[str, Any]:
        self.models.append(model)
        self.values |= values
        return self.values
