"""The dynamic batcher, and plain scheduling, which is the same with batches of one call. On the event loop.

All arrivals of one turn of the loop are seen together: `submit` only puts the call into the queue and asks for one
decision at the end of the turn. The decision itself is `RequestQueue.take`; this shell owns the timer, the idle
instances and the statistics of a batch.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from naiad.errors import Internal, NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes, Instance
from naiad.messages import InferRequest, InferResponse, Result
from naiad.scheduling.queue import Batch, RequestQueue, WaitUntil
from naiad.scheduling.returns import WORTH_WAITING_NS
from naiad.scheduling.scheduler import Call, delay_from
from naiad.scheduling.turns import STOPPED, TurnScheduler, note_beginning, note_end, trace_execution
from naiad.statistics import ModelStatistics

#: In place of the execution of a call that is out of the queue and is refused together with others: the end of one can
#: make the client of another leave.
_REFUSED: Final = object()


class Execution:
    """A batch on its way through an instance; implements `instances.instance.Execution`."""

    __slots__ = (
        "calls",
        "instance",
        "is_noted",
        "is_traced",
        "requests",
        "rows",
        "scheduler",
        "total_rows",
        "unanswered",
    )

    def __init__(self, scheduler: "DynamicScheduler", calls: list[Call], total_rows: int, instance: Instance) -> None:
        self.scheduler = scheduler
        self.calls = calls
        self.total_rows = total_rows
        self.instance = instance
        self.requests: Sequence[InferRequest] = [call.request for call in calls]
        self.rows: Sequence[int] = [call.rows for call in calls]
        self.unanswered = len(calls)
        self.is_noted = self.is_traced = False
        self._join(calls, 0)

    def _join(self, calls: list[Call], start: int) -> None:
        for index, call in enumerate(calls, start):
            call.execution = self
            call.index = index
            if call.request.trace is not None:
                call.request.trace.executing()
                self.is_traced = True
        if note_beginning(calls):
            self.is_noted = True

    def deliver(self, index: int, result: Result | None, final: bool) -> None:
        call = self.calls[index]
        if final:
            self.unanswered -= 1
        self.scheduler.answer(call, result, final)

    def reschedule(self, index: int) -> None:
        # A host offers this to models of iterative sequences only.
        self.deliver(index, Internal("a request that is no iterative sequence cannot be rescheduled"), True)

    def extend(self) -> None:
        calls = self.scheduler.more(self)
        if calls:
            self._join(calls, len(self.calls))
            self.calls = [*self.calls, *calls]
            self.requests = [call.request for call in self.calls]
            self.rows = [call.rows for call in self.calls]
            self.total_rows = sum(self.rows)
            self.unanswered = len(self.calls)

    def complete(self, times: ComputeTimes | None, succeeded: bool = True) -> None:
        self.scheduler.completed(self, times, succeeded)


class DynamicScheduler(TurnScheduler):
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
        super().__init__(model_name, instances, statistics, report)
        self._queue = queue
        self._instances = deque(instances)
        #: They differ in what they run on; and if not, the one that has executed last, and well.
        self._take_turns = False
        self._last: Instance | None = None
        self._look_at_places()
        self._order = _Order(self._deliver) if preserve_ordering else None
        #: Nothing runs before so many calls wait; 0 from then on.
        self._hold = delay_from("TRITONSERVER_DELAY_SCHEDULER")

    def add(self, instance: Instance) -> None:
        instance.on_change = self._ask
        self._instances.append(instance)
        self._look_at_places()
        self._ask()

    def retire(self, instance: Instance) -> asyncio.Event:
        self._instances.remove(instance)
        self._look_at_places()
        gone = asyncio.Event()
        gone.set()
        return gone

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
        self._ask()

    def withdraw(self, call: Call) -> None:
        execution = call.execution
        if execution is None:
            self._queue.withdraw(call)
            self._statistics.pending -= 1
            self._refuse(call, None)
            self._ask()
        elif execution is not _REFUSED:
            execution.instance.cancel(execution, call.index)

    def answer(self, call: Call, result: Result | None, final: bool) -> None:
        """A result of a running call, in order where the model asks for it."""
        if self._order is None:
            self._deliver(call.deliver, result, final)
        else:
            self._order.answer(call, result, final)

    def more(self, execution: Execution) -> list[Call]:
        """Calls that join an execution which has had to wait for its instance."""
        calls = self._queue.more(execution.calls[0], execution.total_rows)
        self._statistics.pending -= len(calls)
        return calls  # type: ignore[return-value]

    def completed(self, execution: Execution, times: ComputeTimes | None, succeeded: bool) -> None:
        if not self._take_turns:
            instance = execution.instance
            self._last = instance if succeeded and times is not None and instance in self._instances else None
        times = self._executed(execution.calls, execution.total_rows, times, succeeded)
        if times.end_ns - times.start_ns >= WORTH_WAITING_NS:
            calls = execution.calls
            self._queue.answered(len(calls), calls[0].signature, times.start_ns, times.end_ns)
        if execution.is_noted:
            note_end(execution.calls, times)
        if execution.is_traced:
            trace_execution(execution.requests, times)

    def fail_waiting(self, error: NaiadError) -> None:
        """Fails what still waits, when nobody will ever take it."""
        self._refuse_all(self._queue.drain(), error)  # type: ignore[arg-type]

    def _look_at_places(self) -> None:
        self._take_turns = len({instance.place for instance in self._instances}) > 1
        self._last = None

    def _available(self) -> Instance | None:
        """`_last` if it is idle, else the one whose turn it is."""
        last = self._last
        if last is not None and last.is_available:
            return last
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
        if expired := queue.expired(now_ns):
            self._refuse_all(expired, Unavailable("Request timeout expired"))  # type: ignore[arg-type]
        wake_ns = queue.next_deadline_ns
        if len(queue) >= self._hold:
            self._hold = 0
        while len(queue) and not self._hold:
            instance = self._available()
            if instance is None:
                if (error := self._unavailable(self._instances)) is not None:
                    self.fail_waiting(error)
                break
            decision = queue.take(now_ns)
            if isinstance(decision, Batch):
                self._execute(decision, instance)
                continue
            if isinstance(decision, WaitUntil):
                # Clients are not waited for by several instances, and not at the end.
                if (self._closed or self._running < len(self._instances) - 1) and queue.hurry():
                    continue
                wake_ns = decision.time_ns if wake_ns is None else min(wake_ns, decision.time_ns)
            break
        if len(queue) and wake_ns is not None:
            self._timer = self._loop.call_later(max(0, wake_ns - time.monotonic_ns()) / 1e9, self._ask)
        if self._closed and self._idle_now():
            self._idle.set()

    def _execute(self, batch: Batch, instance: Instance) -> None:
        self._statistics.pending -= len(batch.calls)
        self._running += 1
        reasons = self._statistics.batch_reasons
        reasons[batch.reason] = reasons.get(batch.reason, 0) + 1
        instance.execute(Execution(self, batch.calls, batch.rows, instance))  # type: ignore[arg-type]

    def _refuse_all(self, calls: list[Call], error: NaiadError) -> None:
        self._statistics.pending -= len(calls)
        for call in calls:
            call.execution = _REFUSED
        for call in calls:
            self._refuse(call, error)

    def _refuse(self, call: Call, error: NaiadError | None) -> None:
        if self._order is not None:
            self._order.forget(call)
        self._fail(call, error)


class _Order:
    """Holds answers back until those of all earlier calls are out (`preserve_ordering`). `pass_on` never raises."""

    def __init__(self, pass_on: Callable[[Callable[[Result | None, bool], None], Result | None, bool], None]) -> None:
        self._pass_on = pass_on
        #: Calls in order of arrival, each with the answers it may not send yet.
        #: A dictionary would look for its first one behind all those that are gone.
        self._held: OrderedDict[Call, list[tuple[Result | None, bool]]] = OrderedDict()

    def expect(self, call: Call) -> None:
        self._held[call] = []

    def forget(self, call: Call) -> None:
        self._held.pop(call, None)
        self._flush()

    def answer(self, call: Call, result: Result | None, final: bool) -> None:
        if next(iter(self._held)) is not call:
            self._held[call].append((result.owned() if isinstance(result, InferResponse) else result, final))
            return
        if final:
            del self._held[call]
        self._pass_on(call.deliver, result, final)
        if final:
            self._flush()

    def _flush(self) -> None:
        while self._held:
            call, answers = next(iter(self._held.items()))
            ended = any(final for _, final in answers)
            if ended:
                del self._held[call]
            else:
                self._held[call] = []
            for result, final in answers:
                self._pass_on(call.deliver, result, final)
            if not ended:
                return
