import numpy as np
import pytest

from naiad.backends.arrays import from_text, to_text
from naiad.errors import InvalidArgument


def objects(*elements: object) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def test_text_and_back() -> None:
    data = objects(b"", b"one", "zw\u00f6lf".encode(), b"a\x00").reshape(2, 2)
    text = to_text(data, "x")
    assert text.tolist() == [["", "one"], ["zw\u00f6lf", "a\x00"]]
    assert from_text(text).tolist() == data.tolist()


def test_no_elements() -> None:
    assert to_text(np.empty((0, 3), np.object_), "x").shape == (0, 3)


def test_what_is_not_text_is_shown() -> None:
    with pytest.raises(InvalidArgument, match=r"input 'x' holds b'\\xff\\xfe', which is not UTF-8"):
        to_text(objects(b"fine", b"\xff\xfe"), "x")


def test_numpys_own_text_and_bytes() -> None:
    assert from_text(np.array(["a", "bc"])).tolist() == [b"a", b"bc"]
    assert from_text(np.array([b"a", b"bc"])).tolist() == [b"a", b"bc"]
