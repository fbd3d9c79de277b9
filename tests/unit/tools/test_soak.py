"""The soak test's own judgement: what counts as growth, and which errors need no other explanation."""

import dataclasses
import threading
import time

import pytest
from tritonclient.utils import InferenceServerException

pytest.importorskip("sklearn")
from tools.soak import AFTERMATH_S, CANCELLED, EXPLAINED, Disturbances, Gate, Tally, Traffic, Use, growth, quarters

USE = Use(memory=50 << 20, files=4 << 20, mappings=4, descriptors=100, threads=10)


def test_what_comes_and_goes_is_no_growth():
    now = Use(memory=56 << 20, files=10 << 20, mappings=8, descriptors=108, threads=14)
    assert not list(growth({"naiad": USE}, {"naiad": now}))
    assert not list(growth({"naiad": now}, {"naiad": USE}))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"memory": 57 << 20}, "memory from 50 to 57 MiB"),
        ({"files": 20 << 20}, "memory files from 4 to 20 MiB"),
        ({"mappings": 9}, "mapped memory files and regions from 4 to 9"),
        ({"descriptors": 120}, "file descriptors from 100 to 120"),
        ({"threads": 15}, "threads from 10 to 15"),
    ],
)
def test_growth_is_told(changed, text):
    now = {"naiad": USE, "naiad:digits": dataclasses.replace(USE, **changed)}
    assert list(growth({"naiad": USE, "naiad:digits": USE}, now)) == [f"naiad:digits: {text}"]


def test_a_process_more_or_less_is_told():
    assert "other processes" in next(growth({"naiad": USE}, {"naiad": USE, "naiad:digits": USE}))


@pytest.mark.parametrize(
    ("memory", "was", "it"),
    [
        # A start of some rounds, and peaks now and then, are no growth.
        ([10, 40, 50, 70, 52, 50, 80, 60, 90, 51, 50, 55], 50, 50),
        ([10, 40, 50, 53, 56, 60, 80, 65, 90, 70, 80, 75], 53, 70),
        ([10, 40, 45, 60], 40, 60),
        ([10], 10, 10),
    ],
)
def test_the_least_of_the_last_quarter_is_compared_with_that_of_the_second(memory, was, it):
    rounds = [{"naiad": dataclasses.replace(USE, memory=value)} for value in memory]
    before, now = quarters(rounds)
    assert (before["naiad"].memory, now["naiad"].memory) == (was, it)


KILLED = (
    "Failed to process the request(s) for model instance 'digits_0', message: its host process was killed by SIGKILL"
)


def judged(error, models=("digits",), disturbed="digits", age_s=0.0):
    """(explained, wrong) of an error to a request that began `age_s` after `disturbed` was."""
    traffic = object.__new__(Traffic)
    traffic.tally, traffic.disturbances = Tally(), Disturbances()
    traffic.disturbances.note(disturbed)
    traffic.judge("infer", models, time.monotonic() + age_s, error)
    return sum(traffic.tally.explained.values()), sum(map(len, traffic.tally.wrong.values()))


def test_errors_of_a_model_that_was_just_killed_are_explained():
    assert judged(InferenceServerException(KILLED)) == (1, 0)
    assert judged(InferenceServerException(KILLED), models=("digits_from_png", "digits")) == (1, 0)


def test_errors_of_a_model_that_is_still_disturbed_are_explained():
    disturbances = Disturbances()
    disturbances.note("visitor", goes_on=True)
    late = time.monotonic() + 10 * AFTERMATH_S
    assert disturbances.explain(("visitor",), late)
    disturbances.note("visitor")
    assert not disturbances.explain(("visitor",), late)


@pytest.mark.parametrize(
    "wrong",
    [
        {"error": InferenceServerException(KILLED), "models": ("words",)},
        {"error": InferenceServerException(KILLED), "age_s": AFTERMATH_S + 1},
        {"error": InferenceServerException("This is a bug")},
        {"error": ConnectionResetError("its host process was killed")},
    ],
)
def test_all_others_are_wrong(wrong):
    assert judged(**wrong) == (0, 1)


def test_texts_are_told_apart():
    assert EXPLAINED.search("Request for unknown model: 'visitor' has no available versions")
    assert EXPLAINED.search("sequence 7 of model 'running_sum' has ended early: the host process of instance")
    assert not EXPLAINED.search("inference request batch-size must be <= 4 for 'digits'")
    assert CANCELLED.search("Locally cancelled by application!")


def test_the_gate_stops_all():
    gate = Gate()
    inside, leave = threading.Event(), threading.Event()

    def traffic():
        with gate:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=traffic)
    thread.start()
    assert not inside.wait(0.05)
    gate.open()
    assert inside.wait(60)
    leave.set()
    assert gate.close()
    thread.join()
