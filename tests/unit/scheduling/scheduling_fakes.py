"""What schedulers are tested between: whoever waits on one side, an instance on the other."""

import asyncio
from typing import Any

from naiad.errors import Unavailable
from naiad.instances.instance import ComputeTimes
from naiad.messages import InferResponse

TIMES = ComputeTimes(1, 2, 3, 4)


class Lease:
    def __init__(self, statistics):
        self.statistics = statistics
        self.released = 0

    def release(self):
        self.released += 1


class Sink:
    def __init__(self):
        self.results = []

    def send(self, result, final):
        self.results.append(result)

    @property
    def only(self):
        (result,) = self.results
        return result


class Meddler(Sink):
    """Cancels another call when it is answered, as the step of an ensemble that fails does; `fails` after that."""

    def __init__(self, other=None, fails=False):
        super().__init__()
        self.other = other
        self.fails = fails

    def send(self, result, final):
        super().send(result, final)
        if self.other is not None:
            self.other.cancel()
        if self.fails:
            raise OSError("the client has left")


class FakeInstance:
    """Keeps its batch until a test answers it."""

    def __init__(self, name="i"):
        self.name = name
        self.losses = 0
        self.place = self
        self.failure: str | None = None
        self.on_change: Any = None
        self.is_up = True
        self.batch: Any = None
        #: When it begins and ends what it executes.
        self.times = TIMES
        self.cancelled = []
        self.executed = asyncio.Event()

    @property
    def is_available(self):
        return self.is_up and self.batch is None

    def execute(self, batch):
        assert self.is_available
        self.batch = batch
        self.executed.set()

    def cancel(self, batch, index):
        self.cancelled.append(index)

    def answer(self, *outputs, error=None):
        """Answers all requests of the batch, with `outputs` in order or an error."""
        batch, self.batch = self.batch, None
        for index, request in enumerate(batch.requests):
            given = outputs[index] if index < len(outputs) else ()
            batch.deliver(index, error or InferResponse("m", 1, request.id, tuple(given)), True)
        batch.complete(self.times)
        self.on_change()

    def die(self):
        batch, self.batch = self.batch, None
        self.is_up = False
        self.losses += 1
        if batch is not None:
            for index in range(len(batch.requests)):
                batch.deliver(index, Unavailable("host died"), True)
            batch.complete(None)

    def revive(self):
        self.is_up = True
        self.on_change()
