"""`python -m benchmarks`: servers take turns at each workload (A B A B) on the same cores, each started anew every time."""

import argparse
import datetime
import os
import platform
import subprocess
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import grpc
from rich.console import Console

from benchmarks import models, report
from benchmarks.load import Measurement, Task, install_programs
from benchmarks.servers import SERVERS, Running
from benchmarks.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results"
Turn = dict[int, Measurement]


def take_turn(
    server: str, workload: Workload, levels: list[int], repository: Path, options: argparse.Namespace
) -> Turn:
    """Starts the server, checks an answer, measures each level, stops it.

    Levels above one at which there is no answer in time are left out. Raises RuntimeError where anything fails.
    """
    seconds = options.seconds * workload.stretch
    if server == "loop":
        return {level: workload.loop(repository, options.cores, seconds, level) for level in levels}
    model = workload.models[0]
    inputs = workload.inputs()
    expected = workload.expected(inputs, repository / model)
    flags = workload.flags + (tuple(options.flag) if server == "naiad" else ())
    turn: Turn = {}
    with Running(SERVERS[server], repository, model, options.cores, flags) as running:
        workload.check(running, inputs, expected)
        for level in levels:
            parts = (running, workload.form, inputs, expected, level)
            if workload.more_is_better:
                workload.measure(Task(*parts, options.warm_up * workload.stretch, options.cores[-1]))
            run = measure(workload, Task(*parts, seconds, options.cores[-1]))
            if not run.value:
                break
            turn[level] = run
    return turn


def measure(workload: Workload, task: Task) -> Measurement:
    """One run. What the generator counts has to be what the model executed."""
    running, counts = task.running, task.running.server.counts
    before, cpu_s = running.executed() if counts else {}, running.cpu_s()
    run = workload.measure(task)
    cpu_s = running.cpu_s() - cpu_s
    if not run.requests:
        return run
    run = replace(run, cpu_us=cpu_s / run.requests * 1e6)
    if not counts:
        return run
    after = running.executed()
    did = {key: after[key] - before[key] for key in after}
    # What is under way when the generator leaves may be answered, cancelled, or counted on one side only; ensembles count a
    # request that is cancelled twice, as Triton does.
    if did["fail"] > 2 * task.level or did["success"] < run.requests - task.level:
        raise RuntimeError(f"{running.server.name}: the generator saw {run.requests} answers, the model {did}")
    return replace(run, batch=did["success"] / max(1, did["executions"]))


def compare(workload: Workload, options: argparse.Namespace, console: Console) -> list[report.Row]:
    """All servers that can run the workload, in turns. One that fails is told of and left out, as is a workload of models
    that cannot be made, for lack of their framework."""
    levels = [level for level in workload.levels if not options.in_flight or level in options.in_flight]
    servers = [name for name in workload.servers if not options.servers or name in options.servers]
    if not levels or not servers:
        return []
    turns: dict[str, list[Turn]] = {server: [] for server in servers}
    with tempfile.TemporaryDirectory() as folder:
        try:
            models.write(Path(folder), workload.models)
        except (OSError, subprocess.SubprocessError) as error:
            console.print(
                f"{workload.name}: left out, its models cannot be made: {error}", markup=False, highlight=False
            )
            return []
        for _ in range(options.repeats):
            for server in list(turns):
                try:
                    turns[server].append(take_turn(server, workload, levels, Path(folder), options))
                except (RuntimeError, OSError, subprocess.SubprocessError, grpc.RpcError) as error:
                    console.print(f"{workload.name}: {server} is left out: {error}", markup=False, highlight=False)
                    del turns[server]
    today = datetime.date.today().isoformat()
    rows = [
        report.summarize(workload.name, level, server, workload.unit, [turn[level] for turn in found], today)
        for level in levels
        for server, found in turns.items()
        if all(level in turn for turn in found)
    ]
    for level in levels:
        figures = ", ".join(f"{row.server} {row.value:,.2f}" for row in rows if row.level == level)
        console.print(f"{workload.name}, {level}: {figures} {workload.unit}", markup=False, highlight=False)
    return rows


def machine(options: argparse.Namespace) -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "naiad": f"{version('naiad')} {' '.join(options.flag)}".rstrip(),
        "peers": ", ".join(server.requirements[0] for server in SERVERS.values() if server.requirements),
        "cores": f"servers on {options.cores}, generator on core {options.cores[-1]}",
        "runs": f"{options.repeats} of {options.seconds} s each in turn, medians; ± is half of (highest - lowest)",
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--list", action="store_true", help="what there is, with the servers that can run it")
    parser.add_argument("--only", nargs="+", default=[""], help="workloads whose names contain one of these texts")
    parser.add_argument("--servers", nargs="+", choices=["loop", *SERVERS], help="only these")
    parser.add_argument("--in-flight", nargs="+", type=int, help="only these levels")
    parser.add_argument("--cores", nargs="+", type=int, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    parser.add_argument("--warm-up", type=int, default=1, metavar="SECONDS", help="before each run")
    parser.add_argument("--flag", action="append", default=[], help="a further flag for naiad")
    parser.add_argument("--quick", action="store_true", help="one short run each, a first impression")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON, Markdown and plot")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.seconds = 1, 1
    return options


def main() -> None:
    options = arguments()
    console = Console(soft_wrap=True)
    workloads = [workload for workload in WORKLOADS if any(text in workload.name for text in options.only)]
    if options.list:
        for workload in workloads:
            levels = " ".join(map(str, workload.levels))
            console.print(f"{workload.name} [{levels}]: {', '.join(workload.servers)}", markup=False, highlight=False)
        return
    install_programs()
    rows: list[report.Row] = []
    try:
        for workload in workloads:
            rows += compare(workload, options, console)
    except KeyboardInterrupt:
        console.print("interrupted; what is measured is kept")
    finally:
        report.print_table(rows)
        everything = report.merged(rows, options.results / "results.json", [workload.name for workload in WORKLOADS])
        for file in report.write(everything, machine(options), options.results):
            console.print(f"wrote {file}")


if __name__ == "__main__":
    main()
