"""Prometheus' text format, and the values it is made of. Pure.

Written out here because the client library for Python adds `_total` to the names of counters, and Triton's have none.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram", "summary"]
CONTENT_TYPE = "text/plain; charset=utf-8"


class Sample(NamedTuple):
    """One line: `suffix` ("_sum", "_count", "_bucket" or "") follows the name of the family."""

    labels: Mapping[str, str]
    value: float
    suffix: str = ""


@dataclass(slots=True)
class Family:
    """All series of one name. `help` and `kind` are what HELP and TYPE say."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample] = field(default_factory=list)


def exposition(families: Iterable[Family]) -> bytes:
    """The text of the families that have samples, in their order."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escape(family.help)}\n# TYPE {family.name} {family.kind}\n")
        for labels, value, suffix in family.samples:
            inside = ",".join(f'{key}="{_escape(labels[key], quotes=True)}"' for key in sorted(labels, key=_place))
            lines.append(f"{family.name}{suffix}{{{inside}}} " if inside else f"{family.name}{suffix} ")
            lines.append(number(value) + "\n")
    return "".join(lines).encode(errors="backslashreplace")


def number(value: float) -> str:
    """A value as Prometheus reads it: `4`, `0.5`, `NaN`, `+Inf`."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _place(key: str) -> tuple[bool, str]:
    """Labels come by name, as from Triton, then the one that tells the lines of a histogram or summary apart."""
    return key in ("le", "quantile"), key


def _escape(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
