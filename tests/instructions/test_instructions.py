"""The hot paths take no more instructions than they did."""

import instruction_counts
import pytest
from instruction_counts import INTERPRETER, CannotCount, complaints, count, is_same_build, kept


def test_hot_paths_take_no_more_instructions() -> None:
    try:
        before = kept()
        counted = count()
    except CannotCount as error:
        pytest.skip(str(error))
    if not is_same_build(counted, before):
        pytest.skip(
            f"another build of Python: {counted[INTERPRETER]:,} instructions for what took {before[INTERPRETER]:,} "
            f"where {instruction_counts.KEPT.name} was written"
        )
    found = complaints(counted, before)
    assert not found, "\n".join([*found, "If that is meant to be so: `make instructions INSTRUCTIONS=--renew`"])


@pytest.mark.parametrize(
    ("counted", "complaint"),
    [
        (1080, None),
        (1081, "'a' takes 1,081 instructions per request, kept are 1,000: +8.1%, where -15% to +8% would do"),
        (850, None),
        (849, "'a' takes 849 instructions per request, kept are 1,000: -15.1%, where -15% to +8% would do"),
    ],
)
def test_a_tolerance_in_both_directions(counted: int, complaint: str | None) -> None:
    assert complaints({"a": counted}, {"a": 1000}) == ([] if complaint is None else [complaint])


def test_all_that_is_counted_is_kept() -> None:
    assert complaints({"new": 1}, {"old": 1}) == ["'new' is not kept yet", "'old' is not counted any more"]


def test_builds_are_told_apart() -> None:
    assert is_same_build({INTERPRETER: 1019}, {INTERPRETER: 1000})
    assert not is_same_build({INTERPRETER: 979}, {INTERPRETER: 1000})
