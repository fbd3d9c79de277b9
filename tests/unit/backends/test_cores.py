"""How many cores a host believes it has."""

import os
from pathlib import Path

import pytest

from naiad.backends import cores


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.usefixtures("four_cpus")
class TestAvailableCores:
    def test_the_affinity_counts(self, tmp_path: Path) -> None:
        assert cores.available_cores(tmp_path) == 4

    def test_hyper_threads_of_a_core_count_once(self, tmp_path: Path) -> None:
        for cpu in range(4):
            pair = "0,2" if cpu % 2 == 0 else "1,3"
            write(tmp_path, **{f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": pair})
        assert cores.available_cores(tmp_path) == 2

    @pytest.mark.parametrize(
        ("limit", "expected"),
        [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 2), ("20000 100000", 1), ("nonsense", 4)],
    )
    def test_the_quota_of_a_container(self, limit: str, expected: int, tmp_path: Path) -> None:
        write(tmp_path, **{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": limit})
        assert cores.available_cores(tmp_path) == expected

    def test_the_smallest_quota_above_the_process_counts(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            **{
                "proc/self/cgroup": "0::/system/naiad\n",
                "sys/fs/cgroup/system/cpu.max": "100000 100000",
                "sys/fs/cgroup/system/naiad/cpu.max": "300000 100000",
            },
        )
        assert cores.available_cores(tmp_path) == 1

    @pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("300000", 3)])
    def test_the_quota_of_cgroup_version_1(self, quota: str, expected: int, tmp_path: Path) -> None:
        write(
            tmp_path,
            **{"sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota, "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        )
        assert cores.available_cores(tmp_path) == expected


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", None), ("400000 100000", None), ("399000 100000", 3), ("199000 100000", 0)]
)
def test_under_a_quota_few_processes_wait_awake(limit: str, expected: int | None, tmp_path: Path) -> None:
    write(tmp_path, **{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": limit})
    assert cores.awake_processes(tmp_path) == expected


def test_on_a_single_core_nobody_waits_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert cores.awake_processes(tmp_path) == 0


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], 8),
        ([{"count": 1, "kind": "KIND_CPU"}], 8),
        ([{"count": 2, "kind": "KIND_CPU"}], 4),
        ([{"count": 2, "kind": "KIND_CPU"}, {"count": 1, "kind": "KIND_CPU"}], 2),
        ([{"count": 2, "kind": "KIND_CPU"}, {"count": 4, "kind": "KIND_GPU"}], 4),
        ([{"count": 20, "kind": "KIND_CPU"}], 1),
    ],
)
def test_instances_share_the_cores(groups: list[object], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    assert cores.cores_per_instance({"instance_group": groups}) == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], 8),
        ([{"count": 1, "kind": "KIND_CPU"}], 8),
        ([{"count": 2, "kind": "KIND_CPU"}, {"count": 4, "kind": "KIND_GPU"}], 7),
        ([{"count": 4, "kind": "KIND_CPU"}], 5),
        ([{"count": 20, "kind": "KIND_CPU"}], 1),
    ],
)
def test_a_shared_pool_and_its_instances_are_as_many_as_the_cores(
    groups: list[object], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    assert cores.cores_left_to_all({"instance_group": groups}) == expected


class TestOccupancy:
    def test_one_batch_after_the_other(self) -> None:
        occupancy = cores.Occupancy()
        for _ in range(3):
            assert occupancy.enter()
            occupancy.leave()

    def test_batches_at_once(self) -> None:
        occupancy = cores.Occupancy()
        assert occupancy.enter()
        assert not occupancy.enter()
        occupancy.leave()
        assert not occupancy.enter()

    def test_a_short_gap_between_those_of_another_is_no_freedom(self) -> None:
        occupancy = cores.Occupancy()
        occupancy.enter()
        occupancy.enter()
        occupancy.leave()
        occupancy.leave()
        assert not occupancy.enter()
        occupancy.leave()
        assert occupancy.enter()
