"""The packed form of BYTES tensors."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad import packed as packed_module
from naiad.datatypes import AT_ONCE
from naiad.errors import InvalidArgument
from naiad.packed import count_elements, pack_bytes, pack_texts, unpack_bytes, unpack_elements, unpack_texts

ELEMENTS = st.lists(st.binary(max_size=300), max_size=20)
#: What bytes become that are not UTF-8, too.
TEXTS = st.lists(st.binary(max_size=300).map(lambda data: data.decode("utf-8", "surrogateescape")), max_size=20)


def packed(elements: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@given(ELEMENTS)
def test_both_ways(elements: list[bytes]) -> None:
    data = packed(elements)
    assert pack_bytes(elements) == data
    assert unpack_elements(data) == (elements, len(data))
    assert unpack_bytes(memoryview(data), (len(elements), 1)).tolist() == [[element] for element in elements]
    assert count_elements(bytearray(data)) == len(elements)


@given(TEXTS)
def test_texts_both_ways(texts: list[str]) -> None:
    data = packed([text.encode("utf-8", "surrogateescape") for text in texts])
    assert pack_texts(texts) == data
    assert unpack_texts(data) == texts


@pytest.mark.parametrize("length", [0, 1, 127, 128, 255, 256, 257, 65535, 65536, 1 << 24])
@pytest.mark.parametrize("character", ["a", "ä", "\0", "\x7f"])
def test_lengths(length: int, character: str) -> None:
    texts = ["", character * length, "b"]
    data = packed([text.encode() for text in texts])
    assert pack_texts(texts) == pack_bytes(texts) == data
    assert unpack_texts(data) == texts
    assert unpack_elements(data)[0] == [text.encode() for text in texts]
    assert count_elements(data) == 3


def test_more_than_at_once() -> None:
    texts = [str(number) for number in range(2 * AT_ONCE + 1)]
    data = pack_texts(texts)
    assert data == packed([text.encode() for text in texts])
    assert unpack_texts(data) == texts
    assert count_elements(data) == len(texts)
    for count in (AT_ONCE, AT_ONCE + 1):
        assert unpack_texts(pack_texts(texts[:count])) == texts[:count]


@given(ELEMENTS, st.integers(1, 400))
def test_what_ends_within_an_element(elements: list[bytes], cut: int) -> None:
    data = packed([*elements, b"x" * 100])
    whole = packed(elements)
    data = data[: max(len(whole) + 1, len(data) - cut)]
    assert unpack_elements(data) == (elements, len(whole))
    assert unpack_texts(data) is None
    assert count_elements(data) == -1
    with pytest.raises(InvalidArgument, match=f"got {len(elements)} in {len(data)} bytes"):
        unpack_bytes(data, (len(elements) + 1,))


def test_a_length_beyond_the_data() -> None:
    data = packed([b"a"]) + b"\xff\xff\xff\xff"
    assert unpack_elements(data) == ([b"a"], 5)
    assert unpack_texts(data) is None
    assert count_elements(data) == -1


@pytest.mark.parametrize(("shape", "count"), [((1,), 1), ((3,), 3), ((2, 2), 4), ((0,), 0)])
def test_the_number_of_elements_is_that_of_the_shape(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(InvalidArgument) as raised:
        unpack_bytes(packed([b"a", b"bc"]), shape)
    assert raised.value.message == f"expected {count} string elements for shape {list(shape)}, got 2 in 11 bytes"


@pytest.mark.parametrize(
    ("elements", "wanted"),
    [
        (["ä", b"\xff"], ["ä".encode(), b"\xff"]),
        ((element for element in (b"a", "b")), [b"a", b"b"]),
        (np.array([b"a", "b", 1, None], object), [b"a", b"b", b"1", b"None"]),
        ([bytearray(b"ab"), memoryview(b"cd"), np.bytes_(b"ef"), np.str_("gh")], [b"ab", b"cd", b"ef", b"gh"]),
        ([1.5, True], [b"1.5", b"True"]),
        ([], []),
    ],
)
def test_other_elements(elements: Any, wanted: list[bytes]) -> None:
    assert pack_bytes(elements) == packed(wanted)


def test_others_run_while_elements_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(packed_module, "sleep", pauses.append)
    large = packed([b"x" * 1_000_000] * 10)
    assert count_elements(large) == 10
    assert len(pauses) >= 3
    pauses.clear()
    assert count_elements(bytes(10_000_000)) == 2_500_000
    assert len(pauses) >= 3
    pauses.clear()
    assert count_elements(packed([b"x" * 10] * 10_000)) == 10_000
    assert pauses == []
