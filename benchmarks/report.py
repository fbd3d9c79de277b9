"""Medians and spread of the measurements, as a table, JSON, Markdown and, with matplotlib, a plot."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load import Measurement, Workload


@dataclass(frozen=True)
class Summary:
    """The median of several runs; `spread` is (highest - lowest) / median of the rates."""

    rate: float
    spread: float
    p50_us: float
    p99_us: float
    batch: float

    @classmethod
    def of(cls, runs: list[Measurement], batches: list[float]) -> "Summary":
        rates = [run.rate for run in runs]
        rate = median(rates)
        return cls(
            rate,
            (max(rates) - min(rates)) / rate,
            median(run.p50_us for run in runs),
            median(run.p99_us for run in runs),
            median(batches),
        )


Results = dict[Workload, dict[str, Summary]]
COLUMNS = [
    "workload",
    "in flight",
    "Triton req/s",
    "Naiad req/s",
    "throughput",
    "p50 ms",
    "p50",
    "p99 ms",
    "p99",
    "batch",
]


def rows(results: Results) -> list[list[str]]:
    """A row for each workload; the ratios are Naiad / Triton, so latency below 1 is the better."""
    found = []
    for workload, summaries in results.items():
        servers = [summaries.get("triton"), summaries.get("naiad")]

        def ratio(field: str, servers: list[Summary | None] = servers) -> str:
            reference, ours = servers
            return f"{getattr(ours, field) / getattr(reference, field):.2f}" if reference and ours else "-"

        def pair(field: str, servers: list[Summary | None] = servers, scale: float = 1000, digits: int = 2) -> str:
            return " / ".join(f"{getattr(s, field) / scale:.{digits}f}" if s else "-" for s in servers)

        found.append([
            workload.name,
            str(workload.in_flight),
            *(f"{s.rate:,.0f} ±{s.spread / 2:.0%}" if s else "-" for s in servers),
            ratio("rate"),
            pair("p50_us"),
            ratio("p50_us"),
            pair("p99_us"),
            ratio("p99_us"),
            pair("batch", scale=1, digits=1),
        ])  # fmt: skip
    return found


def print_table(results: Results) -> None:
    table = Table(title="Triton / Naiad; ratios are Naiad / Triton")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in rows(results):
        table.add_row(*row)
    Console(width=160).print(table)


def write(results: Results, machine: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the results to `folder`; the files."""
    folder.mkdir(exist_ok=True)
    document = {
        "machine": machine,
        "results": [
            {**asdict(workload), "servers": {name: asdict(summary) for name, summary in summaries.items()}}
            for workload, summaries in results.items()
        ],
    }
    files = [folder / "identity.json", folder / "identity.md"]
    files[0].write_text(json.dumps(document, indent=1) + "\n")
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    files[1].write_text("\n".join(lines) + "\n")
    return files + _plot(results, folder / "identity.svg")


def _plot(results: Results, file: Path) -> list[Path]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    names = list(dict.fromkeys(workload.name for workload in results))
    figure = Figure(figsize=(4 * len(names), 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        chosen = [(workload, summaries) for workload, summaries in results.items() if workload.name == name]
        for server in ("triton", "naiad"):
            points = [(w.in_flight, summaries[server].rate) for w, summaries in chosen if server in summaries]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=server)
        axes.set(title=name, xlabel="requests in flight", ylabel="requests/s", xscale="log", ylim=(0, None))
        axes.legend()
    figure.savefig(file)
    return [file]
