"""Traces: which requests are followed, by settings that clients change, and what happened to those when.

Sampling and recording happen on the event loop; files are written by one thread, OpenTelemetry's spans sent by another
(`telemetry.opentelemetry`). While nothing is traced a front end asks for `active`, and that is all. Texts, names and
files are Triton's (reference 12.3). Times are ns of CLOCK_MONOTONIC.
"""

import importlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, Unsupported
from naiad.messages import InferRequest, InferResponse, ResponseSink, Result, Tensor
from naiad.options import Setting, bad_option
from naiad.packed import unpack_bytes
from naiad.telemetry.log import Log

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
#: Triton's names for the level in `--trace-config`; each occurrence adds to the others, but OFF turns all off.
_LEVELS = {"off": (), "false": (), "0": (), "tensors": (TENSORS,)}
#: Traces that go to one file in the end are written when so many characters have gathered.
_CHUNK = 1 << 20
#: Traces that go to files with a number wait for each other in memory, up to so many characters; and so do those for a
#: file that cannot be written.
_LARGEST_FILE = 64 << 20

#: The value of a request header (HTTP) or of metadata (gRPC), None where there is none.
Header = Callable[[str], str | None]


class SpanExport(Protocol):
    """Where journeys go in the mode opentelemetry."""

    #: What clients see of its options.
    shown: Mapping[str, str]

    def parent(self, header: Header) -> Any:
        """The W3C context that came with a request, or None."""

    def began(self, trace: "Trace", parent: Any) -> None:
        """Sets `trace.span` and `trace.context`, and the journey's span with its first trace."""

    def ended(self, journey: "Journey") -> None: ...

    def close(self) -> None:
        """Sends what is left. Blocks."""


class Values(msgspec.Struct, frozen=True):
    """The settings of one model, or of all. `levels` empty is OFF; `count` is how many traces are still to be taken,
    -1 for no end; `rate` 0 is only those whose client asks for it."""

    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


# ---------------------------------------------------------------- one request


class Trace:
    """A request, or one that it caused (the step of an ensemble, a call from inside a model), on its way."""

    __slots__ = (
        "_executing",
        "context",
        "ended_ns",
        "events",
        "executions",
        "id",
        "is_sent_elsewhere",
        "journey",
        "model_name",
        "model_version",
        "parent",
        "request_id",
        "span",
        "started_ns",
        "tensors",
        "unsent",
    )

    def __init__(self, journey: "Journey", parent: "Trace | None") -> None:
        self.journey = journey
        self.parent = parent
        self.id = journey.traces.next_id()
        self.model_name = self.request_id = ""
        self.model_version = 0
        self.started_ns = self.ended_ns = 0
        #: What the front end did and when.
        self.events: list[tuple[str, int]] = []
        #: start, inputs ready, outputs ready, end of each execution.
        self.executions: list[tuple[int, int, int, int]] = []
        self.tensors: list[tuple[str, dict[str, str]]] = []
        #: OpenTelemetry's context as JSON, for model code.
        self.context: str | None = None
        self.span: Any = None
        self._executing = 0
        #: Results go to their client from another process, which says when: how many it has not sent yet.
        self.is_sent_elsewhere = False
        self.unsent = 0

    def __repr__(self) -> str:
        return f"<Trace {self.id} of {self.model_name}>"

    def child(self) -> "Trace":
        """The trace of a request that this one causes."""
        return Trace(self.journey, self)

    def begin(self, request: InferRequest, version: int, sink: ResponseSink) -> ResponseSink:
        """The engine takes the request. Returns the sink that its results have to go through."""
        self.model_name, self.model_version, self.request_id = request.model_name, version, request.id
        self.started_ns = time.monotonic_ns()
        self.journey.began(self)
        self._note_tensors("TENSOR_QUEUE_INPUT", request.inputs)
        return _TracedSink(self, sink)

    def executing(self) -> None:
        """An instance has the request; `computed` follows."""
        self._executing += 1
        self.journey.open += 1

    def computed(self, start_ns: int, input_end_ns: int, output_start_ns: int, end_ns: int) -> None:
        """An execution has ended. For a request that no instance has had, like an ensemble's, this does nothing."""
        if self._executing:
            self._executing -= 1
            self.executions.append((start_ns, input_end_ns, output_start_ns, end_ns))
            self.ended_ns = max(self.ended_ns, end_ns) if self.ended_ns else 0
            self.journey.close_one()

    def end(self) -> None:
        """The request has its last result."""
        self.journey.close_one()

    def answer(self, sink: ResponseSink, result: Result | None, final: bool) -> None:
        """Passes a result on and records it."""
        if isinstance(result, InferResponse):
            self._note_tensors("TENSOR_BACKEND_OUTPUT", result.outputs)
        now = time.monotonic_ns()
        if final:
            self.ended_ns = now
        try:
            if self.parent is not None:
                sink.send(result, final)
                return
            if final or self.journey.protocol == "HTTP":  # as in Triton
                self.events.append(("INFER_RESPONSE_COMPLETE", now))
            sink.send(result, final)
            if result is not None and not self.is_sent_elsewhere:
                self._note_sent(now, time.monotonic_ns())
        finally:
            if final:
                self.end()

    def sending(self) -> None:
        """A result is on its way to the process that sends it; `sent` follows."""
        self.unsent += 1
        self.journey.open += 1

    def sent(self, start_ns: int, end_ns: int) -> None:
        self._note_sent(start_ns, end_ns)
        self.unsent -= 1
        self.journey.close_one()

    def lost(self) -> None:
        """Nobody will send what is unsent."""
        for _ in range(self.unsent):
            self.journey.close_one()
        self.unsent = 0

    def _note_sent(self, start_ns: int, end_ns: int) -> None:
        protocol = self.journey.protocol
        self.events.append((f"{protocol}_SEND_START", start_ns))
        self.events.append((f"{protocol}_SEND_END", end_ns))

    def _note_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        if TENSORS in self.journey.levels:
            self.tensors += [(activity, tensor_document(tensor)) for tensor in tensors]


class _TracedSink:
    __slots__ = ("_sink", "_trace")

    def __init__(self, trace: Trace, sink: ResponseSink) -> None:
        self._trace = trace
        self._sink = sink

    def send(self, result: Result | None, final: bool) -> None:
        self._trace.answer(self._sink, result, final)


class Journey:
    """A client's request with all that it causes. It is written when the last of that has ended."""

    __slots__ = ("epoch_ns", "export_parent", "followed", "levels", "open", "protocol", "sampler", "span", "traces")

    def __init__(self, traces: "TraceSettings", sampler: "_Sampler", protocol: str, export_parent: Any) -> None:
        self.traces = traces
        self.sampler = sampler
        self.levels = sampler.values.levels
        self.protocol = protocol
        self.export_parent = export_parent
        self.followed: list[Trace] = []
        self.open = 0
        #: Added to a time, the ns since 1970.
        self.epoch_ns = time.time_ns() - time.monotonic_ns()
        self.span: Any = None

    def began(self, trace: Trace) -> None:
        self.followed.append(trace)
        self.open += 1
        self.traces.began(trace)

    def close_one(self) -> None:
        self.open -= 1
        if not self.open:
            self.traces.finished(self)


def tensor_document(tensor: Tensor) -> dict[str, str]:
    """A tensor as trace files show it; everything is text."""
    if tensor.datatype is DataType.BYTES:
        items: list[bytes] = unpack_bytes(tensor.data, tensor.shape).ravel().tolist()
        elements = [f'"{item.decode(errors="backslashreplace")}"' for item in items]
    else:
        array = np.frombuffer(tensor.data, tensor.datatype.numpy)
        if tensor.datatype is DataType.BOOL:
            elements = ["1" if item else "0" for item in array.tolist()]
        elif array.dtype.kind in "iu":
            elements = [str(item) for item in array.tolist()]
        else:
            elements = [f"{item:g}" for item in array.tolist()]
    shape = ",".join(map(str, tensor.shape))
    return {"name": tensor.name, "data": ",".join(elements), "shape": shape, "dtype": tensor.datatype.name}


def trace_documents(trace: Trace, levels: Sequence[str]) -> list[dict[str, Any]]:
    """The entries of a trace file for one request: what it is, its timestamps in order, its tensors."""
    about: dict[str, Any] = {"id": trace.id, "model_name": trace.model_name, "model_version": trace.model_version}
    if trace.request_id:
        about["request_id"] = trace.request_id
    if trace.parent is not None:
        about["parent_id"] = trace.parent.id
    entries = [about]
    if TIMESTAMPS in levels:
        computed = [event for times in trace.executions for event in compute_events(times)]
        start, queued, end = request_events(trace)
        events = sorted([*trace.events, start, queued, *computed, end], key=_time_of)
        entries += [{"id": trace.id, "timestamps": [{"name": name, "ns": ns}]} for name, ns in events]
    entries += [{"id": trace.id, "activity": activity, "tensor": document} for activity, document in trace.tensors]
    return entries


def request_events(trace: Trace) -> list[tuple[str, int]]:
    return [
        ("REQUEST_START", trace.started_ns),
        ("QUEUE_START", trace.started_ns),
        ("REQUEST_END", trace.ended_ns or time.monotonic_ns()),
    ]


def compute_events(times: tuple[int, int, int, int]) -> list[tuple[str, int]]:
    names = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
    return list(zip(names, times, strict=True))


def _time_of(event: tuple[str, int]) -> int:
    return event[1]


# ---------------------------------------------------------------- settings


class _Sampler:
    """Decides for the requests of one model, or of all without settings of their own, and gathers their traces."""

    def __init__(self, values: Values, specified: frozenset[str]) -> None:
        self.values = values
        #: The names of the values that were set here; the others are those of the level above.
        self.specified = specified
        self.count = values.count
        self.retired = False
        self._seen = 0
        self._taken = 0
        self._collected = 0
        self._in_buffer = 0
        self._buffer: list[bytes] = []
        self._size = 0

    @property
    def current(self) -> Values:
        return msgspec.structs.replace(self.values, count=self.count)

    def sample(self, forced: bool) -> bool:
        values = self.values
        hit = False
        if values.rate and self.count:
            self._seen += 1
            hit = self._seen % values.rate == 0
            if hit and self.count > 0:
                self.count -= 1
                self._taken += 1
        return hit or forced

    def add(self, entries: bytes, file: "_TraceFile") -> None:
        """Keeps one journey, as JSON objects with commas between them, until it is time to write."""
        self._buffer.append(entries)
        self._size += len(entries)
        self._in_buffer += 1
        self._collected += 1
        frequency = self.values.log_frequency
        all_taken = self.count == 0 and self._collected == self._taken
        if all_taken or (frequency and self._in_buffer >= frequency) or self._size >= _LARGEST_FILE:
            self._write(file, indexed=True)
        elif self.retired or (not frequency and self.count < 0 and self._size >= _CHUNK):
            self.flush(file)

    def flush(self, file: "_TraceFile") -> None:
        """Writes what there is: to a file of its own where traces are written as they come, else to the one file."""
        if self._buffer:
            self._write(file, indexed=self.values.log_frequency != 0)

    def _write(self, file: "_TraceFile", indexed: bool) -> None:
        text = b",".join(self._buffer)
        self._buffer.clear()
        self._size = self._in_buffer = 0
        file.write(text, indexed)


class _TraceFile:
    """`path`, or `path`.0, `path`.1 and so on: each a JSON array. One thread writes.

    What cannot be written waits for the next attempt, which comes with what is next to be written, or at the end.
    """

    def __init__(self, path: str, log: Log) -> None:
        self.path = path
        self._log = log
        self._index = 0
        self._whole: BinaryIO | None = None
        #: So much of the whole file is written.
        self._size = 0
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._waiting_size = 0
        self._reason: str | None = None
        self._thread: ThreadPoolExecutor | None = None

    def write(self, text: bytes, indexed: bool) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "naiad-trace-file")
        self._thread.submit(self._write, text, indexed)

    def close(self) -> None:
        """Ends the whole file. Blocks until everything is written."""
        if self._thread is not None:
            self._thread.submit(self._end)
            self._thread.shutdown(wait=True)
            self._thread = None

    def _write(self, text: bytes, indexed: bool) -> None:
        self._waiting.append((text, indexed))
        self._waiting_size += len(text)
        self._write_waiting()
        while self._waiting_size > _LARGEST_FILE:
            self._drop_first()

    def _drop_first(self) -> None:
        text, _ = self._waiting.popleft()
        self._waiting_size -= len(text)

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                text, indexed = self._waiting[0]
                if indexed:
                    self._write_indexed(text)
                else:
                    self._write_whole(text)
                self._drop_first()
            self._reason = None
        except OSError as error:
            if self._reason != error.strerror:
                self._reason = error.strerror
                self._log.error(
                    f"failed creating trace file '{error.filename or self.path}': {error.strerror}; traces wait in memory, "
                    f"up to {_LARGEST_FILE >> 20} MiB, until it can be written: make that possible, or start the server "
                    "with another file (--trace-config=triton,file=<path>)"
                )

    def _write_indexed(self, text: bytes) -> None:
        with open(f"{self.path}.{self._index}", "wb") as file:
            file.write(b"[" + text + b"]")
        self._index += 1

    def _write_whole(self, text: bytes) -> None:
        if self._whole is None:
            self._whole = open(self.path, "wb")  # noqa: SIM115 - until close
        # An attempt that failed may have left a part.
        self._whole.seek(self._size)
        text = (b"," if self._size else b"[") + text
        self._whole.write(text)
        self._whole.flush()
        self._size += len(text)

    def _end(self) -> None:
        self._write_waiting()
        if self._waiting:
            self._log.error(f"traces are lost: trace file '{self.path}' could not be written until the end")
        if self._whole is not None:
            try:
                with self._whole as file:
                    file.seek(self._size)
                    file.write(b"]" if self._size else b"[]")
                    file.truncate()
            except OSError as error:
                self._log.error(f"failed writing trace file '{self.path}': {error.strerror}; it has no end")
            self._whole = None


class TraceSettings:
    """The trace settings of a server, and the traces being taken. `model` None or "" are the settings of all models.

    `active` says whether anything can be sampled at all.
    """

    def __init__(self, values: Values, file: str, log: Log, export: SpanExport | None = None) -> None:
        self._default = values
        self._global = _Sampler(values, frozenset())
        self._models: dict[str, _Sampler] = {}
        self._file = _TraceFile(file, log)
        self._export = export
        self._log = log
        self._last_id = 0
        self._live: dict[int, Trace] = {}
        self.active = self._is_active()

    @classmethod
    def of(cls, settings: Sequence[Setting], log: Log) -> "TraceSettings":
        """Those of `--trace-config`. Raises InvalidArgument."""
        mode, values = _global_values(settings)
        options = [(setting.key, setting.value) for setting in settings if setting.scope == mode]
        if mode == "opentelemetry":
            try:
                module = importlib.import_module("naiad.telemetry.opentelemetry")
            except ModuleNotFoundError as error:
                raise InvalidArgument(
                    f"the trace mode opentelemetry needs the Python module '{error.name}': "
                    "install it with pip install 'naiad[otel]'"
                ) from error
            return cls(values, "", log, module.OtlpExport.of(options))
        file = ""
        for key, value in options:
            if key == "file":
                file = value
            elif key == "log-frequency":
                values = msgspec.structs.replace(values, log_frequency=_option_number("triton,log-frequency", value))
            else:
                raise _bad_option(f"triton,{key}", "Available settings are file and log-frequency")
        return cls(values, file, log)

    def __repr__(self) -> str:
        return f"<TraceSettings {self._global.current} models={sorted(self._models)} live={len(self._live)}>"

    def close(self) -> None:
        """Writes and sends all that is left. Blocks."""
        self.active = False
        for sampler in (self._global, *self._models.values()):
            sampler.flush(self._file)
        self._file.close()
        if self._export is not None:
            self._export.close()

    # ------------------------------------------------------------ requests

    def follow(
        self, request: InferRequest, protocol: str, start_ns: int, header: Header, end_ns: int = 0
    ) -> InferRequest:
        """The request, with a trace if it is one of those to be traced. `protocol` is HTTP or GRPC; reading it began
        at `start_ns` and ended at `end_ns`, by default now."""
        sampler = self._models.get(request.model_name, self._global)
        if not self._usable(sampler.values):
            return request
        parent = None if self._export is None else self._export.parent(header)
        if not sampler.sample(parent is not None):
            return request
        trace = Trace(Journey(self, sampler, protocol, parent), None)
        name = "RECV" if protocol == "HTTP" else "WAITREAD"
        trace.events += [
            (f"{protocol}_{name}_START", start_ns),
            (f"{protocol}_{name}_END", end_ns or time.monotonic_ns()),
        ]
        return request.followed(trace)

    def live(self, id: int) -> Trace | None:
        """The trace of a request that model code works on."""
        return self._live.get(id)

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def began(self, trace: Trace) -> None:
        self._live[trace.id] = trace
        if self._export is not None:
            self._export.began(trace, trace.journey.export_parent)

    def finished(self, journey: Journey) -> None:
        for trace in journey.followed:
            self._live.pop(trace.id, None)
        try:
            if self._export is not None:
                self._export.ended(journey)
            else:
                entries = [entry for trace in journey.followed for entry in trace_documents(trace, journey.levels)]
                journey.sampler.add(msgspec.json.encode(entries)[1:-1], self._file)
        except Exception as error:  # a trace that cannot be written must not fail the request
            self._log.exception("a trace could not be written", error)
        journey.followed = []

    # ------------------------------------------------------------ settings

    def get(self, model: str | None = None) -> dict[str, str | list[str]]:
        """The settings as clients see them."""
        values = self._models.get(model or "", self._global).current
        shown: dict[str, str | list[str]] = {
            "trace_level": list(values.levels) or ["OFF"],
            "trace_rate": str(values.rate),
            "trace_count": str(values.count),
        }
        if self._export is None:
            return {
                **shown,
                "log_frequency": str(values.log_frequency),
                "trace_file": self._file.path,
                "trace_mode": "triton",
            }
        return {**shown, "trace_mode": "opentelemetry", **self._export.shown}

    def update(self, model: str | None, values: Mapping[str, Any]) -> dict[str, str | list[str]]:
        """Changes what is in `values`, all or nothing; None goes back to the value of all models, or of the command
        line. Unknown keys are ignored. Returns all settings. Raises Triton's errors."""
        changes = read_changes(values)
        if model:
            made = {model: self._changed(self._models.get(model), self._global.current, changes)}
            new_global = self._global
        else:
            new_global = self._changed(self._global, self._default, changes)
            made = {name: self._changed(old, new_global.current, {}) for name, old in self._models.items()}
            self._retire(self._global)
            self._global = new_global
        for name, sampler in made.items():
            old = self._models.pop(name, None)
            if old is not None:
                self._retire(old)
            if sampler.specified:
                self._models[name] = sampler
        self.active = self._is_active()
        return self.get(model)

    def _changed(self, old: _Sampler | None, above: Values, changes: Mapping[str, Any]) -> _Sampler:
        kept = {name: getattr(old.current, name) for name in old.specified} if old is not None else {}
        own = {name: value for name, value in {**kept, **changes}.items() if value is not None}
        values = msgspec.structs.replace(above, **own)
        problem = self._problem(values)
        if problem is None and changes and not values.count:
            # Triton gives no reason. One that has run out counts as 0, too, but changes of others are none of its own.
            problem = "trace_count is 0"
        # With nothing of its own it goes back to what is above, whatever that is.
        if problem is not None and values.levels and own:
            raise InvalidArgument(f"Attempting to set invalid trace setting :{problem}")
        return _Sampler(values, frozenset(own))

    def _retire(self, sampler: _Sampler) -> None:
        """What it follows still ends; it takes nothing new."""
        sampler.retired = True
        sampler.flush(self._file)

    def _problem(self, values: Values) -> str | None:
        if not values.rate:
            return "sample rate must be non-zero"
        if self._export is None and not self._file.path:
            return "trace file name is not given"
        return None

    def _usable(self, values: Values) -> bool:
        # A rate of 0 is fine with OpenTelemetry: clients ask for traces themselves.
        return bool(values.levels) and (self._export is not None or self._problem(values) is None)

    def _is_active(self) -> bool:
        return any(self._usable(sampler.values) for sampler in (self._global, *self._models.values()))


def off() -> TraceSettings:
    """For servers that trace nothing."""
    return TraceSettings(Values(), "", Log())


def _global_values(settings: Sequence[Setting]) -> tuple[str, Values]:
    """The mode, and what is set for both modes."""
    mode, off = "triton", False
    levels: set[str] = set()
    numbers: dict[str, int] = {}
    for setting in settings:
        if setting.scope:
            continue
        if setting.key == "mode":
            mode = setting.value
        elif setting.key == "level":
            found = _LEVELS.get(setting.value.lower(), (TIMESTAMPS,))
            levels.update(found)
            off = off or not found
        else:
            numbers[setting.key] = _option_number(setting.key, setting.value)
    return mode, Values(() if off else _ordered(levels), **numbers)


def _ordered(levels: set[str]) -> tuple[str, ...]:
    return tuple(level for level in (TIMESTAMPS, TENSORS) if level in levels)


def _option_number(setting: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _bad_option(setting, f"Invalid option value. Got {text}") from None


def _bad_option(setting: str, reason: str) -> InvalidArgument:
    return bad_option(f"--trace-config {setting}", reason)


# ---------------------------------------------------------------- what clients send


def read_changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The new values by the names of `Values`; None clears. Raises Triton's errors."""
    if "trace_file" in values:
        raise Unsupported("trace file location can not be updated through network protocol")
    changes: dict[str, Any] = {}
    for key, name, read in (
        ("trace_level", "levels", _read_levels),
        ("trace_rate", "rate", _read_unsigned),
        ("trace_count", "count", _read_count),
        ("log_frequency", "log_frequency", _read_unsigned),
    ):
        if key in values:
            given = values[key]
            value = None if given is None else read(key, given)
            # Levels nobody knows change nothing.
            if given is None or value is not None:
                changes[name] = value
    return changes


def _read_levels(key: str, given: Any) -> tuple[str, ...] | None:
    if type(given) is not list:
        raise Internal("attempt to access JSON non-array as array")
    if not all(type(level) is str for level in given):
        raise Internal("attempt to access JSON non-string as string")
    if "OFF" in given:
        if len(given) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return ()
    return _ordered(set(given)) or None


def _read_unsigned(key: str, given: Any) -> int:
    # Triton reads an int and keeps it without its sign.
    return _read_int(key, given, 0, 2**32 - 1) & 0xFFFFFFFF


def _read_count(key: str, given: Any) -> int:
    count = _read_int(key, given, -1, 2**31 - 1)
    if count < -1:
        raise InvalidArgument(f"Unable to parse '{key}'. Expecting value >= -1, got:{given}")
    return count


def _read_int(key: str, given: Any, least: int, most: int) -> int:
    """The number a text begins with, as C++ reads it."""
    if type(given) is not str:
        raise Internal("attempt to access JSON non-string as string")
    found = re.match(r"\s*([+-]?[0-9]+)", given, re.ASCII)
    if found is None:
        raise InvalidArgument(f"Unable to parse '{key}', got: {given}")
    number = int(found[1])
    if not -(2**31) <= number < 2**31:
        raise InvalidArgument(f"Unable to parse '{key}', value is out of range [ {least}, {most} ], got: {given}")
    return number
