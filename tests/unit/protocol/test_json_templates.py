"""Requests that come again with other data: as if each were the first, whatever the data are."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from naiad.errors import NaiadError
from naiad.protocol import json_templates
from naiad.protocol.json_arrays import DEFAULT_MAX_INPUT_SIZE
from naiad.protocol.json_codec import decode_request

LIMIT = DEFAULT_MAX_INPUT_SIZE


def forget() -> None:
    json_templates._templates.clear()
    json_templates._seen.clear()


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    forget()


def outcome(text: bytes, limit: int = LIMIT) -> Any:
    """What a client sees of a text: all that is read of it, or the error."""
    try:
        request, plan = decode_request(text, len(text), "m", max_input_size=limit)
    except NaiadError as error:
        return type(error), error.message
    tensors = [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs]
    rest = [request.model_name, request.model_version, request.id, request.outputs, request.parameters]
    return tensors, rest, request.priority, request.timeout_us, vars(request.sequence or plan), plan


def first_outcome(text: bytes, limit: int = LIMIT) -> Any:
    """The same, by one who has seen nothing before."""
    known = dict(json_templates._templates), set(json_templates._seen)
    json_templates._templates.clear()
    try:
        return outcome(text, limit)
    finally:
        json_templates._templates.update(known[0])
        json_templates._seen.clear()
        json_templates._seen.update(known[1])


def is_recalled(text: bytes, limit: int = LIMIT) -> bool:
    return json_templates.recall(text, "m", -1, limit) is not None


def learn(text: bytes) -> None:
    outcome(text)
    outcome(text)


def one(data: str, datatype: str = "FP32", shape: str = "[2]", more: str = "") -> bytes:
    return f'{{"inputs":[{{"name":"A","shape":{shape},"datatype":"{datatype}","data":{data}}}]{more}}}'.encode()


TWO = b'{ "id": "x", "inputs": [{"name":"A","data" : %s, "shape":[2],"datatype":"INT8"},\n{"data":%s,"name":"B","shape":[1,2],"datatype":"FP64"}], "parameters":{"p":1}, "outputs":[{"name":"O"}]}\n'


@pytest.mark.parametrize(
    ("text", "again"),
    [
        (one("[1,2]"), one("[3.5,-1e30]")),
        (one("[1,2]"), one("[ 3 , 4 ]")),
        (one("[[1],[2]]"), one("[[3],[4]]")),
        (one("[1,2]"), one("[[3,4]]")),
        (one("[1,2]"), one("[1e300,1]")),
        (one("[1,2]", "UINT8"), one("[300,18446744073709551615]", "UINT8")),
        (one("[true,false]", "BOOL"), one("[false,true]", "BOOL")),
        (one('["a","b"]', "BYTES"), one('["]}","\\n\\"data\\":[1]"]', "BYTES")),
        (one("[1,2]", more=',"parameters":{"sequence_id":7,"sequence_start":true}'),) * 2,
        (one("[]", shape="[0]"), one("[1,2,3]", shape="[0]")),
        (TWO % (b"[1,2]", b"[3,4]"), TWO % (b"[5,6]", b"[[7,8.5]]")),
    ],
)
def test_other_data_are_read_into_the_same_request(text: bytes, again: bytes) -> None:
    first = first_outcome(text)
    assert outcome(text) == first
    assert not is_recalled(text)
    assert outcome(text) == first
    assert is_recalled(text)
    assert is_recalled(again)
    assert outcome(text) == first
    assert outcome(again) == first_outcome(again)


@pytest.mark.parametrize(
    "data",
    [
        "[1]",
        "[1,2,3]",
        "[true,1]",
        "[1,false]",
        "[null,1]",
        '["1","2"]',
        "[NaN,1]",
        "[-Infinity,1]",
        "[1,[2]]",
        "[1,2]]",
        "[1,2,]",
        "[1 2]",
        "[1,2",
        "[1,2]}]}",
        "[1,2]\0",
        "{}",
        "5",
        "",
        "[{}, 1]",
        '[1,2],"data":[3,4]',
        '[1,2],"shape":[1]',
    ],
)
@pytest.mark.parametrize("datatype", ["FP32", "INT16", "BOOL", "BYTES"])
def test_wrong_data_get_the_words_of_one_who_reads_all(data: str, datatype: str) -> None:
    learn(one({"BOOL": "[true,true]", "BYTES": '["a","b"]'}.get(datatype, "[1,2]"), datatype))
    assert any(json_templates._templates.values())
    assert outcome(one(data, datatype)) == first_outcome(one(data, datatype))


@pytest.mark.parametrize(
    "text",
    [
        one("[1,2]", more=',"parameters":{"data":[3]}'),
        one("[1,2]", more=',"x":{"data":"data"}'),
        one('[1,2],"data":[3,4]'),
        one("5", shape="[0]"),
        one("[1,2]", more=',"x":"\\"data\\":[3]"'),
        one("[1,2]").replace(b'"data"', b'"d\\u0061ta"'),
        b'{"parameters":{"p":"data"},"inputs":[{"name":"A","shape":[1],"datatype":"FP32","d\\u0061ta":[5]}]}',
        one("[1,2]", more=',"inputs":[{"name":"A","shape":[1],"datatype":"INT8","data":[1]}]'),
        one("[1,2]", more=f',"x":"{"y" * 2000}"'),
        one(str(list(range(9000))), shape="[9000]"),
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"INT8","parameters":{"binary_data_size":0}}]}',
    ],
)
def test_what_is_not_kept(text: bytes) -> None:
    first = first_outcome(text)
    for _ in range(4):
        assert outcome(text) == first
    assert not any(json_templates._templates.values())


def test_each_limit_is_kept_for_itself() -> None:
    text = one("[1,2]", "FP64")
    learn(text)
    assert is_recalled(text)
    assert not is_recalled(text, len(text))
    assert outcome(text, 10) == first_outcome(text, 10)


def test_other_texts_around_the_data_are_others() -> None:
    learn(one("[1,2]"))
    for text in (
        one("[1,2]", more=',"id":"y"'),
        one("[1,2]") + b"x",
        one("[1,2]").replace(b"A", b"B"),
        b" " + one("[1,2]"),
    ):
        assert not is_recalled(text)
        assert outcome(text) == first_outcome(text)


def test_what_comes_no_more_makes_room() -> None:
    learn(one("[1,2]"))
    other = one("[1,2]", more=',"id":"y"')
    for _ in range(json_templates._MOST_MISSES):
        outcome(other)
        assert not is_recalled(other)
        assert is_recalled(one("[3,4]"))
    for _ in range(3 * json_templates._MOST_MISSES):
        outcome(other)
    assert is_recalled(other)
    assert outcome(other) == first_outcome(other)


def test_what_is_kept_has_an_end() -> None:
    for number in range(3 * json_templates.MOST):
        text = f'{{"id":"{number}",'.encode() + one("[1,2]")[1:]
        learn(text)
        assert is_recalled(text)
    assert len(json_templates._templates) <= json_templates.MOST
    assert len(json_templates._seen) <= json_templates.MOST


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "x"]), inner, max_size=2),
    max_leaves=8,
)


@given(_json.map(json.dumps), _json.map(json.dumps) | st.text('[]{},:1"dat\\ ', max_size=12))
@example("[1,2]", '[1,2]}],"x":[{"y":[1,2]')
def test_any_text_is_read_as_if_it_came_first(known: str, data: str) -> None:
    for datatype in ("FP32", "INT8", "BYTES"):
        forget()
        learn(one(known, datatype))
        learn(one("[1,2]" if datatype != "BYTES" else "[]", datatype))
        text = one(data, datatype)
        assert outcome(text) == first_outcome(text)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1), min_size=1)
)
def test_numbers_are_what_they_are(values: list[Any]) -> None:
    for datatype in ("FP32", "FP64", "INT32", "UINT64"):
        text = one(json.dumps(values), datatype, f"[{len(values)}]")
        learn(text)
        assert outcome(text) == first_outcome(text)
    request, _ = decode_request(text := one(json.dumps(values), "FP64", f"[{len(values)}]"), len(text), "m")
    assert np.frombuffer(request.inputs[0].data, np.float64).tolist() == [float(value) for value in values]
