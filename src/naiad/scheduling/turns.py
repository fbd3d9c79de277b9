"""What the schedulers share that decide once per turn of the event loop. On the event loop."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from naiad.errors import NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes, Instance
from naiad.messages import InferRequest, Result
from naiad.scheduling.queue import Queued
from naiad.scheduling.scheduler import Call, FailureReason
from naiad.statistics import BatchStatistics, ModelStatistics

#: The text of a scheduler that takes no more calls.
STOPPED: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class TurnScheduler(ABC):
    """Calls that wait, and executions that run, on the instances of one model version.

    However much happens in one turn of the loop, one decision follows at its end. Whoever changes what a decision
    depends on asks for one; it is also the decision that notices that nothing is left to do.
    """

    def __init__(
        self,
        model_name: str,
        instances: Sequence[Instance],
        statistics: ModelStatistics,
        report: Callable[[str, BaseException], None],
    ) -> None:
        self._model_name = model_name
        self._statistics = statistics
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._decision_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._running = 0
        #: For `close`: nothing waits or runs any more.
        self._idle = asyncio.Event()
        for instance in instances:
            instance.on_change = self._ask

    @abstractmethod
    def add(self, instance: Instance) -> None:
        """Uses one more instance from now on."""

    @abstractmethod
    def retire(self, instance: Instance) -> asyncio.Event:
        """Begins nothing new on an instance, of which there is another one; the event comes when it gets no more
        batches. What executes there by then goes on."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._model_name} pending={self.pending} running={self._running}>"

    @property
    @abstractmethod
    def pending(self) -> int:
        """Calls submitted and not yet handed to an instance."""

    @property
    def sequences(self) -> int:
        return 0

    def stopped(self, request: InferRequest) -> NaiadError | None:
        return Unavailable(request.label + STOPPED)

    @abstractmethod
    def _decide(self) -> None:
        """Hands to the instances what may run now, and sets `_idle` when that was the last."""

    async def close(self) -> None:
        """Refuses what is new; returns when every call has been handed to an instance and executed."""
        self._closed = True
        if not self._idle_now():
            self._idle.clear()
            self._ask()
            await self._idle.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _idle_now(self) -> bool:
        return not self.pending and not self._running

    def _ask(self) -> None:
        if not self._decision_due:
            self._decision_due = True
            self._loop.call_soon(self._decide)

    def _executed(
        self,
        calls: Sequence[Call],
        total_rows: int,
        times: ComputeTimes | None,
        succeeded: bool,
        null_rows: int = 0,
    ) -> ComputeTimes:
        """Counts an execution that has ended; without times it was lost, and ends now."""
        self._running -= 1
        if times is None:
            now = time.monotonic_ns()
            times = ComputeTimes(now, now, now, now)
            succeeded = False
        count_execution(self._statistics, calls, total_rows, times, succeeded, null_rows)
        self._ask()
        return times

    def _unavailable(self, instances: Iterable[Instance]) -> Unavailable | None:
        """Why nothing that waits will ever run, or None."""
        failures = [instance.failure for instance in instances]
        if not all(failures):
            return None
        why = failures[0] if failures else "all its instance groups are passive"
        return Unavailable(f"model '{self._model_name}' is not available: {why}")

    def _deliver(self, deliver: Callable[[Result | None, bool], None], result: Result | None, final: bool) -> None:
        """Passes a result on. A failing sink is the client's trouble."""
        try:
            deliver(result, final)
        except Exception as error:
            self._report(f"a response of model '{self._model_name}' could not be passed on", error)

    def _fail(self, call: Call, error: NaiadError | None, reason: FailureReason = "REJECTED") -> None:
        """Ends a call that no instance has answered; without an error, as cancelled."""
        try:
            if error is None:
                call.fail_cancelled()
            else:
                call.fail(error, reason)
        except Exception as problem:
            self._report(f"an error of model '{self._model_name}' could not be passed on", problem)


def count_execution(
    statistics: ModelStatistics,
    calls: Sequence[Queued],
    total_rows: int,
    times: ComputeTimes,
    succeeded: bool,
    null_rows: int = 0,
) -> None:
    """Counts one execution as Triton does: durations per request, the whole batch charged to each (R12-22, R12-23).

    A batch whose execution failed counts as an execution of its size, but not among the inferences; neither do
    `null_rows`, rows that end no call.
    """
    count_durations(
        statistics,
        [call.queued_ns for call in calls],
        total_rows,
        times.start_ns,
        times.end_ns,
        times.input_end_ns - times.start_ns,
        times.output_start_ns - times.input_end_ns,
        times.end_ns - times.output_start_ns,
        succeeded,
        null_rows,
    )


def count_durations(
    statistics: ModelStatistics,
    queued_ns: list[int],
    total_rows: int,
    start_ns: int,
    end_ns: int,
    input_ns: int,
    infer_ns: int,
    output_ns: int,
    succeeded: bool = True,
    null_rows: int = 0,
) -> None:
    """Counts one execution of the calls that were queued at these times."""
    statistics.execution_count += 1
    statistics.last_inference_ms = time.time_ns() // 1_000_000
    batch = statistics.batches.get(total_rows)
    if batch is None:
        batch = statistics.batches[total_rows] = BatchStatistics()
    batch.compute_input.add(input_ns)
    batch.compute_infer.add(infer_ns)
    batch.compute_output.add(output_ns)
    count = len(queued_ns)
    queued_sum = sum(queued_ns)
    infer = statistics.infer
    request_sum = end_ns * count - queued_sum
    if not succeeded:
        infer.fail.add(request_sum, count)
        statistics.failures["BACKEND"] += count
        return
    statistics.inference_count += total_rows - null_rows
    infer.success.add(request_sum, count)
    infer.queue.add(start_ns * count - queued_sum, count)
    infer.compute_input.add(input_ns * count, count)
    infer.compute_infer.add(infer_ns * count, count)
    infer.compute_output.add(output_ns * count, count)
    if count:
        statistics.latencies.add_batch(queued_ns, start_ns, end_ns)


def note_beginning(calls: Iterable[Call]) -> bool:
    """Notes that an instance has the calls, where somebody wants to know; whether anybody does."""
    now_ns = 0
    for call in calls:
        if (progress := call.progress) is not None:
            now_ns = now_ns or time.monotonic_ns()
            progress.executing_ns = progress.executing_ns or now_ns
    return now_ns != 0


def note_end(calls: Iterable[Call], times: ComputeTimes) -> None:
    """Notes the times of an execution that has ended."""
    for call in calls:
        if (progress := call.progress) is not None:
            progress.ended(times)


def trace_execution(requests: Sequence[InferRequest], times: ComputeTimes) -> None:
    """Tells the traces of an executed batch its times."""
    for request in requests:
        if request.trace is not None:
            request.trace.computed(times.start_ns, times.input_end_ns, times.output_start_ns, times.end_ns)
