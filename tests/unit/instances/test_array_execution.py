"""Batches of backends that map arrays to arrays: what becomes of their inputs, and of their outputs' shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from naiad.backends.api import Array, ArrayBackend
from naiad.datatypes import DataType
from naiad.errors import InvalidArgument
from naiad.instances import execution as executions
from naiad.instances.channel import encode
from naiad.instances.execution import ArrayExecution, OneShot, Signature
from naiad.instances.frames import Execute, Input, Results

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
SMALL = 4
LARGE = executions._COPIED // 4 + 1


class Model(ArrayBackend):
    def __init__(self, act: Run, keeps_inputs: bool) -> None:
        self.act = act
        self.keeps_inputs = keeps_inputs

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return self.act(inputs)


class Link:
    def __init__(self) -> None:
        self.outputs = memoryview(bytearray(4 * executions._COPIED))
        self.sent: list[Results] = []

    def send(self, results: Results, one_shot: OneShot | None) -> None:
        self.sent.append(msgspec.msgpack.decode(encode(results)[8:], type=Results))

    def one_shot(self, byte_size: int) -> OneShot:
        return OneShot(memoryview(bytearray(byte_size)), None)


class Host:
    """One instance, and the arena that holds its inputs."""

    def __init__(self, act: Run, *, keeps_inputs: bool = True, max_batch_size: int = 8, **output: Any) -> None:
        config = {
            "max_batch_size": max_batch_size,
            "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [{"name": "O", "data_type": "TYPE_FP32", "dims": [-1], **output}],
        }
        self.arena = memoryview(bytearray(4 * executions._COPIED))
        self.link = Link()
        self._execution = ArrayExecution(Model(act, keeps_inputs), Signature("m", "m_0", config), self.link, 1 << 30)

    def execute(self, *shape: int, value: float, rows: Sequence[int] = (1,)) -> Results:
        array = np.full(shape, value, np.float32)
        self.arena[: array.nbytes] = array.reshape(-1).view(np.uint8).data
        inputs = [Input("I", DataType.FP32.number, shape, 0, array.nbytes, None, None)]
        self._execution.execute(Execute(1, inputs, list(rows), (), None, 0), self.arena, 0)
        return self.link.sent[-1]

    def values(self, results: Results) -> list[float]:
        assert results.outputs is not None, results.failure
        (output,) = results.outputs
        return np.frombuffer(self.link.outputs[output.offset : output.offset + output.byte_size], "f4").tolist()


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_what_a_model_keeps_of_its_inputs_stays_as_it_is_or_is_noticed(width: int) -> None:
    kept: list[Array] = []

    def keep(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        kept.append(inputs["I"][0, :2])
        return {"O": inputs["I"]}

    host = Host(keep)
    results = host.execute(1, width, value=1)
    assert host.values(results) == [1] * width
    # In an arena of which something is kept, the server writes nothing more.
    assert results.keeps_inputs == (width == LARGE)
    if not results.keeps_inputs:
        host.execute(1, width, value=2)
        assert [array.tolist() for array in kept] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("keeps_inputs", [True, False])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_inputs_that_are_returned_do_not_count_as_kept(width: int, keeps_inputs: bool) -> None:
    host = Host(lambda inputs: {"O": inputs["I"]}, keeps_inputs=keeps_inputs)
    results = host.execute(2, width, value=3, rows=(1, 1))
    assert host.values(results) == [3] * 2 * width
    assert not results.keeps_inputs


def test_requests_that_are_run_by_themselves_get_what_was_sent() -> None:
    def change(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        array = inputs["I"]
        array += 1
        if len(array) > 1:
            raise InvalidArgument("not together")
        return {"O": array}

    host = Host(change)
    results = host.execute(2, SMALL, value=1, rows=(1, 1))
    assert results.responses is not None
    for response in results.responses:
        assert response.outputs is not None
        (output,) = response.outputs
        data = host.link.outputs[output.offset : output.offset + output.byte_size]
        assert np.frombuffer(data, "f4").tolist() == [2] * SMALL


@pytest.mark.parametrize(
    ("max_batch_size", "returned", "output", "error"),
    [
        (8, (2,), {}, ""),
        (8, (2, 3, 1, 1), {}, ""),
        (0, (1, 3, 2), {}, ""),
        (0, (), {}, ""),
        (8, (), {}, "shape [] for output 'O' of a batch of 2, expected 2 as its first dimension"),
        (8, (1, 2), {}, "shape [1, 2] for output 'O' of a batch of 2, expected 2 as its first dimension"),
        (8, (2, 4), {"dims": [4], "reshape": {"shape": [2, 2]}}, "shape [2, 4] for output 'O', expected 3 dimensions"),
    ],
)
def test_outputs_have_the_shape_that_the_model_returns(
    max_batch_size: int, returned: tuple[int, ...], output: dict[str, Any], error: str
) -> None:
    host = Host(lambda inputs: {"O": np.zeros(returned, np.float32)}, max_batch_size=max_batch_size, **output)
    results = host.execute(2, SMALL, value=0, rows=(2,) if max_batch_size else (1,))
    if error:
        assert results.failure is not None
        assert error in results.failure.message
    else:
        assert results.outputs is not None, results.failure
        assert tuple(results.outputs[0].shape) == returned
