"""The access log beside the answers of requests."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from naiad.errors import Internal
from naiad.frontends.access import logged
from naiad.messages import InferRequest, InferResponse


class Broken:
    def send(self, result: Any, final: bool) -> None:
        raise RuntimeError("the client's connection")


async def test_an_answer_that_cannot_be_sent_has_its_line() -> None:
    lines: list[Any] = []
    sinks: list[Any] = []
    engine: Any = SimpleNamespace(infer=lambda request, sink, model: sinks.append(sink))
    log: Any = SimpleNamespace(access=lines.extend, flush=lambda: None)
    logging = logged(engine, "http", log)
    for result in InferResponse("m", 1, "", ()), Internal("no"):
        logging.infer(InferRequest("m", ()), Broken())
        with pytest.raises(RuntimeError):
            sinks.pop().send(result, True)
    await asyncio.sleep(0)
    assert [fields[4] for fields in lines] == ['"OK"', '"INTERNAL"']
