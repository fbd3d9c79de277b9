"""Ensembles over a fake engine: data flow, errors, pruning, decoupled steps."""

import asyncio
import gc
import time
from typing import Any

import pytest

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.datatypes import DataType
from naiad.errors import Cancelled, Internal, InvalidArgument, NaiadError, NotFound
from naiad.instances.instance import ComputeTimes
from naiad.messages import InferRequest, InferResponse, ResponseSink, Result, Tensor
from naiad.scheduling.ensemble import EnsembleScheduler, _Scope, fitted, members_of
from naiad.scheduling.scheduler import Call, Progress
from naiad.statistics import Duration, ModelStatistics


def config(text: str) -> ModelConfig:
    return ModelConfig(parse_text(text))


def model(name: str, inputs: str, outputs: str, more: str = "") -> ModelConfig:
    tensors = "".join(f'input {{ name: "{n}" data_type: TYPE_INT8 dims: [ 1 ] }}' for n in inputs)
    tensors += "".join(f'output {{ name: "{n}" data_type: TYPE_INT8 dims: [ 1 ] }}' for n in outputs)
    return config(f'name: "{name}" backend: "python" {tensors} {more}')


def step(name: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = "".join(f'input_map {{ key: "{k}" value: "{v}" }}' for k, v in inputs.items())
    maps += "".join(f'output_map {{ key: "{k}" value: "{v}" }}' for k, v in outputs.items())
    return f'step {{ model_name: "{name}" model_version: -1 {maps} }}'


def ensemble(inputs: str, outputs: str, *steps: str, more: str = "") -> ModelConfig:
    tensors = "".join(f'input {{ name: "{n}" data_type: TYPE_INT8 dims: [ 1 ] }}' for n in inputs)
    tensors += "".join(f'output {{ name: "{n}" data_type: TYPE_INT8 dims: [ 1 ] }}' for n in outputs)
    return config(f'name: "e" platform: "ensemble" {tensors} {more} ensemble_scheduling {{ {"".join(steps)} }}')


def tensor(name: str, value: int) -> Tensor:
    return Tensor(name, DataType.INT8, (1,), bytes([value]))


class Lease:
    def __init__(self) -> None:
        self.statistics = ModelStatistics("e", "1")
        self.released = 0

    def lease(self) -> None:
        self.released -= 1

    def release(self) -> None:
        self.released += 1


class Sink:
    def __init__(self) -> None:
        self.results: list[tuple[Result | None, bool]] = []

    def send(self, result: Result | None, final: bool) -> None:
        self.results.append((result, final))

    def values(self) -> list[dict[str, int]]:
        return [
            {t.name: t.data[0] for t in result.outputs}
            for result, _ in self.results
            if isinstance(result, InferResponse)
        ]


class MemberCall:
    """What the fake engine returns for a step: answered by the test."""

    def __init__(self, request: InferRequest, sink: ResponseSink, progress: Progress) -> None:
        self.request = request
        self.sink = sink
        self.progress = progress
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def answer(self, final: bool = True, **outputs: int) -> None:
        tensors = tuple(tensor(name, value) for name, value in outputs.items())
        self.sink.send(InferResponse(self.request.model_name, 1, "", tensors), final)

    def value(self, name: str) -> int:
        return next(t.data[0] for t in self.request.inputs if t.name == name)


class Bench:
    def __init__(self, ensemble: ModelConfig, *models: ModelConfig) -> None:
        self.calls: list[MemberCall] = []
        self.admitted: list[bool] = []
        self.refuse: NaiadError | None = None
        self.lease = Lease()
        self.sink = Sink()
        members = members_of(ensemble, {m.name: m for m in models})
        self.scheduler = EnsembleScheduler(ensemble, 1, members, self.lease.statistics, self.infer, self.report)

    def infer(self, request: InferRequest, sink: ResponseSink, admitted: bool, progress: Progress) -> Any:
        self.admitted.append(admitted)
        if self.refuse is not None:
            raise self.refuse
        call = MemberCall(request, sink, progress)
        self.calls.append(call)
        return call

    def report(self, text: str, error: BaseException) -> None:
        raise AssertionError(text) from error

    def submit(self, outputs: tuple[str, ...] = (), is_late: bool = False, **inputs: int) -> Call:
        request = InferRequest("e", tuple(tensor(n, v) for n, v in inputs.items()), id="r", outputs=outputs)
        call = Call(request, 1, None, self.sink, self.lease, self.scheduler)
        call.is_late = is_late
        self.scheduler.submit(call)
        return call

    def running(self) -> list[str]:
        return [call.request.model_name for call in self.calls]


ADD = model("add", "AB", "S")
NEG = model("neg", "X", "Y")
CHAIN = ensemble("IJ", "O", step("add", {"A": "I", "B": "J"}, {"S": "m"}), step("neg", {"X": "m"}, {"Y": "O"}))


async def test_a_step_starts_when_its_inputs_are_there() -> None:
    bench = Bench(CHAIN, ADD, NEG)
    bench.submit(I=1, J=2)
    assert bench.running() == ["add"]
    assert (bench.calls[0].value("A"), bench.calls[0].value("B")) == (1, 2)
    bench.calls[0].answer(S=3)
    assert bench.running() == ["add", "neg"]
    assert bench.calls[1].value("X") == 3
    bench.calls[1].answer(Y=7)
    assert bench.sink.values() == [{"O": 7}]
    assert bench.sink.results[0][1] is True
    assert bench.lease.released == 1


async def test_an_ensemble_computes_what_its_steps_do() -> None:
    bench = Bench(CHAIN, ADD, NEG)
    call = bench.submit(I=1, J=2)
    for number, outputs in enumerate(({"S": 3}, {"Y": 7})):
        bench.calls[number].answer(**outputs)
        bench.calls[number].progress.ended(ComputeTimes(100, 101, 111, 211))
    await asyncio.sleep(0)
    statistics = bench.lease.statistics
    assert (statistics.inference_count, statistics.execution_count) == (1, 1)
    infer = statistics.infer
    assert (infer.success.count, infer.queue) == (1, Duration(1, 0))
    assert (infer.compute_input, infer.compute_infer, infer.compute_output) == (
        Duration(1, 2),
        Duration(1, 20),
        Duration(1, 200),
    )
    batch = statistics.batches[1]
    assert (batch.compute_input.ns, batch.compute_infer.ns, batch.compute_output.ns) == (2, 20, 200)
    assert statistics.last_inference_ms > 0
    assert time.monotonic_ns() - call.queued_ns >= infer.success.ns > 0


async def test_independent_steps_run_side_by_side() -> None:
    both = ensemble("I", "OP", step("neg", {"X": "I"}, {"Y": "O"}), step("neg", {"X": "I"}, {"Y": "P"}))
    bench = Bench(both, NEG)
    bench.submit(I=1)
    assert bench.running() == ["neg", "neg"]
    bench.calls[1].answer(Y=2)
    assert bench.sink.results == []
    bench.calls[0].answer(Y=1)
    assert bench.sink.values() == [{"O": 1, "P": 2}]


async def test_a_step_error_ends_the_call_and_names_the_ensemble() -> None:
    bench = Bench(CHAIN, ADD, NEG)
    bench.submit(I=1, J=2)
    bench.calls[0].sink.send(NotFound("no such thing"), True)
    [(error, final)] = bench.sink.results
    assert isinstance(error, NotFound)
    assert error.message == "in ensemble 'e', no such thing"
    assert final
    statistics = bench.lease.statistics
    assert (statistics.failures["OTHER"], statistics.infer.fail.count) == (2, 2)


async def test_a_refused_step_ends_the_call() -> None:
    bench = Bench(CHAIN, ADD, NEG)
    bench.refuse = NotFound("gone")
    bench.submit(I=1, J=2)
    assert [str(result) for result, _ in bench.sink.results] == ["in ensemble 'e', gone"]
    assert bench.lease.released == 1


@pytest.mark.parametrize("is_late", [False, True])
async def test_all_steps_are_let_in_of_what_had_begun_before_the_server_was_to_end(is_late: bool) -> None:
    bench = Bench(CHAIN, ADD, NEG)
    assert bench.scheduler.stopped(InferRequest("e", ())) is None
    bench.submit(I=1, J=2, is_late=is_late)
    bench.calls[0].answer(S=3)
    assert bench.admitted == [not is_late] * 2


async def test_the_error_of_one_step_cancels_the_others() -> None:
    both = ensemble("I", "OP", step("neg", {"X": "I"}, {"Y": "O"}), step("neg", {"X": "I"}, {"Y": "P"}))
    bench = Bench(both, NEG)
    bench.submit(I=1)
    bench.calls[0].sink.send(NotFound("x"), True)
    assert bench.calls[1].cancelled
    bench.calls[1].answer(Y=2)
    assert len(bench.sink.results) == 1
    assert bench.lease.statistics.infer.fail.count == 1


async def test_cancelling_reaches_the_steps() -> None:
    bench = Bench(CHAIN, ADD, NEG)
    call = bench.submit(I=1, J=2)
    call.cancel()
    assert bench.calls[0].cancelled
    assert bench.lease.released == 1
    assert bench.lease.statistics.failures["OTHER"] == 2


async def test_only_what_requested_outputs_need_runs() -> None:
    both = ensemble("I", "OP", step("neg", {"X": "I"}, {"Y": "O"}), step("add", {"A": "I", "B": "I"}, {"S": "P"}))
    bench = Bench(both, NEG, ADD)
    bench.submit(("P",), I=1)
    assert bench.running() == ["add"]
    bench.calls[0].answer(S=2)
    assert bench.sink.values() == [{"P": 2}]


async def test_asking_only_for_an_output_that_feeds_a_pruned_step_deadlocks_as_in_triton() -> None:
    chain = ensemble("I", "OP", step("neg", {"X": "I"}, {"Y": "O"}), step("neg", {"X": "O"}, {"Y": "P"}))
    bench = Bench(chain, NEG)
    bench.submit(("O",), I=1)
    [(error, final)] = bench.sink.results
    assert isinstance(error, InvalidArgument)
    assert "unexpected deadlock, at least one output is not set" in error.message
    assert final


async def test_a_step_is_asked_for_what_feeds_others_too() -> None:
    chain = ensemble("I", "OPQ", step("split", {"X": "I"}, {"Y": "O", "Z": "Q"}), step("neg", {"X": "O"}, {"Y": "P"}))
    bench = Bench(chain, model("split", "X", "YZ"), NEG)
    bench.submit(("P", "Q"), I=1)
    assert bench.calls[0].request.outputs == ("Y", "Z")
    bench.calls[0].answer(Y=2, Z=3)
    bench.calls[1].answer(Y=4)
    assert bench.sink.values() == [{"P": 4, "Q": 3}]


async def test_a_step_runs_without_what_another_has_left_out() -> None:
    bench = Bench(CHAIN, ADD, NEG)
    bench.submit(I=1, J=2)
    bench.calls[0].answer(WRONG=1)
    assert bench.running() == ["add", "neg"]
    assert bench.calls[1].request.inputs == ()  # which the model refuses, if it needs them


@pytest.mark.parametrize(("answered", "wanted"), [({"S": 1}, {"O": 1}), ({"T": 2}, {"P": 2}), ({}, {})])
async def test_outputs_that_a_step_has_left_out_are_not_in_the_response(
    answered: dict[str, int], wanted: dict[str, int]
) -> None:
    flow = ensemble("I", "OP", step("two", {"X": "I"}, {"S": "O", "T": "P"}))
    bench = Bench(flow, model("two", "X", "ST"))
    bench.submit(I=1)
    bench.calls[0].answer(**answered)
    assert bench.sink.values() == [wanted]
    [(response, final)] = bench.sink.results
    assert isinstance(response, InferResponse)
    assert final
    assert bool(response.parameters) == bool(wanted)


REPEAT = model("repeat", "X", "Y", "model_transaction_policy { decoupled: true }")
STREAM = ensemble(
    "IJ",
    "O",
    step("repeat", {"X": "I"}, {"Y": "each"}),
    step("neg", {"X": "J"}, {"Y": "same"}),
    step("add", {"A": "each", "B": "same"}, {"S": "O"}),
    more="model_transaction_policy { decoupled: true }",
)


async def test_steps_behind_a_decoupled_one_run_per_response() -> None:
    bench = Bench(STREAM, REPEAT, NEG, ADD)
    bench.submit(I=1, J=2)
    repeat, neg = bench.calls
    repeat.answer(final=False, Y=1)
    assert bench.running() == ["repeat", "neg"], "the other input is not there yet"
    neg.answer(Y=9)
    assert bench.running()[2:] == ["add"]
    repeat.answer(final=False, Y=2)
    assert [(c.value("A"), c.value("B")) for c in bench.calls[2:]] == [(1, 9), (2, 9)]
    repeat.sink.send(None, True)
    bench.calls[2].answer(S=10)
    bench.calls[3].answer(S=11)
    assert bench.sink.values() == [{"O": 10}, {"O": 11}]
    assert [final for _, final in bench.sink.results] == [False, True], "no step can add to the last one"
    assert bench.lease.released == 1


ALONE = ensemble(
    "I", "OP", step("split", {"X": "I"}, {"Y": "O", "Z": "P"}), more="model_transaction_policy { decoupled: true }"
)
SPLIT = model("split", "X", "YZ", "model_transaction_policy { decoupled: true }")


async def test_the_last_response_of_a_decoupled_step_is_the_last_one() -> None:
    bench = Bench(ALONE, SPLIT)
    bench.submit(I=1)
    for value in range(3):
        bench.calls[0].answer(final=value == 2, Y=value, Z=value)
    assert bench.sink.values() == [{"O": value, "P": value} for value in range(3)]
    assert [final for _, final in bench.sink.results] == [False, False, True]


async def test_each_response_of_a_decoupled_step_is_one_whatever_it_leaves_out() -> None:
    bench = Bench(ALONE, SPLIT)
    bench.submit(I=1)
    for outputs in ({"Y": 1, "Z": 1}, {"Z": 2}, {}):
        bench.calls[0].answer(final=False, **outputs)
    assert bench.sink.values() == [{"O": 1, "P": 1}, {"P": 2}, {}]
    bench.calls[0].sink.send(None, True)
    assert bench.sink.results[-1] == (None, True)


async def test_a_client_may_leave_between_responses_that_come_at_once() -> None:
    flow = ensemble(
        "I",
        "OP",
        step("split", {"X": "I"}, {"Y": "O", "Z": "m"}),
        step("neg", {"X": "I"}, {"Y": "P"}),
        more="model_transaction_policy { decoupled: true }",
    )
    bench = Bench(flow, SPLIT, NEG)
    call = bench.submit(I=1)
    send = bench.sink.send

    def leave(result: Result | None, final: bool) -> None:
        send(result, final)
        call.cancel()

    bench.sink.send = leave  # type: ignore[method-assign]
    split, neg = bench.calls
    for value in range(3):
        split.answer(final=False, Y=value, Z=value)
    neg.answer(Y=9)
    (response, _), (error, final) = bench.sink.results
    assert isinstance(response, InferResponse)
    assert isinstance(error, Cancelled)
    assert final
    assert split.cancelled
    assert bench.lease.released == 1


async def test_an_error_comes_behind_the_responses_before_it() -> None:
    flow = ensemble(
        "I",
        "O",
        step("split", {"X": "I"}, {"Y": "O", "Z": "m"}),
        step("neg", {"X": "m"}, {"Y": "n"}),
        more="model_transaction_policy { decoupled: true }",
    )
    bench = Bench(flow, SPLIT, NEG)
    bench.submit(I=1)
    split = bench.calls[0]
    split.answer(final=False, Y=1, Z=1)
    bench.refuse = NotFound("gone")
    split.answer(final=False, Y=2, Z=2)
    assert bench.sink.values()[0] == {"O": 1}
    assert [final for _, final in bench.sink.results] == [False] * (len(bench.sink.results) - 1) + [True]
    assert isinstance(bench.sink.results[-1][0], NotFound)


def scopes() -> int:
    gc.collect()
    return sum(isinstance(each, _Scope) for each in gc.get_objects())


async def test_what_a_response_of_a_decoupled_step_has_brought_goes_when_it_is_answered() -> None:
    flow = ensemble(
        "I",
        "O",
        step("split", {"X": "I"}, {"Y": "m"}),
        step("neg", {"X": "m"}, {"Y": "O"}),
        more="model_transaction_policy { decoupled: true }",
    )
    bench = Bench(flow, model("split", "X", "Y", "model_transaction_policy { decoupled: true }"), NEG)
    bench.submit(I=1)
    split = bench.calls.pop()
    before = scopes()
    for number in range(20):
        split.answer(False, Y=number)
        bench.calls.pop().answer(Y=number)
    assert scopes() <= before + 1
    split.sink.send(None, True)
    assert len(bench.sink.values()) == 20
    assert bench.sink.results[-1] == (None, True)


async def test_responses_wait_for_a_slower_step_beside_the_decoupled_one() -> None:
    flow = ensemble(
        "I",
        "O",
        step("split", {"X": "I"}, {"Y": "m"}),
        step("neg", {"X": "I"}, {"Y": "n"}),
        step("add", {"A": "m", "B": "n"}, {"S": "O"}),
        more="model_transaction_policy { decoupled: true }",
    )
    bench = Bench(flow, model("split", "X", "Y", "model_transaction_policy { decoupled: true }"), NEG, ADD)
    before = scopes()
    bench.submit(I=1)
    split, slow = bench.calls
    bench.calls.clear()
    split.answer(False, Y=1)
    split.answer(False, Y=2)
    assert bench.calls == []
    slow.answer(Y=9)
    split.answer(False, Y=3)
    assert [(call.value("A"), call.value("B")) for call in bench.calls] == [(1, 9), (2, 9), (3, 9)]
    for call in bench.calls:
        call.answer(S=call.value("A"))
    bench.calls.clear()
    del call, slow
    # That of the call and that of the response seen last.
    assert scopes() <= before + 2
    split.sink.send(None, True)
    assert bench.sink.values() == [{"O": 1}, {"O": 2}, {"O": 3}]


async def test_a_decoupled_step_without_responses_ends_the_call_empty() -> None:
    bench = Bench(STREAM, REPEAT, NEG, ADD)
    bench.submit(I=1, J=2)
    bench.calls[0].sink.send(None, True)
    bench.calls[1].answer(Y=1)
    assert bench.sink.results == [(None, True)]


@pytest.mark.parametrize(
    ("shape", "batching", "expected"),
    [((4,), False, (4,)), ((4,), True, (1, 4)), ((2, 4), True, (2, 4)), ((1, 4), False, (4,)), ((2, 4), False, (2, 4))],
)
async def test_the_batch_dimension_fits_the_reader(
    shape: tuple[int, ...], batching: bool, expected: tuple[int, ...]
) -> None:
    assert fitted(shape, 1, batching) == expected


# ---------------------------------------------------------------- max_inflight_requests

FEED = model("stream", "A", "S", "model_transaction_policy { decoupled: true }")


def limited(limit: int) -> Bench:
    steps = step("stream", {"A": "I"}, {"S": "m"}), step("neg", {"X": "m"}, {"Y": "O"})
    more = "model_transaction_policy { decoupled: true }"
    config = ensemble("I", "O", *steps, f"max_inflight_requests: {limit}", more=more)
    return Bench(config, FEED, NEG)


async def test_a_step_waits_for_requests_of_its_own_kind() -> None:
    bench = limited(2)
    bench.submit(I=0)
    (stream,) = bench.calls
    for value in range(5):
        stream.answer(final=value == 4, S=value)
    assert bench.running() == ["stream", "neg", "neg"]
    for value in range(5):
        call = bench.calls[1 + value]
        assert call.value("X") == value
        call.answer(Y=value)
        assert len(bench.running()) == min(6, 1 + 2 + value + 1)
    assert bench.sink.values() == [{"O": value} for value in range(5)]
    assert [final for _, final in bench.sink.results] == [False] * 4 + [True]
    assert bench.lease.released == 1


async def test_the_limit_is_for_all_calls_together() -> None:
    bench = limited(1)
    bench.submit(I=1)
    bench.submit(I=2)
    assert bench.running() == ["stream"]
    bench.calls[0].answer(final=True, S=1)
    assert bench.running() == ["stream", "neg", "stream"]
    bench.calls[2].answer(final=True, S=2)
    assert bench.running() == ["stream", "neg", "stream"]
    bench.calls[1].answer(Y=1)
    bench.calls[3].answer(Y=2)
    assert bench.sink.values() == [{"O": 1}, {"O": 2}]


async def test_who_leaves_waits_no_longer() -> None:
    bench = limited(1)
    first = bench.submit(I=1)
    bench.calls[0].answer(final=False, S=1)
    bench.calls[0].answer(final=True, S=2)
    assert bench.running() == ["stream", "neg"]
    first.cancel()
    assert bench.calls[1].cancelled
    bench.submit(I=3)
    bench.calls[2].answer(final=True, S=3)
    assert bench.running() == ["stream", "neg", "stream"]  # The cancelled one is still under way.
    bench.calls[1].answer(Y=1)
    assert bench.calls[3].value("X") == 3


async def test_an_error_ends_the_call_and_lets_the_next_in() -> None:
    bench = limited(1)
    bench.submit(I=1)
    bench.submit(I=2)
    bench.calls[0].answer(final=False, S=1)
    bench.calls[0].answer(final=True, S=7)
    bench.calls[2].answer(final=True, S=2)
    bench.calls[1].sink.send(InvalidArgument("no"), True)
    # What waited of the failed call is not run.
    assert [call.value("X") for call in bench.calls[3:]] == [2]


async def test_refused_requests_let_the_next_in_one_by_one() -> None:
    bench = limited(1)
    bench.submit(I=1)
    for value in range(2000):
        bench.calls[0].answer(final=value == 1999, S=1)
    bench.refuse = NotFound("gone")
    bench.calls[1].answer(Y=1)
    assert isinstance(bench.sink.results[-1][0], NotFound)
    assert bench.lease.released == 1


async def test_who_has_waited_too_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("naiad.scheduling.ensemble._LIMIT_WAIT_S", 0.0)
    bench = limited(1)
    said: list[str] = []
    heard = asyncio.Event()

    def report(text: str, error: BaseException) -> None:
        said.append(text)
        heard.set()

    bench.scheduler.report = report
    bench.submit(I=1)
    bench.calls[0].answer(final=False, S=1)
    bench.calls[0].answer(final=True, S=2)
    assert len(bench.calls) == 2
    await heard.wait()
    assert bench.calls[2].value("X") == 2
    assert said == [
        "a request of ensemble 'e' to 'neg' goes on beyond the limit, since it has waited too long",
    ]
    bench.calls[1].answer(Y=1)
    bench.calls[2].answer(Y=2)
    assert bench.sink.values() == [{"O": 1}, {"O": 2}]


async def test_what_ends_early_lets_none_of_its_own_steps_in() -> None:
    bench = limited(1)
    bench.submit(I=0)
    (stream,) = bench.calls
    for value in range(3):
        stream.answer(final=False, S=value)
    first = bench.calls[1]
    # One that has not begun ends as soon as it is cancelled.
    first.cancel = lambda: first.sink.send(Cancelled(""), True)  # type: ignore[method-assign]
    stream.sink.send(Internal("no more"), True)
    assert bench.running() == ["stream", "neg"]
    ((result, final),) = bench.sink.results
    assert isinstance(result, Internal)
    assert final
    assert bench.lease.released == 1
