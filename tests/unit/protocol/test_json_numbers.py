"""Long texts of numbers are read in another way, and to the same end."""

import json
import threading
from typing import Any

import numpy as np
import pytest
import simdjson
from hypothesis import given, settings
from hypothesis import strategies as st

from naiad.errors import NaiadError
from naiad.protocol import json_codec, json_numbers
from naiad.protocol.json_text import parse

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-300, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
ARRAYS = st.recursive(
    st.lists(NUMBERS | st.sampled_from(["a", None]), max_size=5), lambda inner: st.lists(inner, max_size=3)
)
DATATYPES = ["FP32", "FP64", "INT8", "INT64", "UINT8", "UINT64", "BOOL", "BYTES", "FP16", "NONE"]


def long(text: bytes) -> bytes:
    """The text, with spaces behind it, so that it counts as long."""
    return text.ljust(json_numbers._LONG)


def body(**tensor: Any) -> bytes:
    document = {"id": "7", "inputs": [{"name": "I", **tensor}], "parameters": {"a": {"b": [1]}}}
    return long(json.dumps(document).encode())


def decoded(text: bytes, read: json_codec.Read = json_numbers.parse_request) -> Any:
    """What becomes of a request, or the error that it gets."""
    try:
        request, _ = json_codec.decode_request(text, len(text), "m", read=read)
    except NaiadError as error:
        return type(error), error.message
    return [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs], request.id, request.parameters


def many(count: int, start: bytes, member: bytes, end: bytes) -> bytes:
    members = b",".join(member.replace(b"#", b"%d" % number) for number in range(count))
    return start + members + end


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (many(200_000, b'{"inputs":[', b"{}", b"]}"), "Input must set only one of the following fields"),
        (many(50_000, b'{"inputs":[],', b'"#":1', b"}"), None),
        (many(50_000, b'{"inputs":[{"name":"I",', b'"#":1', b"}]}"), "Input must set only one of the following fields"),
        (many(200_000, b'{"inputs":[{"name":"I","datatype":"INT8","data":[],"shape":[', b"99999999", b"]}]}"), "count"),
        (b'{"inputs":' + b"[" * 1_000_000, "JSON nesting depth"),
    ],
)
def test_no_text_takes_longer_than_others_of_its_size(text: bytes, error: str | None) -> None:
    """A look through all members for each of them would take minutes."""
    outcome = decoded(text)
    if error is None:
        assert outcome == ([], "", {})
    else:
        assert error in outcome[1]


@pytest.mark.parametrize("datatype", DATATYPES)
@settings(max_examples=60, deadline=None)
@given(data=ARRAYS, count=st.integers(0, 3) | st.none())
def test_a_request_means_the_same_however_it_is_read(datatype: str, data: list[Any], count: int | None) -> None:
    text = body(datatype=datatype, shape=[len(data) if count is None else count], data=data)
    assert decoded(text) == decoded(text, parse)


@pytest.mark.parametrize(
    "text",
    [
        body(datatype="FP32", shape=[2], data=[1, 2.5]),
        body(datatype="FP32", shape=[2], data=[1e300, -1e300]),
        body(datatype="UINT8", shape=[2], data=[256, 7]),
        body(datatype="INT64", shape=[2, 2], data=[[1, 2], [3, -4]]),
        body(datatype="INT32", shape=[0], data=[]),
    ],
)
def test_numbers_do_not_become_python_objects(text: bytes) -> None:
    [tensor] = json_numbers.parse_request(text)["inputs"]
    assert isinstance(tensor["data"], np.ndarray)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs": [{"data": [1], "data": [2], "datatype": "INT32"}], "inputs": []}',
        b'{"inputs": 1}',
        b'{"inputs": [1, {"data": 5}, {"datatype": 3, "data": [1]}]}',
        b' {"inputs": []}',
        b"[1, 2]",
        b'{"inputs": [{"datatype": "FP32", "data": [NaN, Infinity]}]}',
        b'{"inputs": [{"datatype": "BYTES", "data": ["\xff"]}]}',
        b'{"inputs": [{"datatype": "INT32", "data": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}]}",
    ],
)
def test_what_is_no_ordinary_request_is_read_as_ever(text: bytes) -> None:
    assert repr(json_numbers.parse_request(long(text))) == repr(parse(text))


def test_many_strings_are_left_to_the_other_parser_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[simdjson.Parser] = []

    def parser(make: Any = simdjson.Parser) -> simdjson.Parser:
        parsers.append(make())
        return parsers[-1]

    json_numbers.release()
    monkeypatch.setattr(simdjson, "Parser", parser)
    strings = body(datatype="BYTES", shape=[1000], data=[f"text {number}" for number in range(1000)])
    assert json_numbers.parse_request(strings) == parse(strings)
    assert parsers == []
    json_numbers.parse_request(body(datatype="INT32", shape=[1000], data=[1] * 1000))
    assert len(parsers) == 1


def test_what_is_wrong_is_said_as_ever() -> None:
    for text in (b'{"inputs": [1,]}', b'\xef\xbb\xbf{"inputs": }', b'{"inputs": [01]}', b'{"inputs": []} x'):
        text = long(text)
        with pytest.raises(NaiadError) as ours:
            json_numbers.parse_request(text)
        with pytest.raises(NaiadError) as theirs:
            parse(text)
        assert ours.value.message == theirs.value.message


def test_threads_do_not_share_a_parser() -> None:
    texts = [body(datatype="INT32", shape=[2000], data=[number] * 2000) for number in range(8)]
    found: dict[int, set[int]] = {}

    def read(number: int) -> None:
        for _ in range(20):
            [tensor] = json_numbers.parse_request(texts[number])["inputs"]
            found.setdefault(number, set()).update(tensor["data"].tolist())

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: {number} for number in range(8)}
    assert len(json_numbers._free) <= 8
    json_numbers.release()
    assert not json_numbers._free
