"""The access log beside the answers of requests."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument
from naiad.frontends.access import logged
from naiad.messages import InferRequest, InferResponse, Tensor
from naiad.telemetry.log import Log

REQUEST = InferRequest("m", (Tensor("IN", DataType.FP32, (2,), bytes(8)),), id="7")
RESPONSE = InferResponse("m", 3, "7", (Tensor("OUT", DataType.FP32, (4,), memoryview(bytes(16))),))


class Engine:
    """Keeps what it is asked; refuses where `error` is set."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.error: Exception | None = None

    def model(self, name: str, version: int = -1) -> str:
        return f"{name} {version}"

    def infer(self, request: Any, sink: Any, model: Any, progress: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.asked.append((sink, progress))
        return SimpleNamespace(queued_ns=1_000_000)

    def about(self) -> str:
        return "about"


class Broken:
    def send(self, result: Any, final: bool) -> None:
        raise RuntimeError("the client's connection")


class Sink:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []

    def send(self, result: Any, final: bool) -> None:
        self.sent.append((result, final))


@pytest.fixture
def engine() -> Any:
    return Engine()


async def lines(log: Log, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    await asyncio.sleep(0)
    log.flush()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def log() -> Log:
    log = Log()
    log.configure(format="json")
    return log


async def test_an_answer_that_cannot_be_sent_has_its_line(engine, log, capsys):
    logging = logged(engine, "HTTP", log)
    for result in InferResponse("m", 1, "", ()), Internal("no"):
        logging.infer(InferRequest("m", ()), Broken())
        with pytest.raises(RuntimeError):
            engine.asked.pop()[0].send(result, True)
    assert [line["status"] for line in await lines(log, capsys)] == ["OK", "INTERNAL"]


async def test_what_a_line_says_of_a_request(engine, log, capsys, monkeypatch):
    monkeypatch.setattr("naiad.frontends.access._now_ns", lambda: 9_500_000)
    sink = Sink()
    logged(engine, "HTTP", log).infer(REQUEST, sink, "its model")
    ((through, progress),) = engine.asked
    progress.version, progress.executing_ns = 3, 2_000_000
    through.send(RESPONSE, False)
    through.send(RESPONSE, False)
    through.send(None, True)
    assert sink.sent == [(RESPONSE, False), (RESPONSE, False), (None, True)]
    # The times of its execution come in the same turn, after its end.
    progress.start_ns, progress.end_ns = 3_000_000, 8_000_000
    (line,) = await lines(log, capsys)
    values = [line[name] for name in list(line)[-11:]]
    assert values == ["HTTP", "m", 3, "7", "OK", 2000, 5000, 8500, 8, 32, 2]


async def test_a_request_that_nothing_has_executed(engine, log, capsys):
    logged(engine, "GRPC", log).infer(REQUEST, Sink())
    engine.asked[0][0].send(RESPONSE, True)
    (line,) = await lines(log, capsys)
    assert (line["version"], line["queue_us"], line["compute_us"], line["responses"]) == (0, 0, 0, 1)


async def test_a_refused_request(engine, log, capsys):
    engine.error = InvalidArgument("no")
    with pytest.raises(InvalidArgument):
        logged(engine, "GRPC", log).infer(InferRequest("m", (), model_version=2), Sink())
    (line,) = await lines(log, capsys)
    assert (line["status"], line["version"], line["total_us"], line["responses"]) == ("INVALID_ARG", 2, 0, 0)


async def test_the_format_may_change(engine, log, capsys):
    logging = logged(engine, "HTTP", log)
    for format in "json", "ISO8601", "json":
        log.update(None, {"log_format": format})
        logging.infer(REQUEST, Sink())
        engine.asked.pop()[0].send(RESPONSE, True)
        await asyncio.sleep(0)
    log.flush()
    first, second, third = capsys.readouterr().out.splitlines()
    assert json.loads(first).keys() == json.loads(third).keys()
    assert 'access.py:1] access protocol="HTTP" model="m" version=0 id="7" status="OK" queue_us=0' in second


async def test_the_rest_of_the_engine_is_itself(engine, log):
    logging = logged(engine, "HTTP", log)
    assert logging.about() == "about"
    assert logging.model("m", 2) == "m 2"
