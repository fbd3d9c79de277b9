"""Runs batches on a backend object: frames and arenas in, arrays for the backend, results out.

Lives where the model lives: in a host process, or in a thread of the server with `--isolation=none`. Knows nothing
of sockets: a `Link` carries the results away. One thread executes; the answers of a decoupled model may come
from any thread.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from math import prod
from time import monotonic_ns
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from naiad import datatypes
from naiad.backends.api import Array, ArrayBackend, BackendResponse, ConfigDict, RequestBackend
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError, ResourceExhausted, text_of
from naiad.instances import arena
from naiad.instances.client_memory import client_memory
from naiad.instances.composition import Composition, Shape
from naiad.instances.frames import Details, Execute, Failure, Input, Output, Response, Results, Target, failure
from naiad.messages import ParameterValue
from naiad.packed import pack_bytes, unpack_bytes

#: Late results up to this size travel in their frame: copying them costs less than a memory file.
INLINE_LIMIT: Final = 256 * 1024


class OneShot:
    """Memory for the outputs of one frame; `fd` is None inside the server process."""

    __slots__ = ("fd", "view")

    def __init__(self, view: memoryview, fd: int | None) -> None:
        self.view = view
        self.fd = fd


class Link(Protocol):
    """The way of an instance's results to the server. `outputs` is the output arena; a fork gets another one."""

    outputs: memoryview

    def send(self, results: Results, one_shot: OneShot | None) -> None:
        """From any thread; `one_shot` is given away."""

    def one_shot(self, byte_size: int) -> OneShot:
        """Memory beside the arena. Raises ResourceExhausted."""


class TensorSpec:
    """An input or output of the configuration, as execution needs it."""

    __slots__ = ("datatype", "dims", "name", "reshape")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name: str = config["name"]
        self.datatype = datatypes.BY_CONFIG_NAME[config["data_type"]]
        self.dims = tuple(int(extent) for extent in config.get("dims", ()))
        reshape = config.get("reshape")
        self.reshape = None if reshape is None else tuple(int(extent) for extent in reshape.get("shape", ()))


class Signature:
    """The part of a model configuration that execution needs."""

    def __init__(self, model: str, instance: str, config: ConfigDict) -> None:
        self.model = model
        self.instance = instance
        self.batching = int(config.get("max_batch_size", 0)) > 0
        self.decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        self.outputs = {spec.name: spec for spec in map(TensorSpec, config.get("output", ()))}
        self.output_names = tuple(self.outputs)
        sequence = config.get("sequence_batching", {})
        self.iterative = bool(sequence.get("iterative_sequence", False))
        # States are outputs that the server asks for by name.
        for state in sequence.get("state", ()):
            self.outputs.setdefault(state["output_name"], TensorSpec({**state, "name": state["output_name"]}))
        inputs = map(TensorSpec, config.get("input", ()))
        self.reshaped_inputs = {spec.name: spec for spec in inputs if spec.reshape is not None}
        #: None for most models: their batches are rows behind rows, and nobody asks whose.
        self.composition = Composition(model, config) or None


def _reshaped(shape: tuple[int, ...], batching: bool, of: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...]:
    """`shape`, which matches `of` behind the batch dimension, as `to`: the variable extents keep their order."""
    head, tail = (shape[:1], shape[1:]) if batching else ((), shape)
    variable = iter([extent for extent, wanted in zip(tail, of, strict=True) if wanted < 0])
    return head + tuple(next(variable) if extent < 0 else extent for extent in to)


_DATATYPES: Final = datatypes.BY_NUMBER
_BYTES: Final = DataType.BYTES.number


def _array(datatype: int, shape: tuple[int, ...], data: memoryview, offset: int, byte_size: int) -> Array:
    if datatype == _BYTES:
        return unpack_bytes(data[offset : offset + byte_size], shape)
    return np.ndarray(shape, _DATATYPES[datatype].numpy, data, offset)


#: Inputs up to this size are copied out of the arena for backends that see single requests, since their code may keep
#: them; larger ones are not, and where they are kept the server gets itself another arena.
_COPIED: Final = 64 * 1024
#: Up to here a copy more costs less than making an array of the destination.
_SMALL: Final = 16 * 1024


class _Packed:
    """An output that is ready to be placed: an array, or the packed elements of a BYTES tensor."""

    __slots__ = ("_rows", "array", "byte_size", "datatype", "name", "packed", "shape", "shapes", "sizes")

    def __init__(self, name: str, datatype: DataType, array: Array, rows: Sequence[int] | None) -> None:
        """`rows`: the extent of each request's part in the first dimension."""
        self._rows = rows
        self.name = name
        self.datatype = datatype
        self.shape = array.shape
        self.shapes: list[Shape] | None = None
        self.sizes: list[int] | None = None
        if datatype is DataType.BYTES:
            if rows is None or len(rows) == 1:
                self.packed: bytes | None = pack_bytes(array.ravel().tolist())
            else:
                ends = np.cumsum(rows).tolist()
                parts = [
                    pack_bytes(array[end - count : end].ravel().tolist()) for end, count in zip(ends, rows, strict=True)
                ]
                self.sizes = [len(part) for part in parts]
                self.packed = b"".join(parts)
            self.byte_size = len(self.packed)
        else:
            self.packed = None
            self.array = array
            self.byte_size = array.size * datatype.byte_size

    def write(self, data: memoryview, offset: int) -> None:
        if self.packed is not None or self.byte_size <= _SMALL:
            data[offset : offset + self.byte_size] = self.bytes()
        else:
            np.copyto(np.ndarray(self.shape, self.datatype.numpy, data, offset), self.array)

    def parts(self, count: int) -> Sequence[Array] | None:
        """The arrays of `count` requests; None where they are not rows of one."""
        if self.packed is not None or self.shapes is not None:
            return None
        if count == 1:
            return (self.array,)
        if self._rows is None:
            return None
        ends = np.cumsum(self._rows).tolist()
        return [self.array[end - rows : end] for end, rows in zip(ends, self._rows, strict=True)]

    def bytes(self) -> bytes:
        if self.packed is not None:
            return self.packed
        array, dtype = self.array, self.datatype.numpy
        return (array if array.dtype is dtype else array.astype(dtype, copy=False)).tobytes()


class _Column:
    """An output of all requests of a batch, which is placed as one: rows behind rows, of equal shape."""

    __slots__ = ("_arrays", "byte_size", "datatype", "name", "shape", "shapes", "sizes")

    def __init__(self, name: str, datatype: DataType, shape: Shape, arrays: Sequence[Array]) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.shapes: list[Shape] | None = None
        self.sizes: list[int] | None = None
        self.byte_size = prod(shape) * datatype.byte_size
        self._arrays = arrays

    def write(self, data: memoryview, offset: int) -> None:
        np.concatenate(self._arrays, out=np.ndarray(self.shape, self.datatype.numpy, data, offset))

    def parts(self, count: int) -> Sequence[Array]:
        """The arrays of `count` requests."""
        return self._arrays

    def bytes(self) -> bytes:
        return np.concatenate(self._arrays, dtype=self.datatype.numpy).tobytes()


class _Outputs:
    """Places outputs: in the arena while its batch runs, else in the frame or in a one-shot."""

    def __init__(self, link: Link, signature: Signature, byte_limit: int) -> None:
        self._link = link
        self._signature = signature
        self._byte_limit = byte_limit
        self._at = 0
        #: A batch a client of which has left: its memory may serve something else by now.
        self._deserted = 0

    def begin(self) -> None:
        """A new batch: the server has read what lies in the arena."""
        self._at = 0

    def desert(self, batch: int) -> None:
        """From any thread: a client of the batch waits for it no more."""
        self._deserted = batch

    def place_batch(self, frame: Execute, packed: Sequence[_Packed | _Column]) -> tuple[list[Output], OneShot | None]:
        """Outputs of all requests of a batch: in their targets if they have some and fit there, else as `place` does."""
        if frame.targets is None:
            return self.place(packed, in_arena=True)
        written: dict[str, Output] = {}
        for output in packed:
            targets = [target for target in frame.targets if target.output == output.name]
            if targets and self._deserted != frame.batch and _write_to_targets(output, targets):
                number, size = output.datatype.number, output.byte_size
                written[output.name] = Output(output.name, number, output.shape, 0, size, None, None, None, True)
        others, one_shot = self.place([output for output in packed if output.name not in written], in_arena=True)
        rest = iter(others)
        return [written.get(output.name) or next(rest) for output in packed], one_shot

    def place(self, packed: Sequence[_Packed | _Column], in_arena: bool) -> tuple[list[Output], OneShot | None]:
        """Raises ResourceExhausted."""
        total = 0
        for output in packed:
            total = arena.aligned(total) + output.byte_size
        memory = self._link.outputs
        if in_arena and self._at + total <= len(memory):
            data, at, one_shot = memory, self._at, None
            self._at = arena.aligned(at + total)
        elif total <= INLINE_LIMIT:
            return [
                Output(o.name, o.datatype.number, o.shape, 0, o.byte_size, o.sizes, o.bytes(), o.shapes) for o in packed
            ], None
        else:
            if total > self._byte_limit:
                largest = max(packed, key=lambda output: output.byte_size)
                raise ResourceExhausted(
                    f"model '{self._signature.model}': the outputs of one execution take {total} bytes, of which "
                    f"'{largest.name}' {largest.byte_size} bytes; the limit is {self._byte_limit} bytes"
                )
            one_shot = self._link.one_shot(total)
            data, at = one_shot.view, 0
        placed = []
        for output in packed:
            output.write(data, at)
            size, number = output.byte_size, output.datatype.number
            placed.append(Output(output.name, number, output.shape, at, size, output.sizes, None, output.shapes))
            at = arena.aligned(at + output.byte_size)
        return placed, one_shot


def _write_to_targets(output: _Packed | _Column, targets: Sequence[Target]) -> bool:
    """Whether the parts of all requests have been written. If not, the server says why, or does it itself."""
    parts = output.parts(len(targets))
    if parts is None:
        return False
    dtype = output.datatype.numpy
    for target, part in zip(targets, parts, strict=True):
        data = np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8).data
        if len(data) > target.byte_size:
            return False
        try:
            if not client_memory.write(target.file, target.position, data):
                return False
        except OSError:
            return False
    return True


class ArrayExecution:
    """Batches of an ArrayBackend."""

    def __init__(self, backend: ArrayBackend, signature: Signature, link: Link, byte_limit: int) -> None:
        self.backend = backend
        self._signature = signature
        self._link = link
        self._outputs = _Outputs(link, signature, byte_limit)
        self._may_keep = backend.keeps_inputs

    def execute(self, frame: Execute, data: memoryview, received_ns: int) -> None:
        """Runs a batch and sends its results, whatever happens; `data` holds the inputs."""
        signature = self._signature
        inputs_ns = computed_ns = 0
        outputs: list[Output] | None = None
        problem: Failure | None = None
        one_shot: OneShot | None = None
        given = data
        in_use: weakref.ref[Array] | None = None
        if self._may_keep and not frame.one_shot:
            extent = _extent(frame.inputs)
            if extent > _COPIED:
                data, in_use = _watched(data)
            else:
                data = memoryview(bytearray(data[:extent]))
        try:
            inputs = {tensor.name: self._input(tensor, data) for tensor in frame.inputs}
            rows = frame.rows
            shapes: dict[str, Sequence[Shape]] | None = None
            if signature.composition is not None:
                shapes = {tensor.name: _request_shapes(tensor, rows) for tensor in frame.inputs}
                inputs.update(signature.composition.batch_inputs(shapes))
            names = frame.outputs or signature.output_names
            inputs_ns = monotonic_ns()
            arrays = self.backend.run(inputs, names)
            computed_ns = monotonic_ns()
            self._outputs.begin()
            packed = [self._checked(name, arrays, rows, shapes) for name in names]
            outputs, one_shot = self._outputs.place_batch(frame, packed)
            # They may be arrays of the inputs, which this is not to keep.
            del inputs, arrays, packed
        except BaseException as error:
            if isinstance(error, InvalidArgument) and len(frame.rows) > 1:
                self._execute_each(frame, given, received_ns)
                return
            outputs = None
            problem = failure(error)
        end_ns = monotonic_ns()
        inputs_ns = inputs_ns or end_ns
        times = (received_ns, inputs_ns, computed_ns or end_ns, end_ns)
        size = 0 if one_shot is None else len(one_shot.view)
        del data
        keeps_inputs = in_use is not None and in_use() is not None
        self._link.send(Results(frame.batch, outputs, None, problem, times, size, keeps_inputs), one_shot)

    def cancel(self, batch: int, index: int) -> None:
        """An ArrayBackend does not ask."""
        self._outputs.desert(batch)

    def close(self) -> None:
        self.backend.close()

    def _execute_each(self, frame: Execute, data: memoryview, received_ns: int) -> None:
        """Runs the requests of a batch that the backend has refused one by one: only who is at fault shall fail."""
        inputs_ns = monotonic_ns()
        columns = {tensor.name: _split(tensor, frame.rows, data, copy=False) for tensor in frame.inputs}
        responses: list[Response] = []
        self._outputs.begin()
        for index, row_count in enumerate(frame.rows):
            try:
                response, one_shot = self._execute_one(frame, index, row_count, columns)
            except BaseException as error:
                responses.append(Response(index, None, {}, failure(error), True))
                continue
            if one_shot is None:
                responses.append(response)
            else:
                self._link.send(Results(frame.batch, None, [response], None, None, len(one_shot.view)), one_shot)
        end_ns = monotonic_ns()
        times = (received_ns, inputs_ns, end_ns, end_ns)
        keeps_inputs = self._may_keep and not frame.one_shot
        self._link.send(Results(frame.batch, None, responses, None, times, 0, keeps_inputs), None)

    def _execute_one(
        self, frame: Execute, index: int, row_count: int, columns: Mapping[str, Sequence[Array | None]]
    ) -> tuple[Response, OneShot | None]:
        signature, composition = self._signature, self._signature.composition
        arrays = {name: column[index] for name, column in columns.items()}
        given = {name: array for name, array in arrays.items() if array is not None}
        inputs = {name: self._framework_input(name, array) for name, array in given.items()}
        shapes: dict[str, Sequence[Shape]] | None = None
        if composition is not None:
            shapes = {name: [array.shape] for name, array in given.items()}
            inputs.update(composition.batch_inputs(shapes))
        names = frame.outputs or signature.output_names
        results = self.backend.run(inputs, names)
        packed = [self._checked(name, results, [row_count], shapes) for name in names]
        outputs, one_shot = self._outputs.place(packed, in_arena=True)
        return Response(index, outputs, {}, None, True), one_shot

    def _input(self, tensor: Input, data: memoryview) -> Array:
        if tensor.shapes is not None:
            count = sum(prod(shape) for shape in tensor.shapes if shape is not None)
            return _array(tensor.datatype, (count,), data, tensor.offset, tensor.byte_size)
        return self._framework_input(
            tensor.name, _array(tensor.datatype, tensor.shape, data, tensor.offset, tensor.byte_size)
        )

    def _framework_input(self, name: str, array: Array) -> Array:
        """An array of the configured shape as the backend wants to see it."""
        signature = self._signature
        if signature.composition is not None and name in signature.composition.ragged:
            return array.reshape(-1)
        spec = signature.reshaped_inputs.get(name)
        return array if spec is None else _reshape_input(array, spec, signature.batching)

    def _checked(
        self, name: str, arrays: Any, rows: Sequence[int], shapes: Mapping[str, Sequence[Shape]] | None
    ) -> _Packed:
        """The output `name` of what `run` returned. Raises Internal where it is not what the configuration says.

        `shapes` are those of the inputs, request by request, where somebody asks.
        """
        signature = self._signature
        spec = signature.outputs[name]
        try:
            array = arrays[name]
        except (KeyError, TypeError):
            got = sorted(map(str, arrays)) if isinstance(arrays, Mapping) else type(arrays).__name__
            raise Internal(f"model '{signature.model}' returned no output '{name}', got {got}") from None
        if not isinstance(array, np.ndarray):
            raise Internal(
                f"model '{signature.model}' returned a {type(array).__name__} as output '{name}', "
                "expected a numpy array"
            )
        datatype = spec.datatype
        if array.dtype != datatype.numpy and datatypes.from_numpy(array.dtype) is not datatype:
            returned = datatypes.from_numpy(array.dtype)
            raise Internal(
                f"model '{signature.model}' returned data type {returned.name if returned else array.dtype} for output "
                f"'{name}', expected {datatype.name} as configured"
            )
        if shapes is not None and signature.composition is not None:
            scattered = signature.composition.output_shapes(name, shapes)
            if scattered is not None:
                return self._scattered(name, datatype, array, scattered)
        row_count = rows[0] if len(rows) == 1 else sum(rows)
        # Who asks gets the shape that there is, as from Triton; it must be cut into rows, or fit the reshape.
        if spec.reshape is not None and array.ndim != len(spec.reshape) + signature.batching:
            wanted = ([-1] if signature.batching else []) + list(spec.reshape)
            raise Internal(
                f"model '{signature.model}' returned shape {list(array.shape)} for output '{name}', "
                f"expected {len(wanted)} dimensions: {wanted}"
            )
        if signature.batching and (array.ndim == 0 or array.shape[0] != row_count):
            raise Internal(
                f"model '{signature.model}' returned shape {list(array.shape)} for output '{name}' of a batch of "
                f"{row_count}, expected {row_count} as its first dimension"
            )
        if spec.reshape is not None:
            array = array.reshape(_reshaped(array.shape, signature.batching, spec.reshape, spec.dims))
        return _Packed(name, datatype, array, rows if signature.batching else None)

    def _scattered(self, name: str, datatype: DataType, array: Array, shapes: list[Shape]) -> _Packed:
        """An output whose elements are those of the requests, one behind the other, whatever its own shape is."""
        counts = [prod(shape) for shape in shapes]
        if array.size != sum(counts):
            raise Internal(
                f"model '{self._signature.model}' returned {array.size} elements for output '{name}', expected "
                f"{sum(counts)}: those of the shapes {', '.join(str(list(shape)) for shape in shapes)}"
            )
        if len(shapes) == 1:
            return _Packed(name, datatype, array.reshape(shapes[0]), None)
        packed = _Packed(name, datatype, array.reshape(-1), counts)
        packed.shapes = shapes
        packed.sizes = packed.sizes or [count * datatype.byte_size for count in counts]
        return packed


def _request_shapes(tensor: Input, rows: Sequence[int]) -> list[Shape]:
    """The shapes of an input's rows in each request."""
    if tensor.shapes is None:
        if len(rows) == 1:
            return [tensor.shape]
        rest = tensor.shape[1:]
        return [(count, *rest) for count in rows]
    return [(0,) if shape is None else shape for shape in tensor.shapes]


def _watched(data: memoryview) -> tuple[memoryview, "weakref.ref[Array]"]:
    """The same memory through an array of its own, which lives as long as an array of it that model code keeps."""
    whole = np.frombuffer(data, np.uint8)
    return whole.data, weakref.ref(whole)


def _extent(inputs: Sequence[Input]) -> int:
    """How much of the arena the inputs take."""
    return inputs[-1].offset + inputs[-1].byte_size if inputs else 0


def _split(tensor: Input, rows: Sequence[int], data: memoryview, copy: bool) -> list[Array | None]:
    """The arrays of each request, None for one without this input; `copy` where `data` is used again too early."""
    offset = tensor.offset
    if copy and tensor.datatype != _BYTES:
        # Of the whole column: many small copies would take longer.
        data = memoryview(bytearray(data[offset : offset + tensor.byte_size]))
        offset = 0
    split: list[Array | None] = []
    if tensor.shapes is None:
        array = _array(tensor.datatype, tensor.shape, data, offset, tensor.byte_size)
        if len(rows) == 1:
            return [array]
        start = 0
        for count in rows:
            split.append(array[start : start + count])
            start += count
        return split
    assert tensor.sizes is not None
    for shape, size in zip(tensor.shapes, tensor.sizes, strict=True):
        split.append(None if shape is None else _array(tensor.datatype, shape, data, offset, size))
        offset += size
    return split


def _reshape_input(array: Array, spec: TensorSpec, batching: bool) -> Array:
    assert spec.reshape is not None
    return array.reshape(_reshaped(array.shape, batching, spec.dims, spec.reshape))


_parameters_decoder: Final = msgspec.msgpack.Decoder(dict[str, ParameterValue])


def _parameters(parameters: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Parameters of a response, known to be fit to travel. Raises what the encoding raises."""
    return _parameters_decoder.decode(msgspec.msgpack.encode(dict(parameters))) if parameters else {}


_NO_DETAILS: Final = Details("", (), {}, 0, 0, 0, 0)


class HostRequest:
    """A `BackendRequest`: one request of a batch of a RequestBackend."""

    __slots__ = (
        "_batch",
        "_cancelled",
        "_execution",
        "_held",
        "_index",
        "answered",
        "correlation_id",
        "flags",
        "id",
        "inputs",
        "outputs",
        "parameters",
        "priority",
        "timeout_us",
        "trace",
        "trace_context",
    )

    def __init__(
        self,
        execution: "RequestExecution",
        batch: int,
        index: int,
        inputs: Mapping[str, Array],
        details: Details,
        outputs: Sequence[str],
    ) -> None:
        self.id = details.id
        self.inputs = inputs
        self.outputs: Sequence[str] = details.outputs or outputs
        self.parameters: Mapping[str, ParameterValue] = details.parameters
        self.correlation_id = details.correlation_id
        self.flags = details.flags
        self.priority = details.priority
        self.timeout_us = details.timeout_us
        self.trace = details.trace
        self.trace_context = details.trace_context
        self.answered = False
        self._execution = execution
        self._batch = batch
        self._index = index
        self._cancelled = False
        self._held: BackendResponse | NaiadError | None = None

    def send(self, result: BackendResponse | NaiadError | None, final: bool) -> None:
        """See `BackendRequest.send`."""
        self._execution.answer(self, result, final)

    def reschedule(self) -> None:
        """See `BackendRequest.reschedule`."""
        self._execution.reschedule(self)

    def is_cancelled(self) -> bool:
        return self._cancelled


class RequestExecution:
    """Batches of a RequestBackend."""

    def __init__(self, backend: RequestBackend, signature: Signature, link: Link, byte_limit: int) -> None:
        self.backend = backend
        self._signature = signature
        self._link = link
        self._outputs = _Outputs(link, signature, byte_limit)
        self._lock = threading.Lock()
        self._executing = 0
        self._collected: list[Response] = []
        self._open: dict[int, list[HostRequest]] = {}
        #: The newest batch that has begun, and the requests of later ones whose clients have left already.
        self._begun = 0
        self._left: list[tuple[int, int]] = []

    def execute(self, frame: Execute, data: memoryview, received_ns: int) -> None:
        """Runs a batch and sends what is answered until it returns, whatever happens."""
        inputs_ns = computed_ns = 0
        problem: Failure | None = None
        columns: list[Output] | None = None
        one_shot: OneShot | None = None
        requests: list[HostRequest] = []
        in_use: weakref.ref[Array] | None = None
        if not frame.one_shot and _extent(frame.inputs) > _COPIED:
            data, in_use = _watched(data)
        self._outputs.begin()
        self._executing = frame.batch
        try:
            requests = self._requests(frame, data, not frame.one_shot and in_use is None)
            self._open[frame.batch] = requests
            self._begun = frame.batch
            if self._left:
                self._cancel_left(requests)
            inputs_ns = monotonic_ns()
            results = self.backend.execute(requests)
            computed_ns = monotonic_ns()
            if results is not None:
                columns, one_shot = self._answer_all(frame, requests, results)
                # They may be arrays of the inputs, which this is not to keep.
                del results
        except BaseException as error:
            problem = failure(error)
        computed_ns = computed_ns or monotonic_ns()
        with self._lock:
            self._executing = 0
            collected, self._collected = self._collected, []
            if problem is not None or not self._signature.decoupled:
                unanswered = [request for request in requests if not request.answered]
                for request in unanswered:
                    request.answered = True
                    request.inputs = {}
                if problem is None and unanswered:
                    problem = Failure(
                        "Internal",
                        f"model '{self._signature.model}' did not answer {len(unanswered)} of the {len(requests)} "
                        "requests of a batch",
                    )
                self._open.pop(frame.batch, None)
            del data
            keeps_inputs = in_use is not None and in_use() is not None
            times = (received_ns, inputs_ns or computed_ns, computed_ns, monotonic_ns())
            size = 0 if one_shot is None else len(one_shot.view)
            self._link.send(Results(frame.batch, columns, collected, problem, times, size, keeps_inputs), one_shot)

    def _answer_all(
        self, frame: Execute, requests: Sequence[HostRequest], results: Sequence[BackendResponse | NaiadError]
    ) -> tuple[list[Output] | None, OneShot | None]:
        """Answers all requests with what their model has returned: in columns if it can be, which are the result."""
        if len(results) != len(requests):
            raise Internal(
                f"model '{self._signature.model}' returned {len(results)} answers to a batch of {len(requests)} requests"
            )
        columns = None if self._signature.decoupled else self._columns(frame, results)
        if columns is not None:
            placed = self._outputs.place_batch(frame, columns)
            for request in requests:
                request.answered = True
                # The arrays need not live as long as the model keeps the request.
                request.inputs = {}
            return placed
        for request, result in zip(requests, results, strict=True):
            try:
                self.answer(request, result, True)
            except NaiadError as error:
                self.answer(request, error, True)
        return None, None

    def _columns(self, frame: Execute, results: Sequence[BackendResponse | NaiadError]) -> list[_Column] | None:
        """The outputs as columns, where each request has got its rows of the same outputs and nothing else."""
        first = results[0]
        if not isinstance(first, BackendResponse) or not first.outputs:
            return None
        rows, names = frame.rows, list(first.outputs)
        for result in results:
            if not isinstance(result, BackendResponse) or result.parameters or list(result.outputs) != names:
                return None
        columns: list[_Column] = []
        byte_size = 0
        for name, head in first.outputs.items():
            spec = self._signature.outputs.get(name)
            if spec is None or spec.reshape is not None or not isinstance(head, np.ndarray) or not head.ndim:
                return None
            dtype, shape = head.dtype, head.shape
            datatype = datatypes.from_numpy(dtype)
            if datatype is None or datatype is DataType.BYTES:
                return None
            arrays: list[Array] = [head]
            if len(results) > 1:
                if shape[0] != rows[0]:
                    return None
                rest = shape[1:]
                # The errors have been sorted out.
                arrays = [result.outputs[name] for result in results]  # type: ignore[union-attr]
                for array, row_count in zip(arrays, rows, strict=True):
                    if not isinstance(array, np.ndarray):
                        return None
                    if array.dtype is not dtype and array.dtype != dtype:
                        return None
                    if array.shape != (shape if row_count == rows[0] else (row_count, *rest)):
                        return None
                shape = (sum(rows), *rest)
            column = _Column(name, datatype, shape, arrays)
            byte_size += arena.aligned(column.byte_size)
            columns.append(column)
        # What the arena does not hold goes in parts, unless it may go elsewhere.
        return columns if frame.targets is not None or byte_size <= len(self._link.outputs) else None

    def cancel(self, batch: int, index: int) -> None:
        """From the control thread, which may hear of it before the instance's thread has the batch."""
        self._outputs.desert(batch)
        requests = self._open.get(batch)
        if requests is None and batch > self._begun:
            self._left.append((batch, index))
            # It may have begun meanwhile, without having seen that.
            requests = self._open.get(batch)
        if requests is not None and index < len(requests):
            requests[index]._cancelled = True

    def _cancel_left(self, requests: Sequence[HostRequest]) -> None:
        left, self._left = self._left, []
        for batch, index in left:
            if batch == self._begun and index < len(requests):
                requests[index]._cancelled = True

    def close(self) -> None:
        self.backend.close()

    def answer(self, request: HostRequest, result: BackendResponse | NaiadError | None, final: bool) -> None:
        """`HostRequest.send`."""
        with self._lock:
            if request.answered:
                raise Internal(f"model '{self._signature.model}' sent a response after the final one of a request")
            if not self._signature.decoupled:
                # An ordinary request has one response: a result that is not final waits for its ending.
                if result is not None and request._held is not None:
                    raise Internal(
                        f"model '{self._signature.model}' sent more than one response to a request; only models with "
                        "a decoupled transaction policy may"
                    )
                if not final:
                    request._held = result
                    return
                result = request._held if result is None else result
                request._held = None
                if result is None:
                    raise Internal(f"model '{self._signature.model}' sent no response to a request before its end")
            in_time = self._executing == request._batch
            response, one_shot = self._response(request, result, final, in_time)
            if final:
                request.answered = True
                # The arrays need not live as long as the model keeps the request.
                request.inputs = {}
            if one_shot is None and in_time and not self._signature.decoupled:
                self._collected.append(response)
                return
            size = 0 if one_shot is None else len(one_shot.view)
            self._link.send(Results(request._batch, None, [response], None, None, size), one_shot)
            if final:
                self._forget_answered(request._batch)

    def reschedule(self, request: HostRequest) -> None:
        """`HostRequest.reschedule`."""
        with self._lock:
            if request.answered or request._held is not None or not self._signature.iterative:
                raise Internal(
                    f"model '{self._signature.model}' reschedules a request that "
                    + ("it has answered" if self._signature.iterative else "is no iterative sequence")
                )
            request.answered = True
            request.inputs = {}
            response = Response(request._index, None, {}, None, True, again=True)
            if self._executing == request._batch and not self._signature.decoupled:
                self._collected.append(response)
            else:
                self._link.send(Results(request._batch, None, [response], None, None, 0), None)
                self._forget_answered(request._batch)

    def _forget_answered(self, batch: int) -> None:
        """Forgets a batch of a decoupled model when its last request has been answered."""
        requests = self._open.get(batch)
        if self._signature.decoupled and requests is not None and all(other.answered for other in requests):
            self._open.pop(batch, None)

    def _response(
        self, request: HostRequest, result: BackendResponse | NaiadError | None, final: bool, in_time: bool
    ) -> tuple[Response, OneShot | None]:
        index = request._index
        if result is None:
            return Response(index, None, {}, None, final), None
        if isinstance(result, NaiadError):
            return Response(index, None, {}, failure(result), final), None
        try:
            outputs, one_shot = self._placed(request, result, in_time)
            return Response(index, outputs, _parameters(result.parameters), None, final), one_shot
        except NaiadError:
            raise
        except Exception as error:
            # Elements whose str() fails, text that is no Unicode, no memory.
            raise Internal(f"model '{self._signature.model}': a response cannot be sent: {text_of(error)}") from error

    def _placed(
        self, request: HostRequest, result: BackendResponse, in_time: bool
    ) -> tuple[list[Output], OneShot | None]:
        packed = []
        batching = self._signature.batching
        for name, array in result.outputs.items():
            if name not in request.outputs:
                continue
            if not isinstance(array, np.ndarray):
                raise Internal(
                    f"model '{self._signature.model}' answered a {type(array).__name__} as output '{name}', "
                    "expected a numpy array"
                )
            datatype = datatypes.from_numpy(array.dtype)
            if datatype is None:
                raise Internal(
                    f"model '{self._signature.model}' answered an array of {array.dtype} as output '{name}', "
                    "which is no data type of the protocol"
                )
            spec = self._signature.outputs.get(name)
            if spec is not None and spec.reshape is not None and array.ndim == len(spec.reshape) + batching:
                array = array.reshape(_reshaped(array.shape, batching, spec.reshape, spec.dims))
            packed.append(_Packed(name, datatype, array, None))
        return self._outputs.place(packed, in_time)

    def _requests(self, frame: Execute, data: memoryview, copy: bool) -> list[HostRequest]:
        count = len(frame.rows)
        details = frame.details or [_NO_DETAILS] * count
        arrays: list[dict[str, Array]] = [{} for _ in range(count)]
        for tensor in frame.inputs:
            spec = self._signature.reshaped_inputs.get(tensor.name)
            for index, array in enumerate(_split(tensor, frame.rows, data, copy)):
                if array is not None:
                    if spec is not None:
                        array = _reshape_input(array, spec, self._signature.batching)
                    arrays[index][tensor.name] = array
        names = frame.outputs or self._signature.output_names
        return [HostRequest(self, frame.batch, i, arrays[i], details[i], names) for i in range(count)]


def execution(backend: object, signature: Signature, link: Link, byte_limit: int) -> ArrayExecution | RequestExecution:
    """The execution that fits the backend object."""
    if isinstance(backend, ArrayBackend):
        return ArrayExecution(backend, signature, link, byte_limit)
    assert isinstance(backend, RequestBackend), "a backend is an ArrayBackend or a RequestBackend"
    return RequestExecution(backend, signature, link, byte_limit)
