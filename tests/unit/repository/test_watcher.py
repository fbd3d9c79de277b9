import dataclasses
from pathlib import Path

import pytest

from naiad.repository.snapshot import ModelDirectory, Snapshot
from naiad.repository.watcher import SETTLE_S, Settled, looks


def snapshot(*, failed: tuple[str, ...] = (), duplicates: tuple[str, ...] = (), **models: str) -> Snapshot:
    """Models by name and fingerprint; the repository of `x_a` is /x, of all others /r."""
    return Snapshot(
        models={
            name: ModelDirectory(name, "/x" if name.startswith("x_") else "/r", Path("/r", name), fingerprint, {})
            for name, fingerprint in sorted(models.items())
        },
        duplicates={name: (Path("/r", name), Path("/x", name)) for name in duplicates},
        failures=dict.fromkeys(failed, "failed to stat file"),
    )


def seen_by(settled: Settled, *scans: Snapshot) -> list[Snapshot | None]:
    return [settled.observe(scan) for scan in scans]


OLD, NEW, NEWER = snapshot(a="1"), snapshot(a="2"), snapshot(a="3")


@pytest.mark.parametrize(
    ("scans", "results"),
    [
        ([OLD, OLD], [None, None]),
        ([NEW, NEW], [None, NEW]),
        ([NEW, NEW, NEW], [None, NEW, None]),
        ([NEW, NEWER, NEWER], [None, None, NEWER]),
        ([NEW, OLD, OLD], [None, None, None]),
        ([NEW, NEWER, NEW, NEWER], [None, None, None, None]),
        ([snapshot(), snapshot()], [None, snapshot()]),
        ([snapshot(), OLD], [None, None]),
        ([snapshot(a="1", b="1"), snapshot(a="1", b="1")], [None, snapshot(a="1", b="1")]),
    ],
    ids=str,
)
def test_a_change_counts_once_it_was_seen_twice(scans, results):
    assert seen_by(Settled(OLD), *scans) == results


def test_a_model_that_never_settles_does_not_hold_up_the_others():
    settled = Settled(snapshot(a="1", b="1"))
    assert seen_by(settled, snapshot(a="2", b="2"), snapshot(a="3", b="2")) == [None, snapshot(a="1", b="2")]
    assert settled.waiting


def test_what_is_noted_of_a_repository_is_no_change():
    settled = Settled(snapshot())
    noted = dataclasses.replace(snapshot(), notes=("there are no models",))
    assert seen_by(settled, noted, noted) == [None, None]
    assert not settled.waiting


def test_waiting_says_whether_to_look_again_soon():
    settled = Settled(OLD)
    waiting = []
    for scan in (OLD, NEW, NEW, NEW):
        settled.observe(scan)
        waiting.append(settled.waiting)
    assert waiting == [False, True, False, False]


def test_models_of_a_repository_that_cannot_be_read_stay_as_they_are():
    start = snapshot(a="1", x_b="1")
    settled = Settled(start)
    lost = snapshot(a="1", failed=("/x",))
    assert seen_by(settled, lost, lost) == [None, snapshot(a="1", x_b="1", failed=("/x",))]
    assert seen_by(settled, start, start) == [None, start]


def test_a_name_in_two_repositories_is_not_served_because_one_cannot_be_read():
    settled = Settled(snapshot(duplicates=("a",)))
    lost = snapshot(a="1", failed=("/x",))
    assert seen_by(settled, lost, lost) == [None, snapshot(duplicates=("a",), failed=("/x",))]


def test_a_model_that_comes_to_be_in_two_repositories():
    settled = Settled(OLD)
    twice = snapshot(duplicates=("a",))
    assert seen_by(settled, twice, twice) == [None, twice]


class Sleeps:
    """A clock that only notes how long somebody wanted to sleep."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


async def test_changes_are_looked_for_at_the_interval_and_sooner_while_something_is_written():
    scans = iter([OLD, NEW, NEWER, NEWER, NEWER, OLD, OLD])
    asked = []

    def look(paths):
        asked.append(paths)
        return next(scans)

    sleeps = Sleeps()
    stream = looks(["/r"], 15, OLD, look=look, sleep=sleeps)
    assert [await anext(stream) for _ in range(7)] == [None, None, None, NEWER, None, None, OLD]
    assert sleeps.seconds == [15, 15, SETTLE_S, SETTLE_S, 15, 15, SETTLE_S]
    assert asked[0] == ["/r"]
    await stream.aclose()


async def test_a_short_interval_is_never_made_longer():
    scans = iter([NEW, NEW])
    sleeps = Sleeps()
    stream = looks(["/r"], 0.1, OLD, look=lambda paths: next(scans), sleep=sleeps)
    assert [await anext(stream) for _ in range(2)] == [None, NEW]
    assert sleeps.seconds == [0.1, 0.1]
    await stream.aclose()


async def test_an_interval_of_0_looks_never():
    assert [found async for found in looks(["/r"], 0, OLD)] == []


async def test_a_real_repository(tmp_path):
    sleeps = Sleeps()
    stream = looks([tmp_path], 15, Snapshot(), sleep=sleeps)
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert await anext(stream) is None
    found = await anext(stream)
    assert list(found.models["m"].versions) == [1]
    await stream.aclose()
