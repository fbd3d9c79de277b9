"""Counts the instructions of the hot paths, per request, and compares them with the counts that are kept.

    python tests/instructions/instruction_counts.py [--renew]

Counts of valgrind's callgrind, unlike times, are the same on a busy machine and on a virtual one. They are kept for a
minor version of Python and a kind of machine; another build of that interpreter is noticed by a scenario in which
there is nothing of Naiad.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PROGRAM = Path(__file__).with_name("instruction_scenarios.py")
KEPT = Path(__file__).with_name(
    f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}.json"
)
INTERPRETER = "the interpreter itself"
#: How far counts may be from those that are kept. An improvement is to be kept too, else it could be lost again.
ABOVE = 0.08
BELOW = 0.15
#: Interpreters whose counts differ by more are different builds, which say nothing about each other.
SAME_BUILD = 0.02
_DUMP = re.compile(r"^desc: Trigger: Client Request: (\d+) (.+)\n(?s:.*)^totals: (\d+)$", re.MULTILINE)


class CannotCount(Exception):
    """There is nothing to count with here, or nothing to compare with."""


def count() -> dict[str, int]:
    """Instructions per request, by scenario. Raises CannotCount."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise CannotCount("valgrind is not installed")
    if platform.machine() != "x86_64":
        raise CannotCount(f"the scenarios can talk to valgrind on x86_64 only, this is {platform.machine()}")
    with tempfile.TemporaryDirectory(prefix="naiad-instructions-") as folder:
        command = [valgrind, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        ended = subprocess.run(
            [*command, sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=900
        )
        if ended.returncode:
            raise RuntimeError(f"{PROGRAM.name} has failed:\n{ended.stderr}")
        dumps = sorted(Path(folder).glob("counts.*"), key=lambda file: int(file.suffix[1:]))
        found = [_DUMP.search(file.read_text()) for file in dumps]
    return {match[2]: round(int(match[3]) / int(match[1])) for match in found if match is not None}


def kept() -> dict[str, int]:
    """Raises CannotCount where nothing is kept for this interpreter."""
    if not KEPT.is_file():
        raise CannotCount(f"there are no counts for this Python and machine; `make instructions` writes {KEPT.name}")
    counts: dict[str, int] = json.loads(KEPT.read_text())["instructions per request"]
    return counts


def keep(counted: Mapping[str, int]) -> None:
    KEPT.write_text(json.dumps({"python": sys.version, "instructions per request": counted}, indent=2) + "\n")


def is_same_build(counted: Mapping[str, int], before: Mapping[str, int]) -> bool:
    return abs(counted[INTERPRETER] / before[INTERPRETER] - 1) <= SAME_BUILD


def complaints(counted: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
    """What has become slower, or so much faster that it should be kept; scenarios that come or go."""
    found = []
    for name in before.keys() | counted.keys():
        if name not in counted or name not in before:
            found.append(f"'{name}' is {'not counted any more' if name in before else 'not kept yet'}")
            continue
        now, then = counted[name], before[name]
        if not then * (1 - BELOW) <= now <= then * (1 + ABOVE):
            found.append(
                f"'{name}' takes {now:,} instructions per request, kept are {then:,}: "
                f"{now / then - 1:+.1%}, where {-BELOW:+.0%} to {ABOVE:+.0%} would do"
            )
    return sorted(found)


def main(arguments: list[str]) -> None:
    """Prints what is counted next to what is kept; keeps it with `--renew`, or where nothing is."""
    try:
        counted = count()
    except CannotCount as error:
        sys.exit(str(error))
    try:
        before = kept()
    except CannotCount:
        before = {}
    print(f"{'instructions per request':<52} {'now':>9} {'kept':>9}")
    for name, now in counted.items():
        change = f"{before[name]:>9,} {now / before[name] - 1:+7.1%}" if name in before else ""
        print(f"{name:<52} {now:>9,} {change}")
    if "--renew" in arguments or not before:
        keep(counted)
        print(f"These are kept now, in {KEPT}")
    elif not is_same_build(counted, before):
        print("The counts that are kept are those of another build of Python.")


if __name__ == "__main__":
    main(sys.argv[1:])
