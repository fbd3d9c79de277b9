"""Memory that tensors have left is kept while a process works, and given back when it rests."""

import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from naiad.instances import heap
from naiad.instances.heap import LONG_NS, REST_NS, Heap

#: Executes batches with 96 MB of intermediate tensors in a thread, prints page faults per batch before and after they are
#: known to be long, then the memory (MB) that is left while it works and when it rests.
PROGRAM = """
import resource, threading
import numpy as np
from naiad.instances import heap

now = 0
kept = heap.Heap(256 << 20, clock=lambda: now)

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def batch():
    tensors = [np.ones(4 << 20, np.uint8) for _ in range(24)]

def batches():
    global now
    before = resident()
    counts = []
    for _ in range(2):
        batch()
        begin = faults()
        for _ in range(4):
            batch()
        counts.append((faults() - begin) // 4)
        kept.used(0, heap.LONG_NS)
        kept.trim_unused()
    now = heap.LONG_NS + heap.REST_NS - 1
    kept.trim_unused()
    working = resident() - before
    now += 1
    kept.trim_unused()
    print(*counts, working, resident() - before)

thread = threading.Thread(target=batches)
thread.start()
thread.join()
"""
glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory as it likes")


def measured(**variables: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    output = subprocess.run(command, env={**environment, **variables}, check=True, capture_output=True, text=True)
    return [int(number) for number in output.stdout.split()]


@glibc_only
def test_memory_of_a_thread_stays_while_it_works_and_goes_when_it_rests() -> None:
    unknown, known, working, resting = measured()
    assert unknown > 1_000
    assert known < 100
    assert working > 80
    assert resting < 20


@glibc_only
@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_what_the_environment_wants_counts(variable: str) -> None:
    unknown, known, _, _ = measured(**{variable: "131072"})
    assert min(unknown, known) > 1_000


class Clock:
    now = 100 * REST_NS

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that have given back."""
    threads: list[int] = []
    monkeypatch.setattr(heap, "keep", lambda size, heap_parts: True)
    monkeypatch.setattr(heap, "_give_back", lambda: threads.append(threading.get_ident()))
    return threads


def test_short_batches_keep_nothing_and_give_nothing_back(given_back: list[int]) -> None:
    clock = Clock()
    kept = Heap(1, clock)
    kept.used(clock.now, clock.now + LONG_NS - 1)
    clock.now += REST_NS
    assert not kept.trim_unused()
    assert given_back == []


def test_each_thread_gives_back_once_when_none_has_worked_for_a_while(given_back: list[int]) -> None:
    clock = Clock()
    kept = Heap(1, clock)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:

        def used(executor: Executor) -> None:
            executor.submit(kept.used, clock.now - LONG_NS, clock.now).result()

        def trim(executor: Executor) -> bool:
            return executor.submit(kept.trim_unused).result()

        used(one)
        assert not trim(two)
        clock.now += REST_NS - 1
        assert trim(one)
        clock.now += 1
        used(two)
        assert trim(one)
        clock.now += REST_NS
        assert given_back == []
        for executor in (two, two, one):
            assert not trim(executor)
        assert len(set(given_back)) == len(given_back) == 2
        used(one)
        clock.now += REST_NS
        assert not trim(one)
        assert given_back[2] == given_back[1]
