"""Calls and the face of a scheduler. On the event loop.

A call is the fact that somebody waits for a model. It ends exactly once, and its end gives the lease of the model
version back and counts it. Schedulers decide which calls run together; they do not know protocols.
"""

import os
import time
from typing import Any, Literal, Protocol

from naiad.errors import Cancelled, NaiadError
from naiad.instances.instance import ComputeTimes
from naiad.messages import InferRequest, ResponseSink, Result
from naiad.scheduling.queue import Queued
from naiad.statistics import ModelStatistics

FailureReason = Literal["REJECTED", "CANCELED", "BACKEND", "OTHER"]


class Scheduler(Protocol):
    """Takes calls of one model version and sees to it that each ends."""

    @property
    def pending(self) -> int:
        """Calls submitted and not yet handed to an instance."""

    @property
    def sequences(self) -> int:
        """Sequences that have begun and not ended."""

    def stopped(self, request: InferRequest) -> NaiadError | None:
        """Why a request is refused when the server is about to end. None if it goes on with what has begun, or if that
        is for the members of an ensemble to say."""

    def submit(self, call: "Call") -> None:
        """Takes a call. Raises NaiadError instead when it is refused at once (full queue, closed)."""

    def withdraw(self, call: "Call") -> None:
        """The client of `call` has left: take it out of the queue, or tell whoever works on it."""

    async def close(self) -> None:
        """Stops taking calls. Those submitted are still answered, or failed when there is nobody left to do it."""


class Lease(Protocol):
    """What a call holds of its model version."""

    statistics: ModelStatistics

    def lease(self) -> None: ...

    def release(self) -> None: ...


class Progress:
    """How far a call has come, for who wants to know. `version` is the one that takes it; the times are ns of
    CLOCK_MONOTONIC, 0 for what has not been: an instance has the call; its first execution began; its last one ended."""

    __slots__ = ("end_ns", "executing_ns", "start_ns", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.executing_ns = 0
        self.start_ns = 0
        self.end_ns = 0

    def ended(self, times: ComputeTimes) -> None:
        """An execution has ended."""
        self.start_ns = self.start_ns or times.start_ns
        self.end_ns = times.end_ns


class Call(Queued):
    """One request on its way. Made by the engine; owned by the scheduler it was submitted to."""

    __slots__ = ("cancelled", "execution", "index", "is_late", "lease", "progress", "scheduler", "sink")

    def __init__(
        self,
        request: InferRequest,
        rows: int,
        signature: object,
        sink: ResponseSink,
        lease: Lease,
        scheduler: Scheduler,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(request, rows, signature, time.monotonic_ns())
        self.sink = sink
        self.lease = lease
        self.scheduler = scheduler
        self.progress = progress
        self.cancelled = False
        #: It came when the server was about to end: what it would begin is refused.
        self.is_late = False
        #: The batch that took the call and its place there, or what else `withdraw` needs to find it again.
        self.execution: Any = None
        self.index = 0

    def __repr__(self) -> str:
        state = "ended" if self.ended else "cancelled" if self.cancelled else "running" if self.execution else "queued"
        return f"<Call {self.request.model_name} id={self.request.id!r} rows={self.rows} {state}>"

    def deliver(self, result: Result | None, final: bool) -> None:
        """Hands a result to whoever waits; the last one ends the call."""
        assert not self.ended, f"this is a bug: {self!r} is answered twice"
        if final:
            self.ended = True
            # Batch and call know each other: without this only the garbage collector would free them.
            self.execution = None
            self.lease.release()
        self.sink.send(result, final)

    def fail(self, error: NaiadError, reason: FailureReason, times: int = 1) -> None:
        """Ends a call that no instance has answered, and counts it as failed, so many times."""
        statistics = self.lease.statistics
        statistics.failures[reason] += times
        statistics.infer.fail.add((time.monotonic_ns() - self.queued_ns) * times, times)
        self.deliver(error, True)

    def cancel(self) -> None:
        """The client has left. A queued call ends now; a running one when its instance answers."""
        if not self.ended and not self.cancelled:
            self.cancelled = True
            self.scheduler.withdraw(self)

    def fail_cancelled(self) -> None:
        self.fail(Cancelled(""), "CANCELED")


def delay_from(variable: str) -> int:
    """How many requests must wait before a scheduler runs the first ones: a test hook of Triton, an environment
    variable that tests of clients set. 0 where it is not set."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else 0
