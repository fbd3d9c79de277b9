"""Runs ensembles: models chained by named tensors. On the event loop.

An ensemble computes nothing itself: each step is an ordinary inference through the engine, with its own batching,
statistics and lease. A step starts as soon as all tensors it maps are there, so independent steps run side by side.

Where tensors live. A call has a root scope with the ensemble's inputs. What an ordinary step answers is put into the
scope it ran in. Each response of a decoupled step opens a child scope, and the steps that need it run once per child,
seeing the tensors of all scopes above. A step belongs to the innermost scope that holds one of its inputs; so does a
response of the ensemble. This is Triton's behaviour (reference R5-26 to R5-34), without its iteration counters.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from naiad.config.model_config import ModelConfig, TensorConfig
from naiad.errors import Cancelled, InvalidArgument, NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes
from naiad.messages import NO_SEQUENCE, InferRequest, InferResponse, ResponseSink, Result, Tensor
from naiad.scheduling.scheduler import Call, Progress
from naiad.scheduling.turns import STOPPED, count_durations
from naiad.statistics import ModelStatistics

#: How long a request of a step waits for `max_inflight_requests`, in seconds, before it goes on all the same.
_LIMIT_WAIT_S: Final = 300.0

#: Clients ask for the outputs of an ensemble in few ways, but could in many.
_KEPT_PLANS: Final = 64

#: How a step is run: `Engine.infer`. The bool says whether it belongs to what had begun before the server was about to
#: end.
Infer = Callable[[InferRequest, ResponseSink, bool, Progress], Call]


class _Wire:
    """Whoever gets the tensor `source`, as `name`, and the shape that he expects."""

    __slots__ = ("batching", "name", "rank", "source")

    def __init__(self, name: str, source: str, spec: TensorConfig, batching: bool) -> None:
        self.name = name
        self.source = source
        self.rank = len(spec.dims)
        self.batching = batching

    def end(self, tensor: Tensor) -> Tensor:
        """The tensor as it arrives."""
        return Tensor(self.name, tensor.datatype, fitted(tensor.shape, self.rank, self.batching), tensor.contents)


class Member:
    """A step with what is known of its model: `inputs` and `outputs` map the model's names to the ensemble's tensors."""

    __slots__ = ("decoupled", "inputs", "model_name", "model_version", "outputs", "wires")

    def __init__(
        self,
        model_name: str,
        model_version: int,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        config: ModelConfig,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.inputs = inputs
        self.outputs = outputs
        self.wires = tuple(
            [_Wire(name, tensor, config.inputs[name], config.batching) for name, tensor in inputs.items()]
        )
        self.decoupled = config.decoupled


def members_of(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> tuple[Member, ...]:
    """The steps of an ensemble; `models` holds the configurations of its models by name."""
    return tuple(
        Member(step.model_name, step.model_version, step.inputs, step.outputs, models[step.model_name])
        for step in ensemble.ensemble_steps
    )


class EnsembleScheduler:
    """Runs the calls of one ensemble version."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        members: tuple[Member, ...],
        statistics: ModelStatistics,
        infer: Infer,
        report: Callable[[str, BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.config = config
        self.name = config.name
        self.inputs = tuple(config.inputs)
        self.decoupled = config.decoupled
        self.version = version
        self.members = members
        self.statistics = statistics
        self.infer = infer
        self.report = report
        #: Empty where nothing is limited.
        self.gates: dict[Member, _Gate] = {}
        if config.max_inflight_requests:
            self.gates = {member: _Gate(self, member, config.max_inflight_requests) for member in members}
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<EnsembleScheduler {self.config.name} of {len(self.members)} steps>"

    @property
    def pending(self) -> int:
        """Ensembles have no queue of their own: what waits, waits for a member."""
        return 0

    @property
    def sequences(self) -> int:
        return 0

    def stopped(self, request: InferRequest) -> NaiadError | None:
        # The members say so.
        return None

    def submit(self, call: Call) -> None:
        if self._closed:
            raise Unavailable(call.request.label + STOPPED)
        requested = call.request.outputs
        plan = self._plans.get(requested)
        if plan is None:
            plan = _Plan(self.config, self.members, requested)
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[requested] = plan
        run = _Run(self, call, plan)
        call.execution = run
        run.start()

    def withdraw(self, call: Call) -> None:
        call.execution.abort(None)

    async def close(self) -> None:
        """Takes no more calls; those under way hold leases, for which the model waits."""
        self._closed = True


def wanted_steps(ensemble: ModelConfig, members: tuple[Member, ...], requested: tuple[str, ...]) -> tuple[Member, ...]:
    """The steps to run for the requested outputs.

    Outputs that nobody asked for are pruned, then the steps all of whose outputs are pruned, then the tensors that
    only those needed. A tensor whose last consumer was pruned goes too, even if it was asked for: such a request ends
    in the deadlock error, as it does in Triton.
    """
    if not requested or set(requested) == set(ensemble.outputs):
        return members
    consumers: dict[str, set[int]] = {}
    maker: dict[str, int] = {}
    for index, member in enumerate(members):
        for tensor in member.inputs.values():
            consumers.setdefault(tensor, set()).add(index)
        for tensor in member.outputs.values():
            maker[tensor] = index
    alive = {index: set(member.outputs.values()) for index, member in enumerate(members)}
    ignored = {name for name in ensemble.outputs if name not in requested}
    while ignored:
        newly: set[str] = set()
        for tensor in ignored:
            index = maker.get(tensor, -1)
            if index not in alive:
                continue
            alive[index].discard(tensor)
            if not alive[index]:
                del alive[index]
                for needed in members[index].inputs.values():
                    consumers[needed].discard(index)
                    if not consumers[needed]:
                        newly.add(needed)
        ignored = newly
    return tuple([member for index, member in enumerate(members) if index in alive])


class _Step:
    """A step that is wanted: the outputs to ask its model for, all that have a place as in Triton, and what its tensors
    are for: the steps that need one of them, by their numbers in the plan, and whether one `answers`, being an output that
    is wanted."""

    __slots__ = ("answers", "followers", "member", "outputs")

    def __init__(self, member: Member, wanted: tuple[Member, ...], asked: set[str]) -> None:
        self.member = member
        self.outputs = tuple(member.outputs)
        made = set(member.outputs.values())
        self.followers = tuple([n for n, other in enumerate(wanted) if not made.isdisjoint(other.inputs.values())])
        self.answers = not made.isdisjoint(asked)


class _Plan:
    """What calls with the same requested outputs have in common."""

    __slots__ = ("outputs", "steps")

    def __init__(self, ensemble: ModelConfig, members: tuple[Member, ...], requested: tuple[str, ...]) -> None:
        asked = {name for name in ensemble.outputs if not requested or name in requested}
        self.outputs = tuple([_Wire(name, name, ensemble.outputs[name], ensemble.batching) for name in sorted(asked)])
        wanted = wanted_steps(ensemble, members, requested)
        self.steps = tuple([_Step(member, wanted, asked) for member in wanted])


class _Scope:
    """Tensors at one place of the flow; None is one that has been left out: who needs it goes on without, as in Triton."""

    __slots__ = ("answered", "children", "ordinary", "parent", "started", "tensors")

    def __init__(self, parent: "_Scope | None") -> None:
        self.parent = parent
        self.tensors: dict[str, Tensor | None] = {}
        #: Those that may still see new tensors from here or from above; others live as long as their steps run.
        self.children: list[_Scope] = []
        #: Steps under way whose answers go here.
        self.ordinary = 0
        self.started: set[int] = set()
        self.answered = False

    def holder(self, name: str) -> "_Scope | None":
        """The scope in sight that has the tensor."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.tensors:
            scope = scope.parent
        return scope

    def may_grow(self) -> bool:
        """Whether tensors may still come to it or to those above. None do later if no step is under way for them."""
        scope: _Scope | None = self
        while scope is not None:
            if scope.ordinary:
                return True
            scope = scope.parent
        return False

    def below(self) -> "list[_Scope]":
        """Those whose steps may see its tensors."""
        found = [self]
        for child in self.children:
            found += child.below()
        return found


class _Gate:
    """Lets in at most `limit` requests of one step at a time, whichever calls they are of; others wait in order.

    It keeps a decoupled step from flooding the next; what waits is in the memory of the server.
    """

    __slots__ = ("_is_admitting", "_limit", "_member", "_running", "_scheduler", "_waiting")

    def __init__(self, scheduler: EnsembleScheduler, member: Member, limit: int) -> None:
        self._scheduler = scheduler
        self._member = member
        self._limit = limit
        self._running = 0
        self._waiting: dict[_StepSink, asyncio.TimerHandle] = {}
        self._is_admitting = False

    def enter(self, sink: "_StepSink") -> bool:
        """Whether the request may start now; else it is started later."""
        if self._running < self._limit:
            self._running += 1
            return True
        self._waiting[sink] = self._scheduler.loop.call_later(_LIMIT_WAIT_S, self._overdue, sink)
        return False

    def leave(self) -> None:
        """A request has ended."""
        self._running -= 1
        if self._is_admitting:
            # One that ended while it was being started: the loop below goes on.
            return
        self._is_admitting = True
        try:
            while self._waiting and self._running < self._limit:
                self._start(next(iter(self._waiting)))
        finally:
            self._is_admitting = False

    def forget(self, sink: "_StepSink") -> None:
        """Whoever wants this request no longer waits for it."""
        if (timer := self._waiting.pop(sink, None)) is not None:
            timer.cancel()

    def _overdue(self, sink: "_StepSink") -> None:
        error = Unavailable(
            f"{self._limit} requests have been under way for {_LIMIT_WAIT_S:g} s (max_inflight_requests)"
        )
        self._scheduler.report(
            f"a request of ensemble '{self._scheduler.name}' to '{self._member.model_name}' goes on beyond the "
            "limit, since it has waited too long",
            error,
        )
        self._start(sink)

    def _start(self, sink: "_StepSink") -> None:
        self._waiting.pop(sink).cancel()
        self._running += 1
        sink.start()


class _Run:
    """One call of an ensemble."""

    def __init__(self, scheduler: EnsembleScheduler, call: Call, plan: _Plan) -> None:
        self._scheduler = scheduler
        self._call = call
        self._plan = plan
        self._root = _Scope(None)
        self._running: dict[_StepSink, Call | None] = {}
        self._ended = False
        self._responses = 0
        #: The last response of a decoupled ensemble, until it is known whether it was the last of all.
        self._held: InferResponse | None = None
        #: How deep in `_advance` we are: a step may answer while it is being started.
        self._starting = 0
        #: What the executions of all steps have taken, in ns.
        self.input_ns = self.infer_ns = self.output_ns = 0
        sequence = call.request.sequence
        #: What Triton adds to every response of an ensemble.
        self._parameters = NO_SEQUENCE
        if sequence is not None:
            self._parameters = {
                "sequence_id": sequence.correlation_id,
                "sequence_start": sequence.start,
                "sequence_end": sequence.end,
            }

    def start(self) -> None:
        given = {tensor.name: tensor for tensor in self._call.request.inputs}
        for name in self._scheduler.inputs:
            self._root.tensors[name] = given.get(name)
        self._advance(self._root, range(len(self._plan.steps)), True)
        self._settle()

    def abort(self, error: NaiadError | None) -> None:
        """Ends the call before its time: with a step's error, or because the client has left."""
        held, self._held = self._held, None
        if held is not None and error is not None:
            self._deliver(held, False)
            if self._ended:
                return  # whoever got it has left
        self._ended = True
        steps, self._running = self._running, {}
        if gates := self._scheduler.gates:
            # Before any place becomes free: none is to be given to a step of this call.
            for sink, running in steps.items():
                if running is None:
                    gates[sink.member].forget(sink)
        for running in steps.values():
            if running is not None:
                running.cancel()
        try:
            # Triton counts a failed request of an ensemble as it answers it, and once more if no step is under way then.
            self._call.fail(error or Cancelled(""), "OTHER", times=1 if steps and error is not None else 2)
        except Exception as problem:
            self._scheduler.report(f"an error of ensemble '{self._scheduler.name}' could not be passed on", problem)

    def answered(self, sink: "_StepSink", result: Result | None, final: bool) -> None:
        """A step has answered."""
        if final:
            self._running.pop(sink, None)
            if not sink.member.decoupled:
                sink.scope.ordinary -= 1
        if not self._ended:
            self._go_on(sink, result, final)
        if final and self._scheduler.gates:
            self._scheduler.gates[sink.member].leave()

    def _go_on(self, sink: "_StepSink", result: Result | None, final: bool) -> None:
        name = self._scheduler.name
        if isinstance(result, NaiadError):
            self.abort(type(result)(f"in ensemble '{name}', {result.message}"))
            return
        if result is not None:
            scope = sink.scope
            step = sink.step
            if step.member.decoupled:
                scope = _Scope(sink.scope)
                if sink.scope.may_grow():
                    sink.scope.children.append(scope)
            self._put(scope, step.member, result.owned())
            self._advance(scope, step.followers, step.answers)
            if scope.children and not scope.may_grow():
                scope.children.clear()
        self._settle()

    def _put(self, scope: _Scope, member: Member, response: InferResponse) -> None:
        got = {tensor.name: tensor for tensor in response.outputs}
        for output, name in member.outputs.items():
            scope.tensors[name] = got.get(output)

    def _advance(self, scope: _Scope, steps: Iterable[int], answers: bool) -> None:
        """Starts those of `steps` that can start now that `scope` has new tensors, and answers what is complete if one of
        them `answers`."""
        self._starting += 1
        try:
            for place in scope.below():
                for index in steps:
                    if index not in place.started:
                        step = self._plan.steps[index]
                        inputs = self._inputs_of(step.member, place)
                        if inputs is not None:
                            place.started.add(index)
                            self._start_step(step, inputs, place)
                            if self._ended:
                                return
                if answers:
                    self._answer(place)
                    if self._ended:
                        return
        finally:
            self._starting -= 1

    @staticmethod
    def _inputs_of(member: Member, place: _Scope) -> tuple[Tensor, ...] | None:
        """The tensors of a step under its model's names and with or without a batch dimension as the model has it; the
        model says whether it can do without those left out. None as long as not all are settled in sight of `place`, and
        where none is in `place` itself."""
        inputs: list[Tensor] = []
        own = False
        for wire in member.wires:
            scope = place.holder(wire.source)
            if scope is None:
                return None
            own = own or scope is place
            tensor = scope.tensors[wire.source]
            if tensor is not None:
                inputs.append(wire.end(tensor))
        return tuple(inputs) if own else None

    def _start_step(self, step: _Step, inputs: tuple[Tensor, ...], place: _Scope) -> None:
        member = step.member
        request = self._call.request
        step_request = InferRequest(
            member.model_name,
            inputs,
            member.model_version,
            request.id,
            step.outputs,
            request.parameters,
            request.sequence,
            request.priority,
            request.timeout_us,
            request.trace.child() if request.trace is not None else None,
        )
        sink = _StepSink(self, step, place, step_request)
        self._running[sink] = None
        if not member.decoupled:
            place.ordinary += 1
        gates = self._scheduler.gates
        if not gates or gates[member].enter(sink):
            self._infer(sink)

    def _infer(self, sink: "_StepSink") -> None:
        try:
            call = self._scheduler.infer(sink.request, sink, not self._call.is_late, sink)
        except NaiadError as error:
            del self._running[sink]
            self.abort(type(error)(f"in ensemble '{self._scheduler.name}', {error.message}"))
            if self._scheduler.gates:
                self._scheduler.gates[sink.member].leave()
            return
        if sink in self._running:
            self._running[sink] = call

    def start_waiting(self, sink: "_StepSink") -> None:
        """Starts a step that had to wait for others of its kind."""
        self._starting += 1
        try:
            self._infer(sink)
        finally:
            self._starting -= 1
        self._settle()

    def _answer(self, place: _Scope) -> None:
        """Responds when all outputs are settled in sight, once per scope that holds one of them. Those left out are not in
        the response, even if none is left."""
        if place.answered:
            return
        tensors: list[Tensor] = []
        own = False
        for wire in self._plan.outputs:
            scope = place.holder(wire.source)
            if scope is None:
                return
            own = own or scope is place
            tensor = scope.tensors[wire.source]
            if tensor is not None:
                tensors.append(wire.end(tensor))
        if not own:
            return
        place.answered = True
        scheduler = self._scheduler
        parameters = self._parameters if tensors else {}
        response = InferResponse(scheduler.name, scheduler.version, self._call.request.id, tuple(tensors), parameters)
        self._responses += 1
        if not scheduler.decoupled:
            self._end(response)
            return
        held, self._held = self._held, None
        if held is not None:
            self._deliver(held, False)
            if self._ended:
                return  # whoever got it has left
        self._held = response

    def _settle(self) -> None:
        """Passes on the response that is held, as the last one if no step runs and none can start; else that is the end
        without one."""
        if self._ended or self._starting:
            return
        response, self._held = self._held, None
        if self._running:
            if response is not None:
                self._deliver(response, False)
        elif response is not None or self._responses or self._scheduler.decoupled:
            self._end(response)
        else:
            self.abort(
                InvalidArgument(
                    f"in ensemble '{self._scheduler.name}', {self._call.request.label}"
                    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
                )
            )

    def _end(self, response: InferResponse | None) -> None:
        self._ended = True
        # The times of the last step are told in this turn of the loop, but after its answer.
        self._scheduler.loop.call_soon(self._count, time.monotonic_ns())
        self._deliver(response, True)

    def _deliver(self, response: InferResponse | None, final: bool) -> None:
        try:
            self._call.deliver(response, final)
        except Exception as problem:
            name = self._scheduler.name
            self._scheduler.report(f"a response of ensemble '{name}' could not be passed on", problem)

    def _count(self, end_ns: int) -> None:
        """An ensemble counts as one execution that has not waited and computes what its steps compute, those side by side
        one after the other (reference R12-26)."""
        call = self._call
        count_durations(
            self._scheduler.statistics,
            [call.queued_ns],
            call.rows,
            call.queued_ns,
            end_ns,
            self.input_ns,
            self.infer_ns,
            self.output_ns,
        )


class _StepSink(Progress):
    """Where the answers of one step go, and what it has taken."""

    __slots__ = ("_run", "member", "request", "scope", "step")

    def __init__(self, run: _Run, step: _Step, scope: _Scope, request: InferRequest) -> None:
        super().__init__(step.member.model_version)
        self._run = run
        self.step = step
        self.member = step.member
        self.scope = scope
        self.request = request

    def send(self, result: Result | None, final: bool) -> None:
        self._run.answered(self, result, final)

    def ended(self, times: ComputeTimes) -> None:
        run = self._run
        run.input_ns += times.input_end_ns - times.start_ns
        run.infer_ns += times.output_start_ns - times.input_end_ns
        run.output_ns += times.end_ns - times.output_start_ns

    def start(self) -> None:
        self._run.start_waiting(self)


def fitted(shape: tuple[int, ...], rank: int, batching: bool) -> tuple[int, ...]:
    """A shape with the batch dimension that a reader of `rank` other ones expects: 1 is put in front for a model that batches, and dropped
    for one that does not, where only that is missing or too much (reference R2-39)."""
    if batching and len(shape) == rank:
        return (1, *shape)
    if not batching and len(shape) == rank + 1 and shape[0] == 1:
        return shape[1:]
    return shape
