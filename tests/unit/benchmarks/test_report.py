"""Medians, spread and the direction of the ratios."""

import json
from pathlib import Path

from benchmarks import report
from benchmarks.load import Measurement, Workload
from benchmarks.report import Summary

WORKLOAD = Workload("json", 16, 4)


def summary(rate: float, p50_us: float = 1000, p99_us: float = 2000) -> Summary:
    return Summary(rate, 0.1, p50_us, p99_us, 1.0)


def test_summary_takes_medians_and_the_spread_of_the_rates() -> None:
    runs = [Measurement(rate, p50_us, p50_us * 2, 10) for rate, p50_us in ((100, 5), (120, 3), (110, 4))]
    assert Summary.of(runs, [1, 3, 2]) == Summary(110, 20 / 110, 4, 8, 2)


def test_ratios_are_naiad_by_triton() -> None:
    (row,) = report.rows({WORKLOAD: {"triton": summary(100), "naiad": summary(150, 500, 3000)}})
    found = dict(zip(report.COLUMNS, row, strict=True))
    assert (found["throughput"], found["p50"], found["p99"]) == ("1.50", "0.50", "1.50")
    assert found["p50 ms"] == "1.00 / 0.50"


def test_a_server_alone_has_no_ratios(tmp_path: Path) -> None:
    results = {WORKLOAD: {"triton": summary(100)}}
    assert dict(zip(report.COLUMNS, report.rows(results)[0], strict=True))["throughput"] == "-"
    files = report.write(results, {"date": "today"}, tmp_path)
    assert json.loads(files[0].read_text())["results"][0]["servers"]["triton"]["rate"] == 100
    assert "| HTTP json, 16 floats | 4 |" in files[1].read_text()
