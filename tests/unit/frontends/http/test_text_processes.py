"""Processes that read and write large JSON: the same comes out, whatever happens to them."""

import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from http_fake_engine import FakeEngine
from http_raw_client import Client

from naiad.datatypes import LARGE
from naiad.errors import NaiadError
from naiad.frontends.http import text_processes
from naiad.frontends.http.app import HttpFrontend
from naiad.frontends.http.text_processes import HERE, TextProcess, TextProcesses, Texts

#: Long enough for simdjson.
COUNT = 20_000
#: More is worth a process.
MANY = LARGE
NUMBERS = [number / 7 for number in range(COUNT)]
SOON_S = 20


@pytest.fixture(scope="module")
def process() -> Iterator[TextProcess]:
    made = TextProcess()
    yield made
    assert not made.has_failed
    made.end()


def request_text(*inputs: dict[str, Any], **members: Any) -> bytes:
    return json.dumps({"id": "ä\n", "inputs": inputs, **members}, ensure_ascii=False).encode()


def tensor(datatype: str, data: Any) -> dict[str, Any]:
    return {"name": "I", "shape": [COUNT], "datatype": datatype, "data": data, "parameters": {"a": 0.1}}


def outcome(read: Callable[[bytes], Any], text: bytes) -> Any:
    try:
        return plain(read(text))
    except NaiadError as error:
        return type(error), error.message


def plain(value: Any) -> Any:
    """Arrays with their dtype, so that what is equal is the same."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, nothing is read or written in this process."""

    def never(*_: Any) -> Any:
        raise AssertionError("it was done here")

    def forbid() -> None:
        monkeypatch.setattr(text_processes, "HERE", SimpleNamespace(read=never, write=never))

    return forbid


@pytest.mark.parametrize(
    "text",
    [
        request_text(tensor("FP32", NUMBERS)),
        request_text(tensor("FP64", NUMBERS), tensor("INT8", list(range(COUNT)))),
        request_text(tensor("UINT64", [2**64 - 1] * COUNT), tensor("INT64", [-(2**63)] * COUNT)),
        request_text(tensor("FP32", [NUMBERS[:100]] * 200), parameters={"x": 1e300, "y": 2**63, "z": "\\"}),
        request_text(tensor("FP32", NUMBERS), tensor("BOOL", [True, False])),
        request_text(tensor("FP32", NUMBERS), tensor("BYTES", ["a", "ß"])),
        request_text(tensor("FP32", NUMBERS), "no object", 5),
    ],
)
def test_reads_numbers(process: TextProcess, by_itself: Callable[[], None], text: bytes) -> None:
    wanted = plain(HERE.read(text))
    by_itself()
    assert plain(process.read(text)) == wanted
    assert plain(process.read(memoryview(bytearray(text)))) == wanted


@pytest.mark.parametrize(
    "text",
    [
        request_text(tensor("FP32", ["a"] * COUNT)),
        request_text(tensor("INT32", [2**70] * COUNT)),
        request_text(tensor("BOOL", [True] * COUNT)),
        request_text(tensor("FP32", NUMBERS), tensor("BYTES", ["a"] * COUNT)),
        request_text(tensor("FP32", NUMBERS)).replace(b"0.5", b"NaN", 1),
        request_text(tensor("FP32", NUMBERS))[:-1],
        request_text(tensor("FP32", NUMBERS)) + b"}",
        request_text(tensor("FP32", NUMBERS)).replace(b"I", b"\xff", 1),
        b'{"inputs":5,"data":[' + b"1," * COUNT * 4 + b"1]}",
        b"[" + b"1," * COUNT * 4 + b"1]",
        b"",
    ],
)
def test_what_it_cannot_read_is_read_here(process: TextProcess, text: bytes) -> None:
    assert outcome(process.read, text) == outcome(HERE.read, text)


def document(outputs: list[Any]) -> dict[str, Any]:
    return {
        "id": "ä\udcfe",
        "parameters": {"a": math.nan, "b": 2**63, "c": "null", "d": True},
        "outputs": [{"name": "nonnull", "shape": (COUNT,), "data": data} for data in outputs] + [{"name": "region"}],
    }


@pytest.mark.parametrize(
    "outputs",
    [
        [np.arange(MANY) / 7],
        [np.arange(MANY, dtype=np.int8), np.arange(300, dtype=np.uint64), np.zeros(MANY, np.bool_)],
        [np.array([1.0, math.nan, math.inf, -math.inf] * (MANY // 4))],
        [np.arange(MANY, dtype=np.float32), ["a", "\udcff", "null"], (1.5, 2.5)],
        [np.zeros(0), np.ones(MANY)],
    ],
)
def test_writes_numbers(process: TextProcess, by_itself: Callable[[], None], outputs: list[Any]) -> None:
    wanted = HERE.write(document(outputs))
    by_itself()
    given = document(outputs)
    assert process.write(given) == wanted
    assert all(output["data"] is data for output, data in zip(given["outputs"], outputs, strict=False))


@pytest.mark.parametrize("outputs", [[np.arange(COUNT)], [["a"] * COUNT, np.arange(300)], []])
def test_few_numbers_are_written_here(
    process: TextProcess, monkeypatch: pytest.MonkeyPatch, outputs: list[Any]
) -> None:
    wanted = HERE.write(document(outputs))
    monkeypatch.setattr(TextProcess, "_ask", None)
    assert process.write(document(outputs)) == wanted


def test_the_memory_of_a_long_text_is_not_kept(
    process: TextProcess, by_itself: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_processes, "_KEPT_MEMORY", 1 << 20)
    by_itself()
    for values in ([0.5] * MANY, [1.0 / 3.0] * COUNT, [0.25] * COUNT):
        read = process.read(request_text(tensor("FP32", values)))
        assert read["inputs"][0]["data"].tolist() == values
    assert os.fstat(process._memory).st_size < 1 << 20


def test_what_it_keeps_does_not_change(process: TextProcess) -> None:
    first = process.read(request_text(tensor("FP32", NUMBERS)))
    process.read(request_text(tensor("FP32", [0.5] * COUNT)))
    assert first["inputs"][0]["data"].tolist() == NUMBERS


def test_from_several_threads(process: TextProcess) -> None:
    texts = [request_text(tensor("INT32", [1000 + number] * COUNT)) for number in range(4)]
    wrong: list[int] = []

    def read(number: int) -> None:
        for _ in range(5):
            found = set(process.read(texts[number])["inputs"][0]["data"].tolist())
            wrong.extend(found - {1000 + number})

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("use", ["read", "write"])
def test_one_that_dies(use: str) -> None:
    process = TextProcess()
    answer = {"outputs": [{"data": np.arange(MANY)}]}
    text = request_text(tensor("FP32", NUMBERS))
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        if use == "read":
            assert plain(process.read(text)) == plain(HERE.read(text))
        else:
            assert process.write(answer) == HERE.write(answer)
        assert process.has_failed
    process.end()


@pytest.mark.parametrize("others", [0, MANY])
def test_one_that_hangs_is_ended(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does not answer or does not even take the job, as when there are long texts beside the numbers."""
    monkeypatch.setattr(text_processes, "_HANGS_AFTER_S", 1)
    process = TextProcess()
    os.kill(process.pid, signal.SIGSTOP)
    answer = {"outputs": [{"data": np.arange(MANY)}, {"data": ["a"] * others}]}
    assert process.write(answer) == HERE.write(answer)
    assert process.has_failed
    process.end()


def test_it_has_a_name(process: TextProcess) -> None:
    process.read(request_text(tensor("FP32", NUMBERS)))
    assert Path(f"/proc/{process.pid}/comm").read_text() == "naiad-json\n"


def test_one_that_is_ended_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TextProcess()
    os.kill(process.pid, signal.SIGSTOP)
    text = request_text(tensor("FP32", NUMBERS))
    found: list[Any] = []
    asks = threading.Event()
    receive = process._channel.receive
    monkeypatch.setattr(process._channel, "receive", lambda: (asks.set(), receive())[1])
    reader = threading.Thread(target=lambda: found.append(process.read(text)))
    reader.start()
    asks.wait()
    process.end()
    reader.join()
    assert plain(found) == [plain(HERE.read(text))]


def test_without_memory(process: TextProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError("no space")

    text = request_text(tensor("FP32", NUMBERS))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert plain(process.read(text)) == plain(HERE.read(text))
    assert process.read(text) is not None


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def processes(most: int, kept_s: float = 60.0) -> AsyncIterator[TextProcesses]:
    made = TextProcesses(most, kept_s)
    try:
        yield made
    finally:
        pids = made.pids
        await made.close()
        assert made.pids == []
        assert not any(map(is_there, pids))


async def started(made: TextProcesses) -> None:
    """Texts come until one is used."""
    async with asyncio.timeout(SOON_S):
        while await made.run(lambda texts: texts is HERE):  # noqa: ASYNC110 - nobody says when one is there
            await asyncio.sleep(0.01)


class TestProcesses:
    async def test_starts_for_the_second_text(self) -> None:
        async with processes(1) as made:
            assert await made.run(lambda texts: texts is HERE)
            assert "[] of 1" in repr(made)
            await started(made)
            assert len(made.pids) == 1

    async def test_texts_far_apart_start_none(self) -> None:
        async with processes(1, kept_s=0.0) as made:
            for _ in range(20):
                assert await made.run(lambda texts: texts is HERE)
            assert made.pids == []

    async def test_ends_when_nothing_comes(self) -> None:
        async with processes(1, kept_s=0.5) as made:
            await started(made)
            async with asyncio.timeout(SOON_S):
                while made.pids:  # noqa: ASYNC110 - a timer of its own ends it
                    await asyncio.sleep(0.01)
            await started(made)

    async def test_no_more_than_there_may_be(self) -> None:
        async with processes(2) as made:
            inside: list[int] = []
            most: list[int] = []

            def work(texts: Texts) -> None:
                inside.append(0)
                texts.read(request_text(tensor("FP32", NUMBERS)))
                most.append(len(inside))
                inside.pop()

            async with asyncio.timeout(SOON_S):
                while len(made.pids) < 2:
                    await asyncio.gather(*[made.run(work) for _ in range(6)])
            assert max(most) <= 2

    async def test_none(self) -> None:
        async with processes(0) as made:
            for _ in range(3):
                assert await made.run(lambda texts: texts is HERE)

    async def test_errors_are_passed_on(self) -> None:
        async with processes(1) as made:
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    await made.run(lambda _: 1 / 0)

    async def test_who_does_not_wait_any_more_takes_no_place(self) -> None:
        async with processes(1) as made:
            begun, go_on = threading.Event(), threading.Event()
            first = asyncio.ensure_future(made.run(lambda _: (begun.set(), go_on.wait())))
            await asyncio.to_thread(begun.wait)
            waiting = asyncio.ensure_future(made.run(lambda _: None))
            await asyncio.sleep(0)
            waiting.cancel()
            go_on.set()
            await first
            assert await made.run(lambda _: 5) == 5

    async def test_one_that_is_there_right_when_all_are_to_end_ends_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def at_once(work: Callable[[], Any]) -> Any:
            return work()

        monkeypatch.setattr(asyncio, "to_thread", at_once)
        async with processes(1) as made:
            [place] = made._places
            place.texts(start=True)
            assert made.pids == []

    async def test_one_that_dies_is_started_again_and_without_work_not_for_ever(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = request_text(tensor("FP32", NUMBERS))
        async with processes(1) as made:
            # That the last one has worked is no excuse for the next ones.
            for works in [True] * 4 + [False] * 2:
                await started(made)
                if works:
                    assert await made.run(lambda texts: texts.read(text)["inputs"][0]["name"]) == "I"
                os.kill(made.pids[0], signal.SIGKILL)
                assert await made.run(lambda texts: texts.read(text)["inputs"][0]["name"]) == "I"
                assert not caplog.records
            assert await made.run(lambda texts: texts is HERE)
            assert [record.message[:42] for record in caplog.records] == ["there is no process for large JSON any mor"]

    async def test_none_is_taken_away_from_a_text(self) -> None:
        async with processes(1, kept_s=0.3) as made:
            await started(made)
            go_on = threading.Event()
            long = asyncio.ensure_future(made.run(lambda texts: (go_on.wait(), texts)[1]))
            await asyncio.sleep(0.6)
            assert made.pids
            go_on.set()
            used = await long
            assert isinstance(used, TextProcess)
            assert not used.has_failed

    async def test_a_thread_that_nobody_waits_for_keeps_its_place(self) -> None:
        async with processes(1) as made:
            begun, go_on = threading.Event(), threading.Event()
            first = asyncio.ensure_future(made.run(lambda _: (begun.set(), go_on.wait())))
            await asyncio.to_thread(begun.wait)
            first.cancel()
            second = asyncio.ensure_future(made.run(lambda _: go_on.is_set()))
            await asyncio.sleep(0.05)
            assert not second.done()
            go_on.set()
            assert await second

    async def test_a_closed_one_starts_nothing(self) -> None:
        made = TextProcesses(1, 60.0)
        await started(made)
        await made.close()
        for _ in range(5):
            assert await made.run(lambda texts: texts is HERE)
        assert made.pids == []
        await made.close()

    async def test_one_that_cannot_be_started(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_descriptors() -> None:
            raise OSError("too many open files")

        monkeypatch.setattr(text_processes, "TextProcess", no_descriptors)
        async with processes(1) as made:
            async with asyncio.timeout(SOON_S):
                while not caplog.records:
                    assert await made.run(lambda texts: texts is HERE)
            assert "too many open files" in caplog.records[0].message
            assert len(caplog.records) == 1


async def test_a_server_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("naiad.frontends.http.inference.LARGE", 100_000)
    values = list(range(30_000))
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 30_000], "data": values}
    ask = {"inputs": [tensor]}
    async with HttpFrontend(FakeEngine(), address="127.0.0.1", port=0, grace_s=5, text_processes=1) as front_end:
        client = Client(front_end.bound_port)
        texts = front_end._texts  # what a client cannot see
        async with asyncio.timeout(SOON_S):
            uses = False
            while not uses:
                uses = bool(texts.pids)
                answer = await client.post("/v2/models/ident_i32/infer", ask)
                assert answer.status == 200
                assert answer.json["outputs"][0]["data"] == values
        wrong = await client.post("/v2/models/ident_i32/infer", {"inputs": [tensor | {"shape": [1, 1]}]})
        assert wrong.status == 500
        assert "Shape does not match true shape" in wrong.json["error"]
        pids = texts.pids
    assert pids
    assert not any(map(is_there, pids))
