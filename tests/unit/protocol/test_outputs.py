import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.datatypes import DataType
from naiad.errors import InvalidArgument
from naiad.messages import Tensor
from naiad.packed import unpack_bytes
from naiad.protocol.outputs import OutputSpec, classify, plan_of

LABELS = ["cat", "dog", "fox"]


def tensor(datatype: DataType, values: list[list[float]]) -> Tensor:
    array = np.array(values, datatype.numpy)
    return Tensor("OUT", datatype, array.shape, array.tobytes())


def texts(result: Tensor) -> list[str]:
    return [element.decode() for element in unpack_bytes(result.data, result.shape).ravel()]


@pytest.mark.parametrize(
    ("datatype", "values", "count", "labels", "batched", "shape", "expected"),
    [
        (DataType.FP32, [[0.1, 0.7, 0.2, 0.4]], 1, LABELS, True, (1, 1), ["0.700000:1:dog"]),
        (
            DataType.FP32,
            [[0.1, 0.7, 0.2, 0.4]],
            10,
            LABELS,
            True,
            (1, 4),
            ["0.700000:1:dog", "0.400000:3", "0.200000:2:fox", "0.100000:0:cat"],
        ),
        (
            DataType.FP32,
            [[1, 2, 3, 4], [4, 3, 2, 1]],
            2,
            LABELS,
            True,
            (2, 2),
            ["4.000000:3", "3.000000:2:fox", "4.000000:0:cat", "3.000000:1:dog"],
        ),
        (DataType.FP32, [[1, 2], [4, 3]], 1, [], False, (1,), ["4.000000:2"]),
        (DataType.INT64, [[5, 7, -1]], 2, [], True, (1, 2), ["7:1", "5:0"]),
        (DataType.UINT8, [[255, 0, 255]], 3, [], True, (1, 3), ["255:0", "255:2", "0:1"]),
        (DataType.FP64, [[1, 1, 1]], 2, ["", "b"], True, (1, 2), ["1.000000:0", "1.000000:1:b"]),
        (
            DataType.FP32,
            [[0.3333333333333333, 1e-07, 123456.789, 2]],
            4,
            [],
            True,
            (1, 4),
            ["123456.789062:2", "2.000000:3", "0.333333:0", "0.000000:1"],
        ),
        (DataType.FP32, [[]], 3, [], True, (1, 0), []),
    ],
)
def test_classify(
    datatype: DataType,
    values: list[list[float]],
    count: int,
    labels: list[str],
    batched: bool,
    shape: tuple[int, ...],
    expected: list[str],
) -> None:
    result = classify(tensor(datatype, values), count, labels, batched)
    assert (result.name, result.datatype, result.shape) == ("OUT", DataType.BYTES, shape)
    assert texts(result) == expected


@pytest.mark.parametrize("datatype", [DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES])
def test_unsupported(datatype: DataType) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"class result not available for output due to unsupported type '{datatype.name}'"
    ):
        classify(Tensor("OUT", datatype, (1, 1), b"\0\0"), 1, [], True)


@given(
    st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 7.0, math.inf, math.nan]), min_size=1), st.integers(1, 5)
)
def test_a_few_of_many_are_those_that_sorting_all_finds(values: list[float], count: int) -> None:
    row = tensor(DataType.FP32, [values])
    everything = texts(classify(row, len(values), [], True))
    assert texts(classify(row, count, [], True)) == everything[:count]
    assert [int(text.rpartition(":")[2]) for text in everything] == sorted(
        range(len(values)), key=lambda index: (not math.isnan(values[index]), -values[index], index)
    )


def test_many_classes_are_as_few_are() -> None:
    result = classify(tensor(DataType.INT32, [list(range(70_000))]), 70_000, [], True)
    assert texts(result) == [f"{number}:{number}" for number in reversed(range(70_000))]


def test_what_is_said_first_of_an_output_counts() -> None:
    first, other, second = OutputSpec("A", True), OutputSpec("B"), OutputSpec("A", False, 3)
    assert plan_of([first, other, second], False).outputs == {"A": first, "B": other}
