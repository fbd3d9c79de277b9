"""Clients that do their worst to the HTTP service: right statuses, and nothing is left of them."""

import contextlib
import json
import os
import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served import Repository, Server, until

REQUEST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}]}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.echo("echo")
    repository.doer("doer")
    with Server(repository) as server:
        yield server.started()


@pytest.fixture(autouse=True)
def _still_serves(server: Server) -> Iterator[None]:
    yield
    assert server.http.infer("echo", "IN", np.zeros(3, np.float32)).shape == (3,)
    assert "Traceback" not in server.log


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60)


def request(body: bytes, *headers: str, path: str = "echo/infer") -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def status(client: socket.socket) -> int:
    """The status of an answer, whose connection is read to its end or to the end of its body."""
    return int(read(client).split(b" ", 2)[1])


def read(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        assert part, f"the connection ended after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < size:
        part = client.recv(65536)
        assert part, "the connection ended within a body"
        body += part
    return head + b"\r\n\r\n" + body


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def resident(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def in_flight(server: Server) -> int:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[2]}/metrics/all", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("naiad_requests_in_flight{"))


@contextlib.contextmanager
def nothing_left(server: Server) -> Iterator[None]:
    """Descriptors and requests in flight are afterwards what they were before."""
    server.http.infer("echo", "IN", np.zeros(3, np.float32))
    until(lambda: in_flight(server) == 0, "nothing is in flight")
    before = descriptors(server)
    yield
    until(lambda: in_flight(server) == 0, "nothing is in flight any more")
    until(lambda: descriptors(server) <= before + 2, f"the {before} descriptors from before")


def test_a_request_that_comes_byte_by_byte_is_served_and_nobody_waits_for_it(server: Server) -> None:
    with nothing_left(server):
        slow = [connect(server) for _ in range(20)]
        data = request(BODY)
        for at in range(len(data) - 1):
            for client in slow:
                client.send(data[at : at + 1])
            if at % 60 == 0:
                assert server.http.infer("echo", "IN", np.zeros(3, np.float32)).shape == (3,)
        for client in slow:
            client.send(data[-1:])
            assert status(client) == 200
            client.close()


def test_half_closed_sockets_are_let_go(server: Server) -> None:
    with nothing_left(server):
        clients = []
        for sent in (b"", REQUEST, request(BODY)[:-5], REQUEST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
            client = connect(server)
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            clients.append(client)
        for client in clients:
            assert client.recv(10) == b"", "there is nothing to answer"
            client.close()


def test_a_client_that_sends_no_more_is_answered_and_what_one_that_has_left_asked_is_not_run(
    server: Server, tmp_path: Path
) -> None:
    def ask(action: str) -> socket.socket:
        client = connect(server)
        body = json.dumps({"inputs": [{"name": "DO", "datatype": "BYTES", "shape": [1], "data": [action]}]})
        client.sendall(request(body.encode(), path="doer/infer"))
        return client

    def ended(action: str) -> socket.socket:
        client = ask(action)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        return client

    go, ran = tmp_path / "go", tmp_path / "ran"
    with nothing_left(server):
        clients = [ended(f"import os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"), ended("pass")]
        before = in_flight(server)
        leaving = ask(f"open({str(ran)!r}, 'w')")
        until(lambda: in_flight(server) == before + 1, "all are there")
        leaving.close()
        until(lambda: in_flight(server) == before, "the one that has left is gone")
        go.touch()
        for client in clients:
            assert status(client) == 200
            assert client.recv(1) == b""
            client.close()
    assert not ran.exists()


def test_idle_connections(server: Server) -> None:
    count = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 200), hard))
    with nothing_left(server):
        before = resident(server)
        clients = [connect(server) for _ in range(count)]
        assert server.http.infer("echo", "IN", np.zeros(3, np.float32)).shape == (3,)
        assert resident(server) - before < count * 20_000
        for client in random.Random(3).sample(clients, 50):
            client.sendall(request(BODY))
            assert status(client) == 200
        for client in clients:
            client.close()


@pytest.mark.parametrize("name", [b"X-Large: ", b""])
def test_a_head_without_an_end_is_refused(server: Server, name: bytes) -> None:
    """64 MB of one header, and of no header at all."""
    with nothing_left(server), connect(server) as client:
        before = resident(server)
        client.sendall(REQUEST + name)
        sent = 0
        block = b"a" * (1 << 20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 64:
                client.sendall(block)
                sent += 1
        assert sent < 64, "the server has hung up before"
        assert resident(server) - before < 16 << 20


def test_a_head_that_is_too_large_has_its_status(server: Server) -> None:
    with connect(server) as client:
        client.sendall(REQUEST + b"X-Large: " + b"a" * 65536)
        assert status(client) == 431


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (b"Content-Length: 10000000000\r\n\r\n", 413),
        (b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"Content-Length: -1\r\n\r\n", 400),
        (b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n", 400),
        (b"\0: x\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused(server: Server, headers: bytes, expected: int) -> None:
    with nothing_left(server), connect(server) as client:
        client.sendall(REQUEST + headers)
        assert status(client) == expected
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b"", "the connection is closed"


def test_memory_for_a_body_is_taken_as_it_comes(server: Server) -> None:
    with nothing_left(server):
        before = resident(server)
        clients = [connect(server) for _ in range(20)]
        for client in clients:
            client.sendall(REQUEST + b"Content-Length: 4000000000\r\n\r\n" + b"x" * 1000)
        assert server.http.infer("echo", "IN", np.zeros(3, np.float32)).shape == (3,)
        assert resident(server) - before < 64 << 20
        for client in clients:
            client.close()


def test_clients_that_leave_in_the_middle(server: Server) -> None:
    """200 at a time: some within the head, some within the body, some before the answer, some within a stream."""
    chance = random.Random(5)
    text = b"time.sleep(0.002)"
    ask = b'{"inputs":[{"name":"DO","datatype":"BYTES","shape":[1],"data":["%b"]}]}' % text
    whole = request(ask, path="doer/infer")
    stream = request(ask, path="doer/infer_stream")
    sizes: list[int] = []
    with nothing_left(server):
        for _ in range(6):
            clients = []
            for number in range(200):
                client = connect(server)
                clients.append(client)
                data = stream if number % 3 == 0 else whole
                client.sendall(data[: chance.randrange(1, len(data))] if number % 2 else data)
            for client in clients:
                if chance.random() < 0.5:
                    # Without a farewell: the other side gets an error.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
            until(lambda: in_flight(server) == 0, "nothing is in flight any more")
            sizes.append(resident(server))
    assert sizes[-1] - sizes[1] < 16 << 20, "memory does not grow with clients that leave"
