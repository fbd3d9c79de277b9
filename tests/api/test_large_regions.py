"""Large tensors in shared memory, which are read when their batch is made: whichever way they take, each client gets its
own back, and one that takes its memory away harms nobody else."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from served import Repository, Server, error_of, put, until
from tritonclient.utils import serialize_byte_tensor

COUNT = 50_000
SIZE = 4 * COUNT
CLIENTS = 4
BATCHED = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.echo("batched", config=BATCHED)
    repository.echo("cached", config=BATCHED + "response_cache { enable: true }")
    repository.echo("strings", datatype="STRING")
    repository.echo(
        "patient",
        config="max_batch_size: 8 dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 60000000 }",
    )
    repository.echo(
        "sequence",
        config="max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 4 } }",
    )
    (repository.path / "ensemble" / "1").mkdir(parents=True)
    tensors = "data_type: TYPE_FP32 dims: [ -1 ]"
    maps = 'input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "%s" }'
    put(
        repository.path / "ensemble" / "config.pbtxt",
        f'platform: "ensemble" max_batch_size: 8 input [ {{ name: "IN" {tensors} }} ]\n'
        f'output [ {{ name: "OUT" {tensors} }}, {{ name: "AGAIN" {tensors} }} ]\n'
        f'ensemble_scheduling {{ step [ {{ model_name: "batched" model_version: -1 {maps % "OUT"} }},'
        f' {{ model_name: "batched" model_version: -1 {maps % "AGAIN"} }} ] }}\n',
    )
    with Server(repository, flags=("--cache-config=local,size=16777216",)) as server:
        yield server.started()


def connect(server: Server, protocol: str) -> Any:
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    return module, module.InferenceServerClient(f"127.0.0.1:{server.ports[protocol == 'grpc']}")


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("model", "outputs"),
    [("batched", ["OUT"]), ("cached", ["OUT"]), ("sequence", ["OUT"]), ("ensemble", ["OUT", "AGAIN"])],
)
def test_each_client_gets_its_own_back(server: Server, protocol: str, model: str, outputs: list[str]) -> None:
    region = f"naiad-test-{os.getpid()}"
    handle = shm.create_shared_memory_region(region, f"/{region}", 3 * SIZE * CLIENTS)
    begin = threading.Barrier(CLIENTS)

    def work(number: int) -> None:
        module, client = connect(server, protocol)
        first = 3 * SIZE * number
        tensor = module.InferInput("IN", [1, COUNT], "FP32")
        tensor.set_shared_memory(region, SIZE, first)
        wanted = [module.InferRequestedOutput(name) for name in outputs]
        for place, output in enumerate(wanted):
            output.set_shared_memory(region, SIZE, first + (place + 1) * SIZE)
        more = {"sequence_id": number + 1, "sequence_start": True, "sequence_end": True} if model == "sequence" else {}
        begin.wait(30)
        for turn in range(5):
            data = np.full(COUNT, 10 * number + turn, np.float32)
            shm.set_shared_memory_region(handle, [data], first)
            client.infer(model, [tensor], outputs=wanted, **more)
            for place in range(len(outputs)):
                found = shm.get_contents_as_numpy(handle, np.float32, [COUNT], first + (place + 1) * SIZE)
                np.testing.assert_array_equal(found, data)
        client.close()

    try:
        _, client = connect(server, protocol)
        client.register_system_shared_memory(region, f"/{region}", 3 * SIZE * CLIENTS)
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(work, range(CLIENTS)))
        client.unregister_system_shared_memory(region)
        client.close()
    finally:
        shm.destroy_shared_memory_region(handle)


def test_strings_that_are_large_together(server: Server, protocol: str) -> None:
    region = f"naiad-test-{os.getpid()}"
    strings = np.array([f"string {number}".encode() for number in range(20_000)], object)
    size = len(serialize_byte_tensor(strings).item())
    handle = shm.create_shared_memory_region(region, f"/{region}", size)
    module, client = connect(server, protocol)
    try:
        shm.set_shared_memory_region(handle, [serialize_byte_tensor(strings)])
        client.register_system_shared_memory(region, f"/{region}", size)
        tensor = module.InferInput("IN", [len(strings)], "BYTES")
        tensor.set_shared_memory(region, size)
        assert client.infer("strings", [tensor]).as_numpy("OUT").tolist() == strings.tolist()
        tensor.set_shared_memory(region, size - 3)
        assert "but only 9 bytes available" in error_of(client.infer, "strings", [tensor])
        client.unregister_system_shared_memory(region)
    finally:
        client.close()
        shm.destroy_shared_memory_region(handle)


def test_a_region_that_shrinks_is_an_error_of_its_client(server: Server, protocol: str) -> None:
    region = f"naiad-test-{os.getpid()}"
    handle = shm.create_shared_memory_region(region, f"/{region}", SIZE)
    module, client = connect(server, protocol)
    try:
        client.register_system_shared_memory(region, f"/{region}", SIZE)
        os.truncate(f"/dev/shm/{region}", SIZE // 2)
        tensor = module.InferInput("IN", [1, COUNT], "FP32")
        tensor.set_shared_memory(region, SIZE)
        assert f"shared memory object '/{region}' has become smaller" in error_of(client.infer, "batched", [tensor])
        tensor.set_data_from_numpy(np.ones((1, COUNT), np.float32))
        assert client.infer("batched", [tensor]).as_numpy("OUT").sum() == COUNT
        client.unregister_system_shared_memory(region)
    finally:
        client.close()
        shm.destroy_shared_memory_region(handle)


def test_a_region_that_shrinks_while_its_request_waits_is_an_error_of_its_client(server: Server, protocol: str) -> None:
    region, other = f"naiad-test-{os.getpid()}", f"naiad-test-{os.getpid()}-other"
    handles = [shm.create_shared_memory_region(name, f"/{name}", SIZE) for name in (region, other)]
    module, client = connect(server, protocol)
    try:
        tensors = []
        for name, handle in zip((region, other), handles, strict=True):
            client.register_system_shared_memory(name, f"/{name}", SIZE)
            shm.set_shared_memory_region(handle, [np.full(COUNT, 3, np.float32)])
            tensors.append(module.InferInput("IN", [1, COUNT], "FP32"))
            tensors[-1].set_shared_memory(name, SIZE)
        process = server.named("naiad:patient")
        assert process
        begin = [tensors[0], tensors[1], tensors[1]]
        with ThreadPoolExecutor(3) as pool:

            def ask(tensor: Any) -> Any:
                return pool.submit(connect(server, protocol)[1].infer, "patient", [tensor])

            for _ in range(3):
                # The third fills their batch. By the end both are mapped by the model's process.
                answers = [ask(tensor) for tensor in begin]
                assert [answer.result().as_numpy("OUT").sum() for answer in answers] == [3 * COUNT] * 3
            waiting = [ask(tensor) for tensor in begin[:2]]
            until(lambda: server.pending("patient") == 2, "two requests wait")
            os.truncate(f"/dev/shm/{region}", SIZE // 2)
            third = ask(begin[2])
            assert f"shared memory object '/{region}' has become smaller" in error_of(waiting[0].result)
            assert [answer.result().as_numpy("OUT").sum() for answer in (waiting[1], third)] == [3 * COUNT] * 2
        assert server.named("naiad:patient") == process
        client.unregister_system_shared_memory()
    finally:
        client.close()
        for handle in handles:
            shm.destroy_shared_memory_region(handle)


def test_memory_of_a_client_that_has_gone_is_let_go(server: Server, protocol: str) -> None:
    region = f"naiad-test-{os.getpid()}-gone"
    handle = shm.create_shared_memory_region(region, f"/{region}", 2 * SIZE)
    module, client = connect(server, protocol)

    def holders() -> list[int]:
        found = []
        for pid in server.pids():
            with suppress(OSError):
                files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
                if any(region in name for name in (*files, Path(f"/proc/{pid}/maps").read_text())):
                    found.append(pid)
        return found

    try:
        client.register_system_shared_memory(region, f"/{region}", 2 * SIZE)
        shm.set_shared_memory_region(handle, [np.ones(2 * COUNT, np.float32)])
        tensor = module.InferInput("IN", [1, COUNT], "FP32")
        tensor.set_shared_memory(region, SIZE)
        output = module.InferRequestedOutput("OUT")
        output.set_shared_memory(region, SIZE, SIZE)
        for _ in range(3):
            client.infer("batched", [tensor], outputs=[output])
        assert set(server.named("naiad:batched")) & set(holders())
        client.unregister_system_shared_memory(region)
    finally:
        client.close()
        shm.destroy_shared_memory_region(handle)
    assert server.process.pid not in holders()
    until(lambda: not holders(), "the model's process does not map it any more")
