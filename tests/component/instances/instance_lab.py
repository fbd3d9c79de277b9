"""Hosts with real processes, and executions to give them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from naiad import datatypes
from naiad.backends.api import InstanceContext
from naiad.datatypes import DataType
from naiad.instances.hosts import ModelSpec
from naiad.messages import InferRequest, Tensor
from naiad.packed import pack_bytes, unpack_bytes

HERE = str(Path(__file__).parent)


def tensor(name, array, datatype=None):
    array = np.asarray(array)
    datatype = datatype or datatypes.from_numpy(array.dtype)
    is_bytes = datatype is DataType.BYTES
    data = pack_bytes(array.ravel().tolist()) if is_bytes else np.ascontiguousarray(array).tobytes()
    return Tensor(name, datatype, array.shape, data)


def array(tensor):
    if tensor.datatype is DataType.BYTES:
        return unpack_bytes(tensor.data, tensor.shape)
    return np.frombuffer(bytes(tensor.data), tensor.datatype.numpy).reshape(tensor.shape)


def request(*arrays, name="m", **fields):
    inputs = tuple(
        value if isinstance(value, Tensor) else tensor(f"INPUT{index}", value) for index, value in enumerate(arrays)
    )
    return InferRequest(model_name=name, inputs=inputs, **fields)


def config(datatype="FP32", dims=(-1,), count=1, max_batch_size=0, **more):
    kind = datatypes.BY_NAME[datatype].config_name
    return {
        "name": "m",
        "max_batch_size": max_batch_size,
        "input": [{"name": f"INPUT{i}", "data_type": kind, "dims": list(dims)} for i in range(count)],
        "output": [{"name": f"OUTPUT{i}", "data_type": kind, "dims": list(dims)} for i in range(count)],
        **more,
    }


def parameters(**values):
    return {"parameters": {key: {"string_value": value} for key, value in values.items()}}


class Batch:
    """An Execution that copies what it is given. `ended` resolves when all is answered and completed."""

    def __init__(self, *requests, rows=None):
        self.requests = requests
        self.rows = rows or [r.inputs[0].shape[0] if r.inputs else 1 for r in requests]
        self.results = [[] for _ in requests]
        self.finals = [0] * len(requests)
        self.completions = []
        self.changed = asyncio.Event()

    def deliver(self, index, result, final):
        assert not self.finals[index], "an answer after the final one"
        self.finals[index] += final
        if result is not None and hasattr(result, "outputs"):
            result = SimpleNamespace(
                outputs={t.name: array(t) for t in result.outputs}, parameters=result.parameters, id=result.id
            )
        self.results[index].append(result)
        self.changed.set()

    def complete(self, times, succeeded=True):
        self.completions.append(times)
        self.changed.set()

    async def ended(self):
        while not (all(self.finals) and self.completions):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 20)
        assert len(self.completions) == 1
        return self.results

    async def answered(self, index=0):
        while not self.results[index]:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 20)


async def run(instance, *requests, rows=None):
    batch = Batch(*requests, rows=rows)
    instance.execute(batch)
    return await batch.ended()


async def available(instance):
    """Waits until the instance takes a batch, or is given up."""
    changed = asyncio.Event()
    instance.on_change = changed.set
    while not instance.is_available and instance.failure is None:
        changed.clear()
        await asyncio.wait_for(changed.wait(), 20)


async def until(condition):
    """Waits for what the system does and tells nobody."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Lab:
    """A pool and shortcuts to load test backends in it."""

    def __init__(self, hosts, logs):
        self.hosts = hosts
        self.logs = logs

    async def open(self, backend, name="m", reference=None, **parameters):
        return await self.hosts.open(
            ModelSpec(
                name=name,
                version=1,
                backend="test",
                reference=reference or f"backends_for_tests:{backend}",
                directory=Path("/models/m"),
                version_directory=Path("/models/m/1"),
                path=Path("/models/m/1/model.test"),
                settings={"key": "value"},
                parameters=parameters,
            )
        )

    async def load(self, backend, configuration, instances=1, name="m", **parameters):
        model = await self.open(backend, name, **parameters)
        contexts = [InstanceContext(f"{name}_0_{number}", "KIND_CPU") for number in range(instances)]
        await model.load(configuration, contexts)
        return model
