"""The engine over fakes: what becomes of leases when a scheduler fails, and of requests whose check takes long."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from naiad.datatypes import LARGE, DataType, TakesLong
from naiad.engine import Engine
from naiad.errors import Cancelled, InvalidArgument, NaiadError, Unavailable
from naiad.messages import InferRequest, Result, SequenceControl, Tensor
from naiad.models.check import BrokenContents
from naiad.scheduling.scheduler import Call
from naiad.statistics import ModelStatistics


class Refusing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def submit(self, call: object) -> None:
        raise self.error


@pytest.mark.parametrize("error", [Unavailable("queue full"), ValueError("a bug")])
def test_a_request_that_is_not_taken_holds_no_lease(error: Exception) -> None:
    leases: list[int] = []
    model = SimpleNamespace(
        version=1,
        statistics=ModelStatistics("m", "1"),
        scheduler=Refusing(error),
        check=lambda request: (request, 1, None),
        lease=lambda: leases.append(1),
        release=lambda: leases.append(-1),
    )
    manager: Any = SimpleNamespace(table=SimpleNamespace(records={}, lookup=lambda name, version: model))
    with pytest.raises(type(error)):
        Engine(manager).infer(InferRequest("m", ()), SimpleNamespace())  # type: ignore[arg-type]
    assert leases == [1, -1]
    # Triton counts what was never queued nowhere.
    assert model.statistics.refused == 1
    assert not any(model.statistics.failures.values())
    assert model.statistics.infer.fail.count == 0


class Stopping:
    """A scheduler that says what it would say when the server is about to end, and takes all."""

    def __init__(self, refusal: NaiadError | None) -> None:
        self.refusal = refusal
        self.calls: list[Call] = []

    def stopped(self, request: InferRequest) -> NaiadError | None:
        return self.refusal

    def submit(self, call: Call) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_server_that_is_about_to_end_takes_what_goes_on_with_something(refuses: bool) -> None:
    model = SlowModel()
    model.check = lambda request, in_thread=False: (request, 1, None)  # type: ignore[method-assign]
    scheduler = Stopping(Unavailable("stopping") if refuses else None)
    model.scheduler = scheduler  # type: ignore[assignment]
    engine = model.engine()
    engine.infer(InferRequest("m", ()), Sink())
    engine.exiting()
    engine.infer(InferRequest("m", ()), Sink(), admitted=True)
    assert [call.is_late for call in scheduler.calls] == [False, False]
    if refuses:
        with pytest.raises(Unavailable, match="stopping"):
            engine.infer(InferRequest("m", ()), Sink())
        assert (model.leases, model.statistics.refused) == (2, 1)
    else:
        engine.infer(InferRequest("m", ()), Sink())
        assert scheduler.calls[-1].is_late


def test_what_a_model_asks_for_goes_on_while_it_has_requests() -> None:
    models = [SimpleNamespace(name="m", version=version, in_flight=version - 1) for version in (1, 2)]
    engine = Engine(SimpleNamespace(table=SimpleNamespace(records={}, models=lambda: models)))  # type: ignore[arg-type]
    asked = [("m", 1), ("m", 2), ("gone", 2)]
    assert [engine.goes_on(*each) for each in asked] == [True, True, True]
    engine.exiting()
    assert [engine.goes_on(*each) for each in asked] == [False, True, False]


async def test_a_server_that_is_about_to_end_tells_little() -> None:
    engine = SlowModel().engine()
    engine.exiting()

    async def is_live() -> bool:
        return engine.is_live()

    async def ask(question: Any) -> None:
        await question()

    for question, text in [
        (is_live, "Server exiting"),
        (engine.is_ready, "Server exiting"),
        (lambda: engine.model_ready("m"), "Server not ready"),
        (lambda: engine.model_metadata("m"), "Server not ready"),
        (engine.statistics, "Server not ready"),
        (engine.index, "Server not ready"),
        (lambda: engine.load("m"), "Server not ready"),
        (lambda: engine.unload("m"), "Server not ready"),
    ]:
        with pytest.raises(Unavailable) as raised:
            await ask(question)
        assert raised.value.message == text
    assert engine.metadata().name == "triton"


REQUEST = InferRequest("m", (Tensor("A", DataType.BYTES, (1,), bytes(LARGE)),))


class Queue:
    """A scheduler that answers nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.withdrawn: list[Call] = []
        self.submitted = asyncio.Event()

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self.submitted.set()

    def withdraw(self, call: Call) -> None:
        self.withdrawn.append(call)


class Sink:
    def __init__(self) -> None:
        self.results: list[tuple[Result | None, bool]] = []
        self.got_one = asyncio.Event()

    def send(self, result: Result | None, final: bool) -> None:
        self.results.append((result, final))
        self.got_one.set()

    async def refusal(self) -> NaiadError:
        await self.got_one.wait()
        ((result, final),) = self.results
        assert isinstance(result, NaiadError)
        assert final
        return result


class SlowModel:
    """Its check takes long, and ends with what a test says."""

    version = 1

    def __init__(self, error: NaiadError | None = None) -> None:
        self.statistics = ModelStatistics("m", "1")
        self.scheduler = Queue()
        self.leases = 0
        self.threads: list[bool] = []
        self.may_go_on = threading.Event()
        self._error = error

    def check(self, request: InferRequest, in_thread: bool = False) -> tuple[InferRequest, int, object]:
        if not in_thread:
            raise TakesLong
        in_main = threading.current_thread() is threading.main_thread()
        self.threads.append(in_main)
        assert in_main or self.may_go_on.wait(10)
        if self._error is not None:
            raise self._error
        return request, 3, "shape"

    def lease(self) -> None:
        self.leases += 1

    def release(self) -> None:
        self.leases -= 1

    def engine(self) -> Engine:
        manager: Any = SimpleNamespace(table=SimpleNamespace(records={}, lookup=lambda name, version: self))
        return Engine(manager)


async def test_what_takes_long_to_check_is_checked_in_a_thread() -> None:
    model, sink = SlowModel(), Sink()
    asked = model.engine().infer(REQUEST, sink)
    assert (model.leases, model.scheduler.calls) == (1, [])
    model.may_go_on.set()
    await model.scheduler.submitted.wait()
    (call,) = model.scheduler.calls
    assert (call.request, call.rows, call.signature) == (REQUEST, 3, "shape")
    await asyncio.sleep(0)
    assert (model.leases, model.threads) == (1, [False])
    asked.cancel()
    assert model.scheduler.withdrawn == [call]
    call.deliver(None, True)
    assert (sink.results, model.leases) == ([(None, True)], 0)


@pytest.mark.parametrize("error", [InvalidArgument("too few"), Unavailable("queue full")])
async def test_what_is_wrong_with_it_goes_to_the_sink(error: NaiadError) -> None:
    model, sink = SlowModel(error), Sink()
    model.may_go_on.set()
    model.engine().infer(REQUEST, sink)
    assert await sink.refusal() is error
    assert error.refused
    await asyncio.sleep(0)
    assert (model.leases, model.statistics.failures["BACKEND"]) == (0, 0)


async def test_broken_contents_count_as_a_failure_of_the_model() -> None:
    model, sink = SlowModel(BrokenContents("cut short")), Sink()
    model.may_go_on.set()
    model.engine().infer(REQUEST, sink)
    error = await sink.refusal()
    assert (error.message, error.refused) == ("cut short", False)
    await asyncio.sleep(0)
    assert (model.leases, model.statistics.failures["BACKEND"]) == (0, 1)


async def test_it_may_be_cancelled_while_it_is_checked() -> None:
    model, sink = SlowModel(), Sink()
    model.engine().infer(REQUEST, sink).cancel()
    model.may_go_on.set()
    assert isinstance(await sink.refusal(), Cancelled)
    assert (model.leases, model.scheduler.calls, model.statistics.failures["CANCELED"]) == (0, [], 1)


async def test_requests_of_a_sequence_are_checked_at_once() -> None:
    model = SlowModel()
    request = InferRequest("m", REQUEST.inputs, sequence=SequenceControl(1))
    assert model.engine().infer(request, Sink()) is model.scheduler.calls[0]
    assert (model.leases, model.threads) == (1, [True])
    wrong = InvalidArgument("too few")
    with pytest.raises(InvalidArgument, match="too few"):
        SlowModel(wrong).engine().infer(request, Sink())
