"""The sequence batcher: binds sequences to slots of instances and runs their requests in order. On the event loop.

Where a request goes and what runs together is decided by `Slots`; this shell owns the timer, makes requests for the
instances (control inputs, implicit state, rows for empty slots), and keeps the state and the statistics.

Iterative sequences: a request is a sequence of its own, and the model may give it back (RESCHEDULE) to have it run
once more, together with whatever else waits by then.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from naiad.config.model_config import ModelConfig
from naiad.errors import InvalidArgument, NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes, Instance
from naiad.messages import InferRequest, InferResponse, Result, SequenceControl, Tensor
from naiad.scheduling.controls import Controls, null_request
from naiad.scheduling.queue import WaitUntil
from naiad.scheduling.scheduler import Call, FailureReason, delay_from
from naiad.scheduling.slots import Direct, Oldest, Round, Slots, Step
from naiad.scheduling.states import States, nulls
from naiad.scheduling.turns import STOPPED, TurnScheduler, note_beginning, note_end, trace_execution
from naiad.statistics import ModelStatistics


class SequenceExecution:
    """A round on its way through an instance; implements `instances.instance.Execution`."""

    __slots__ = ("again", "instance", "requests", "rows", "scheduler", "steps")

    def __init__(
        self,
        scheduler: "SequenceScheduler",
        steps: list[Step | None],
        requests: list[InferRequest],
        instance: Instance,
    ) -> None:
        self.scheduler = scheduler
        self.steps = steps
        self.requests: Sequence[InferRequest] = requests
        self.rows: Sequence[int] = [1] * len(steps)
        self.instance = instance
        #: The steps that the model has given back.
        self.again: list[Step] = []
        for index, step in enumerate(steps):
            if step is not None:
                step.execution = self
                step.index = index
                if step.request.trace is not None:
                    step.request.trace.executing()
        note_beginning([step.call for step in steps if step is not None])

    def deliver(self, index: int, result: Result | None, final: bool) -> None:
        # Nobody has asked for the row of an empty slot.
        if (step := self.steps[index]) is not None:
            self.scheduler.answer(step, result, final)

    def extend(self) -> None:
        pass

    def reschedule(self, index: int) -> None:
        if (step := self.steps[index]) is not None:
            self.again.append(step)
            self.scheduler.run_again(step)

    def complete(self, times: ComputeTimes | None, succeeded: bool = True) -> None:
        self.scheduler.completed(self, times, succeeded)


class SequenceScheduler(TurnScheduler):
    """Runs the sequences of one model version. `initial_states`: see `States`."""

    def __init__(
        self,
        config: ModelConfig,
        instances: Sequence[Instance],
        statistics: ModelStatistics,
        *,
        initial_states: Mapping[str, bytes],
        report: Callable[[str, BaseException], None],
        warn: Callable[[str], None],
    ) -> None:
        batching = config.sequence_batching
        assert batching is not None, "this is a bug: a sequence scheduler for a model without sequences"
        super().__init__(config.name, instances, statistics, report)
        self._instances = dict(enumerate(instances))
        self._instance_count = len(instances)
        self._warn = warn
        self._is_iterative = batching.iterative
        self._iterations = 0
        self._controls = Controls(config)
        self._states = States(config, initial_states)
        self._slots = slots_for(config, len(self._instances))
        self._idle_ns = batching.max_sequence_idle_us * 1000
        self._losses = {number: instance.losses for number, instance in self._instances.items()}
        self._down: set[int] = set()
        #: Instances whose sequences are the last they get.
        self._retired: dict[int, asyncio.Event] = {}
        #: Sequences that a lost instance took along: until when that is remembered (ns), and what to tell of it.
        self._lost: dict[int | str, tuple[int, str]] = {}
        self._hold = delay_from("TRITONSERVER_DELAY_SCHEDULER")
        self._hold_backlog = delay_from("TRITONSERVER_BACKLOG_DELAY_SCHEDULER")

    @property
    def pending(self) -> int:
        return len(self._slots)

    @property
    def sequences(self) -> int:
        return sum(1 for _ in self._slots.sequences())

    def stopped(self, request: InferRequest) -> NaiadError | None:
        begins = self._is_iterative or (request.sequence is not None and request.sequence.start)
        return Unavailable(STOPPED) if begins else None

    # ---- instances --------------------------------------------------------------------------------------

    def add(self, instance: Instance) -> None:
        number = self._instance_count
        self._instance_count += 1
        instance.on_change = self._ask
        self._instances[number] = instance
        self._losses[number] = instance.losses
        self._slots.add(number, time.monotonic_ns())
        self._ask()

    def retire(self, instance: Instance) -> asyncio.Event:
        """The sequences it has go on there, until they end or have rested too long."""
        number = next(number for number, other in self._instances.items() if other is instance)
        gone = self._retired[number] = asyncio.Event()
        self._slots.retire(number)
        self._forget_gone()
        return gone

    def _forget_gone(self) -> None:
        for number in [number for number in self._retired if number not in self._slots]:
            del self._instances[number]
            del self._losses[number]
            self._down.discard(number)
            self._retired.pop(number).set()

    # ---- calls ------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        request = call.request
        if call.rows > 1:
            raise InvalidArgument(
                f"inference request to model '{self._model_name}' must specify batch-size 1 due to requirements of "
                "sequence batcher"
            )
        sequence = request.sequence or SequenceControl(0)
        key, start, end = sequence.correlation_id, sequence.start, sequence.end
        if not key:
            if not self._is_iterative:
                raise InvalidArgument(
                    f"inference request to model '{self._model_name}' must specify a non-zero or non-empty "
                    "correlation ID"
                )
            self._iterations += 1
            key, start, end = self._iterations, True, False
        if start and self._closed:
            raise Unavailable(STOPPED)
        self._notice_losses(call.queued_ns)
        if key in self._lost:
            if not start:
                raise Unavailable(self._lost[key][1])
            del self._lost[key]
        step = Step(call, call.signature, call.queued_ns, start, end)
        last = end or self._is_iterative
        if self._slots.put(step, key, call.queued_ns, last=last, timeout_us=request.timeout_us):
            self._warn(
                f"model '{self._model_name}': sequence {key} starts before the one of that correlation id has ended; "
                "requests of the previous one that still wait run first, then the new one begins"
            )
        call.execution = step
        self._statistics.pending += 1
        self._ask()

    def withdraw(self, call: Call) -> None:
        """The requests behind that of `call` in its sequence are cancelled too: they would miss its effect."""
        step: Step = call.execution
        if step.execution is not None:
            step.execution.instance.cancel(step.execution, step.index)
            return
        self._refuse(self._slots.cancel(step, time.monotonic_ns()), None)
        self._ask()

    def answer(self, step: Step, result: Result | None, final: bool) -> None:
        """A result of a running step."""
        sequence = step.sequence
        if self._states and isinstance(result, InferResponse):
            result, sequence.state = self._states.split(result, step.call.request, sequence.state)
            sequence.shapes = self._states.shapes(sequence.state)
        if final:
            self._slots.finish(step, time.monotonic_ns())
            self._ask()
        self._deliver(step.call.deliver, result, final)

    def run_again(self, step: Step) -> None:
        """The model has given a step back. One whose client has left is not run again: the model may not have looked."""
        step.execution = None
        if step.call.cancelled:
            self._end(step, None)
        elif self._slots.again(step, time.monotonic_ns()):
            self._statistics.pending += 1
            self._ask()
        else:
            self._end(step, Unavailable(f"model '{self._model_name}': the instance that ran this request is gone"))

    def completed(self, execution: SequenceExecution, times: ComputeTimes | None, succeeded: bool) -> None:
        # Each iteration counts as an inference, as in Triton; the next one has waited from the end of this one on.
        calls = [step.call for step in execution.steps if step is not None]
        row_count = len(execution.steps)
        times = self._executed(calls, row_count, times, succeeded, null_rows=row_count - len(calls))
        for step in execution.again:
            step.call.queued_ns = times.end_ns
        note_end(calls, times)
        trace_execution(execution.requests, times)

    # ---- decisions --------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._decision_due = False
        now_ns = time.monotonic_ns()
        slots = self._slots
        self._notice_losses(now_ns)
        self._refuse(slots.expired(now_ns), Unavailable("timeout of the corresponding sequence has been expired"))
        slots.idle(now_ns)
        if self._retired:
            self._forget_gone()
        wake_ns = slots.next_wake_ns
        if len(slots) and not self._is_held():
            for number, instance in self._instances.items():
                # A model that cannot run at all leaves its instance idle.
                while instance.is_available:
                    decision = slots.take(number, now_ns)
                    if isinstance(decision, Round):
                        self._execute(decision.steps, instance)
                        continue
                    if isinstance(decision, WaitUntil):
                        wake_ns = decision.time_ns if wake_ns is None else min(wake_ns, decision.time_ns)
                    break
            if len(slots) and (error := self._unavailable(self._instances.values())) is not None:
                self._refuse(slots.drain(), error)
        self._wake_at(wake_ns)
        if self._closed and self._idle_now():
            self._idle.set()

    def _wake_at(self, wake_ns: int | None) -> None:
        """Waking too early does no harm, so a timer that is set is only replaced by an earlier one."""
        if wake_ns is None:
            return
        at = self._loop.time() + max(0, wake_ns - time.monotonic_ns()) / 1e9
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._ask()

    def _is_held(self) -> bool:
        """Triton's test hook: nothing runs before so many requests wait."""
        if self._hold:
            if self._slots.waiting_in_slots < self._hold or self._slots.waiting_in_backlog < self._hold_backlog:
                return True
            self._hold = 0
        return False

    def _execute(self, steps: list[Step | None], instance: Instance) -> None:
        self._statistics.pending -= sum([step is not None for step in steps])
        if self._controls.broken is not None:
            for step in steps:
                if step is not None:
                    self._end(step, InvalidArgument(self._controls.broken), "BACKEND")
            return
        self._running += 1
        like = next(step for step in steps if step is not None)
        requests = [
            self._null_request(like) if step is None else self._request(step, self._state(step)) for step in steps
        ]
        instance.execute(SequenceExecution(self, steps, requests, instance))

    def _state(self, step: Step) -> tuple[Tensor, ...]:
        sequence = step.sequence
        if step.start:
            sequence.state = self._states.initial
            sequence.shapes = None
        state: tuple[Tensor, ...] = sequence.state
        return state

    def _request(self, step: Step, state: tuple[Tensor, ...]) -> InferRequest:
        """What the instance gets to see of a step."""
        request: InferRequest = step.call.request
        sequence = request.sequence
        if self._is_iterative:
            sequence = SequenceControl(step.sequence.key, step.start, step.end)
        return InferRequest(
            request.model_name,
            request.inputs + self._controls.ready(step.sequence.key, step.start, step.end) + state,
            request.model_version,
            request.id,
            self._states.outputs(request.outputs) if self._states else request.outputs,
            request.parameters,
            sequence,
            request.priority,
            request.timeout_us,
            request.trace,
        )

    def _null_request(self, like: Step) -> InferRequest:
        request: InferRequest = like.call.request
        outputs = self._states.outputs(request.outputs) if self._states else request.outputs
        return null_request(request, self._controls.not_ready() + nulls(self._state(like)), outputs)

    # ---- losses -----------------------------------------------------------------------------------------

    def _notice_losses(self, now_ns: int) -> None:
        for number, instance in self._instances.items():
            if instance.losses != self._losses[number]:
                self._losses[number] = instance.losses
                self._down.add(number)
                if number in self._slots:
                    self._lose(number, instance, now_ns)
            if number in self._down and instance.is_available and number in self._slots:
                self._down.remove(number)
                self._slots.restore(number, now_ns)

    def _lose(self, number: int, instance: Instance, now_ns: int) -> None:
        for key in [key for key, (until_ns, _) in self._lost.items() if until_ns <= now_ns]:
            del self._lost[key]
        ended, steps = self._slots.lose(number, now_ns)
        for sequence in ended:
            self._lost[sequence.key] = (now_ns + self._idle_ns, self._loss_text(sequence.key, instance))
        for step in steps:
            self._refuse([step], Unavailable(self._loss_text(step.sequence.key, instance)))

    def _loss_text(self, key: int | str, instance: Instance) -> str:
        return (
            f"sequence {key} of model '{self._model_name}' has ended early: the host process of instance "
            f"'{instance.name}', which held its state, has ended. Start the sequence again."
        )

    # ---- endings ----------------------------------------------------------------------------------------

    def _refuse(self, steps: list[Step], error: NaiadError | None) -> None:
        """Ends steps that have not run; without an error, as cancelled."""
        self._statistics.pending -= len(steps)
        for step in steps:
            self._fail(step.call, error)

    def _end(self, step: Step, error: NaiadError | None, reason: FailureReason = "OTHER") -> None:
        """Ends a step that was taken, but not by an instance; without an error, as cancelled."""
        if step.sequence.running is step:
            self._slots.finish(step, time.monotonic_ns())
        self._fail(step.call, error, reason)


def slots_for(config: ModelConfig, instances: int) -> Slots:
    """The slots that a model's configuration asks for."""
    batching = config.sequence_batching
    assert batching is not None, "this is a bug: slots for a model without sequences"
    rows = max(1, config.max_batch_size)
    delay_ns = batching.max_queue_delay_us * 1000
    strategy: Direct | Oldest
    if batching.strategy == "oldest":
        strategy = Oldest(batching.preferred_batch_sizes, delay_ns)
        width = batching.max_candidate_sequences or rows
    else:
        strategy = Direct(batching.minimum_slot_utilization, delay_ns)
        width = rows
    return Slots(
        config.name,
        instances,
        width,
        strategy=strategy,
        max_batch_size=config.max_batch_size,
        idle_ns=batching.max_sequence_idle_us * 1000,
    )
