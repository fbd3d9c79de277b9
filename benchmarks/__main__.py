"""`python -m benchmarks`: both servers run, and take turns at each workload (A B A B) on the same cores."""

import argparse
import datetime
import os
import platform
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from benchmarks import report, triton
from benchmarks.load import WORKLOADS, Measurement, Workload, install_programs, send
from benchmarks.servers import Server

RESULTS = Path(__file__).parent / "results"


def measure(server: Server, workload: Workload, seconds: float, core: int) -> tuple[Measurement, float]:
    """One run and its mean batch. What the generator counts has to be what the model executed."""
    port = server.grpc_port if workload.form == "grpc" else server.http_port
    before = server.executed()
    run = send(workload, port, seconds, core)
    after = server.executed()
    did = {key: after[key] - before[key] for key in after}
    # What is under way when the generator leaves may be answered, cancelled, or counted on one side only.
    if did["fail"] > workload.in_flight or did["success"] < run.requests - workload.in_flight:
        raise RuntimeError(f"{server.name}, {workload.name}: the generator saw {run.requests} answers, the model {did}")
    return run, did["success"] / max(1, did["executions"])


def machine(servers: list[Server], arguments: argparse.Namespace) -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "servers": ", ".join(server.version for server in servers)
        + f" (nvidia-pytriton {triton.VERSION}); naiad {version('naiad')} {' '.join(arguments.flag)}".rstrip(),
        "cores": f"servers on {arguments.cores}, generator on core {arguments.cores[-1]}",
        "runs": f"{arguments.repeats} of {arguments.seconds} s each in turn, medians; ± is half of (highest - lowest)",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--servers", nargs="+", choices=("triton", "naiad"), default=["triton", "naiad"])
    parser.add_argument("--cores", nargs="+", type=int, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    parser.add_argument("--warm-up", type=int, default=1, metavar="SECONDS", help="before each run")
    parser.add_argument("--only", default="", help="the workloads whose name contains this, for example gRPC")
    parser.add_argument("--in-flight", nargs="+", type=int, help="only these numbers of requests in flight")
    parser.add_argument("--flag", action="append", default=[], help="a further flag for naiad")
    parser.add_argument("--quick", action="store_true", help="one short run each, a first impression")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON, Markdown and plot")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.seconds = 1, 1
    install_programs()
    console = Console()
    workloads = [
        workload
        for workload in WORKLOADS
        if arguments.only in workload.name
        and (arguments.in_flight is None or workload.in_flight in arguments.in_flight)
    ]
    results: report.Results = {}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(name, arguments.cores, arguments.flag if name == "naiad" else []))
            for name in arguments.servers
        ]
        for workload in workloads:
            runs: dict[str, list[tuple[Measurement, float]]] = {server.name: [] for server in servers}
            for _ in range(arguments.repeats):
                for server in servers:
                    measure(server, workload, arguments.warm_up, arguments.cores[-1])
                    runs[server.name].append(measure(server, workload, arguments.seconds, arguments.cores[-1]))
            results[workload] = {
                name: report.Summary.of([run for run, _ in found], [batch for _, batch in found])
                for name, found in runs.items()
            }
            rates = ", ".join(f"{name} {summary.rate:,.0f}/s" for name, summary in results[workload].items())
            console.print(f"{workload.name}, {workload.in_flight} in flight: {rates}", highlight=False)
        described = machine(servers, arguments)
    report.print_table(results)
    for file in report.write(results, described, arguments.results):
        console.print(f"wrote {file}")


if __name__ == "__main__":
    main()
