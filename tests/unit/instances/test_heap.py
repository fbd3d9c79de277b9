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

#: Executes batches in a thread; what it prints are page faults per batch and, in MB, the memory that is left.
PROGRAM = """
import resource, threading
import numpy as np
from naiad.instances import heap

now = 0
kept = heap.Heap(256 << 20, clock=lambda: now)

def left():
    return (int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20) - before

def faults(count, size, duration_ns):
    begin = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(8):
        tensors = [np.ones(size, np.uint8) for _ in range(count)]
        del tensors
        kept.used(now - duration_ns, now)
        kept.trim_unused()
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - begin) // 8

before = 0
before = left()
def batches():
    global now
    faults(24, 4 << 20, 0)
    print(faults(24, 4 << 20, 0))
    faults(24, 4 << 20, heap.LONG_NS)
    print(faults(24, 4 << 20, heap.LONG_NS))
    now += heap.REST_NS - 1
    kept.trim_unused()
    print(left())
    now += 1
    kept.trim_unused()
    print(left())
    faults(1, 300_000, 0)
    print(faults(1, 300_000, 0))
    faults(24, 4 << 20, heap.LONG_NS)
    print(left())
    kept.leave()
    print(left())

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
def test_memory_of_a_thread_stays_while_it_works_and_goes_when_it_rests_or_ends() -> None:
    unknown, known, working, resting, short_ones, working_again, after = measured()
    assert unknown > 200
    assert known < 20
    assert working > 80
    assert resting < 20
    assert short_ones < 10
    assert working_again > 80
    assert after < 20


@glibc_only
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("MALLOC_TOP_PAD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_environment_wants_counts(variable: str, value: str) -> None:
    assert min(measured(**{variable: value})[:2]) > 1_000


class Clock:
    now = 100 * REST_NS

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that have given back."""
    threads: list[int] = []
    monkeypatch.setattr(heap, "_libc", object())
    monkeypatch.setattr(heap, "_keep_all", lambda size: None)
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


def test_a_forked_process_gives_back_what_its_parent_keeps(given_back: list[int]) -> None:
    clock = Clock()
    kept = Heap(1, clock)
    kept.forked()
    assert given_back == []
    with ThreadPoolExecutor(1) as other:
        other.submit(kept.used, clock.now - LONG_NS, clock.now).result()
    kept.forked()
    kept.forked()
    assert given_back == [threading.get_ident()]


def test_where_malloc_is_another_one_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_libc", None)
    heap.keep()
    kept = Heap(1)
    kept.used(0, LONG_NS)
    assert not kept.trim_unused()
