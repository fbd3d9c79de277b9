"""Answers that a backend returns: in columns where they can be, and to the clients the same as if each were sent."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from naiad.backends.api import BackendRequest, BackendResponse, RequestBackend
from naiad.datatypes import DataType
from naiad.errors import Internal, NaiadError
from naiad.instances import execution as executions
from naiad.instances import layout
from naiad.instances.channel import encode
from naiad.instances.delivery import Batches
from naiad.instances.execution import OneShot, RequestExecution, Signature
from naiad.instances.frames import Execute, Input, Results
from naiad.messages import InferRequest, InferResponse, Tensor

Result = BackendResponse | NaiadError

CONFIG = {
    "max_batch_size": 8,
    "input": [{"name": "I", "data_type": "TYPE_INT8", "dims": [1]}],
    "output": [
        {"name": "A", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "B", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "R", "data_type": "TYPE_FP32", "dims": [4], "reshape": {"shape": [2, 2]}},
    ],
}


class Model(RequestBackend):
    def __init__(self, results: list[Result], returns: bool = True) -> None:
        self.results = results
        self.returns = returns

    def execute(self, requests: Sequence[BackendRequest]) -> list[Result] | None:
        if self.returns:
            return self.results
        for request, result in zip(requests, self.results, strict=True):
            try:
                request.send(result, True)
            except NaiadError as error:
                request.send(error, True)
        return None


class Link:
    def __init__(self, arena_size: int) -> None:
        self.outputs = memoryview(bytearray(arena_size))
        self.sent: list[tuple[Results, memoryview]] = []

    def send(self, results: Results, one_shot: OneShot | None) -> None:
        frame = msgspec.msgpack.decode(encode(results)[8:], type=Results)
        self.sent.append((frame, self.outputs if one_shot is None else one_shot.view))

    def one_shot(self, byte_size: int) -> OneShot:
        return OneShot(memoryview(bytearray(byte_size)), None)


class Execution:
    def __init__(self, rows: list[int]) -> None:
        self.requests = [InferRequest("m", (Tensor("I", DataType.INT8, (n, 1), bytes(n)),)) for n in rows]
        self.rows = rows
        self.got: list[Any] = [None] * len(rows)
        self.completed: list[bool] = []

    def deliver(self, index: int, result: Any, final: bool) -> None:
        assert final
        assert self.got[index] is None
        if isinstance(result, InferResponse):
            tensors = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in result.outputs]
            self.got[index] = tensors, dict(result.parameters)
        else:
            self.got[index] = type(result), result.message

    def complete(self, times: Any, succeeded: bool = True) -> None:
        self.completed.append(succeeded)


class Run:
    """A batch of a model that returns these results, or sends them, up to what its clients get."""

    def __init__(
        self,
        results: list[Result],
        rows: list[int],
        returns: bool = True,
        arena: int = 1 << 16,
        decoupled: bool = False,
    ) -> None:
        self.batch = Execution(rows)
        self.batches = Batches("m", 1, decoupled)
        link = Link(arena)
        config = {**CONFIG, "model_transaction_policy": {"decoupled": decoupled}}
        self.target = RequestExecution(Model(results, returns), Signature("m", "m_0", config), link, 1 << 20)
        number = self.batches.begin(self.batch)  # type: ignore[arg-type]
        laid_out = layout.lay_out(self.batch.requests)
        inputs = memoryview(bytearray(1 << 12))
        laid_out.write(inputs)
        self.target.execute(Execute(number, laid_out.inputs, rows, (), None, 0), inputs, 0)
        for frame, region in link.sent:
            self.batches.deliver(frame, region)
        assert not self.batches
        self.frame = link.sent[-1][0]
        self.got = self.batch.got


def f4(*shape: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


def answer(parameters: Any = None, **outputs: Any) -> BackendResponse:
    return BackendResponse(outputs, parameters or {})


IN_COLUMNS = {
    "one row each": ([answer(A=f4(1, 3, start=3 * i)) for i in range(4)], [1, 1, 1, 1]),
    "several rows": ([answer(A=f4(2, 3)), answer(A=f4(1, 3, start=9)), answer(A=f4(3, 3))], [2, 1, 3]),
    "two outputs": ([answer(A=f4(1, 2, start=i), B=f4(1, 1, start=i)) for i in range(3)], [1, 1, 1]),
    "one request": ([answer(A=f4(1, 5))], [1]),
    "one request, whatever its shape": ([answer(A=f4(7, 2, 2))], [1]),
    "no elements": ([answer(A=f4(1, 0)), answer(A=f4(1, 0))], [1, 1]),
    "not in order": ([answer(A=f4(3, 2).T[:1]), answer(A=f4(3, 2).T[1:])], [1, 1]),
    "big endian": ([answer(A=f4(1, 3).astype(">f4")), answer(A=f4(1, 3, start=4).astype(">f4"))], [1, 1]),
    "bf16": ([answer(A=f4(1, 3).astype(ml_dtypes.bfloat16)) for _ in range(2)], [1, 1]),
}
ONE_BY_ONE = {
    "other widths": ([answer(A=f4(1, 3)), answer(A=f4(1, 2))], [1, 1]),
    "other ranks": ([answer(A=f4(1, 3)), answer(A=f4(1, 3, 1))], [1, 1]),
    "other rows": ([answer(A=f4(2, 3)), answer(A=f4(1, 3))], [1, 1]),
    "other rows of all": ([answer(A=f4(2, 3)), answer(A=f4(2, 3))], [1, 1]),
    "other types": ([answer(A=f4(1, 3)), answer(A=f4(1, 3).astype(np.int32))], [1, 1]),
    "other outputs": ([answer(A=f4(1, 3)), answer(B=f4(1, 3))], [1, 1]),
    "another order": ([answer(A=f4(1, 2), B=f4(1, 1)), answer(B=f4(1, 1), A=f4(1, 2, start=5))], [1, 1]),
    "fewer outputs": ([answer(A=f4(1, 3), B=f4(1, 1)), answer(A=f4(1, 3))], [1, 1]),
    "no outputs": ([answer(), answer()], [1, 1]),
    "parameters": ([answer(A=f4(1, 3)), answer({"p": 1}, A=f4(1, 3))], [1, 1]),
    "an error": ([answer(A=f4(1, 3)), Internal("no")], [1, 1]),
    "an error first": ([Internal("no"), answer(A=f4(1, 3))], [1, 1]),
    "strings": ([answer(A=np.array([[b"a"]], object)), answer(A=np.array([[b"bc"]], object))], [1, 1]),
    "reshaped": ([answer(R=f4(1, 2, 2)), answer(R=f4(1, 2, 2))], [1, 1]),
    "no array": ([answer(A=f4(1, 3)), answer(A=[1.0])], [1, 1]),
    "no array first": ([answer(A=[1.0]), answer(A=f4(1, 3))], [1, 1]),
    "no data type": ([answer(A=np.zeros((1, 2), np.complex64)), answer(A=f4(1, 2))], [1, 1]),
    "scalars": ([answer(A=np.float32(1).reshape(())), answer(A=np.float32(1).reshape(()))], [1, 1]),
}


@pytest.mark.parametrize(
    ("results", "rows", "in_columns"),
    [(*case, True) for case in IN_COLUMNS.values()] + [(*case, False) for case in ONE_BY_ONE.values()],
    ids=[*IN_COLUMNS, *ONE_BY_ONE],
)
def test_what_is_returned_arrives_as_if_it_were_sent(results: list[Result], rows: list[int], in_columns: bool) -> None:
    returned = Run(results, rows)
    assert returned.got == Run(results, rows, returns=False).got
    assert None not in returned.got
    assert returned.batch.completed == [True]
    assert (returned.frame.outputs is not None) == in_columns
    assert bool(returned.frame.responses) != in_columns


def test_what_the_arena_does_not_hold_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "INLINE_LIMIT", 100)
    results: list[Result] = [answer(A=f4(1, 100, start=i)) for i in range(6)]
    returned = Run(results, [1] * 6, arena=1024)
    assert returned.frame.outputs is None
    assert returned.got == Run(results, [1] * 6, returns=False).got


def test_too_few_answers_are_an_error_of_all() -> None:
    run = Run([answer(A=f4(1, 1))], [1, 1])
    assert run.got == [(Internal, "model 'm' returned 1 answers to a batch of 2 requests")] * 2
    assert run.batch.completed == [False]


def test_a_decoupled_model_may_return_its_answers_too() -> None:
    run = Run([answer(A=f4(1, 1)), answer(A=f4(1, 1, start=1))], [1, 1], decoupled=True)
    assert [got[0][0][3] for got in run.got] == [f4(1).tobytes(), f4(1, start=1).tobytes()]
    assert not run.target._open


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("results_fit", [True, False], ids=["in columns", "one by one"])
def test_inputs_that_are_answered_as_they_are_do_not_count_as_kept(returns: bool, results_fit: bool) -> None:
    def execute(requests: Sequence[BackendRequest]) -> list[Result] | None:
        parameters = {} if results_fit else {"p": 1}
        results: list[Result] = [BackendResponse({"A": request.inputs["I"]}, parameters) for request in requests]
        if returns:
            return results
        for request, result in zip(requests, results, strict=True):
            request.send(result, True)
        return None

    width = executions._COPIED // 4
    data = memoryview(bytearray(f4(2, width).tobytes()))
    frame = Execute(1, [Input("I", DataType.FP32.number, (2, width), 0, len(data), None, None)], [1, 1], (), None, 0)
    link = Link(1 << 20)
    backend: Any = SimpleNamespace(execute=execute)
    RequestExecution(backend, Signature("m", "m_0", CONFIG), link, 1 << 20).execute(frame, data, 0)
    ((results, _),) = link.sent
    assert results.failure is None
    assert not results.keeps_inputs


def test_arrays_of_inputs_are_let_go_when_all_is_answered() -> None:
    seen: list[BackendRequest] = []

    def execute(requests: Sequence[BackendRequest]) -> list[Result]:
        seen.extend(requests)
        return [answer(A=f4(1, 1)) for _ in requests]

    target = RequestExecution(SimpleNamespace(execute=execute), Signature("m", "m_0", CONFIG), Link(1 << 12), 1 << 20)  # type: ignore[arg-type]
    batch = Execution([1, 1])
    laid_out = layout.lay_out(batch.requests)
    target.execute(Execute(1, laid_out.inputs, [1, 1], (), None, 0), memoryview(bytearray(1 << 12)), 0)
    assert [dict(request.inputs) for request in seen] == [{}, {}]
    with pytest.raises(Internal, match="after the final one"):
        seen[0].send(answer(A=f4(1, 1)), True)
