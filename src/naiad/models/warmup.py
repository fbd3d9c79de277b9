"""Warm-up: runs the samples of `model_warmup` on every instance before a version turns READY. On the event loop.

A sample is a batch of `batch_size` requests of one row. It goes past the scheduler, straight to the instance; statistics
count it, as Triton's do. For a model with the sequence batcher each of its requests is a sequence of its own, start and end at once,
and gets the control inputs and states that the sample does not give itself. What a model answers is thrown away; an
error fails the load.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from naiad.config.model_config import ModelConfig, WarmupInput, WarmupSample
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError
from naiad.instances.instance import ComputeTimes, Instance
from naiad.messages import InferRequest, Result, SequenceControl, Tensor
from naiad.models.check import RequestCheck
from naiad.scheduling.controls import Controls, elements
from naiad.scheduling.queue import Queued
from naiad.scheduling.states import States, read_initial_states
from naiad.scheduling.turns import count_execution
from naiad.statistics import ModelStatistics
from naiad.telemetry.log import Log

_RANDOM_SEED = 0
#: How texts begin that name a request without an id.
_LABEL = InferRequest("", ()).label


async def warm_up(
    config: ModelConfig,
    version: int,
    directory: Path,
    instances: Sequence[Instance],
    statistics: ModelStatistics,
    log: Log,
) -> None:
    """Runs all samples, instance beside instance. Raises the error of the first sample that is wrong or fails."""
    if not config.warmup:
        return
    name = instances[0].name if instances else ""
    batches = await asyncio.to_thread(lambda: list(samples_of(config, version, directory, name)))
    outcomes = await asyncio.gather(
        *(_run_all(config.name, batches, instance, statistics, log) for instance in instances), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def samples_of(
    config: ModelConfig, version: int, directory: Path, instance: str = ""
) -> Iterator[tuple[WarmupSample, list[InferRequest]]]:
    """Each sample with its requests; inputs that the model does not have are left out. Raises InvalidArgument or
    Internal, with Triton's texts, which name an instance, where one does not fit the model or its file cannot be read.
    Reads files and makes data: for a thread."""
    check = RequestCheck(config)
    for sample in config.warmup:
        if not sample.batch_size:
            continue
        if sample.batch_size > max(1, config.max_batch_size):
            # Once for each request.
            too_many = (
                f"batch size {sample.batch_size} for '{instance}', max allowed is {max(1, config.max_batch_size)}; "
            )
            raise InvalidArgument(f"failed to run warmup sample '{sample.name}': {too_many * sample.batch_size}")
        tensors = {item.name: _tensor(item, directory, config.batching) for item in sample.inputs}
        extra = _sequence_inputs(config, directory) if config.scheduling == "sequence" else {}
        inputs = tuple([tensor for name, tensor in tensors.items() if name in config.inputs])
        request, _, _ = check(InferRequest(config.name, inputs, version), in_thread=True)
        extra.update((name, tensor) for name, tensor in tensors.items() if name in extra)
        requests = [
            InferRequest(
                config.name,
                request.inputs + tuple(extra.values()),
                version,
                sequence=SequenceControl(number + 1, True, True) if config.scheduling == "sequence" else None,
            )
            for number in range(sample.batch_size)
        ]
        yield sample, requests


def _sequence_inputs(config: ModelConfig, directory: Path) -> dict[str, Tensor]:
    """Control inputs of a sequence of one request, and the initial state, by name."""
    tensors = Controls(config).ready(1, True, True) + States(config, read_initial_states(directory, config)).initial
    return {tensor.name: tensor for tensor in tensors}


def _tensor(item: WarmupInput, directory: Path, batching: bool) -> Tensor:
    shape = (1, *item.dims) if batching else item.dims
    return Tensor(item.name, item.datatype, shape, _data(item, directory))


def _data(item: WarmupInput, directory: Path) -> bytes:
    count = elements(item.dims)
    if item.data == "file":
        path = directory / "warmup" / item.data_file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Internal(f"failed to open text file for read {path}: {error.strerror}") from None
        if item.datatype is DataType.BYTES:
            return data
        size = count * item.datatype.byte_size
        if len(data) < size:
            raise InvalidArgument(
                f"{_LABEL}warmup setting expects {size} bytes, but the data provided from {item.data_file}only "
                f"has {len(data)} bytes"
            )
        return data[:size]
    if item.datatype is DataType.BYTES:
        # Random text is no text: Triton takes empty strings for both.
        return bytes(4 * count)
    if item.data == "random":
        return _random(item.datatype, count)
    return bytes(count * item.datatype.byte_size)


def _random(datatype: DataType, count: int) -> bytes:
    """The same values at every load: floats from 0 to 1, integers of the whole range."""
    generator = np.random.default_rng(_RANDOM_SEED)
    if datatype is DataType.BOOL:
        return generator.integers(0, 2, count, dtype=np.uint8).tobytes()
    if datatype.name.startswith(("INT", "UINT")):
        return generator.bytes(count * datatype.byte_size)
    return generator.random(count).astype(datatype.numpy).tobytes()


async def _run_all(
    model: str,
    batches: list[tuple[WarmupSample, list[InferRequest]]],
    instance: Instance,
    statistics: ModelStatistics,
    log: Log,
) -> None:
    for sample, requests in batches:
        for iteration in range(1, sample.count + 1):
            log.verbose(
                f"model '{model}' instance {instance.name} is running warmup sample '{sample.name}' "
                f"for iteration {iteration}"
            )
            try:
                await _Run(instance, requests, statistics).ended
            except NaiadError as error:
                # With the semicolon, which Triton puts behind each failure.
                raise InvalidArgument(f"failed to run warmup sample '{sample.name}': {error.message}; ") from error


class _Run:
    """One batch of a sample; an `Execution`. `ended` resolves when all is answered, with the first error."""

    def __init__(self, instance: Instance, requests: Sequence[InferRequest], statistics: ModelStatistics) -> None:
        self.requests = requests
        self._statistics = statistics
        self._began_ns = time.monotonic_ns()
        self.rows: Sequence[int] = [1] * len(requests)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered = len(requests)
        self._executing = True
        self._error: NaiadError | None = None
        if not instance.is_available:
            raise Internal(f"instance '{instance.name}' is not available")
        instance.execute(self)

    def deliver(self, index: int, result: Result | None, final: bool) -> None:
        if isinstance(result, NaiadError) and self._error is None:
            self._error = result
        if final:
            self._unanswered -= 1
            self._end()

    def extend(self) -> None:
        pass

    def reschedule(self, index: int) -> None:
        # Once is warm enough.
        self._unanswered -= 1
        self._end()

    def complete(self, times: ComputeTimes | None, succeeded: bool = True) -> None:
        self._executing = False
        if times is not None:
            queued = [Queued(request, 1, None, self._began_ns) for request in self.requests]
            count_execution(self._statistics, queued, len(queued), times, succeeded)
        self._end()

    def _end(self) -> None:
        if self._unanswered or self._executing or self.ended.done():
            return
        if self._error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._error)
