"""The access log: a line for each inference request that the engine was given. On the event loop.

An engine with a log around it, made where `--access-log=true` asks for one; without it nothing of this runs.
"""

import asyncio
import time
from typing import Any, cast

import msgspec

from naiad.engine import Engine
from naiad.errors import NaiadError
from naiad.messages import InferRequest, InferResponse, RequestTrace, ResponseSink, Result
from naiad.models.model import Model
from naiad.scheduling.scheduler import Call
from naiad.telemetry.log import Log


def logged(engine: Engine, protocol: str, log: Log) -> Engine:
    """The engine, for the front end of `protocol`, with each of its requests in the log."""
    return cast(Engine, _LoggedEngine(engine, protocol, log))


class _LoggedEngine:
    def __init__(self, engine: Engine, protocol: str, log: Log) -> None:
        self._engine = engine
        self._protocol = protocol
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def infer(self, request: InferRequest, sink: ResponseSink, model: Model | None = None) -> Call:
        access = _Access(self._log, self._protocol, request, sink)
        try:
            return self._engine.infer(msgspec.structs.replace(request, trace=access), access, model)
        except NaiadError as error:
            access.refuse(error)
            raise


class _Untraced:
    """The trace of a request that has none."""

    id = 0
    context: str | None = None

    def child(self) -> RequestTrace:
        return self

    def begin(self, request: InferRequest, version: int, sink: ResponseSink) -> ResponseSink:
        return sink

    def end(self) -> None: ...

    def executing(self) -> None: ...

    def computed(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None: ...


_UNTRACED = _Untraced()


class _Access:
    """One request: stands between it and its trace and sink, and writes the line when its last result is out."""

    def __init__(self, log: Log, protocol: str, request: InferRequest, sink: ResponseSink) -> None:
        self._log = log
        self._protocol = protocol
        self._request = request
        self._sink = sink
        self._trace: RequestTrace = request.trace or _UNTRACED
        self._version = max(request.model_version, 0)
        self._began_ns = time.monotonic_ns()
        self._executing_ns = self._start_ns = self._end_ns = self._sent_ns = 0
        self._status = "OK"
        self._bytes_out = self._responses = 0

    @property
    def id(self) -> int:
        return self._trace.id

    @property
    def context(self) -> str | None:
        return self._trace.context

    def child(self) -> RequestTrace:
        return self._trace.child()

    def begin(self, request: InferRequest, version: int, sink: ResponseSink) -> ResponseSink:
        self._version = version
        return self._trace.begin(request, version, sink)

    def end(self) -> None:
        self._trace.end()

    def executing(self) -> None:
        self._executing_ns = self._executing_ns or time.monotonic_ns()
        self._trace.executing()

    def computed(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        self._start_ns = self._start_ns or start_ns
        self._end_ns = end_ns
        self._trace.computed(start_ns, input_end_ns, output_start_ns, end_ns)

    def send(self, result: Result | None, final: bool) -> None:
        if isinstance(result, InferResponse):
            self._responses += 1
            self._bytes_out += sum([memoryview(tensor.data).nbytes for tensor in result.outputs])
        elif result is not None:
            self._status = result.triton_code
        self._sink.send(result, final)
        if final:
            self._sent_ns = time.monotonic_ns()
            # The times of its execution are told after its results, in the same turn of the loop.
            asyncio.get_running_loop().call_soon(self._write)

    def refuse(self, error: NaiadError) -> None:
        self._status = error.triton_code
        self._sent_ns = time.monotonic_ns()
        self._write()

    def _write(self) -> None:
        request = self._request
        executed = self._executing_ns or self._start_ns
        start_ns = self._start_ns or self._executing_ns
        self._log.access(
            {
                "protocol": self._protocol,
                "model": request.model_name,
                "version": self._version,
                "id": request.id,
                "status": self._status,
                "queue_us": (start_ns - self._began_ns) // 1000 if executed else 0,
                "compute_us": ((self._end_ns or self._sent_ns) - start_ns) // 1000 if executed else 0,
                "total_us": (self._sent_ns - self._began_ns) // 1000,
                "bytes_in": sum([memoryview(tensor.data).nbytes for tensor in request.inputs]),
                "bytes_out": self._bytes_out,
                "responses": self._responses,
            }
        )
