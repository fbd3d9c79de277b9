"""Medians, spread, the direction of the ratios, and what is kept of earlier runs."""

import json
from pathlib import Path

from benchmarks import report
from benchmarks.load import Measurement
from benchmarks.report import Row


def row(server: str, value: float, p50_ms: float | None = 1, workload: str = "echo", level: int = 4) -> Row:
    return Row(workload, level, server, "requests/s", value, 0.1, p50_ms, 2.0, 50.0, None, "2026-01-01")


def test_a_row_has_medians_and_the_spread_of_the_values() -> None:
    runs = [
        Measurement(value, p50_ms, p50_ms * 2, 10, cpu_us, batch)
        for value, p50_ms, cpu_us, batch in ((100, 5, 7, 1), (120, 3, 9, 3), (110, 4, 8, 2))
    ]
    found = report.summarize("echo", 4, "naiad", "requests/s", runs, "2026-01-01")
    assert found == Row("echo", 4, "naiad", "requests/s", 110, 20 / 110, 4, 8, 8, 2, "2026-01-01")


def test_a_figure_nobody_gave_is_none() -> None:
    assert report.summarize("start", 1, "naiad", "s", [Measurement(2)], "2026-01-01").p50_ms is None


def test_ratios_are_naiads_figures_by_the_servers() -> None:
    triton, naiad = report.cells([row("triton", 100), row("naiad", 150, 0.5)])
    assert dict(zip(report.COLUMNS, triton, strict=True))["Naiad / it"] == "1.50"
    assert dict(zip(report.COLUMNS, triton, strict=True))["p50 / its"] == "0.50"
    assert dict(zip(report.COLUMNS, naiad, strict=True))["Naiad / it"] == ""


def test_a_server_alone_has_no_ratios() -> None:
    (found,) = report.cells([row("triton", 100, None)])
    assert dict(zip(report.COLUMNS, found, strict=True))["Naiad / it"] == ""


def test_rows_that_were_not_measured_anew_are_kept(tmp_path: Path) -> None:
    old = [row("naiad", 1), row("naiad", 2, level=1), row("naiad", 3, workload="gone")]
    (file, *_) = report.write(old, {}, tmp_path)
    found = report.merged([row("naiad", 5), row("triton", 6)], file, ["first", "echo"])
    assert [(r.workload, r.level, r.server, r.value) for r in found] == [
        ("echo", 1, "naiad", 2),
        ("echo", 4, "naiad", 5),
        ("echo", 4, "triton", 6),
    ]


def test_files_say_what_was_measured_and_where(tmp_path: Path) -> None:
    files = report.write([row("triton", 100)], {"cores": "two"}, tmp_path / "new")
    document = json.loads(files[0].read_text())
    assert (document["machine"], document["rows"][0]["value"]) == ({"cores": "two"}, 100)
    assert "cores: two" in files[1].read_text()
    assert "| echo | 4 | triton | 100 requests/s |" in files[1].read_text()
