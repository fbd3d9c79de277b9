"""The dynamic batcher, and plain scheduling, which is the same with batches of one call. On the event loop.

All arrivals of one turn of the loop are seen together: `submit` only puts the call into the queue and asks for one
decision at the end of the turn. The decision itself is `RequestQueue.take`; this shell owns the timer, the idle
instances and the statistics of a batch.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from naiad.errors import Internal, NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes, Instance
from naiad.messages import BatchStatistics, InferRequest, InferResponse, ModelStatistics, Result
from naiad.scheduling.queue import Batch, RequestQueue, WaitUntil
from naiad.scheduling.scheduler import Call, delay_from

#: The text of a scheduler that takes no more calls.
STOPPED = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Execution:
    """A batch on its way through an instance; implements `instances.instance.Execution`."""

    __slots__ = ("calls", "instance", "is_traced", "requests", "rows", "scheduler", "total_rows", "unanswered")

    def __init__(self, scheduler: "DynamicScheduler", calls: list[Call], total_rows: int, instance: Instance) -> None:
        self.scheduler = scheduler
        self.calls = calls
        self.total_rows = total_rows
        self.instance = instance
        self.requests: Sequence[InferRequest] = [call.request for call in calls]
        self.rows: Sequence[int] = [call.rows for call in calls]
        self.unanswered = len(calls)
        self.is_traced = False
        for index, call in enumerate(calls):
            call.execution = self
            call.index = index
            if call.request.trace is not None:
                call.request.trace.executing()
                self.is_traced = True

    def cancelled(self, index: int) -> bool:
        return self.calls[index].cancelled

    def deliver(self, index: int, result: Result | None, final: bool) -> None:
        call = self.calls[index]
        if final:
            self.unanswered -= 1
        self.scheduler.answer(call, result, final)

    def reschedule(self, index: int) -> None:
        # A host offers this to models of iterative sequences only.
        self.deliver(index, Internal("a request that is no iterative sequence cannot be rescheduled"), True)

    def complete(self, times: ComputeTimes | None, succeeded: bool = True) -> None:
        self.scheduler.completed(self, times, succeeded)


def count_execution(
    statistics: ModelStatistics,
    calls: Sequence[Call],
    total_rows: int,
    times: ComputeTimes,
    succeeded: bool,
    null_rows: int = 0,
) -> None:
    """Counts one execution as Triton does: durations per request, the whole batch charged to each (R12-22, R12-23).

    A batch whose execution failed counts as an execution of its size, but not among the inferences; neither do
    `null_rows`, rows that end no call.
    """
    compute_input = times.input_end_ns - times.start_ns
    compute_infer = times.output_start_ns - times.input_end_ns
    compute_output = times.end_ns - times.output_start_ns
    statistics.execution_count += 1
    batch = statistics.batches.get(total_rows)
    if batch is None:
        batch = statistics.batches[total_rows] = BatchStatistics()
    batch.compute_input.add(compute_input)
    batch.compute_infer.add(compute_infer)
    batch.compute_output.add(compute_output)
    count = len(calls)
    queued_ns = [call.queued_ns for call in calls]
    queued_sum = sum(queued_ns)
    infer = statistics.infer
    request_sum = times.end_ns * count - queued_sum
    if not succeeded:
        infer.fail.add(request_sum, count)
        statistics.failures["BACKEND"] += count
        return
    queue_sum = times.start_ns * count - queued_sum
    statistics.inference_count += total_rows - null_rows
    statistics.last_inference_ms = time.time_ns() // 1_000_000
    infer.success.add(request_sum, count)
    infer.queue.add(queue_sum, count)
    infer.compute_input.add(compute_input * count, count)
    infer.compute_infer.add(compute_infer * count, count)
    infer.compute_output.add(compute_output * count, count)
    if count:
        statistics.latencies.add_batch(queued_ns, times.start_ns, times.end_ns)


def trace_execution(requests: Sequence[InferRequest], times: ComputeTimes) -> None:
    """Tells the traces of an executed batch its times."""
    for request in requests:
        if request.trace is not None:
            request.trace.computed(times.start_ns, times.input_end_ns, times.output_start_ns, times.end_ns)


class DynamicScheduler:
    """Batches calls over the instances of one model version."""

    def __init__(
        self,
        model_name: str,
        queue: RequestQueue,
        instances: Sequence[Instance],
        statistics: ModelStatistics,
        *,
        preserve_ordering: bool = False,
        report: Callable[[str, BaseException], None],
    ) -> None:
        self._model_name = model_name
        self._queue = queue
        self._instances = deque(instances)
        self._statistics = statistics
        self._order = _Order() if preserve_ordering else None
        self._report = report
        #: Nothing runs before so many calls wait; 0 from then on.
        self._hold = delay_from("TRITONSERVER_DELAY_SCHEDULER")
        self._loop = asyncio.get_running_loop()
        self._decision_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        for instance in instances:
            instance.on_change = self._ask

    def __repr__(self) -> str:
        return f"<DynamicScheduler {self._model_name} pending={len(self._queue)} running={self._running}>"

    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, call: Call) -> None:
        request = call.request
        if self._closed:
            raise Unavailable(request.label + STOPPED)
        self._queue.put(call, call.queued_ns, request.priority, request.timeout_us)
        self._statistics.pending += 1
        if self._order is not None:
            self._order.expect(call)
        self._idle.clear()
        if not self._decision_due:
            self._decision_due = True
            self._loop.call_soon(self._decide)

    def withdraw(self, call: Call) -> None:
        execution = call.execution
        if execution is None:
            self._queue.remove(call)
            self._statistics.pending -= 1
            self._refuse(call, None)
        else:
            execution.instance.cancel(execution, call.index)

    def answer(self, call: Call, result: Result | None, final: bool) -> None:
        """A result of a running call, in order where the model asks for it. A failing sink is the client's trouble."""
        deliver = call.deliver if self._order is None else self._order.deliver_for(call)
        try:
            deliver(result, final)
        except Exception as error:
            self._report(f"a response of model '{self._model_name}' could not be passed on", error)

    def completed(self, execution: Execution, times: ComputeTimes | None, succeeded: bool) -> None:
        self._running -= 1
        if times is None:
            now = time.monotonic_ns()
            times = ComputeTimes(now, now, now, now)
            succeeded = False
        count_execution(self._statistics, execution.calls, execution.total_rows, times, succeeded)
        if execution.is_traced:
            trace_execution(execution.requests, times)
        self._ask()

    async def close(self) -> None:
        """Refuses new calls; returns when every call has been handed to an instance and executed."""
        self._closed = True
        if self._idle_now():
            self._idle.set()
        await self._idle.wait()

    def fail_waiting(self, error: NaiadError) -> None:
        """Fails what still waits, when nobody will ever take it."""
        for call in self._queue.drain():
            self._statistics.pending -= 1
            self._refuse(call, error)  # type: ignore[arg-type]

    def _idle_now(self) -> bool:
        return not len(self._queue) and not self._running

    def _ask(self) -> None:
        if not self._decision_due:
            self._decision_due = True
            self._loop.call_soon(self._decide)

    def _available(self) -> Instance | None:
        """The idle instance that has been idle longest."""
        instances = self._instances
        for _ in range(len(instances)):
            instance = instances[0]
            instances.rotate(-1)
            if instance.is_available:
                return instance
        return None

    def _decide(self) -> None:
        self._decision_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = time.monotonic_ns()
        queue = self._queue
        for call in queue.expired(now_ns):
            self._statistics.pending -= 1
            self._refuse(call, Unavailable("Request timeout expired"))  # type: ignore[arg-type]
        wake_ns = queue.next_deadline_ns
        if len(queue) >= self._hold:
            self._hold = 0
        while len(queue) and not self._hold:
            instance = self._available()
            if instance is None:
                self._give_up_if_dead()
                break
            decision = queue.take(now_ns)
            if isinstance(decision, Batch):
                self._execute(decision, instance)
                continue
            if isinstance(decision, WaitUntil):
                wake_ns = decision.time_ns if wake_ns is None else min(wake_ns, decision.time_ns)
            break
        if len(queue) and wake_ns is not None:
            self._timer = self._loop.call_later(max(0, wake_ns - time.monotonic_ns()) / 1e9, self._ask)
        if self._idle_now():
            self._idle.set()

    def _execute(self, batch: Batch, instance: Instance) -> None:
        self._statistics.pending -= len(batch.calls)
        self._running += 1
        reasons = self._statistics.batch_reasons
        reasons[batch.reason] = reasons.get(batch.reason, 0) + 1
        instance.execute(Execution(self, batch.calls, batch.rows, instance))  # type: ignore[arg-type]

    def _give_up_if_dead(self) -> None:
        failures = [instance.failure for instance in self._instances]
        if all(failures):
            self.fail_waiting(Unavailable(f"model '{self._model_name}' is not available: {failures[0]}"))

    def _refuse(self, call: Call, error: NaiadError | None) -> None:
        if self._order is not None:
            self._order.forget(call)
        try:
            if error is None:
                call.fail_cancelled()
            else:
                call.fail(error, "REJECTED")
        except Exception as problem:
            self._report(f"an error of model '{self._model_name}' could not be passed on", problem)


class _Order:
    """Holds answers back until those of all earlier calls are out (`preserve_ordering`)."""

    def __init__(self) -> None:
        #: Calls in order of arrival, each with the answers it may not send yet.
        self._held: dict[Call, list[tuple[Result | None, bool]]] = {}

    def expect(self, call: Call) -> None:
        self._held[call] = []

    def forget(self, call: Call) -> None:
        self._held.pop(call, None)
        self._flush()

    def deliver_for(self, call: Call) -> Callable[[Result | None, bool], None]:
        def deliver(result: Result | None, final: bool) -> None:
            if next(iter(self._held)) is not call:
                self._held[call].append((result.owned() if isinstance(result, InferResponse) else result, final))
                return
            if final:
                del self._held[call]
            call.deliver(result, final)
            if final:
                self._flush()

        return deliver

    def _flush(self) -> None:
        while self._held:
            call, answers = next(iter(self._held.items()))
            ended = any(final for _, final in answers)
            if ended:
                del self._held[call]
            else:
                self._held[call] = []
            for result, final in answers:
                call.deliver(result, final)
            if not ended:
                return
