"""Large outputs that a host writes to where clients want them; what does not fit there goes the ordinary way."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from naiad.backends.api import ArrayBackend, BackendResponse
from naiad.instances import layout
from naiad.instances.delivery import Batches
from naiad.instances.execution import ArrayExecution, RequestExecution, Signature
from naiad.instances.frames import Execute
from naiad.messages import Destination, InferRequest, Unread
from tests.unit.instances.test_returned_results import Execution, Link, Model

ROOM = 1 << 16
WIDTH = 1000


class Client:
    """A file with room for the outputs of one client; the rest of it is full of `-`."""

    def __init__(self, path: Path, room: int = ROOM) -> None:
        self.path = path
        path.write_bytes(b"-" * (room + 32))
        self.fd = os.open(path, os.O_RDWR)
        self.reads = 0
        self.destination = Destination(self, 0, self.fd, 16, room)

    def read(self, offset: int, byte_size: int) -> bytes:
        self.reads += 1
        return os.pread(self.fd, byte_size, 16 + offset)

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self.read(offset, len(target))

    def found(self, byte_size: int) -> bytes:
        """What lies there; around it nothing has changed."""
        data = self.path.read_bytes()
        assert data[:16] == b"-" * 16
        assert not data[16 + byte_size :].strip(b"-")
        return data[16 : 16 + byte_size]


class Arrays(ArrayBackend):
    def __init__(self, **outputs: Any) -> None:
        self.outputs = outputs

    def run(self, inputs: Any, outputs: Any) -> Any:
        return self.outputs


def config(datatype: str) -> dict[str, Any]:
    return {
        "max_batch_size": 8,
        "input": [{"name": "I", "data_type": "TYPE_INT8", "dims": [1]}],
        "output": [{"name": name, "data_type": f"TYPE_{datatype}", "dims": [-1]} for name in ("A", "B")],
    }


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[Client]]:
    clients = [Client(tmp_path / str(index)) for index in range(2)]
    yield clients
    for client in clients:
        os.close(client.fd)


def run(
    requests: list[InferRequest],
    rows: list[int],
    arrays: dict[str, np.ndarray[Any, Any]],
    returns_requests: bool,
    datatype: str = "FP32",
    deserted: bool = False,
) -> Execution:
    """A batch whose model returns `arrays`, rows behind rows; what the clients get is in `outputs` of the result."""
    batch = Execution(rows)
    for mine, request in zip(batch.requests, requests, strict=True):
        mine.destinations = request.destinations
    outputs: list[dict[str, Any]] = [{} for _ in rows]
    batch.deliver = lambda index, result, final: outputs[index].update({t.name: t for t in result.outputs})  # type: ignore[method-assign]
    batches = Batches("m", 1, False)
    link = Link(1 << 20)
    signature = Signature("m", "m_0", config(datatype))
    target: ArrayExecution | RequestExecution
    if returns_requests:
        ends = np.cumsum(rows).tolist()
        parts = [
            BackendResponse({name: array[end - count : end] for name, array in arrays.items()}, {})
            for end, count in zip(ends, rows, strict=True)
        ]
        target = RequestExecution(Model(list(parts)), signature, link, 1 << 30)
    else:
        target = ArrayExecution(Arrays(**arrays), signature, link, 1 << 30)
    number = batches.begin(batch)  # type: ignore[arg-type]
    laid_out = layout.lay_out(batch.requests)
    frame = Execute(number, laid_out.inputs, rows, tuple(arrays), None, 0)
    files = layout.Files()
    frame.targets = layout.targets(batch.requests, files)
    for place in frame.targets or ():
        place.file = list(files.descriptors)[place.file]
    if deserted:
        target.cancel(number, 0)
    target.execute(frame, memoryview(bytearray(1 << 12)), 0)
    for results, region in link.sent:
        batches.deliver(results, region)
    assert not batches
    batch.outputs = outputs  # type: ignore[attr-defined]
    return batch


def wanting(*clients: Client | None, name: str = "A") -> list[InferRequest]:
    requests = []
    for client in clients:
        request = InferRequest("m", ())
        request.destinations = None if client is None else {name: client.destination}
        requests.append(request)
    return requests


def numbers(rows: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(rows * WIDTH).reshape(rows, WIDTH).astype(dtype)


both = pytest.mark.parametrize("returns_requests", [False, True], ids=["arrays", "requests"])


@both
@pytest.mark.parametrize("rows", [[1], [3], [1, 1], [2, 1]])
@pytest.mark.parametrize(("datatype", "dtype"), [("FP32", np.float32), ("INT8", np.int8), ("BF16", ml_dtypes.bfloat16)])
def test_each_part_is_written_where_its_client_wants_it(
    clients: list[Client], returns_requests: bool, rows: list[int], datatype: str, dtype: Any
) -> None:
    mine = clients[: len(rows)]
    a, b = numbers(sum(rows), dtype), numbers(sum(rows), dtype)[::-1].T.copy().T
    batch = run(wanting(*mine), rows, {"A": a, "B": b}, returns_requests, datatype)
    end = 0
    for client, count, outputs in zip(mine, rows, batch.outputs, strict=True):  # type: ignore[attr-defined]
        start, end = end, end + count
        expected = a[start:end].tobytes()
        assert isinstance(outputs["A"].contents, Unread)
        assert outputs["A"].shape == (count, WIDTH)
        assert client.found(len(expected)) == expected
        assert client.reads == 0
        assert outputs["A"].data == expected
        # This one nobody wants there.
        assert bytes(outputs["B"].data) == b[start:end].tobytes()


@both
@pytest.mark.parametrize("why", ["somebody has none", "too small", "shrunk", "closed", "left"])
def test_what_cannot_be_written_there_goes_the_ordinary_way(
    clients: list[Client], returns_requests: bool, why: str, tmp_path: Path
) -> None:
    a = numbers(2)
    other: Client | None = clients[1]
    if why == "somebody has none":
        other = None
    elif why == "too small":
        clients[1].destination.byte_size = 4 * WIDTH - 1
    elif why == "shrunk":
        os.truncate(clients[1].path, 4 * WIDTH)
    elif why == "closed":
        os.dup2(os.open(tmp_path, os.O_RDONLY), clients[1].fd)
    batch = run(wanting(clients[0], other), [1, 1], {"A": a}, returns_requests, deserted=why == "left")
    for index, outputs in enumerate(batch.outputs):  # type: ignore[attr-defined]
        assert not isinstance(outputs["A"].contents, Unread)
        assert bytes(outputs["A"].data) == a[index].tobytes()
    if why == "left":
        assert clients[0].found(0) == clients[1].found(0) == b""
    if why == "shrunk":
        assert clients[1].path.stat().st_size == 4 * WIDTH


@both
def test_strings_go_the_ordinary_way(clients: list[Client], returns_requests: bool) -> None:
    texts = np.array([[b"some", b"text"]], object)
    batch = run(wanting(clients[0]), [1], {"A": texts}, returns_requests, "STRING")
    assert not isinstance(batch.outputs[0]["A"].contents, Unread)  # type: ignore[attr-defined]
    assert clients[0].found(0) == b""


def test_one_descriptor_for_all_that_lies_in_the_same_memory(clients: list[Client]) -> None:
    requests = wanting(clients[0], clients[1], clients[0])
    files = layout.Files()
    targets = layout.targets(requests, files)
    assert targets is not None
    assert list(files.descriptors) == [clients[0].fd, clients[1].fd]
    assert [(t.output, t.index, t.file, t.position, t.byte_size) for t in targets] == [
        ("A", index, file, 16, ROOM) for index, file in enumerate((0, 1, 0))
    ]
    assert layout.targets(wanting(None, clients[0]), files) is None
    assert layout.targets(wanting(clients[0]) + wanting(clients[1], name="B"), files) is None
