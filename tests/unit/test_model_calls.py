"""What model code asks of the server: when nobody is left to answer, and when it cannot have it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from naiad.backends.python.calls import Increment, LoadCall, MetricCall, NewFamily, NewMetric, SetValue
from naiad.errors import NotFound, Unavailable, Unsupported
from naiad.instances.call_link import Caller
from naiad.model_calls import ModelCalls
from naiad.telemetry.custom_metrics import CustomMetrics

CALLER = Caller("m", 1, 1)


async def test_who_still_waits_when_the_server_ends_is_told() -> None:
    begun = asyncio.Event()

    async def load(name: str, parameters: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    engine: Any = SimpleNamespace(load=load)
    calls = ModelCalls(engine, SimpleNamespace())  # type: ignore[arg-type]
    replies: list[Any] = []
    asked = msgspec.Raw(msgspec.msgpack.encode(LoadCall("n")))
    calls(CALLER, "load_model", asked, lambda *reply: replies.append(reply))
    await begun.wait()
    await calls.close()
    [(value, error)] = replies
    assert value is None
    assert isinstance(error, Unavailable)


async def test_what_is_not_offered_or_makes_no_sense_is_refused() -> None:
    calls = ModelCalls(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    replies: list[Any] = []
    nothing = msgspec.Raw(msgspec.msgpack.encode({}))
    for method in "fly", "infer", "load_model":
        calls(CALLER, method, nothing, lambda *reply: replies.append(reply))
    assert [value for value, _ in replies] == [None] * 3
    assert [type(error) for _, error in replies] == [NotFound, msgspec.ValidationError, msgspec.ValidationError]


async def test_a_change_of_a_metric_that_is_refused_takes_no_other_along() -> None:
    metrics = CustomMetrics()
    calls = ModelCalls(SimpleNamespace(), metrics)  # type: ignore[arg-type]
    answer: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
    changes = (
        NewFamily("f", "", "counter"),
        NewMetric("f", {}),
        SetValue("f", {}, 3.0),
        Increment("gone", {}, 1.0),
        Increment("f", {}, 5.0),
    )
    asked = msgspec.Raw(msgspec.msgpack.encode(MetricCall(changes)))
    calls(CALLER, "metric", asked, lambda *reply: answer.set_result(reply))
    _, error = await answer
    assert isinstance(error, Unsupported)
    assert error.message == "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"
    assert metrics.value("m", "f", {}) == 5.0
