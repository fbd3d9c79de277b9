"""`pb_utils.MetricFamily` and `Metric`: the model's own metrics, whose values the server keeps.

A change is only noted here, so that model code does not wait for the server. A thread passes the notes on: at once, so
that whoever has an answer of the model finds it counted, or together once they come too often. What a metric of its
kind cannot do is refused at once.
"""

import enum
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import ClassVar

from naiad.backends.python import calls, current
from naiad.backends.python.failures import TritonModelException
from naiad.backends.python.texts import text
from naiad.errors import NaiadError

#: So many exchanges a second are spent on notes, and so many more after a pause.
_RATE = 200
_BURST = 20


class MetricKind(enum.IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """Metrics of one name that differ by their labels. It goes, with them, when the model lets go of it."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._name = name = text(name, "MetricFamily needs a str as its name")
        description = text(description, "MetricFamily needs a str as its description")
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily needs a MetricKind, got {type(kind)}")
        self._kind = kind
        self._notes = notes_of(current.instance())
        self._alive = [True]
        kind_name: dict[MetricKind, calls.MetricKind] = {
            MetricKind.COUNTER: "counter",
            MetricKind.GAUGE: "gauge",
            MetricKind.HISTOGRAM: "histogram",
        }
        _ask(
            self._notes,
            calls.NewFamily(name, description, kind_name[self._kind]),
            "Error when creating MetricFamily",
        )
        weakref.finalize(self, _drop_family, self._notes, self._alive, name).atexit = False

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> "Metric":
        """A metric of this family. `buckets` are the ascending upper bounds of a histogram, and needed for one; with
        none in them it only counts."""
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is None:
            if self._kind is MetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
        elif not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        elif self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        named = {str(key): str(value) for key, value in (labels or {}).items()}
        bounds = None if buckets is None else tuple(float(bound) for bound in buckets)
        _ask(self._notes, calls.NewMetric(self._name, named, bounds), "Error when creating Metric")
        return Metric(self._name, self._kind, named, self._notes, self._alive)


class Metric:
    """One metric; made by `MetricFamily.Metric`."""

    def __init__(
        self, family: str, kind: MetricKind, labels: dict[str, str], notes: "Notes", alive: list[bool]
    ) -> None:
        self._family = family
        self._kind = kind
        self._labels = labels
        self._key = (family, tuple(sorted(labels.items())))
        self._alive = alive
        self._notes = notes
        weakref.finalize(self, _drop_metric, self._notes, alive, family, labels).atexit = False

    def increment(self, value: float) -> None:
        """Adds `value`, which must not be negative for a counter."""
        value = self._checked("increment", value)
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("increment", "Increment")
        if self._kind is MetricKind.COUNTER and value < 0:
            raise self._notes.instance.refused(
                "Failed to increment metric value",
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
            )
        self._notes.increment(self._key, value)

    def set(self, value: float) -> None:
        """Sets a gauge."""
        value = self._checked("set", value)
        if self._kind is not MetricKind.GAUGE:
            raise self._unsupported("set", "Set")
        self._notes.set(self._key, value)

    def observe(self, value: float) -> None:
        """Adds an observation to a histogram."""
        value = self._checked("observe", value)
        if self._kind is not MetricKind.HISTOGRAM:
            raise self._unsupported("observe", "Observe")
        self._notes.observe(self._key, value)

    def value(self) -> float:
        """The value of a counter or a gauge, with what other instances have added."""
        self._checked("get", 0.0)
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("get", "Value")
        return _ask(self._notes, calls.MetricValue(self._family, self._labels), "Failed to get metric value")

    def _checked(self, verb: str, value: float) -> float:
        if not self._alive[0]:
            raise TritonModelException(
                f"Failed to {verb} metric value: Invalid metric operation as the corresponding 'MetricFamily' has been "
                "deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have "
                "been deleted."
            )
        if isinstance(value, str | bytes | bytearray):  # which float() would read
            raise TypeError(f"a metric needs a number, got {type(value)}")
        return float(value)

    def _unsupported(self, verb: str, operation: str) -> TritonModelException:
        return self._notes.instance.refused(
            f"Failed to {verb} metric value",
            f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}",
        )


_Key = tuple[str, tuple[tuple[str, str], ...]]


class Notes:
    """Changes not yet passed on to the server, added up per metric. Any thread may note."""

    def __init__(self, instance: current.Instance) -> None:
        self.instance = instance
        self._services = instance.services
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._increments: dict[_Key, float] = {}
        self._values: dict[_Key, float] = {}
        self._observations: dict[_Key, list[float]] = {}
        # What finalizers use has no lock: they may run in the middle of anything.
        self._drops: SimpleQueue[calls.MetricChange] = SimpleQueue()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._is_awake = False
        threading.Thread(target=self._pass_on, name="metrics", daemon=True).start()

    def increment(self, key: _Key, value: float) -> None:
        with self._lock:
            self._increments[key] = self._increments.get(key, 0.0) + value
        self._noted()

    def set(self, key: _Key, value: float) -> None:
        with self._lock:
            self._increments.pop(key, None)
            self._values[key] = value
        self._noted()

    def observe(self, key: _Key, value: float) -> None:
        with self._lock:
            self._observations.setdefault(key, []).append(value)
        self._noted()

    def drop(self, change: calls.MetricChange) -> None:
        self._drops.put(change)
        self._noted()

    def _noted(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wake.put(True)

    def _take(self) -> tuple[calls.MetricChange, ...]:
        """What has been noted since the last time, in an order that gives the same values."""
        with self._lock:
            values, self._values = self._values, {}
            increments, self._increments = self._increments, {}
            observations, self._observations = self._observations, {}
        changes: list[calls.MetricChange] = []
        for (family, labels), value in values.items():
            changes.append(calls.SetValue(family, dict(labels), value))
        for (family, labels), value in increments.items():
            changes.append(calls.Increment(family, dict(labels), value))
        for (family, labels), observed in observations.items():
            changes.append(calls.Observe(family, dict(labels), tuple(observed)))
        while not self._drops.empty():
            changes.append(self._drops.get())
        return tuple(changes)

    def send(self) -> None:
        """Passes on what is noted. The server's log says what is refused of it: nobody waits for that."""
        with self._sending:
            self._send()

    def ask(self, change: calls.MetricChange) -> float:
        """Passes on what is noted, and then `change` by itself. Raises what comes of that; what was noted stands."""
        with self._sending:
            self._send()
            return self._call(change)

    def _send(self) -> None:
        if changes := self._take():
            try:
                self._call(*changes)
            except NaiadError as error:
                self._services.log("WARNING", f"metrics of the model are lost: {error.message}", __file__, 0)

    def _call(self, *changes: calls.MetricChange) -> float:
        return self._services.call("metric", calls.MetricCall(changes), float)

    def close(self) -> None:
        """Passes on what is noted and ends the thread."""
        self._wake.put(False)
        self.send()

    def _pass_on(self) -> None:
        allowed = float(_BURST)
        before = time.monotonic()
        while self._wake.get():
            now = time.monotonic()
            allowed = min(allowed + (now - before) * _RATE, _BURST) - 1
            before = now
            if allowed < 0:
                time.sleep(1 / _RATE)
            self._is_awake = False
            self.send()


def notes_of(instance: current.Instance) -> Notes:
    """The notes of an instance, made when its model has its first metric."""
    if instance.notes is None:
        instance.notes = Notes(instance)
    return instance.notes


def _ask(notes: Notes, change: calls.MetricChange, failed: str) -> float:
    try:
        return notes.ask(change)
    except NaiadError as error:
        raise notes.instance.refused(failed, error.message) from error


def _drop_family(notes: Notes, alive: list[bool], family: str) -> None:
    alive[0] = False
    notes.drop(calls.DropFamily(family))


def _drop_metric(notes: Notes, alive: list[bool], family: str, labels: dict[str, str]) -> None:
    if alive[0]:
        notes.drop(calls.DropMetric(family, labels))
