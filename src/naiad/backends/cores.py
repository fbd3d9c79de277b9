"""How many processor cores a host may use, for frameworks that size a thread pool. Runs in hosts.

Frameworks ask the machine, not the container they are in, and know nothing of other instances; both make them
start far too many threads.
"""

import math
import os
from pathlib import Path
from typing import Any


def available_cores(root: Path = Path("/")) -> int:
    """The physical cores this process may use: its affinity, hyper-threads counted once, its cgroup's quota.

    Never less than 1. `root` is where /sys and /proc lie.
    """
    cpus = os.sched_getaffinity(0)
    cores = len({_siblings(root, cpu) for cpu in cpus})
    return max(1, math.ceil(min(cores, _cgroup_quota(root))))


def cores_per_instance(config: dict[str, Any]) -> int:
    """The cores of one CPU instance, so that all of its model running at once do not fight over them."""
    instances = sum(
        int(group.get("count", 1)) for group in config.get("instance_group", ()) if group.get("kind") != "KIND_GPU"
    )
    return max(1, available_cores() // max(1, instances))


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
