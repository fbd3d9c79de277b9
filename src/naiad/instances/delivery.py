"""The batches inside an instance: which have no final answers yet, and how results reach them. On the event loop."""

from collections.abc import Sequence

from naiad.errors import Internal, NaiadError
from naiad.instances import layout
from naiad.instances.frames import Response, Results
from naiad.instances.instance import ComputeTimes, Execution
from naiad.messages import InferResponse, Tensor


class _OpenBatch:
    """`unanswered` is None as long as nobody has been answered."""

    __slots__ = ("execution", "unanswered")

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.unanswered: set[int] | None = None

    def fail(self, error: NaiadError) -> None:
        unanswered = range(len(self.execution.requests)) if self.unanswered is None else sorted(self.unanswered)
        self.unanswered = set()
        for index in unanswered:
            self.execution.deliver(index, error, True)


class Batches:
    """At most one batch is executing; those of a decoupled model may stay open after their execution.

    Sees to it that each request gets one final answer and each execution one `complete`.
    """

    __slots__ = ("_count", "_decoupled", "_model", "_open", "_version", "executing")

    def __init__(self, model: str, version: int, decoupled: bool) -> None:
        self._model = model
        self._version = version
        self._decoupled = decoupled
        self._count = 0
        self._open: dict[int, _OpenBatch] = {}
        #: The number of the batch being executed, 0 for none.
        self.executing = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def begin(self, execution: Execution) -> int:
        """A new batch; its number."""
        self._count = self.executing = number = self._count + 1
        self._open[number] = _OpenBatch(execution)
        return number

    def number(self, execution: Execution) -> int | None:
        """The number of an open batch."""
        return next((number for number, batch in self._open.items() if batch.execution is execution), None)

    def refuse(self, number: int, error: NaiadError) -> None:
        """Fails a batch that could not be handed over."""
        if (batch := self._open.pop(number, None)) is not None:
            self.executing = 0
            batch.fail(error)
            batch.execution.complete(None)

    def fail(self, error: NaiadError) -> None:
        """Fails all that is open: the instance is gone."""
        open_batches = self._open
        self._open = {}
        executing, self.executing = self.executing, 0
        for batch in open_batches.values():
            batch.fail(error)
        if executing in open_batches:
            open_batches[executing].execution.complete(None)

    def deliver(self, results: Results, region: memoryview) -> bool:
        """Hands out results whose outputs lie in `region`; whether the execution has ended with them.

        Raises Internal, ValueError or KeyError where they make no sense; `fail` is due then.
        """
        number = results.batch
        batch = self._open.get(number)
        if batch is None:
            return False
        execution = batch.execution
        if results.outputs is not None:
            requests = execution.requests
            if batch.unanswered is not None:
                raise Internal(f"batch {number} was answered twice")
            split = layout.split(results.outputs, execution.rows, region, requests)
            batch.unanswered = set()
            model, version = self._model, self._version
            if len(requests) == 1:
                execution.deliver(0, InferResponse(model, version, requests[0].id, split[0]), True)
            else:
                for index, outputs in enumerate(split):
                    request = requests[index]
                    asked = request.outputs
                    if asked and len(asked) < len(outputs):
                        outputs = _asked(outputs, asked)
                    execution.deliver(index, InferResponse(model, version, request.id, outputs), True)
        if results.responses:
            self._deliver_responses(batch, results.responses, region)
        if results.failure is not None:
            batch.fail(results.failure.error())
        times = results.times
        if times is None:
            if batch.unanswered is not None and not batch.unanswered and number != self.executing:
                del self._open[number]
            return False
        if not self._decoupled and batch.unanswered != set():
            batch.fail(Internal(f"model '{self._model}' ended a batch without answering all of it"))
        if number != self.executing:
            raise Internal(f"batch {number} has ended twice")
        self.executing = 0
        if batch.unanswered is not None and not batch.unanswered:
            del self._open[number]
        execution.complete(ComputeTimes(*times), results.failure is None)
        return True

    def _deliver_responses(self, batch: _OpenBatch, responses: Sequence[Response], region: memoryview) -> None:
        execution = batch.execution
        if batch.unanswered is None:
            batch.unanswered = set(range(len(execution.requests)))
        for response in responses:
            index = response.index
            if index not in batch.unanswered:
                raise Internal(f"request {index} was answered after its final response")
            if response.final:
                batch.unanswered.discard(index)
            if response.again:
                execution.reschedule(index)
            elif response.failure is not None:
                execution.deliver(index, response.failure.error(), response.final)
            elif response.outputs is None:
                execution.deliver(index, None, True)
            else:
                request = execution.requests[index]
                outputs = tuple([layout.tensor(output, region) for output in response.outputs])
                if request.outputs and len(request.outputs) < len(outputs):
                    outputs = _asked(outputs, request.outputs)
                answer = InferResponse(self._model, self._version, request.id, outputs, response.parameters)
                execution.deliver(index, answer, response.final)


def _asked(outputs: tuple[Tensor, ...], names: Sequence[str]) -> tuple[Tensor, ...]:
    """A batch computes what any of its requests asks for; each gets what it has asked for."""
    return tuple([tensor for tensor in outputs if tensor.name in names])
