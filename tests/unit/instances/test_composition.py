"""What a backend is told of the composition of a batch, kind by kind; shapes of scattered outputs."""

import numpy as np
import pytest

from naiad.errors import Internal
from naiad.instances.composition import Composition


def batch_input(kind="", names=("T",), data_type="TYPE_INT32", source="A"):
    entry = {"target_name": list(names), "data_type": data_type, "source_input": [source]}
    return entry | ({"kind": kind} if kind else {})


def composition(*batch_inputs, max_batch_size=8, **more):
    return Composition("m", {"max_batch_size": max_batch_size, "batch_input": list(batch_inputs), **more})


@pytest.mark.parametrize(
    ("kind", "shapes", "wanted"),
    [
        ("", [(1, 3), (2, 2)], [3, 4]),
        ("BATCH_ELEMENT_COUNT", [(1, 3), (1, 4), (1, 5)], [3, 4, 5]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [(1, 3), (1, 4), (1, 5)], [3, 7, 12]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [(1, 3), (1, 4), (1, 5)], [0, 3, 7, 12]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [(1, 0)], [0, 0]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [(1, 3), (1, 4), (1, 2)], [0, 0, 0, 0]),
        ("BATCH_ITEM_SHAPE", [(2, 1, 2), (1, 2, 2)], [[1, 2], [1, 2], [2, 2]]),
        ("BATCH_ITEM_SHAPE", [(0, 1, 2)], np.zeros((0, 2)).tolist()),
        ("BATCH_ITEM_SHAPE_FLATTEN", [(2, 1, 2), (1, 2, 2)], [1, 2, 1, 2, 2, 2]),
    ],
)
@pytest.mark.parametrize(("data_type", "dtype"), [("TYPE_INT32", np.int32), ("TYPE_FP32", np.float32)])
def test_each_kind(kind, shapes, wanted, data_type, dtype):
    arrays = composition(batch_input(kind, data_type=data_type)).batch_inputs({"A": shapes})
    assert arrays["T"].tolist() == wanted
    assert arrays["T"].dtype == dtype


def test_every_target_of_every_entry_is_made():
    made = composition(
        batch_input(names=("T", "U")), batch_input("BATCH_ACCUMULATED_ELEMENT_COUNT", ("V",), source="B")
    )
    arrays = made.batch_inputs({"A": [(1, 2)], "B": [(1, 5)]})
    assert len({id(array) for array in arrays.values()}) == len(arrays), "a model may write to one of them"
    assert {name: array.tolist() for name, array in arrays.items()} == {"T": [2], "U": [2], "V": [5]}


def test_a_source_that_is_not_there():
    with pytest.raises(
        Internal, match="model 'm': batch input 'T' is made from input 'A', which the requests do not have"
    ):
        composition(batch_input()).batch_inputs({})


@pytest.mark.parametrize(
    ("max_batch_size", "dims", "shapes", "wanted"),
    [
        (8, [-1, 2], [(1, 3, 9), (2, 1, 9)], [(1, 3, 2), (2, 1, 2)]),
        (8, [4], [(1, 3), (2, 1)], [(1, 4), (2, 4)]),
        (0, [-1], [(5,)], [(5,)]),
    ],
)
def test_variable_extents_of_a_scattered_output_are_those_of_its_source(max_batch_size, dims, shapes, wanted):
    made = composition(
        max_batch_size=max_batch_size,
        output=[{"name": "O", "dims": dims}, {"name": "P", "dims": dims}],
        batch_output=[{"target_name": ["O"], "source_input": ["A"]}],
    )
    assert made.output_shapes("O", {"A": shapes}) == wanted
    assert made.output_shapes("P", {"A": shapes}) is None
    if -1 in dims:
        with pytest.raises(Internal, match="takes its variable dimensions from input 'A', which has 0 dimensions"):
            made.output_shapes("O", {"A": [()]})


def test_most_models_have_none():
    assert not Composition("m", {"input": [{"name": "A"}], "output": [{"name": "O", "dims": [1]}]})
    assert Composition("m", {"input": [{"name": "A", "allow_ragged_batch": True}]})
