"""The access log: a line for each inference request that the engine was given. On the event loop.

An engine with a log around it, made where `--access-log=true` asks for one; without it nothing of this runs. The
requests that end in one turn of the loop become lines together, and these wait some ms for others: a write per request
would cost a client that asks for one thing at a time more than all the rest of its line.
"""

import asyncio
from time import monotonic_ns, time_ns
from typing import Any, Final

from naiad.engine import Engine
from naiad.errors import NaiadError
from naiad.messages import InferRequest, InferResponse, ResponseSink, Result
from naiad.models.model import Model
from naiad.scheduling.scheduler import Call, Progress
from naiad.telemetry.access_lines import AccessLines
from naiad.telemetry.log import Log

#: How long a line waits for others.
_WAIT_S: Final = 0.01
#: A constant, compiled, is not looked up by name each time.
_now_ns: Final = monotonic_ns


def logged(engine: Engine, protocol: str, log: Log) -> Any:
    """The engine, for the front end of `protocol`, with each of its requests in the log."""
    return _LoggedEngine(engine, protocol, log)


class _LoggedEngine:
    def __init__(self, engine: Engine, protocol: str, log: Log) -> None:
        self._engine = engine
        self._protocol = protocol
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._lines = AccessLines(protocol, log.log_format, log.access_head)
        self._ended: list[_Access] = []
        self._is_waiting = False
        self.model = engine.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def infer(self, request: InferRequest, sink: ResponseSink, model: Model | None = None) -> Call:
        access = _Access(self, request, sink)
        try:
            call = self._engine.infer(request, access, model, progress=access)
        except NaiadError as error:
            access.refuse(error)
            raise
        access.began_ns = call.queued_ns
        return call

    def ended(self, access: "_Access") -> None:
        """The request has its last result. The times of its execution are told afterwards, in the same turn."""
        if not self._ended:
            self._loop.call_soon(self._write)
        self._ended.append(access)

    def _write(self) -> None:
        ended, self._ended = self._ended, []
        log = self._log
        lines = self._lines
        if log.log_format != lines.format:
            lines = self._lines = AccessLines(self._protocol, log.log_format, log.access_head)
        lines.begin(time_ns())
        for access in ended:
            access.describe(lines)
        log.hold(lines.take())
        if not self._is_waiting:
            self._is_waiting = True
            self._loop.call_later(_WAIT_S, self._flush)

    def _flush(self) -> None:
        self._is_waiting = False
        self._log.flush()


class _Access(Progress):
    """One request: stands before its sink."""

    __slots__ = ("_bytes_out", "_engine", "_request", "_responses", "_sent_ns", "_sink", "_status", "began_ns")

    def __init__(self, engine: _LoggedEngine, request: InferRequest, sink: ResponseSink) -> None:
        super().__init__(max(request.model_version, 0))
        self._engine = engine
        self._request = request
        self._sink = sink
        self._status = "OK"
        self._bytes_out = self._responses = self._sent_ns = 0
        #: When its call was made; 0 for a request that is refused before.
        self.began_ns = 0

    def send(self, result: Result | None, final: bool) -> None:
        if isinstance(result, InferResponse):
            self._responses += 1
            for tensor in result.outputs:
                self._bytes_out += len(tensor.contents)
        elif result is not None:
            self._status = result.triton_code
        try:
            self._sink.send(result, final)
        finally:
            if final:
                self._sent_ns = _now_ns()
                self._engine.ended(self)

    def refuse(self, error: NaiadError) -> None:
        self._status = error.triton_code
        self._engine.ended(self)

    def describe(self, lines: AccessLines) -> None:
        request = self._request
        began_ns, sent_ns = self.began_ns, self._sent_ns
        start_ns = self.start_ns or self.executing_ns
        bytes_in = 0
        for tensor in request.inputs:
            bytes_in += len(tensor.contents)
        lines.add(
            request.model_name,
            self.version,
            request.id,
            self._status,
            (start_ns - began_ns) // 1000 if start_ns else 0,
            ((self.end_ns or sent_ns) - start_ns) // 1000 if start_ns else 0,
            (sent_ns - began_ns) // 1000,
            bytes_in,
            self._bytes_out,
            self._responses,
        )
