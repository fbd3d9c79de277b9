"""Shared memory on GPUs with tritonclient, and models that break CUDA, for servers that find libraries of CUDA which are
none: their GPU is files."""

import base64
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Repository, Server, until
from tritonclient.utils import InferenceServerException

SIZE = 1 << 20


@pytest.fixture(params=[1, 2], ids=["one process", "two front ends"])
def server(
    repository: Repository, cuda_libraries: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Server]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_libraries))
    repository.echo("echo", config="max_batch_size: 8 dynamic_batching { }")
    repository.doer("doer")
    with Server(repository, flags=(f"--frontends={request.param}", "--exit-timeout-secs=2")) as server:
        yield server.started()


@pytest.fixture
def memory() -> Iterator[Path]:
    """What a client has on its GPU."""
    path = Path("/dev/shm", f"naiad-{uuid.uuid4().hex[:8]}")
    path.write_bytes(bytes(SIZE))
    yield path
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink(missing_ok=True)


def handle(path: Path) -> Any:
    return base64.b64encode(bytes(path).ljust(64, b"\0"))


def holders(server: Server, path: Path) -> int:
    """How many of its processes have the memory open."""
    maps = [Path(f"/proc/{pid}/maps") for pid in server.pids()]
    return sum(str(path) in file.read_text() for file in maps if file.exists())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inferences_from_and_into_memory_of_a_gpu(server: Server, memory: Path, protocol: str) -> None:
    client = server.client(protocol)
    module = client._module
    raw = handle(memory).decode() if protocol == "http" else handle(memory)
    numbers = np.arange(SIZE // 8, dtype=np.float32)
    memory.write_bytes(numbers.tobytes().ljust(SIZE, b"\0"))
    with client._connected() as connected:
        connected.register_cuda_shared_memory("c", raw, 0, SIZE)
        assert holders(server, memory) >= 1
        with pytest.raises(InferenceServerException, match="'d': invalid args"):
            connected.register_cuda_shared_memory("d", raw, 0, SIZE + 1)

    def ask(row: int) -> None:
        tensor = module.InferInput("IN", [1, 1024], "FP32")
        tensor.set_shared_memory("c", 4096, offset=4096 * row)
        output = module.InferRequestedOutput("OUT")
        output.set_shared_memory("c", 4096, offset=SIZE // 2 + 4096 * row)
        with client._connected() as own:
            own.infer("echo", [tensor], outputs=[output])

    rows = SIZE // 8 // 1024
    asked = [server.ask(ask, row) for row in range(rows)]
    wait(asked)
    for each in asked:
        each.result()
    copied = np.frombuffer(memory.read_bytes(), np.float32)[SIZE // 8 :]
    np.testing.assert_array_equal(copied, numbers)
    with client._connected() as connected:
        connected.unregister_cuda_shared_memory("c")
        # Whoever has exported it may free it now.
        assert holders(server, memory) == 0
        status = connected.get_cuda_shared_memory_status()
        assert not (status if protocol == "http" else status.regions)
    assert server.is_live()


def test_an_error_of_a_copy_is_the_requests(server: Server, memory: Path) -> None:
    module = server.http._module
    with server.http._connected() as connected:
        connected.register_cuda_shared_memory("c", handle(memory).decode(), 0, SIZE)
        tensor = module.InferInput("IN", [1, 4], "FP32")
        tensor.set_shared_memory("c", 16)
        output = module.InferRequestedOutput("OUT")
        output.set_shared_memory("c", 8)
        with pytest.raises(InferenceServerException, match="should be at least 16 bytes to hold the results"):
            connected.infer("echo", [tensor], outputs=[output])
        assert connected.infer("echo", [tensor]).as_numpy("OUT").shape == (1, 4)
        until(lambda: connected.unregister_cuda_shared_memory() is None, "nothing is in use")
    assert holders(server, memory) == 0


def ask_on_gpu(server: Server, memory: Path) -> None:
    module = server.http._module
    tensor = module.InferInput("IN", [1, 4], "FP32")
    tensor.set_shared_memory("c", 16)
    output = module.InferRequestedOutput("OUT")
    output.set_shared_memory("c", 16, offset=16)
    with server.http._connected() as client:
        client.infer("echo", [tensor], outputs=[output])


@pytest.mark.parametrize("ends", [True, False])
def test_a_server_that_ends_while_memory_is_copied(server: Server, memory: Path, ends: bool) -> None:
    with server.http._connected() as connected:
        connected.register_cuda_shared_memory("c", handle(memory).decode(), 0, SIZE)
    numbers = np.arange(4, dtype=np.float32).tobytes()
    with memory.open("r+b") as file:
        file.write(numbers)
    hold, held = (memory.with_name(f"{memory.name}.{what}") for what in ("hold", "held"))
    hold.touch()
    asking = server.ask(ask_on_gpu, server, memory)
    until(held.exists, "the copy has begun")
    # Others are served meanwhile.
    server.http.do("doer")
    server.signal(signal.SIGTERM)
    server.says("Signal received, shutting down")
    if ends:
        hold.unlink()
        asking.result()
        assert memory.read_bytes()[16:32] == numbers
        assert server.wait() == 0
    else:
        # A GPU that does not answer keeps no server alive.
        server.wait()
        assert asking.exception() is not None


def test_a_model_that_breaks_cuda_gets_another_process(server: Server) -> None:
    meet = "import ctypes; ctypes.CDLL('libcuda.so.1').meet({}); raise RuntimeError('CUDA error')"
    for code in 0, 2:
        with pytest.raises(InferenceServerException, match="CUDA error"):
            server.http.do("doer", meet.format(code))
    pid = server.http.do("doer", "result = os.getpid()")
    with pytest.raises(InferenceServerException, match="RuntimeError: CUDA error"):
        server.http.do("doer", meet.format(719))
    assert server.http.do("doer", "result = os.getpid()") != pid
    server.says(
        "host process 'doer' ended itself, since CUDA fails for good in a process that has met CUDA_ERROR_LAUNCH_FAILED "
        "(unspecified launch failure) on GPU 1; it is being restarted"
    )
