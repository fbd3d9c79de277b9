"""The process that converts: `python -m naiad.convert.process`, a Job on its input, Reports to a pipe.

The end of its input is that of the process that asked: then it ends, too, and takes what it has written with it.

Frameworks write what they like to its output and error output, which the parent keeps for the case of failure.
"""

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from naiad.backends.api import Array
from naiad.convert.compare import (
    check,
    dependent_output,
    difference,
    given_arrays,
    paired,
    random_arrays,
    read_arrays,
)
from naiad.convert.job import REPORTS_FD, Difference, Done, Failed, Job, Report, Step
from naiad.convert.plan import TARGETS
from naiad.convert.served import Served, load
from naiad.convert.sources import Source, open_source
from naiad.convert.targets import write
from naiad.errors import InvalidArgument, NaiadError

_STEPS = 5
#: What open dimensions behind the batch are tried with, until the source has taken two: long enough for convolutions, and
#: usual sides of pictures. 1, which much is compiled apart for, only where no other will do.
_EXTENTS = (8, 12, 5, 64, 224, 1)

#: A set of inputs, what it is called, and what the source answers.
_Tried = tuple[str, Mapping[str, Array], Mapping[str, Array]]


class _Conversion:
    def __init__(self, job: Job, pipe: int) -> None:
        self._job = job
        self._pipe = pipe
        self._step = 0

    def send(self, report: Report) -> None:
        os.write(self._pipe, msgspec.json.encode(report) + b"\n")

    def _next(self, text: str) -> None:
        self._step += 1
        self.send(Step(self._step, _STEPS, text))

    def run(self) -> Done:
        job = self._job
        backend, filename = TARGETS[job.target]
        self._next(f"Load {job.source}")
        source = open_source(job)
        remarks: list[str] = []
        self._next("Run the source")
        tried = self._run_source(source, remarks)
        self._next(f"Convert to {job.target}")
        path = Path(job.folder) / filename
        _, example, answer = tried[0]
        batching = job.batching and source.batchable
        if batching and (problem := _dependence(source, tried, job.tolerance)) is not None:
            batching = False
            remarks.append(f"it does not batch: {problem}")
        config = write(job, source, path, example, answer)
        self._next(f"Load the result with the backend {backend}")
        sizes = [job.max_batch_size, 0] if batching and job.max_batch_size else [0]
        result, problems = load(backend, path, job.model, config, sizes)
        remarks += problems
        remarks += [
            f"output '{name}' is left out: the source has nothing to compare it with"
            for name in result.leave_out_all_but([theirs for _, theirs in paired(list(answer), result.outputs)])
        ]
        self._next("Compare the results")
        differences = _compare(result, tried)
        check(differences, job.tolerance)
        return Done(result.config, differences, remarks)

    def _run_source(self, source: Source, remarks: list[str]) -> list[_Tried]:
        """On the given inputs and on random ones; the first is what converters trace."""
        tried: list[_Tried] = []
        if self._job.arrays is not None:
            arrays = given_arrays(read_arrays(self._job.arrays), source.inputs)
            tried.append(("the given inputs", arrays, source.run(arrays)))
        random, problem = _on_random_inputs(source)
        if not random:
            if not tried:
                raise InvalidArgument(
                    f"the source itself fails on random inputs: {problem}. Give inputs it can work with: --inputs FILE.npz"
                )
            remarks.append(f"the source fails on random inputs, only the given ones were compared: {problem}")
        return tried + random


def _on_random_inputs(source: Source) -> tuple[list[_Tried], Exception | None]:
    """In batches of 2 and 3, and where dimensions behind the batch are open with two lengths, of those that the source
    takes. Why it took none, else."""
    is_open = any(-1 in it.dims[1:] for it in source.inputs)
    found: list[_Tried] = []
    problem: Exception | None = None
    lengths = 0
    for extent in _EXTENTS:
        if lengths == (2 if is_open else 1) or (lengths and extent == 1):
            break
        length = f", lengths of {extent}" if is_open else ""
        try:
            found += [
                (f"random inputs, batch of {rows}{length}", arrays, source.run(arrays))
                for rows in ((2, 3) if source.batchable and not found else (2,))
                for arrays in (random_arrays(source.inputs, rows, extent, seed=rows),)
            ]
            lengths += 1
        except Exception as error:
            problem = problem or error
    return found, problem


def _dependence(source: Source, tried: list[_Tried], tolerance: float) -> str | None:
    """Why rows of different requests cannot share a batch: the first and the last row of each are run alone."""
    for what, arrays, answer in tried:
        rows = len(next(iter(arrays.values())))
        for row in sorted({0, rows - 1}):
            try:
                alone = source.run({name: array[row : row + 1] for name, array in arrays.items()})
            except Exception as error:
                return f"the source fails on one row of {what}: {error}"
            if (output := dependent_output(answer, row, alone, tolerance)) is not None:
                return f"output '{output}' of one row depends on the others of {what}"
    return None


def _compare(result: Served, tried: list[_Tried]) -> list[Difference]:
    differences = []
    for what, arrays, wanted in tried:
        names = dict(paired(list(arrays), [it.name for it in result.inputs]))
        feeds = {names[name]: array if array.ndim else array.reshape(1) for name, array in arrays.items()}
        try:
            got = result.run(feeds)
        except NaiadError as error:
            raise NaiadError(f"the result fails on {what}, the source does not: {error.message}") from error
        differences += [
            difference(theirs, what, wanted[ours], got[theirs]) for ours, theirs in paired(list(wanted), list(got))
        ]
    return differences


def _end_with_parent(scratch: str) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # with the converters that it runs as programs


def main() -> None:
    """The program."""
    pipe = int(os.environ.pop(REPORTS_FD))
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_end_with_parent, args=(job.scratch,), daemon=True).start()
    conversion = _Conversion(job, pipe)
    try:
        conversion.send(conversion.run())
    except NaiadError as error:
        conversion.send(Failed(error.message))
    except Exception as error:
        traceback.print_exc()
        conversion.send(Failed(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
