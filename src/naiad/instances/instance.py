"""What a scheduler sees of an instance, and an instance of a batch. Lives on the event loop."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from naiad.messages import InferRequest, Result


@dataclass(init=False)
class ComputeTimes:
    """When the phases of one execution ended, in ns of CLOCK_MONOTONIC (`time.monotonic_ns`), which all
    processes of a machine share: handed over, inputs ready, outputs ready, done."""

    start_ns: int
    input_end_ns: int
    output_start_ns: int
    end_ns: int

    def __init__(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        self.start_ns = start_ns
        self.input_end_ns = input_end_ns
        self.output_start_ns = output_start_ns
        self.end_ns = end_ns


class Execution(Protocol):
    """A batch on its way through an instance.

    The batch dimension of request i is `rows[i]`; for a model with `max_batch_size` 0 there is one request and
    its rows count 1 without being a dimension.
    """

    requests: Sequence[InferRequest]
    rows: Sequence[int]

    def deliver(self, index: int, result: Result | None, final: bool) -> None:
        """A result of request `index`; `None` only with `final`. Each index gets `final` exactly once."""

    def complete(self, times: ComputeTimes | None, succeeded: bool = True) -> None:
        """The instance has finished executing and can take another batch. Called exactly once; for ordinary
        models after every final `deliver`, for decoupled ones possibly before. `None`: it never ran to its end.
        `succeeded` is False when the execution itself raised; an error that a model answers to one request is
        not a failed execution."""

    def extend(self) -> None:
        """The instance has kept the batch waiting and executes it now: what has come since may join it."""

    def reschedule(self, index: int) -> None:
        """Model code gives request `index` back to be executed once more, in place of a final answer. Hosts offer
        that to models of iterative sequences only."""


class Instance(Protocol):
    """One loaded copy of a model version: at most one batch at a time, each batch answered exactly once, also
    when its process dies. Thread and process are classes with this face."""

    name: str
    #: What it runs on: equal for threads of one host with the same device. Of these the one that executed last may still be
    #: awake, so it is the one to take the next batch; others take turns.
    place: Hashable
    #: Called, on the loop, whenever `is_available` may have turned true or the instance was given up for good.
    on_change: Callable[[], None]

    @property
    def losses(self) -> int:
        """How often all that model code knew was lost since the instance was made, with its process."""

    @property
    def is_available(self) -> bool:
        """Loaded, healthy and executing nothing."""

    @property
    def failure(self) -> str | None:
        """Why the instance will not come back; None while it serves or is being restarted."""

    def execute(self, batch: Execution) -> None:
        """Starts a batch; only when `is_available`. Returns at once; never raises for what the batch contains."""

    def cancel(self, batch: Execution, index: int) -> None:
        """Tells model code that the client of request `index` has left."""
