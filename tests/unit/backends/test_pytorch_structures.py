"""Which part of what a model returned is which output."""

import dataclasses
import types
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest

from naiad.errors import Internal, InvalidArgument

torch = pytest.importorskip("torch")

from naiad.backends.pytorch.structures import (  # noqa: E402
    describe,
    has_order,
    index_of,
    leaf_names,
    leaves,
    places,
)

A, B, C = (torch.full((1, size), size) for size in (1, 2, 3))


class Pair(NamedTuple):
    logits: Any
    hidden: Any


@dataclasses.dataclass
class Record:
    logits: Any
    hidden: Any


class HuggingFace(OrderedDict):  # type: ignore[type-arg]
    """Their ModelOutput: a dictionary with attributes that leaves None out."""

    def __init__(self, **values: Any) -> None:
        super().__init__({key: value for key, value in values.items() if value is not None})


class Plain:
    def __init__(self) -> None:
        self.logits, self.hidden, self._cache = A, B, C


def chosen(value: Any, names: list[str], asked: list[str] | None = None) -> dict[str, Any]:
    found = leaves(value)
    at = places("m", value, [path for path, _ in found], names, names if asked is None else asked)
    return {name: found[place][1] for name, place in at.items()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, {"anything": A}),
        (A, {"RESULT": A}),
        (A, {"OUTPUT__0": A}),
        ((A, B), {"OUTPUT__1": B, "OUTPUT__0": A}),
        ((A, B), {"second__1": B}),
        ((A, B), {"first": A, "second": B}),
        ((A, B), {"OUTPUT__1": A, "second": B}),  # conventions mix: strict order
        ([A, B], {"first": A, "second": B}),
        ({"logits": A, "hidden": B}, {"hidden": B, "logits": A}),
        ({"logits": A, "hidden": B}, {"hidden": B}),
        ({"logits": A, "hidden": B}, {"OUTPUT__1": B, "logits": A}),
        ({"OUTPUT__1": A, "OUTPUT__0": B}, {"OUTPUT__0": B, "OUTPUT__1": A}),  # keys before indices
        (UserDict(logits=A), {"logits": A}),
        (HuggingFace(loss=None, logits=A), {"logits": A}),
        (Pair(A, B), {"hidden": B, "logits": A}),
        (Pair(A, B), {"x": A, "y": B}),  # a tuple, as Triton sees it
        (Record(A, B), {"hidden": B}),
        (Plain(), {"hidden": B}),
        (types.SimpleNamespace(logits=A), {"logits": A}),
        (torch.max(C, dim=1), {"indices": torch.max(C, dim=1).indices}),
        ({"boxes": {"xy": A, "wh": B}, "score": C}, {"boxes.xy": A, "wh": B, "score": C}),
        ({"hidden": (A, B), "logits": C}, {"hidden__1": B, "OUTPUT__2": C}),
        ({"hidden": (A, B), "logits": C}, {"RESULT[hidden][1]": B, "RESULT[logits]": C}),
        ((A, {"logits": B}), {"logits": B, "loss__0": A}),
        ((A, (B, [C])), {"OUTPUT__2": C}),
        ({"a": {"x": A}, "b": {"x": B}}, {"a.x": A, "b.x": B}),
        (({"x": A}, {"x": B}), {"RESULT[1][x]": B}),
        ({"text": ["a", "b"], "count": 2}, {"text": ["a", "b"], "count": 2}),
        ([], {}),
    ],
)
def test_outputs_are_found(value: Any, expected: dict[str, Any]) -> None:
    found = chosen(value, list(expected))
    assert list(found) == list(expected)
    for name, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(found[name], leaf)
        else:
            assert found[name] == leaf


@pytest.mark.parametrize(
    ("value", "names", "kind", "parts"),
    [
        (
            {"logits": A, "hidden": (B, C)},
            ["nothing"],
            Internal,
            ["output 'nothing' of model 'm'", "'logits', 'hidden__0', 'hidden__1'", "{'logits': Tensor(int64[1, 1]), "],
        ),
        ({"logits": A}, ["logits", "lables"], Internal, ["output 'lables'", "'logits'"]),
        (Record(A, B), ["x"], Internal, ["Record(logits=Tensor(int64[1, 1]), hidden=Tensor(int64[1, 2]))"]),
        ({"a": {"x": A}, "b": {"x": B}}, ["x"], Internal, ["'a.x', 'b.x'"]),  # whose x?
        ({}, ["x"], Internal, ["{}, which holds nothing"]),
        (
            (A, B),
            ["OUTPUT__2"],
            InvalidArgument,
            [
                "The output OUTPUT__2 in the model configuration refers to an output index which doesn't exist."
                " This model has 2 outputs"
            ],
        ),
        (A, ["a", "b"], InvalidArgument, ["The output b in", "This model has 1 outputs"]),
        ({"logits": A}, ["OUTPUT__1"], InvalidArgument, ["This model has 1 outputs"]),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    value: Any, names: list[str], kind: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(kind) as raised:
        chosen(value, names)
    for part in parts:
        assert part in str(raised.value)


def test_only_what_is_asked_for_must_be_there() -> None:
    assert chosen({"logits": A}, ["logits", "loss"], ["logits"]) == {"logits": A}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (A, ["OUTPUT__0"]),
        ((A, (B, C)), ["OUTPUT__0", "OUTPUT__1", "OUTPUT__2"]),
        (Pair(A, (B, C)), ["logits", "hidden__0", "hidden__1"]),
        (({"x": A}, {"x": B}), ["OUTPUT__0", "OUTPUT__1"]),
        ({1: A}, ["1"]),
        ((["a"], A), ["OUTPUT__0", "OUTPUT__1"]),
        (([], A), ["OUTPUT__0", "OUTPUT__1"]),
        (([["a"], []], A), ["OUTPUT__0", "OUTPUT__1"]),
        ({"words": [], "n": A}, ["words", "n"]),
        (([A, []], B), ["OUTPUT__0", "OUTPUT__1", "OUTPUT__2"]),
    ],
)
def test_each_leaf_has_a_name_that_finds_it(value: Any, names: list[str]) -> None:
    found = leaves(value)
    assert leaf_names([path for path, _ in found]) == names
    assert list(chosen(value, names).values()) == [leaf for _, leaf in found]


@pytest.mark.parametrize(
    ("name", "index"),
    [("a__0", 0), ("a_b__12", 12), ("a__b__3", 3), ("a", None), ("a__", None), ("__1", None), ("a__x", None)],
)
def test_index_of(name: str, index: int | None) -> None:
    assert index_of(name) == index


def test_describe() -> None:
    assert describe([A, ("a", 1.0, None, ["x"], [["y"]], [])]) == (
        "[Tensor(int64[1, 1]), (str, float, NoneType, List[str], List[List[str]], list)]"
    )
    assert describe(HuggingFace(logits=A)) == "HuggingFace({'logits': Tensor(int64[1, 1])})"
    assert describe(list(range(40))).endswith("int, ... 8 more]")
    nested: Any = A
    for _ in range(100):
        nested = (nested,)
    assert "..." in describe(nested)


def test_order() -> None:
    assert all(map(has_order, (A, (A,), [A], Pair(A, B))))
    assert not any(map(has_order, ({"a": A}, Record(A, B), Plain())))
