"""How a batch lies in an arena, and how batched outputs become those of single requests. Pure; in the server."""

from collections.abc import Sequence
from math import prod
from typing import TypeVar, cast

from naiad.datatypes import BY_NUMBER, Buffer
from naiad.errors import Internal, ResourceExhausted
from naiad.instances import arena
from naiad.instances.frames import Details, Input, Output, Source, Target
from naiad.messages import UNREAD_FROM, InferRequest, ParameterValue, Tensor, Unread

_Value = TypeVar("_Value", bound=ParameterValue)


class Files:
    """Memory of clients that a host is to read or write, each file once, and the inputs that it reads."""

    __slots__ = ("descriptors", "unread")

    def __init__(self) -> None:
        #: In the order of their numbers, which are the values.
        self.descriptors: dict[int, int] = {}
        self.unread: list[Unread] = []

    def number(self, fd: int) -> int:
        return self.descriptors.setdefault(fd, len(self.descriptors))

    def source(self, part: Unread, offset: int) -> Source:
        self.unread.append(part)
        return Source(offset, self.number(part.fd), part.position, len(part))


class Layout:
    """The inputs of a batch and the buffers of each, one behind the other from its offset on."""

    __slots__ = ("byte_size", "columns", "inputs")

    def __init__(self, inputs: list[Input], columns: list[list[Buffer | Unread]], byte_size: int) -> None:
        self.inputs = inputs
        self.columns = columns
        self.byte_size = byte_size

    def too_large(self, model: str, limit: int) -> ResourceExhausted:
        """The error of a batch that takes more than `limit` bytes."""
        largest = max(self.inputs, key=lambda tensor: tensor.byte_size)
        return ResourceExhausted(
            f"model '{model}': the inputs of one execution take {self.byte_size} bytes, of which '{largest.name}' "
            f"{largest.byte_size} bytes; the limit is {limit} bytes"
        )

    def write(self, view: memoryview, files: Files | None = None) -> list[Source]:
        """Copies the buffers, but for those in files of clients where `files` are given, which are the result."""
        sources: list[Source] = []
        for tensor, parts in zip(self.inputs, self.columns, strict=True):
            at = tensor.offset
            if len(parts) > 1 and tensor.byte_size < UNREAD_FROM:
                # One copy of all is faster than many small ones.
                view[at : at + tensor.byte_size] = b"".join(cast(list[Buffer], parts))
                continue
            for part in parts:
                end = at + len(part)
                if not isinstance(part, Unread):
                    view[at:end] = part
                elif files is None or part.fd < 0:
                    part.read_into_batch(view[at:end])
                else:
                    sources.append(files.source(part, at))
                at = end
        return sources

    def write_file(self, fd: int) -> None:
        """Blocks as long as copying takes; for a thread where that is long."""
        for tensor, parts in zip(self.inputs, self.columns, strict=True):
            arena.write(fd, tensor.offset, [part.for_batch() if isinstance(part, Unread) else part for part in parts])


def lay_out(requests: Sequence[InferRequest]) -> Layout:
    """Rows behind rows, input by input, each input aligned. Requests may name their inputs in any order."""
    inputs: list[Input] = []
    columns: list[list[Buffer | Unread]] = []
    first = requests[0].inputs
    at = 0
    if len(requests) == 1:
        for tensor in first:
            size = len(tensor.contents)
            inputs.append(Input(tensor.name, tensor.datatype.number, tensor.shape, at, size, None, None))
            columns.append([tensor.contents])
            at = (at + size + 63) & -64
        return Layout(inputs, columns, at)
    for tensors in _columns(requests):
        tensor = next(t for t in tensors if t is not None)
        shape, rest = tensor.shape, tensor.shape[1:]
        parts: list[Buffer | Unread] = []
        rows = 0
        for t in tensors:
            # Most shapes of a batch are equal: that is the cheaper question.
            if t is None or (t.shape != shape and t.shape[1:] != rest):
                rows = -1
                break
            rows += t.shape[0]
            parts.append(t.contents)
        sizes: list[int] | None = None
        shapes: list[tuple[int, ...] | None] | None = None
        if rows < 0:
            parts = [t.contents for t in tensors if t is not None]
            shapes = [None if t is None else t.shape for t in tensors]
            sizes = [0 if t is None else len(t.contents) for t in tensors]
        else:
            shape = (rows, *rest)
        size = sum(map(len, parts))
        inputs.append(Input(tensor.name, tensor.datatype.number, shape, at, size, sizes, shapes))
        columns.append(parts)
        at = (at + size + 63) & -64
    return Layout(inputs, columns, at)


def _columns(requests: Sequence[InferRequest]) -> Sequence[Sequence[Tensor | None]]:
    """The tensors of each input, in the order of the requests, None where a request lacks it."""
    inputs = [request.inputs for request in requests]
    if len({len(tensors) for tensors in inputs}) == 1:
        columns = list(zip(*inputs, strict=True))
        if all(len({tensor.name for tensor in column}) == 1 for column in columns):
            return columns
    names = {tensor.name: None for request in requests for tensor in request.inputs}
    by_name = [{tensor.name: tensor for tensor in request.inputs} for request in requests]
    return [[tensors.get(name) for tensors in by_name] for name in names]


def asked_outputs(requests: Sequence[InferRequest]) -> tuple[str, ...]:
    """The names of all outputs anybody asked for; empty for all."""
    first = requests[0].outputs
    for request in requests:
        if request.outputs is not first and request.outputs != first:
            break
    else:
        return first
    names: dict[str, None] = {}
    for request in requests:
        if not request.outputs:
            return ()
        names.update(dict.fromkeys(request.outputs))
    return tuple(names)


def details(requests: Sequence[InferRequest], asked: tuple[str, ...]) -> list[Details] | None:
    """What the requests carry besides tensors; None where it is nothing, but that all ask for the outputs `asked`."""
    for r in requests:
        if (
            r.id
            or (r.outputs is not asked and r.outputs != asked)
            or r.parameters
            or r.sequence is not None
            or r.priority
            or r.timeout_us
            or (r.trace is not None and r.trace.id)
        ):
            return [_details(request) for request in requests]
    return None


def _details(request: InferRequest) -> Details:
    sequence = request.sequence
    trace = request.trace
    return Details(
        _utf8(request.id),
        request.outputs,
        {_utf8(key): _utf8(value) for key, value in request.parameters.items()} if request.parameters else {},
        0 if sequence is None else _utf8(sequence.correlation_id),
        0 if sequence is None else sequence.start | sequence.end << 1,
        request.priority,
        request.timeout_us,
        0 if trace is None else trace.id,
        None if trace is None else trace.context,
    )


def _utf8(value: _Value) -> _Value:
    """A value as model code can have it: JSON of clients may bring texts that are not UTF-8."""
    if isinstance(value, str) and not value.isascii():
        return value.encode(errors="surrogateescape").decode(errors="replace")  # type: ignore[return-value]
    return value


def targets(requests: Sequence[InferRequest], files: Files) -> list[Target] | None:
    """Where outputs that all requests want in memory of their clients' go."""
    if requests[0].destinations is None:
        return None
    wishes = [request.destinations or {} for request in requests]
    found: list[Target] = []
    for name in wishes[0]:
        if all(name in destinations for destinations in wishes):
            for index, destinations in enumerate(wishes):
                place = destinations[name]
                found.append(Target(name, index, files.number(place.fd), place.position, place.byte_size))
    return found or None


def tensor(output: Output, region: memoryview) -> Tensor:
    """An output as it is. Raises Internal where it lies outside of its memory."""
    return Tensor(output.name, BY_NUMBER[output.datatype], output.shape, _data(output, region))


def _data(output: Output, region: memoryview) -> Buffer:
    if output.data is not None:
        return output.data
    data = region[output.offset : output.offset + output.byte_size]
    if len(data) != output.byte_size:
        raise Internal(f"output '{output.name}' lies outside of the memory its host has sent")
    return data


def split(
    outputs: Sequence[Output], rows: Sequence[int], region: memoryview, requests: Sequence[InferRequest]
) -> list[tuple[Tensor, ...]]:
    """Batched outputs as those of each request, by its rows; views of `region`, or written to its destinations."""
    if len(rows) == 1:
        return [
            tuple([_written(o, rows, requests)[0] if o.is_written else tensor(o, region) for o in outputs]),
        ]
    columns: list[list[Tensor]] = []
    row_count = sum(rows)
    for output in outputs:
        if output.is_written:
            columns.append(_written(output, rows, requests))
            continue
        datatype = BY_NUMBER[output.datatype]
        name, rest = output.name, output.shape[1:]
        data = memoryview(_data(output, region))
        column: list[Tensor] = []
        at = 0
        if output.shapes is not None:
            assert output.sizes is not None, "this is a bug: an output in parts of unknown size"
            for part, size in zip(output.shapes, output.sizes, strict=True):
                column.append(Tensor(name, datatype, part, data[at : at + size]))
                at += size
        elif output.sizes is not None:
            for count, size in zip(rows, output.sizes, strict=True):
                column.append(Tensor(name, datatype, (count, *rest), data[at : at + size]))
                at += size
        else:
            row_size = output.byte_size // row_count
            shape = (1, *rest)
            for count in rows:
                if count != shape[0]:
                    shape = (count, *rest)
                end = at + count * row_size
                column.append(Tensor(name, datatype, shape, data[at:end]))
                at = end
        columns.append(column)
    if not columns:
        return [()] * len(rows)
    return list(zip(*columns, strict=True))


def _written(output: Output, rows: Sequence[int], requests: Sequence[InferRequest]) -> list[Tensor]:
    """The parts of an output that its host has written to the requests' destinations."""
    datatype = BY_NUMBER[output.datatype]
    written: list[Tensor] = []
    for count, request in zip(rows, requests, strict=True):
        if request.destinations is None:
            raise Internal(f"output '{output.name}' was written where nobody wants it")
        shape = output.shape if len(rows) == 1 else (count, *output.shape[1:])
        place = request.destinations[output.name]
        written.append(Tensor(output.name, datatype, shape, place.written(prod(shape) * datatype.byte_size)))
    return written
