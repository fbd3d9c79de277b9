import json
import queue
import resource
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError, Unsupported
from naiad.messages import InferRequest, InferResponse, Result, Tensor
from naiad.options import Setting
from naiad.packed import pack_bytes
from naiad.telemetry import trace
from naiad.telemetry.trace import TraceSettings, Values, read_changes, tensor_document


def request_for(model: str) -> InferRequest:
    return InferRequest(model, (Tensor("A", DataType.INT32, (2,), np.int32([1, 2]).tobytes()),), id="r")


REQUEST = request_for("m")


class FailingLog:
    def error(self, message: str) -> None:
        raise AssertionError(message)

    def exception(self, message: str, error: BaseException) -> None:
        raise AssertionError(message) from error


class KeptLog:
    """Keeps what is said, from whatever thread."""

    def __init__(self) -> None:
        self.errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.error = self.errors.put


def no_header(name: str) -> None:
    return None


class Sink:
    def __init__(self) -> None:
        self.results: list[tuple[Result | None, bool]] = []

    def send(self, result: Result | None, final: bool) -> None:
        self.results.append((result, final))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.json"


def settings(path, **values: Any) -> TraceSettings:
    return TraceSettings(Values(**{"levels": ("TIMESTAMPS",), "rate": 1, **values}), str(path), FailingLog())


def run(traces: TraceSettings, request: InferRequest = REQUEST) -> bool:
    """A request from beginning to end; whether it was followed."""
    request = traces.follow(request, "HTTP", 1, no_header)
    if request.trace is None:
        return False
    sink = Sink()
    traced = request.trace.begin(request, 3, sink)
    request.trace.executing()
    response = InferResponse("m", 3, "r", (Tensor("B", DataType.FP32, (1,), np.float32([0.5]).tobytes()),))
    traced.send(response, True)
    request.trace.computed(10, 11, 12, 13)
    assert sink.results == [(response, True)]
    return True


def ids(text: str) -> list[int]:
    return list(dict.fromkeys(entry["id"] for entry in json.loads(text)))


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("sent", "changes"),
    [
        ({}, {}),
        ({"colour": "red"}, {}),
        ({"trace_level": ["TIMESTAMPS"]}, {"levels": ("TIMESTAMPS",)}),
        ({"trace_level": ["TENSORS", "TIMESTAMPS"]}, {"levels": ("TIMESTAMPS", "TENSORS")}),
        ({"trace_level": ["OFF"]}, {"levels": ()}),
        ({"trace_level": ["EVERYTHING"]}, {}),
        ({"trace_level": []}, {}),
        ({"trace_level": None, "trace_rate": None}, {"levels": None, "rate": None}),
        ({"trace_rate": "10"}, {"rate": 10}),
        ({"trace_rate": " 10abc"}, {"rate": 10}),
        ({"trace_rate": "-1"}, {"rate": 4294967295}),
        ({"trace_count": "-1"}, {"count": -1}),
        ({"trace_count": "3", "log_frequency": "4"}, {"count": 3, "log_frequency": 4}),
    ],
)
def test_changes_that_clients_send(sent, changes):
    assert read_changes(sent) == changes


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [
        ({"trace_file": None}, Unsupported, "trace file location can not be updated through network protocol"),
        ({"trace_level": "TIMESTAMPS"}, Internal, "attempt to access JSON non-array as array"),
        ({"trace_level": [1]}, Internal, "attempt to access JSON non-string as string"),
        ({"trace_level": ["OFF", "TENSORS"]}, InvalidArgument, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": 7}, Internal, "attempt to access JSON non-string as string"),
        ({"trace_rate": "fast"}, InvalidArgument, "Unable to parse 'trace_rate', got: fast"),
        (
            {"trace_rate": "99999999999"},
            InvalidArgument,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
        ({"trace_count": "-2"}, InvalidArgument, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (
            {"trace_count": "3000000000"},
            InvalidArgument,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 3000000000",
        ),
        ({"log_frequency": ""}, InvalidArgument, "Unable to parse 'log_frequency', got: "),
    ],
)
def test_what_clients_may_not_send(sent, kind, text):
    with pytest.raises(NaiadError) as caught:
        read_changes(sent)
    assert (type(caught.value), caught.value.message) == (kind, text)


def test_a_model_has_the_settings_of_all_where_it_has_none_of_its_own(path):
    traces = settings(path, rate=5)
    assert traces.update("m", {"trace_rate": "3"})["trace_rate"] == "3"
    assert traces.update(None, {"log_frequency": "9", "trace_rate": "4"})["trace_rate"] == "4"
    assert (traces.get("m")["trace_rate"], traces.get("m")["log_frequency"]) == ("3", "9")
    assert traces.get("other")["trace_rate"] == "4"
    traces.update("m", {"trace_rate": None})
    assert traces.get("m")["trace_rate"] == "4"
    assert traces.update(None, {"trace_rate": None, "log_frequency": None})["trace_rate"] == "5"
    assert traces.get("m") == traces.get() == traces.get("")


def test_a_count_that_has_run_out_wants_a_new_one(path):
    traces = settings(path)
    traces.update("m", {"trace_count": "1"})
    assert run(traces)
    with pytest.raises(InvalidArgument, match="trace_count is 0"):
        traces.update("m", {"trace_rate": "2"})
    assert traces.update(None, {"trace_rate": "3"})["trace_rate"] == "3"
    assert traces.update("m", {"trace_count": "1"})["trace_rate"] == "3"
    traces.close()


def test_what_a_model_has_of_its_own_can_be_taken_back_when_the_count_of_all_has_run_out(path):
    traces = settings(path, count=1)
    traces.update("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": "2", "trace_count": "10"})
    assert run(traces, request_for("other"))
    with pytest.raises(InvalidArgument, match="trace_count is 0"):
        traces.update("m", {"trace_count": None})
    assert traces.get("m")["trace_count"] == "10"
    taken_back = {"trace_level": None, "trace_rate": None, "trace_count": None}
    assert traces.update("m", taken_back) == traces.update("m", taken_back) == traces.get()
    assert traces.get("m")["trace_count"] == "0"
    traces.close()


def test_a_wrong_value_changes_nothing(path):
    traces = settings(path)
    before = traces.get()
    with pytest.raises(InvalidArgument):
        traces.update(None, {"trace_rate": "2", "trace_count": "many"})
    assert traces.get() == before


def test_tracing_needs_a_rate_and_a_file(path):
    with pytest.raises(
        InvalidArgument, match=r"^Attempting to set invalid trace setting :sample rate must be non-zero$"
    ):
        settings(path).update(None, {"trace_rate": "0"})
    with pytest.raises(InvalidArgument, match=r"^Attempting to set invalid trace setting :trace_count is 0$"):
        settings(path).update(None, {"trace_count": "0"})
    without = TraceSettings(Values(), "", FailingLog())
    with pytest.raises(
        InvalidArgument, match=r"^Attempting to set invalid trace setting :trace file name is not given$"
    ):
        without.update("m", {"trace_level": ["TIMESTAMPS"]})
    assert without.update(None, {"trace_rate": "0"})["trace_rate"] == "0", "nothing is traced anyway"
    assert without.update(None, {"trace_count": "0"})["trace_count"] == "0"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "trace_file": ""}),
        (
            [("", "level", "timestamps"), ("", "level", "TENSORS"), ("", "rate", "2"), ("", "count", "3")],
            {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "2", "trace_count": "3"},
        ),
        ([("", "level", "TIMESTAMPS"), ("", "level", "off")], {"trace_level": ["OFF"]}),
        ([("", "level", "max")], {"trace_level": ["TIMESTAMPS"]}),
        (
            [("triton", "file", "/t"), ("triton", "log-frequency", "8"), ("opentelemetry", "url", "u")],
            {"trace_file": "/t", "log_frequency": "8", "trace_mode": "triton"},
        ),
    ],
)
def test_settings_of_the_command_line(given, shown):
    got = TraceSettings.of([Setting(*one) for one in given], FailingLog()).get()
    assert got == {**got, **shown}


@pytest.mark.parametrize("given", [("triton", "colour", "red"), ("triton", "log-frequency", "often")])
def test_wrong_settings_of_the_command_line(given):
    with pytest.raises(InvalidArgument, match=f'^Bad option: "--trace-config triton,{given[1]}"'):
        TraceSettings.of([Setting(*given)], FailingLog())


def test_without_the_extra_the_mode_opentelemetry_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "naiad.telemetry.opentelemetry", raising=False)
    with pytest.raises(InvalidArgument, match=r"pip install 'naiad\[otel\]'"):
        TraceSettings.of([Setting("", "mode", "opentelemetry")], FailingLog())


# ---------------------------------------------------------------- sampling


def test_nothing_is_active_unless_something_can_be_sampled(path):
    traces = settings(path, levels=())
    assert not traces.active
    traces.update("m", {"trace_level": ["TIMESTAMPS"]})
    assert traces.active
    assert run(traces)
    assert not run(traces, request_for("other"))
    traces.update("m", {"trace_level": None})
    assert not traces.active
    traces.close()


def test_every_nth_request_is_followed_until_there_are_enough(path):
    traces = settings(path, rate=3, count=2)
    assert [run(traces) for _ in range(12)] == [False, False, True] * 2 + [False] * 6
    assert traces.get()["trace_count"] == "0"
    traces.update(None, {"trace_count": "1"})
    assert [run(traces) for _ in range(4)] == [False, False, True, False]
    traces.close()


def test_a_model_with_settings_of_its_own_counts_for_itself(path):
    traces = settings(path, rate=2)
    traces.update("other", {"trace_rate": "3"})
    other = request_for("other")
    assert [(run(traces), run(traces, other)) for _ in range(3)] == [(False, False), (True, False), (False, True)]
    traces.close()


# ---------------------------------------------------------------- files


def test_entries_of_a_request(path):
    traces = settings(path, levels=("TIMESTAMPS", "TENSORS"))
    run(traces)
    traces.close()
    entries = json.loads(path.read_text())
    assert entries[0] == {"id": 1, "model_name": "m", "model_version": 3, "request_id": "r"}
    stamps = [stamp for entry in entries for stamp in entry.get("timestamps", ())]
    assert {stamp["name"] for stamp in stamps} == {
        *("HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START"),
        *("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
        *("INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END", "REQUEST_END"),
    }
    assert [stamp["ns"] for stamp in stamps] == sorted(stamp["ns"] for stamp in stamps)
    assert entries[-2:] == [
        {
            "id": 1,
            "activity": "TENSOR_QUEUE_INPUT",
            "tensor": {"name": "A", "data": "1,2", "shape": "2", "dtype": "INT32"},
        },
        {
            "id": 1,
            "activity": "TENSOR_BACKEND_OUTPUT",
            "tensor": {"name": "B", "data": "0.5", "shape": "1", "dtype": "FP32"},
        },
    ]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "text"),
    [
        (DataType.BOOL, (2,), b"\x01\x00", "1,0"),
        (DataType.UINT64, (1,), np.uint64([2**64 - 1]).tobytes(), "18446744073709551615"),
        (DataType.FP64, (2,), np.float64([1 / 3, 1e20]).tobytes(), "0.333333,1e+20"),
        (DataType.FP16, (1,), np.float16([1.5]).tobytes(), "1.5"),
        (DataType.BF16, (1,), np.array([2.5], ml_dtypes.bfloat16).tobytes(), "2.5"),
        (DataType.BYTES, (2,), pack_bytes([b'a"b', b"\xff"]), '"a"b","\\xff"'),
        (DataType.INT8, (0,), b"", ""),
    ],
)
def test_tensors_as_text(datatype, shape, data, text):
    document = tensor_document(Tensor("T", datatype, shape, data))
    assert document == {"name": "T", "data": text, "shape": str(shape[0]), "dtype": datatype.name}


def test_traces_go_to_one_file_in_the_end(path):
    traces = settings(path)
    for _ in range(3):
        run(traces)
    assert not path.exists()
    traces.close()
    assert ids(path.read_text()) == [1, 2, 3]
    assert list(path.parent.iterdir()) == [path]


def test_many_traces_are_written_as_they_come(path, monkeypatch):
    monkeypatch.setattr("naiad.telemetry.trace._CHUNK", 1000)
    traces = settings(path)
    for _ in range(9):
        run(traces)
    assert not traces._global._buffer or traces._global._size < 1000
    traces.close()
    assert ids(path.read_text()) == list(range(1, 10))


def test_files_with_a_number_hold_as_many_traces_as_asked_for(path):
    traces = settings(path, log_frequency=2)
    for _ in range(5):
        run(traces)
    traces.close()
    files = {file.name: ids(file.read_text()) for file in path.parent.iterdir()}
    assert files == {"t.json.0": [1, 2], "t.json.1": [3, 4], "t.json.2": [5]}


@pytest.mark.parametrize("values", [{"count": 100}, {"log_frequency": 100}])
def test_traces_do_not_fill_the_memory_while_they_wait_for_others(path, values, monkeypatch):
    monkeypatch.setattr("naiad.telemetry.trace._LARGEST_FILE", 1000)
    traces = settings(path, **values)
    followed = 0
    while not traces._file._index:
        run(traces)
        followed += 1
        traces._file.close()
        assert followed < 100
    assert ids((path.parent / "t.json.0").read_text()) == list(range(1, followed + 1))
    assert not traces._global._buffer


def test_a_full_count_is_written_at_once_to_a_file_with_a_number(path):
    traces = settings(path, rate=2, count=2)
    for _ in range(4):
        run(traces)
    traces._file.close()
    assert ids((path.parent / "t.json.0").read_text()) == [1, 2]


def test_a_change_of_settings_loses_nothing(path):
    traces = settings(path)
    under_way = traces.follow(REQUEST, "GRPC", 1, no_header)
    assert under_way.trace is not None
    traced = under_way.trace.begin(under_way, 1, Sink())
    run(traces)
    traces.update(None, {"trace_level": ["OFF"]})
    assert not run(traces)
    traced.send(None, True)
    traces.close()
    assert ids(path.read_text()) == [2, 1]


def test_a_file_that_cannot_be_written_is_told_once_and_written_when_it_can_be(tmp_path):
    log = KeptLog()
    path = tmp_path / "no" / "t.json"
    traces = TraceSettings(Values(("TIMESTAMPS",), 1, log_frequency=1), str(path), log)
    run(traces)
    run(traces)
    assert log.errors.get(timeout=60) == (
        f"failed creating trace file '{path}.0': No such file or directory; traces wait in memory, up to 64 MiB, until it "
        "can be written: make that possible, or start the server with another file (--trace-config=triton,file=<path>)"
    )
    traces.update("other", {"trace_rate": "7"})
    path.parent.mkdir()
    run(traces)
    traces.close()
    assert log.errors.empty()
    assert [ids((path.parent / f"t.json.{n}").read_text()) for n in range(3)] == [[1], [2], [3]]


def test_a_file_that_is_full_for_a_while_is_whole_in_the_end(path):
    log = KeptLog()
    traces = TraceSettings(Values(("TIMESTAMPS",), 1), str(path), log)
    run(traces)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, unlimited[1]))
    try:
        traces.update(None, {"trace_rate": "1"})
        assert "File too large" in log.errors.get(timeout=60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    run(traces)
    traces.close()
    assert log.errors.empty()
    assert ids(path.read_text()) == [1, 2]


def test_traces_that_nobody_could_write_are_said_to_be_lost(tmp_path):
    log = KeptLog()
    traces = TraceSettings(Values(("TIMESTAMPS",), 1), str(tmp_path / "no" / "t.json"), log)
    run(traces)
    traces.close()
    assert "No such file" in log.errors.get_nowait()
    assert log.errors.get_nowait() == (
        f"traces are lost: trace file '{tmp_path}/no/t.json' could not be written until the end"
    )


def test_of_traces_that_wait_for_their_file_the_oldest_go(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_LARGEST_FILE", 2000)
    log = KeptLog()
    path = tmp_path / "no" / "t.json"
    traces = TraceSettings(Values(("TIMESTAMPS",), 1, log_frequency=1), str(path), log)
    for _ in range(9):
        run(traces)
    traces.close()
    path.parent.mkdir()
    run(traces)
    traces.close()
    written = [ids(file.read_text()) for file in sorted(path.parent.iterdir())]
    assert written[-1] == [10]
    assert 1 < len(written) < 6


# ---------------------------------------------------------------- a request and what it causes


def test_requests_that_a_request_causes_are_written_with_it(path):
    traces = settings(path)
    request = traces.follow(REQUEST, "GRPC", 1, no_header)
    root = request.trace
    assert root is not None
    outer = root.begin(request, 1, Sink())
    child = root.child()
    inner = child.begin(request_for("step"), 2, Sink())
    child.executing()
    inner.send(None, True)
    outer.send(None, True)
    assert traces.live(child.id) is child, "an execution is still under way"
    child.computed(1, 2, 3, 4)
    assert traces.live(child.id) is None
    traces.close()
    entries = json.loads(path.read_text())
    (about,) = [entry for entry in entries if entry.get("model_name") == "step"]
    assert about == {"id": 2, "model_name": "step", "model_version": 2, "request_id": "r", "parent_id": 1}
    names = [stamp["name"] for entry in entries if entry["id"] == 2 for stamp in entry.get("timestamps", ())]
    assert not [name for name in names if name.startswith(("GRPC", "INFER"))]


def test_a_request_that_was_refused_after_all_is_written(path):
    traces = settings(path)
    request = traces.follow(REQUEST, "HTTP", 1, no_header)
    assert request.trace is not None
    request.trace.begin(request, 1, Sink())
    request.trace.end()
    traces.close()
    assert ids(path.read_text()) == [1]


def test_times_of_what_no_instance_has_had_are_none(path):
    traces = settings(path)
    request = traces.follow(REQUEST, "HTTP", 1, no_header)
    assert request.trace is not None
    sink = request.trace.begin(request, 1, Sink())
    request.trace.computed(1, 2, 3, 4)
    sink.send(None, True)
    traces.close()
    assert "COMPUTE" not in path.read_text()


@pytest.mark.parametrize(("protocol", "complete"), [("GRPC", 1), ("HTTP", 3)])
def test_a_decoupled_request_ends_with_its_execution_and_sends_every_response(path, protocol, complete):
    traces = settings(path)
    request = traces.follow(REQUEST, protocol, 1, no_header)
    assert request.trace is not None
    sink = request.trace.begin(request, 1, Sink())
    request.trace.executing()
    for _ in range(2):
        sink.send(InferResponse("m", 1, "r", ()), False)
    sink.send(None, True)
    late = 2**62
    request.trace.computed(1, 2, 3, late)
    traces.close()
    stamps = [stamp for entry in json.loads(path.read_text()) for stamp in entry.get("timestamps", ())]
    names = [stamp["name"] for stamp in stamps]
    assert (names.count(f"{protocol}_SEND_START"), names.count("INFER_RESPONSE_COMPLETE")) == (2, complete)
    assert stamps[-1] == {"name": "REQUEST_END", "ns": late}


def test_a_sink_that_fails_ends_the_trace_all_the_same(path):
    class Failing:
        def send(self, result: Result | None, final: bool) -> None:
            raise ConnectionError

    traces = settings(path)
    request = traces.follow(REQUEST, "HTTP", 1, no_header)
    assert request.trace is not None
    sink = request.trace.begin(request, 1, Failing())
    with pytest.raises(ConnectionError):
        sink.send(None, True)
    traces.close()
    assert ids(path.read_text()) == [1]
