"""Arrays to try models with, and differences."""

from pathlib import Path

import numpy as np
import pytest

from naiad.convert.compare import (
    Input,
    check,
    dependent_output,
    difference,
    given_arrays,
    paired,
    random_arrays,
    read_arrays,
)
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument, NaiadError

INPUTS = (Input("a", DataType.FP32, (-1, 4)), Input("b", DataType.INT64, (-1, -1)))


def test_random_arrays_fill_the_dynamic_extents() -> None:
    arrays = random_arrays(INPUTS, rows=3, extent=5)
    assert arrays["a"].shape == (3, 4)
    assert arrays["a"].dtype == np.float32
    assert arrays["b"].shape == (3, 5)
    assert set(arrays["b"].reshape(-1).tolist()) <= {0, 1}


@pytest.mark.parametrize("datatype", list(DataType))
def test_random_arrays_of_every_type(datatype: DataType) -> None:
    assert random_arrays([Input("a", datatype, (2, 3))], 1, 1)["a"].dtype == datatype.numpy


def test_random_arrays_are_the_same_each_time() -> None:
    np.testing.assert_array_equal(random_arrays(INPUTS, 2, 3)["a"], random_arrays(INPUTS, 2, 3)["a"])


def test_given_arrays_get_the_models_type() -> None:
    arrays = given_arrays({"a": np.ones((2, 4)), "b": np.ones((2, 7), np.int32)}, INPUTS)
    assert arrays["a"].dtype == np.float32
    assert arrays["b"].dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"a": np.ones((2, 4))}, r"has \['a'\], the model wants \['a', 'b'\]"),
        ({"a": np.ones((2, 5)), "b": np.ones((2, 2))}, r"input 'a' has shape \[2, 5\]"),
        ({"a": np.ones(4), "b": np.ones((2, 2))}, r"input 'a' has shape \[4\]"),
    ],
)
def test_given_arrays_that_do_not_fit(arrays: dict[str, np.ndarray], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        given_arrays(arrays, INPUTS)


def test_outputs_are_paired_by_name_else_by_place() -> None:
    assert paired(["x", "y"], ["y", "x"]) == [("x", "x"), ("y", "y")]
    assert paired(["x"], ["x", "more"]) == [("x", "x")]
    assert paired(["x", "y"], ["a", "b"]) == [("x", "a"), ("y", "b")]
    with pytest.raises(InvalidArgument, match="no telling which is which"):
        paired(["x"], ["a", "b"])


@pytest.mark.parametrize(
    ("wanted", "got", "largest"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0),
        ([np.nan, 1.0], [1.0, 1.0], np.inf),
        ([np.inf], [1.0], np.inf),
        ([1.0], [np.inf], np.inf),
        ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
        ([True, False], [True, False], 0.0),
        (["a", "b"], [b"a", b"b"], 0.0),
        (["a", "b"], [b"a", b"c"], np.inf),
        ([], [], 0.0),
    ],
)
def test_differences(wanted: list[object], got: list[object], largest: float) -> None:
    assert difference("o", "these", np.array(wanted), np.array(got)).largest == largest


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(InvalidArgument, match=r"output 'o' has shape \[3\] on these, the source's \[2\]"):
        difference("o", "these", np.ones(2), np.ones(3))
    assert difference("o", "these", np.array(1.0), np.array([1.0])).largest == 0


@pytest.mark.parametrize(
    ("datatype", "wanted", "got", "fits"),
    [
        (np.float32, 1000, 1001, True),
        (np.float32, 1000, 1002, False),
        (np.float32, 0.01, 0.010009, True),
        (np.float32, 0.01, 0.0101, False),
        (np.float32, 2.5e-5, 0, False),
        (np.float32, 0, 9e-7, True),
        (np.float32, 0, 2e-6, False),
        (np.float64, 0.01, 0.0101, False),
        (np.float16, 0.5, 0.501, True),
        (np.float16, 0.5, 0.504, False),
        (np.float16, 0.0001, 0.00018, True),
        (np.float16, 0.002, 0, False),
        (np.int64, 5000, 5004, True),
        (np.int64, 1, 2, False),
        (np.bool_, True, False, False),
    ],
)
def test_the_tolerance_is_a_part_of_the_largest_value(datatype: type, wanted: float, got: float, fits: bool) -> None:
    found = [difference("o", "these", np.array([wanted, 0], datatype), np.array([got, 0], datatype))]
    if fits:
        check(found, 1e-3)
    else:
        with pytest.raises(NaiadError, match=r"output 'o' differs by .* on these"):
            check(found, 1e-3)


def test_the_coarser_type_says_what_rounding_makes() -> None:
    check([difference("o", "these", np.array([0.5], np.float64), np.array([0.501], np.float16))], 1e-3)


@pytest.mark.parametrize(
    ("batch", "row", "alone", "depends"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], 1, [[3.0, 4.0]], False),
        ([[1.0, 2.0], [3.0, 4.0]], 1, [[3.0, 4.001]], False),
        ([[1.0, 2.0], [3.0, 4.0]], 1, [[3.0, 4.1]], True),
        ([[1.0, 2.0], [3.0, 4.0]], 1, [[3.0]], True),
        (1.0, 0, 1.0, True),  # nothing has rows
        ([1.0], 1, [1.0], True),
        (["a", "b"], 0, ["a"], False),
        (["a", "b"], 0, ["b"], True),
    ],
)
def test_an_output_whose_rows_depend_on_each_other(batch: object, row: int, alone: object, depends: bool) -> None:
    found = dependent_output({"o": np.array(batch)}, row, {"o": np.array(alone)}, 1e-3)
    assert found == ("o" if depends else None)


def test_without_a_tolerance_results_must_be_the_same() -> None:
    check([difference("o", "these", np.ones(1, np.float32), np.ones(1, np.float32))], 0)
    with pytest.raises(NaiadError, match="the tolerance is 0"):
        check([difference("o", "these", np.zeros(1, np.float32), np.full(1, 1e-9, np.float32))], 0)


def test_a_file_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(2), b=np.zeros(3))
    assert {name: array.shape for name, array in read_arrays(str(tmp_path / "x.npz")).items()} == {"a": (2,), "b": (3,)}
    np.save(tmp_path / "one.npy", np.ones(2))
    (tmp_path / "text").write_text("no arrays")
    (tmp_path / "empty").touch()
    np.savez(tmp_path / "objects.npz", a=np.array([{}], object))
    for name in ("one.npy", "text", "empty", "objects.npz"):
        with pytest.raises(InvalidArgument, match=f"{name} is no .npz file of numbers"):
            read_arrays(str(tmp_path / name))
