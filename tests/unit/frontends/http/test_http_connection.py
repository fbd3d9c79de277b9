"""The HTTP/1.1 connection through a real socket: framing, order, limits, clients that leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from http_raw_client import Answer, read_answer, request_bytes

from naiad.frontends.http import connection as module
from naiad.frontends.http.connection import Connection, ConnectionClosed, Connections, Exchange
from naiad.frontends.listener import Listener

TEXT = [("content-type", "text/plain")]


class Echo:
    """Answers with method, path and body; under /later when the test says so, under /no before the body is read."""

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.bodies: list[bytes] = []
        self.left: list[str] = []
        self.came = asyncio.Event()

    def accept(self, exchange: Exchange) -> None:
        if exchange.path == "/no":
            exchange.response_bytes(403, TEXT, b"no")

    def handle(self, exchange: Exchange) -> None:
        self.bodies.append(bytes(exchange.body))
        self.came.set()
        if exchange.path.startswith("/later"):
            exchange.on_disconnect = lambda: self.left.append(exchange.path)
            self.held.append(exchange)
        else:
            exchange.response_bytes(200, TEXT, answer_to(exchange))

    async def got(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.bodies) < count:
                self.came.clear()
                await self.came.wait()


def answer_to(exchange: Exchange) -> bytes:
    return f"{exchange.method} {exchange.path} {len(exchange.body)}".encode()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


class Clients:
    """Opens connections and closes those that are left."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def __call__(self) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            await hang_up(writer)


def listener_of(echo: Echo, grace_s: float) -> Listener:
    connections = Connections()
    return Listener(lambda: Connection(echo, connections), connections, "test", "127.0.0.1", 0, grace_s=grace_s)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Echo, Listener, Clients]]:
    echo = Echo()
    async with listener_of(echo, 5) as listener:
        clients = Clients(listener.bound_port)
        try:
            yield echo, listener, clients
        finally:
            await clients.close()


@asynccontextmanager
async def client() -> AsyncIterator[tuple[Echo, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with served() as (echo, _, connect):
        reader, writer = await connect()
        async with asyncio.timeout(30):
            yield echo, reader, writer


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> Answer:
    writer.write(data)
    return await read_answer(reader)


@pytest.mark.parametrize("size", [0, 1, 40_000, 300_000, 3_000_000])
async def test_bodies_of_all_sizes_arrive_whole(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with client() as (echo, reader, writer):
        for _ in range(2):
            answer = await ask(reader, writer, request_bytes("POST", "/a?b=c", body, {}))
            assert answer.body == f"POST /a {size}".encode()
        assert echo.bodies == [body, body]


async def test_a_body_grows_as_it_comes_where_its_length_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 1000)
    body = bytes(range(250)) * 400
    async with client() as (echo, reader, writer):
        await ask(reader, writer, request_bytes("POST", "/a", body, {}))
        assert echo.bodies == [body]


async def test_a_request_may_come_byte_by_byte() -> None:
    async with client() as (echo, reader, writer):
        for byte in request_bytes("POST", "/slow", b"xyz", {}):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await read_answer(reader)).body == b"POST /slow 3"
        assert echo.bodies == [b"xyz"]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with client() as (echo, reader, writer):
        writer.write(b"".join(request_bytes("POST", path, b"ab", {}) for path in ("/later", "/2", "/3")))
        await echo.got(1)
        assert len(echo.bodies) == 1, "the next one waits"
        echo.held[0].response_bytes(200, TEXT, b"1")
        assert [(await read_answer(reader)).body for _ in range(3)] == [b"1", b"POST /2 2", b"POST /3 2"]


class Written:
    """A transport in memory, of a client that reads nothing by itself."""

    def __init__(self, connection: Connection, limit: int = 1 << 20) -> None:
        self._connection = connection
        self._limit = limit
        self.data = b""
        self.is_reading = True
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > self._limit:
            self._connection.pause_writing()

    def read(self) -> bytes:
        data, self.data = self.data, b""
        if len(data) > self._limit:
            self._connection.resume_writing()
        return data

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


def receive(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


async def test_what_comes_right_after_an_answer_goes_behind_what_came_before_it() -> None:
    echo = Echo()
    connection = Connection(echo, Connections())
    written = Written(connection)
    connection.connection_made(written)
    receive(connection, b"GET /later HTTP/1.1\r\n\r\nGET /sec")
    echo.held[0].response_bytes(200, TEXT, b"first")
    receive(connection, b"ond HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0)
    assert written.data.endswith(b"\r\nGET /second 0"), written.data


async def test_a_client_that_does_not_read_its_replies_gets_no_more_of_them() -> None:
    echo = Echo()
    connection = Connection(echo, Connections())
    written = Written(connection, limit=0)
    connection.connection_made(written)
    request = b"GET /1 HTTP/1.1\r\n\r\n"
    receive(connection, 3 * request)
    for count in (1, 2, 3):
        for _ in range(4):
            await asyncio.sleep(0)
        assert len(echo.bodies) == count
        if count == 3:
            receive(connection, request * 4000)
            assert not written.is_reading, "what a client may send ahead is limited"
        assert written.read().endswith(b"\r\nGET /1 0")
        assert written.is_reading


async def test_chunked_bodies() -> None:
    head = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with client() as (echo, reader, writer):
        for _ in range(2):
            writer.write(head + b"3\r\nabc\r\n")
            await writer.drain()
            answer = await ask(reader, writer, b"4\r\ndefg\r\n0\r\n\r\n")
            assert answer.body == b"POST /c 7"
        assert echo.bodies == [b"abcdefg"] * 2


async def test_an_offered_upgrade_is_not_taken_up() -> None:
    offer = b"HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    async with client() as (_, reader, writer):
        for _ in range(2):
            answer = await ask(
                reader, writer, b"POST /c " + offer + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            )
            assert answer.body == b"POST /c 3"
            assert (
                await ask(reader, writer, b"POST /l " + offer + b"Content-Length: 2\r\n\r\nab")
            ).body == b"POST /l 2"
        writer.write(b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /g " + offer + b"\r\n")
        assert (await read_answer(reader)).body == b"POST /c 0"


async def test_what_follows_a_chunked_request_does_it_no_harm() -> None:
    head = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with client() as (_, reader, writer):
        answer = await ask(reader, writer, head + b"1\r\nx\r\n0\r\n\r\n\1no request\r\n\r\n")
        assert (answer.body, answer.headers.get("connection")) == (b"POST /c 1", None)
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await reader.read() == b""


@pytest.mark.parametrize("path", [b"/c", b"/no"])
async def test_requests_with_chunks_may_be_pipelined(path: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    async with client() as (_, reader, writer):
        writer.write((head + b"1\r\nx\r\n0\r\nA: b\r\n\r\n") * 2 + request_bytes("GET", "/g", b"", {}))
        expected = b"no" if path == b"/no" else b"POST /c 1"
        assert [(await read_answer(reader)).body for _ in range(3)] == [expected, expected, b"GET /g 0"]


async def test_too_many_chunks_are_refused() -> None:
    head = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with client() as (_, reader, writer):
        answer = await ask(reader, writer, head + b"1\r\nx\r\n" * 70_000)
        assert answer.status == 400
        assert "chunks" in answer.json["error"]


async def test_any_number_of_chunks_that_are_not_small_is_taken() -> None:
    head = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with client() as (_, reader, writer):
        answer = await ask(reader, writer, head + (b"400\r\n" + bytes(1024) + b"\r\n") * 70_000 + b"0\r\n\r\n")
        assert answer.body == b"POST /c %d" % (70_000 * 1024)


@pytest.mark.parametrize("expected", [b"100-continue", b"100-Continue, more", b"something"])
async def test_a_client_that_asks_whether_to_go_on_is_told(expected: bytes) -> None:
    async with client() as (echo, reader, writer):
        writer.write(b"POST /e HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: %b\r\n\r\n" % expected)
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert await reader.readline() == b"\r\n"
        assert (await ask(reader, writer, b"ok")).body == b"POST /e 2"
        assert echo.bodies == [b"ok"]


async def test_a_refused_request_is_answered_before_its_body_and_a_small_body_is_dropped() -> None:
    async with client() as (echo, reader, writer):
        answer = await ask(reader, writer, b"POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n")
        assert answer.status == 403
        writer.write(b"12345")
        assert (await ask(reader, writer, request_bytes("GET", "/yes", b"", {}))).body == b"GET /yes 0"
        assert echo.bodies == [b""]


async def test_after_refusing_a_large_body_the_connection_ends() -> None:
    async with client() as (_, reader, writer):
        answer = await ask(reader, writer, b"POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n")
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        assert await reader.read() == b""


async def test_a_client_that_sends_much_gets_to_read_why_it_is_refused() -> None:
    async with client() as (_, reader, writer):
        writer.write(request_bytes("POST", "/no", bytes(30 << 20), {}))
        await writer.drain()
        assert (await read_answer(reader)).status == 403
        assert (await ask(reader, writer, request_bytes("GET", "/yes", b"", {}))).status == 200


async def test_of_a_refused_request_small_chunks_are_dropped() -> None:
    head = b"POST /no HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with client() as (echo, reader, writer):
        for part in (b"", b"3\r\nabc\r\n"):
            answer = await ask(reader, writer, head + part)
            assert (answer.status, answer.headers.get("connection")) == (403, None)
            writer.write(b"4\r\ndefg\r\n0\r\n\r\n")
            assert (await ask(reader, writer, request_bytes("GET", "/yes", b"", {}))).body == b"GET /yes 0"
        assert echo.bodies == [b"", b""]


@pytest.mark.parametrize("more", [b"zz\r\n", b"200000\r\n" + bytes(1 << 20) + b"x"])
async def test_of_a_refused_request_large_chunks_and_nonsense_end_the_connection(
    more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_DROPPED", 1 << 19)
    echo = Echo()
    connection = Connection(echo, Connections())
    written = Written(connection)
    connection.connection_made(written)
    receive(connection, b"POST /no HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert written.read().endswith(b"\r\nno")
    for start in range(0, len(more), 1 << 17):
        receive(connection, more[start : start + (1 << 17)])
    assert (written.data, written.is_closed, echo.bodies) == (b"", True, [])


async def test_a_refused_body_that_does_not_come_holds_nobody_up() -> None:
    echo = Echo()
    listener = listener_of(echo, 60)
    await listener.__aenter__()
    connect = Clients(listener.bound_port)
    reader, writer = await connect()
    answer = await ask(reader, writer, b"POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n")
    assert answer.status == 403
    async with asyncio.timeout(20):
        await listener.__aexit__(None, None, None)
    assert await reader.read() == b""
    await connect.close()


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed HTTP request"),
        (b"POST /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "malformed HTTP request"),
        (b"POST /a HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413, "99999999999 bytes"),
        (b"GET /a HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431, "head of a request"),
        (b"x" * 70_000, 431, "head of a request"),
        (b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "malformed HTTP request"),
    ],
)
async def test_what_is_no_request_is_refused_and_the_connection_ends(data: bytes, status: int, text: str) -> None:
    async with client() as (_, reader, writer):
        answer = await ask(reader, writer, data)
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert text in answer.json["error"]
        assert await reader.read() == b""


async def test_old_and_closing_clients() -> None:
    async with served() as (_, _, connect):
        for head, said in (
            (b"GET /a HTTP/1.0\r\n\r\n", "close"),
            (b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive"),
            (b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", "close"),
        ):
            reader, writer = await connect()
            answer = await ask(reader, writer, head)
            assert answer.headers["connection"] == said
            if said == "close":
                assert await reader.read() == b""


async def test_a_reply_to_head_has_no_body() -> None:
    async with client() as (_, reader, writer):
        writer.write(request_bytes("HEAD", "/h", b"", {}) + request_bytes("GET", "/g", b"", {}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 9\r\n" in head
        assert (await read_answer(reader)).body == b"GET /g 0"


async def test_a_client_that_leaves_is_noticed_while_its_request_is_handled() -> None:
    async with served() as (echo, listener, connect):
        _, writer = await connect()
        writer.write(request_bytes("POST", "/later", b"", {}))
        await echo.got(1)
        await hang_up(writer)
        async with asyncio.timeout(20):
            await listener.connections.gone()
        assert echo.left == ["/later"]
        echo.held[0].response_bytes(200, TEXT, b"too late")  # nobody minds


async def test_what_a_client_asked_before_it_ended_its_half_is_answered() -> None:
    async with client() as (echo, reader, writer):
        later, other, part = (request_bytes("POST", path, b"", {}) for path in ("/later", "/a", "/part"))
        writer.write(later + other + part[:-5])
        await echo.got(1)
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        echo.held[0].response_bytes(200, TEXT, b"late")
        assert (await read_answer(reader)).body == b"late"
        assert (await read_answer(reader)).body == b"POST /a 0"
        assert await reader.read() == b""
        assert echo.left == []


async def test_what_comes_together_with_the_end_is_answered() -> None:
    async with served() as (_, _, connect):
        reader, writer = await connect()
        writer.write(b"".join(request_bytes("GET", path, b"", {}) for path in ("/a", "/b", "/c")))
        writer.write_eof()
        async with asyncio.timeout(20):
            text = (await reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert [text.find(b"GET " + path) > 0 for path in (b"/a", b"/b", b"/c")] == [True] * 3
        assert text.count(b"HTTP/1.1 200 OK") == 3


async def test_a_client_that_ends_its_half_and_then_leaves_is_let_go_with_its_answer() -> None:
    async with served() as (echo, listener, connect):
        reader, writer = await connect()
        writer.write(request_bytes("POST", "/later", b"", {}))
        await echo.got(1)
        writer.write_eof()
        await reader.readuntil(b"\r\n\r\n")
        await hang_up(writer)
        echo.held[0].response_bytes(200, TEXT, b"late")
        async with asyncio.timeout(20):
            await listener.connections.gone()


async def test_an_old_client_that_sends_no_more_counts_as_one_that_has_left() -> None:
    """It cannot be asked whether it waits."""
    async with served() as (echo, listener, connect):
        reader, writer = await connect()
        writer.write(b"POST /later HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        await echo.got(1)
        writer.write_eof()
        async with asyncio.timeout(20):
            await listener.connections.gone()
        assert echo.left == ["/later"]
        assert await reader.read() == b""


async def test_chunked_replies_and_their_end() -> None:
    async with client() as (echo, reader, writer):
        writer.write(request_bytes("POST", "/later", b"", {}) + request_bytes("GET", "/next", b"", {}))
        await echo.got(1)
        stream = echo.held[0].response_stream(200, TEXT)
        for part in (b"one", b"", b"two"):
            await stream.send_bytes(part)
        echo.held[0].end_stream()
        answer = await read_answer(reader)
        assert (answer.body, answer.headers["transfer-encoding"]) == (b"onetwo", "chunked")
        assert (await read_answer(reader)).body == b"GET /next 0"


async def test_a_stream_to_a_client_that_has_left_says_so() -> None:
    async with served() as (echo, listener, connect):
        _, writer = await connect()
        writer.write(request_bytes("POST", "/later", b"", {}))
        await echo.got(1)
        stream = echo.held[0].response_stream(200, TEXT)
        await hang_up(writer)
        async with asyncio.timeout(20):
            await listener.connections.gone()
        with pytest.raises(ConnectionClosed):
            await stream.send_bytes(b"x")
        assert echo.left == ["/later"]


async def test_a_stream_waits_for_a_slow_client() -> None:
    async with client() as (echo, reader, writer):
        writer.write(request_bytes("POST", "/later", b"", {}))
        await echo.got(1)
        stream = echo.held[0].response_stream(200, TEXT)
        part = bytes(1 << 20)

        async def send() -> None:
            for _ in range(32):
                await stream.send_bytes(part)
            echo.held[0].end_stream()

        sending = asyncio.create_task(send())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not sending.done(), "32 MB do not fit between here and a client that does not read"
        answer = await read_answer(reader)
        await sending
        assert len(answer.body) == 32 << 20


async def test_stopping_lets_requests_finish_and_closes_idle_connections() -> None:
    echo = Echo()
    listener = listener_of(echo, 20)
    await listener.__aenter__()
    connect = Clients(listener.bound_port)
    idle, _ = await connect()
    reader, writer = await connect()
    writer.write(request_bytes("POST", "/later", b"", {}))
    await echo.got(1)
    stopping = asyncio.create_task(listener.__aexit__(None, None, None))
    assert await idle.read() == b""
    with pytest.raises(ConnectionRefusedError):
        await connect()
    echo.held[0].response_bytes(200, TEXT, b"done")
    answer = await read_answer(reader)
    assert (answer.body, answer.headers["connection"]) == (b"done", "close")
    await stopping
    await connect.close()


async def test_requests_that_do_not_finish_in_time_are_dropped() -> None:
    echo = Echo()
    listener = listener_of(echo, 0.05)
    await listener.__aenter__()
    connect = Clients(listener.bound_port)
    reader, writer = await connect()
    writer.write(request_bytes("POST", "/later", b"", {}))
    await echo.got(1)
    await listener.__aexit__(None, None, None)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await connect.close()
    assert echo.left == ["/later"]


async def test_a_client_that_stalls_in_the_middle_of_a_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from naiad.frontends import listener as listening

    monkeypatch.setattr(listening, "STALLED_S", 0.02)
    monkeypatch.setattr(listening, "_LOOK_S", 0.01)
    async with served() as (_, _, connect):
        idle_reader, idle_writer = await connect()
        reader, writer = await connect()
        writer.write(b"POST /a HTTP/1.1\r\nContent-")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(20):
                await reader.readexactly(1)
        assert (await ask(idle_reader, idle_writer, request_bytes("GET", "/", b"", {}))).status == 200
