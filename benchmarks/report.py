"""Medians and spread of the measurements, as a table, JSON, Markdown and a plot."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load import Measurement


@dataclass(frozen=True)
class Row:
    """The medians of several runs of one workload on one server; `spread` is (highest - lowest) / median of the values."""

    workload: str
    level: int
    server: str
    unit: str
    value: float
    spread: float
    p50_ms: float | None
    p99_ms: float | None
    #: CPU time of the server for each answer, in microseconds.
    cpu_us: float | None
    #: Requests of an execution, where the server tells.
    batch: float | None
    date: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.workload, self.level, self.server


def summarize(workload: str, level: int, server: str, unit: str, runs: list[Measurement], date: str) -> Row:
    values = [run.value for run in runs]
    value = median(values)
    return Row(
        workload,
        level,
        server,
        unit,
        value,
        (max(values) - min(values)) / value,
        _median(run.p50_ms for run in runs),
        _median(run.p99_ms for run in runs),
        _median(run.cpu_us for run in runs),
        _median(run.batch for run in runs),
        date,
    )


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


COLUMNS = [
    "workload",
    "level",
    "server",
    "result",
    "±",
    "p50 ms",
    "p99 ms",
    "CPU µs",
    "batch",
    "Naiad / it",
    "p50 / its",
    "p99 / its",
    "CPU / its",
]


def cells(rows: list[Row]) -> list[list[str]]:
    """A line for each row. The last columns are Naiad's figure divided by the server's."""
    found = {row.key: row for row in rows}
    lines = []
    for row in rows:
        ours = found.get((row.workload, row.level, "naiad"))
        ours = None if row.server.startswith("naiad") else ours
        lines.append([
            row.workload,
            str(row.level),
            row.server,
            f"{_number(row.value)} {row.unit}",
            f"{row.spread / 2:.0%}",
            _number(row.p50_ms),
            _number(row.p99_ms),
            _number(row.cpu_us),
            _number(row.batch),
            _ratio(ours.value if ours else None, row.value),
            _ratio(ours.p50_ms if ours else None, row.p50_ms),
            _ratio(ours.p99_ms if ours else None, row.p99_ms),
            _ratio(ours.cpu_us if ours else None, row.cpu_us),
        ])  # fmt: skip
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs else ""


def print_table(rows: list[Row]) -> None:
    table = Table(
        title="the last columns are Naiad's figures divided by the server's: of rates more is better, of times and MB less"
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("workload", "server") else "right")
    for line in cells(rows):
        table.add_row(*line)
    Console(width=170).print(table)


def merged(rows: list[Row], file: Path, order: list[str]) -> list[Row]:
    """`rows` and those of `file` that were not measured anew, in the order of the workloads."""
    old = [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []
    everything = {row.key: row for row in [*old, *rows] if row.workload in order}
    servers = list(dict.fromkeys(row.server for row in everything.values()))
    return sorted(
        everything.values(), key=lambda row: (order.index(row.workload), row.level, servers.index(row.server))
    )


def write(rows: list[Row], machine: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the results to `folder`; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "results.json", folder / "results.md"]
    files[0].write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(line) + " |" for line in cells(rows)]
    files[1].write_text("\n".join(lines) + "\n")
    return files + _plot(rows, folder / "results.svg")


def _plot(rows: list[Row], file: Path) -> list[Path]:
    """The workloads that were measured at several levels, a drawing each. Nothing without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return []
    names = [name for name in dict.fromkeys(row.workload for row in rows) if _levels(rows, name) > 1]
    if not names:
        return []
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4 * columns, 3 * lines), layout="constrained")
    drawings = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in drawings[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(drawings, names, strict=False):
        chosen = [row for row in rows if row.workload == name]
        for server in dict.fromkeys(row.server for row in chosen):
            points = [(row.level, row.value) for row in chosen if row.server == server]
            axes.plot(*zip(*points, strict=True), marker="o", label=server)
        axes.set(title=name, ylabel=chosen[0].unit, xscale="log", ylim=(0, None))
        axes.legend(fontsize="small")
    with rc_context({"svg.fonttype": "none"}):  # text as text, a tenth of the size
        figure.savefig(file)
    return [file]


def _levels(rows: list[Row], workload: str) -> int:
    return len({row.level for row in rows if row.workload == workload})
