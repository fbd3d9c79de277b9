"""What models cost while nobody asks them: time until ready, memory, loading and unloading."""

import time
from statistics import median

from benchmarks.load import Measurement, Task
from benchmarks.models import MANY

#: How often a model is loaded and unloaded in one run.
TIMES = 10


def ready(task: Task) -> Measurement:
    """Seconds from the start of the process until it is ready."""
    return Measurement(task.running.ready_s)


def memory(task: Task) -> Measurement:
    """MB for each further model, idle and never asked; the server has the first one."""
    first = task.running.memory_mb()
    prefix = task.running.model.rstrip("0")
    for index in range(1, MANY):
        task.running.manage("load", f"{prefix}{index}")
    return Measurement((task.running.memory_mb() - first) / (MANY - 1))


def load(task: Task) -> Measurement:
    """Milliseconds until a model is loaded and ready to be asked."""
    return _median(task, "load")


def unload(task: Task) -> Measurement:
    """Milliseconds until the model is not ready any more."""
    return _median(task, "unload")


def _median(task: Task, verb: str) -> Measurement:
    took_ms: dict[str, list[float]] = {"load": [], "unload": []}
    running, model = task.running, task.running.model
    for _ in range(TIMES):
        for step in ("unload", "load"):
            start = time.perf_counter()
            running.manage(step, model)
            while running.is_loaded(model) != (step == "load"):
                time.sleep(0.001)
            took_ms[step].append((time.perf_counter() - start) * 1000)
    return Measurement(median(took_ms[verb]))
