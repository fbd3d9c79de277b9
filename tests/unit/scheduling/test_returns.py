"""Waiting for clients that have just been answered, as tables. Times in ms."""

import pytest

from naiad.scheduling.returns import Returns

MS = 1_000_000
NEVER = 1 << 62


def answered(returns: Returns, count: int = 3, waiting: int = 1, at: int = 1000, took: int = 200) -> Returns:
    returns.answered(count, waiting, (3,), (at - took) * MS, at * MS)
    return returns


@pytest.mark.parametrize(
    ("took", "until"),
    [(20, 1000.4), (200, 1004), (500, 1010), (60_000, 1010)],
    ids=["the shortest", "a share", "the longest", "no more than that"],
)
def test_how_long_clients_are_waited_for(took: int, until: float) -> None:
    assert answered(Returns(), at=1000, took=took).wait_until(1000 * MS, 1, (3,), NEVER) == until * MS


@pytest.mark.parametrize(
    ("now", "count", "signature", "deadline", "waits"),
    [
        (1000, 1, (3,), NEVER, True),
        (1003, 3, (3,), NEVER, True),
        (1003, 4, (3,), NEVER, False),
        (1003, 5, (3,), NEVER, False),
        (1004, 3, (3,), NEVER, False),
        (1003, 3, (4,), NEVER, False),
        (1003, 3, (3,), 1004 * MS, False),
        (1003, 3, (3,), 1005 * MS, True),
    ],
    ids=[
        "none is back",
        "one is missing",
        "all are there",
        "and others",
        "it is over",
        "those who were answered cannot join",
        "a call expires first",
        "a call expires later",
    ],
)
def test_when_a_batch_waits(now: int, count: int, signature: object, deadline: int, waits: bool) -> None:
    until_ns = answered(Returns()).wait_until(now * MS, count, signature, deadline)
    assert until_ns == (1004 * MS if waits else 0)


def test_nobody_is_waited_for_before_anybody_was_answered_nor_twice() -> None:
    returns = Returns()
    assert returns.wait_until(0, 1, None, NEVER) == 0
    answered(returns)
    assert not returns.gone(4)
    assert returns.wait_until(1001 * MS, 1, (3,), NEVER) == 0


def chances(returns: Returns, found: int, then: int, number: int) -> list[int]:
    """Which of so many chances are taken, where `found` calls are there at first and `then` when the wait is over."""
    taken = []
    for chance in range(number):
        answered(returns)
        if returns.wait_until(1000 * MS, found, (3,), NEVER):
            taken.append(chance)
        returns.gone(then)
    return taken


def test_after_waiting_in_vain_more_and_more_chances_are_passed_over() -> None:
    returns = Returns()
    assert chances(returns, 1, 1, 270) == [0, 3, 10, 25, 56, 119, 182, 245]
    # An odd number apart: where batches of few and of many take turns, both are tried.
    assert chances(returns, 1, 3, 60) == list(range(38, 60))


def test_a_batch_that_became_full_has_not_waited_in_vain() -> None:
    returns = Returns()
    assert chances(returns, 1, 1, 3) == [0]
    answered(returns)
    assert returns.wait_until(1000 * MS, 1, (3,), NEVER)
    assert chances(returns, 1, 1, 3) == [0]
    assert chances(returns, 1, 1, 1) == [0]
