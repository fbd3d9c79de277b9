"""The access log: a line for each inference request that the engine was given. On the event loop.

An engine with a log around it, made where `--access-log=true` asks for one; without it nothing of this runs. The
requests that end in one turn of the loop become lines together, and these wait some ms for others: a write per request
would cost a client that asks for one thing at a time more than all the rest of its line.
"""

import asyncio
import time
from typing import Any

from naiad.datatypes import Buffer
from naiad.engine import Engine
from naiad.errors import NaiadError
from naiad.messages import InferRequest, InferResponse, RequestTrace, ResponseSink, Result, Unread
from naiad.models.model import Model
from naiad.scheduling.scheduler import Call
from naiad.telemetry.log import AccessFields, Log, quoted

#: How long a line waits for others.
_WAIT_S = 0.01


def logged(engine: Engine, protocol: str, log: Log) -> Any:
    """The engine, for the front end of `protocol`, with each of its requests in the log."""
    return _LoggedEngine(engine, protocol, log)


class _LoggedEngine:
    def __init__(self, engine: Engine, protocol: str, log: Log) -> None:
        self._engine = engine
        self.protocol = quoted(protocol)
        self._log = log
        self._ended: list[_Access] = []
        self._is_waiting = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def infer(self, request: InferRequest, sink: ResponseSink, model: Model | None = None) -> Call:
        access = _Access(self, request, sink)
        try:
            return self._engine.infer(request.followed(access), access, model)
        except NaiadError as error:
            access.refuse(error)
            raise

    def ended(self, access: "_Access") -> None:
        """The request has its last result. The times of its execution are told afterwards, in the same turn."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._write)
        self._ended.append(access)

    def _write(self) -> None:
        ended, self._ended = self._ended, []
        self._log.access([access.fields() for access in ended])
        if not self._is_waiting:
            self._is_waiting = True
            asyncio.get_running_loop().call_later(_WAIT_S, self._flush)

    def _flush(self) -> None:
        self._is_waiting = False
        self._log.flush()


class _Access:
    """One request: stands between it and its trace, which most have not, and its sink."""

    __slots__ = (
        "_began_ns",
        "_bytes_out",
        "_end_ns",
        "_engine",
        "_executing_ns",
        "_request",
        "_responses",
        "_sent_ns",
        "_sink",
        "_start_ns",
        "_status",
        "_trace",
        "_version",
        "id",
    )

    def __init__(self, engine: _LoggedEngine, request: InferRequest, sink: ResponseSink) -> None:
        trace = request.trace
        self.id = 0 if trace is None else trace.id
        self._engine = engine
        self._request = request
        self._sink = sink
        self._trace: RequestTrace | None = trace
        self._version = max(request.model_version, 0)
        self._executing_ns = self._start_ns = self._end_ns = self._sent_ns = 0
        self._status = "OK"
        self._bytes_out = self._responses = 0
        self._began_ns = time.monotonic_ns()

    @property
    def context(self) -> str | None:
        return None if self._trace is None else self._trace.context

    def child(self) -> RequestTrace | None:
        return None if self._trace is None else self._trace.child()

    def begin(self, request: InferRequest, version: int, sink: ResponseSink) -> ResponseSink:
        self._version = version
        return sink if self._trace is None else self._trace.begin(request, version, sink)

    def end(self) -> None:
        if self._trace is not None:
            self._trace.end()

    def executing(self) -> None:
        self._executing_ns = self._executing_ns or time.monotonic_ns()
        if self._trace is not None:
            self._trace.executing()

    def computed(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        self._start_ns = self._start_ns or start_ns
        self._end_ns = end_ns
        if self._trace is not None:
            self._trace.computed(start_ns, input_end_ns, output_start_ns, end_ns)

    def send(self, result: Result | None, final: bool) -> None:
        if isinstance(result, InferResponse):
            self._responses += 1
            for tensor in result.outputs:
                self._bytes_out += _size(tensor.contents)
        elif result is not None:
            self._status = result.triton_code
        try:
            self._sink.send(result, final)
        finally:
            if final:
                self._sent_ns = time.monotonic_ns()
                self._engine.ended(self)

    def refuse(self, error: NaiadError) -> None:
        self._status = error.triton_code
        self._sent_ns = time.monotonic_ns()
        self._engine.ended(self)

    def fields(self) -> AccessFields:
        request = self._request
        start_ns = self._start_ns or self._executing_ns
        bytes_in = 0
        for tensor in request.inputs:
            bytes_in += _size(tensor.contents)
        return (
            self._engine.protocol,
            quoted(request.model_name),
            self._version,
            quoted(request.id),
            quoted(self._status),
            (start_ns - self._began_ns) // 1000 if start_ns else 0,
            ((self._end_ns or self._sent_ns) - start_ns) // 1000 if start_ns else 0,
            (self._sent_ns - self._began_ns) // 1000,
            bytes_in,
            self._bytes_out,
            self._responses,
        )


def _size(data: Buffer | Unread) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)
