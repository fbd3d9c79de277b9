"""Replays the recorded answers of Triton against `naiad`: one test for each group of cases and server flags.

The corpus is no part of this repository: it is looked for beside it (`../shared/conformance`), or where
NAIAD_CONFORMANCE says. Which cases may differ, and why, stands in known_differences.toml.
"""

import importlib
import json
import os
import socket
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CORPUS = Path(os.environ.get("NAIAD_CONFORMANCE", Path(__file__).parents[3] / "shared" / "conformance"))
KNOWN: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "known_differences.toml").read_text())
NAIAD = Path(sys.executable).parent / "naiad"
#: The least part of the cases replayed in which the answer has to be the recorded one to the letter.
EXACT_RATE = 0.95

pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason=f"no conformance corpus at {CORPUS}; set NAIAD_CONFORMANCE")


def groups() -> Iterator[tuple[str, str, list[str]]]:
    """(area, group, case names) of the corpus."""
    for file in sorted((CORPUS / "cases").glob("*.json")):
        for group in json.loads(file.read_text())["groups"]:
            yield file.stem, group["name"], [f"{file.stem}/{case['id']}" for case in group["cases"]]


GROUPS = list(groups())


def unsupported(area: str, group: str) -> str | None:
    """Why a group is not replayed; None where it is."""
    known = KNOWN["unsupported"]
    return known.get(area) or known.get(f"{area}/{group}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


@pytest.fixture(scope="module")
def replay() -> Iterator[Any]:
    """The corpus's own replayer."""
    sys.path.insert(0, str(CORPUS))
    try:
        yield importlib.import_module("replay")
    finally:
        sys.path.remove(str(CORPUS))


def described(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines.append(row["case"] + ("" if row["verdict"] != "SKIP" else ": skipped by the replayer"))
        lines += [f"    [{d['kind']}] {d['path']}: {d['what']}" for d in row["differences"]]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("area", "group"), [pytest.param(area, group, id=f"{area}-{group}") for area, group, _ in GROUPS]
)
def test_answers_as_recorded(area: str, group: str, replay: Any, tmp_path: Path) -> None:
    if reason := unsupported(area, group):
        pytest.skip(reason)
    (chosen,) = (g for g in replay.load_groups([CORPUS / "cases"], f"^{area}/") if (g.area, g.name) == (area, group))
    report = replay.Report("exact", quiet=True)
    command = (
        f"{NAIAD} --model-repository={{repo}} --http-port={{http_port}} "
        "--grpc-port={grpc_port} --metrics-port={metrics_port} {flags}"
    )
    arguments = Namespace(
        server_cmd=command, models=[CORPUS / "models"], ports=free_ports(3), scrub=[], log_dir=tmp_path
    )
    replay.run_with_command(chosen, arguments, report)

    def differing(strictness: set[str]) -> set[str]:
        return {
            row["case"]
            for row in report.rows
            if any(replay.STRICTNESS[found["kind"]] in strictness for found in row["differences"])
        }

    answers = differing({"status", "structure"})
    texts = differing({"exact"}) - answers
    skipped = {row["case"] for row in report.rows if row["verdict"] == "SKIP"}
    cases = {row["case"] for row in report.rows}
    unexpected = (answers - KNOWN["answer"].keys()) | (texts - KNOWN["text"].keys()) | skipped
    (log,) = tmp_path.iterdir()
    assert not unexpected, (
        described([row for row in report.rows if row["case"] in unexpected])
        + "\n\nThe end of the server's log:\n"
        + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    )
    assert answers == KNOWN["answer"].keys() & cases, "listed under [answer], but the answers agree"
    assert texts == KNOWN["text"].keys() & cases, "listed under [text], but the texts agree"


def test_known_differences_name_cases_and_areas_of_the_corpus() -> None:
    cases = {case for _, _, names in GROUPS for case in names}
    places = {area for area, _, _ in GROUPS} | {f"{area}/{group}" for area, group, _ in GROUPS}
    assert KNOWN["answer"].keys() | KNOWN["text"].keys() <= cases
    assert KNOWN["unsupported"].keys() <= places


def test_enough_answers_are_exact() -> None:
    """With the lists verified case by case above, the rate follows from them."""
    replayed = {case for area, group, names in GROUPS if not unsupported(area, group) for case in names}
    differing = KNOWN["answer"].keys() | KNOWN["text"].keys()
    assert len(replayed - differing) >= EXACT_RATE * len(replayed)
