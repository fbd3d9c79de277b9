"""Quantiles of durations over the last minute, for summaries. Only there when summaries are on."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from naiad.statistics import Duration

#: The window that quantiles look at, and how many steps it moves in.
WINDOW_S: Final = 60.0
STEPS: Final = 5
_PER_OCTAVE: Final = 64


class Sketch:
    """Counts of values in buckets whose width grows with the value: quantiles are off by less than 1 %.

    At most `STEPS` steps are kept, and a step has about 64 buckets for each doubling of the value.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, int]] = {}

    def add(self, value: float, count: int, now: float) -> None:
        """Counts `value` `count` times at the time `now` (seconds)."""
        step = int(now * STEPS / WINDOW_S)
        buckets = self._steps.get(step)
        if buckets is None:
            self._drop_old(step)
            buckets = self._steps[step] = {}
        key = _bucket(value)
        buckets[key] = buckets.get(key, 0) + count

    def quantile(self, share: float, now: float) -> float:
        """The value that `share` (0 to 1) of those in the window do not exceed; NaN if there are none."""
        self._drop_old(int(now * STEPS / WINDOW_S))
        merged: dict[int, int] = {}
        for buckets in self._steps.values():
            for key, count in buckets.items():
                merged[key] = merged.get(key, 0) + count
        rank = max(1, math.ceil(share * sum(merged.values())))
        for key in sorted(merged):
            rank -= merged[key]
            if rank <= 0:
                return _value(key)
        return math.nan

    def _drop_old(self, step: int) -> None:
        for old in [old for old in self._steps if old <= step - STEPS]:
            del self._steps[old]


_ZERO: Final = -(1 << 30)


def _bucket(value: float) -> int:
    if value <= 0:
        return _ZERO
    mantissa, exponent = math.frexp(value)  # mantissa in [0.5, 1)
    return exponent * _PER_OCTAVE + int((mantissa - 0.5) * 2 * _PER_OCTAVE)


def _value(bucket: int) -> float:
    """The middle of a bucket."""
    if bucket == _ZERO:
        return 0.0
    exponent, part = divmod(bucket, _PER_OCTAVE)
    return math.ldexp(0.5 + (part + 0.5) / (2 * _PER_OCTAVE), exponent)


@dataclass
class ObservedDuration(Duration):
    """A duration that also remembers how the single ones were spread, in µs.

    An `add` for several requests counts their mean for each of them: the requests of one batch are told apart by
    nothing but when they arrived.
    """

    sketch: Sketch = field(default_factory=Sketch)
    clock: Callable[[], float] = time.monotonic

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns
        if count > 0:
            self.sketch.add(ns / count / 1000, count, self.clock())

    def quantile_us(self, share: float) -> float:
        """The quantile over the last minute, in µs; NaN if nothing happened in it."""
        return self.sketch.quantile(share, self.clock())
