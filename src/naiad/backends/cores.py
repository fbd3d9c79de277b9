"""How many processor cores a host may use, for frameworks that size a thread pool. Runs in hosts.

Frameworks ask the machine, not the container they are in, and know nothing of other instances; both make them
start far too many threads. `Occupancy` says whether a batch has the cores for itself.
"""

import math
import os
import threading
from pathlib import Path
from typing import Any

#: A batch that takes less gains little from more threads, which then spin where the server has work to do.
WORTH_WAKING_NS = 1_000_000


def available_cores(root: Path = Path("/")) -> int:
    """The physical cores this process may use: its affinity, hyper-threads counted once, its cgroup's quota.

    Never less than 1. `root` is where /sys and /proc lie.
    """
    cpus = os.sched_getaffinity(0)
    cores = len({_siblings(root, cpu) for cpu in cpus})
    return max(1, math.ceil(min(cores, _cgroup_quota(root))))


def awake_processes(root: Path = Path("/")) -> int | None:
    """How many processes of ours may look for messages instead of sleeping, None for any number.

    On cores that are theirs they give way to each other, but where a quota counts what they take on a larger machine,
    all of them would soon be stopped for the rest of its period. With a single core they would only be in the way.
    """
    quota = _cgroup_quota(root)
    if min(available_cores(root), quota) < 2:
        return 0
    return None if quota >= len(os.sched_getaffinity(0)) else math.floor(quota)


def cores_per_instance(config: dict[str, Any]) -> int:
    """The cores of one CPU instance, so that all of its model running at once do not fight over them."""
    return max(1, available_cores() // _instances(config))


def cores_left_to_all(config: dict[str, Any]) -> int:
    """The threads of a pool that all CPU instances of a model share, so that those and the instances' own are as many
    as there are cores."""
    return max(1, available_cores() - _instances(config) + 1)


class Occupancy:
    """Who computes in this process: of instances that are its threads, each calls `enter` and `leave` around a batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_alone = True

    def enter(self) -> bool:
        """Whether all cores are there for this batch: nobody else computes, and nobody did as the batch before began.
        Without the latter, whoever begins in the short gap between two batches of another would take cores away."""
        with self._lock:
            self._inside += 1
            alone = self._inside == 1
            is_free = alone and self._was_alone
            self._was_alone = alone
            return is_free

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1


def _instances(config: dict[str, Any]) -> int:
    """Those on CPUs, of which one asks."""
    groups = config.get("instance_group", ())
    return max(1, sum(int(group.get("count", 1)) for group in groups if group.get("kind") != "KIND_GPU"))


def _siblings(root: Path, cpu: int) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota(root: Path) -> float:
    """The smallest CPU quota, in cores, of this process's cgroup and those above it; infinity without one."""
    quota = math.inf
    try:
        line = next(line for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = Path(line.removeprefix("0::").lstrip("/"))
    except (OSError, StopIteration):
        group = Path()
    for folder in (group, *group.parents):
        try:
            limit, period = (root / "sys/fs/cgroup" / folder / "cpu.max").read_text().split()
            if limit != "max":
                quota = min(quota, int(limit) / int(period))
        except (OSError, ValueError):
            continue
    try:  # cgroup version 1
        limit = (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
        period = (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        if int(limit) > 0:
            quota = min(quota, int(limit) / int(period))
    except (OSError, ValueError):
        pass
    return quota
