"""The HTTP/2 server of the gRPC front end through a real socket, as strict as RFC 9113, RFC 7541 and gRPC's
PROTOCOL-HTTP2.md want it, in the order of h2spec; then floods, clients that leave, and conversations made by chance."""

import asyncio
import gzip
import logging
import random
import socket
import ssl
import struct
import tracemalloc
import weakref
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import grpc_fake_engine
import numpy as np
import pytest
import trustme
from grpc_fake_engine import FakeCall, FakeEngine
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded, TrailersReceived
from hpack import Encoder
from http2_client import (
    INFER,
    PATIENCE_S,
    PREFACE,
    SERVER_LIVE,
    STREAM_INFER,
    Client,
    Fields,
    Part,
    ask,
    binary,
    block,
    call,
    connected,
    data,
    headers,
    message,
    ping,
    raw,
    request,
    reset,
    settings,
    turns,
    window,
    wire,
)
from hyperframe.frame import ContinuationFrame, GoAwayFrame, HeadersFrame, PriorityFrame, SettingsFrame
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from naiad.datatypes import DataType
from naiad.errors import InvalidArgument
from naiad.frontends import listener
from naiad.frontends.addresses import bound
from naiad.frontends.grpc import compression, connection, inference_stream
from naiad.frontends.grpc import stream as stream_module
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.server import GrpcFrontend
from naiad.messages import Tensor

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HUGE = 2**31 - 1


class Server:
    """A front end, its engine, and all of its calls that have not been freed."""

    def __init__(self, engine: FakeEngine, frontend: GrpcFrontend, alive: "weakref.WeakSet[FakeCall]") -> None:
        self.engine = engine
        self.port = frontend.port
        self.alive = alive

    async def works(self) -> None:
        """A client that comes now is served."""
        async with connected(self.port) as client:
            client.send(call())
            assert (await client.answer()).tensor == b"abcdefgh"

    async def forgets(self, tasks: set["asyncio.Task[Any]"]) -> None:
        """All clients have left: every call is cancelled and then, when the engine gives it up, nothing remains."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.engine.calls.empty():
                held: FakeCall = self.engine.calls.get_nowait()
                await held.cancelled.wait()
                held.sink.send(InvalidArgument("cancelled"), True)
                del held
            self.engine.requests.clear()
            while self.alive or asyncio.all_tasks() - tasks - {asyncio.current_task()}:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Server]:
    async with serving(monkeypatch, caplog) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with connected(server.port) as client:
        yield client


@asynccontextmanager
async def serving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **options: Any
) -> AsyncIterator[Server]:
    """A front end that must have nothing left, and nothing to complain of, when its clients have gone."""
    alive: weakref.WeakSet[FakeCall] = weakref.WeakSet()

    class CountedCall(FakeCall):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            alive.add(self)

    monkeypatch.setattr(grpc_fake_engine, "FakeCall", CountedCall)
    accidents: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: accidents.append(context))
    engine = FakeEngine()
    method = options.pop("method", None)
    given: dict[str, Any] = {"address": "127.0.0.1", "port": 0, "drain_s": 0.0, "http2_max_ping_strikes": 0}
    async with GrpcFrontend(engine, GrpcOptions(**given | options), method=method) as frontend:
        tasks = asyncio.all_tasks()
        server = Server(engine, frontend, alive)
        yield server
        await server.forgets(tasks)
    assert accidents == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# ---------------------------------------------------------------- 3.4 the preface


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r!",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /inference.GRPCInferenceService/ModelInfer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # the beginning of TLS
        bytes(24),
        PREFACE + wire(ping()),
        PREFACE + wire(headers(1, end=True)),
        PREFACE + raw(SETTINGS, ACK, 0),
        PREFACE + PREFACE,
    ],
    ids=["last byte", "HTTP/1.1", "HTTP/1.1 POST", "TLS", "zeros", "PING first", "HEADERS first", "ack first", "twice"],
)
async def test_a_wrong_preface(server: Server, sent: bytes) -> None:
    async with connected(server.port, handshake=False) as client:
        client.send(sent)
        assert await client.end() in ("closed", "GOAWAY PROTOCOL_ERROR", "GOAWAY FRAME_SIZE_ERROR")
    await server.works()


async def test_half_a_preface(server: Server) -> None:
    for length in (0, 1, 23, 24, 30):
        async with connected(server.port, handshake=False) as client:
            client.send((PREFACE + wire(settings({})))[:length])
            client.writer.write_eof()
            assert await client.end() == "closed"
    await server.works()


async def test_the_preface_byte_by_byte(server: Server) -> None:
    opening = wire(PREFACE, settings({}), call())
    async with connected(server.port, handshake=False) as client:
        await client.send_in_pieces(opening, range(1, len(opening)))
        assert (await client.answer()).tensor == b"abcdefgh"


async def test_a_call_need_not_wait_for_the_settings_of_the_server(server: Server) -> None:
    async with connected(server.port, handshake=False) as client:
        client.send(PREFACE, settings({}), call())
        assert (await client.answer()).tensor == b"abcdefgh"
        assert client.settings_acknowledged == 1


async def test_the_first_frame_of_the_server_is_its_settings(server: Server) -> None:
    async with connected(server.port, handshake=False) as client:
        client.send(PREFACE, settings({}))
        await client.read_frame()
        assert client.settings
        assert client.settings.get(SettingsFrame.ENABLE_PUSH, 0) == 0


# ---------------------------------------------------------------- 4 to 6: frames

OPEN = headers(1)
HELD = call(1, "held")
DONE: tuple[Part | int, ...] = (call(1), 1)

#: name: (what is sent, a number being a stream that is over first; what comes then: of several, any).
FRAMES: dict[str, tuple[tuple[Part | int, ...], str]] = {
    # 4.1
    "unknown frame": ((raw(0x16, 0, 0, b"12345678"),), "ignored"),
    "unknown frame, empty": ((raw(0xFF, 0xFF, 0),), "ignored"),
    "unknown frame, idle stream": ((raw(0x16, 0xFF, 3, b"x"),), "ignored"),
    "unknown frame between DATA": ((OPEN, raw(0x16, 0, 1, b"x"), data(1, message(ask()), True)), "grpc-status 0"),
    "unknown frame of 16 KiB": ((raw(0x16, 0, 0, bytes(16384)),), "ignored"),
    "undefined flags of PING": ((raw(PING, 0xFE, 0, b"12345678"),), "ignored"),
    "undefined flags of SETTINGS": ((raw(SETTINGS, 0xFE, 0),), "ignored"),
    "undefined flags of DATA": ((OPEN, raw(DATA, 0xF7, 1, message(ask()))), "grpc-status 0"),
    "undefined flags of HEADERS": (
        (raw(HEADERS, 0xD6, 1, block(request())), data(1, message(ask()), True)),
        "grpc-status 0",
    ),
    "reserved bit of PING": ((raw(PING, 0, 1 << 31, b"12345678"),), "ignored"),
    "reserved bit of HEADERS": (
        (raw(HEADERS, END_HEADERS, 1 << 31 | 1, block(request())), data(1, message(ask()), True)),
        "grpc-status 0",
    ),
    "reserved bit of an increment": ((raw(WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 31 | 1)),), "ignored"),
    # 4.2
    "SETTINGS of 3 bytes": ((raw(SETTINGS, 0, 0, b"\0\3\0"),), "GOAWAY FRAME_SIZE_ERROR"),
    "SETTINGS of 7 bytes": ((raw(SETTINGS, 0, 0, bytes(7)),), "GOAWAY FRAME_SIZE_ERROR"),
    "SETTINGS ack with content": ((raw(SETTINGS, ACK, 0, bytes(6)),), "GOAWAY FRAME_SIZE_ERROR"),
    "PING of 0 bytes": ((raw(PING, 0, 0),), "GOAWAY FRAME_SIZE_ERROR"),
    "PING of 7 bytes": ((raw(PING, 0, 0, bytes(7)),), "GOAWAY FRAME_SIZE_ERROR"),
    "PING of 9 bytes": ((raw(PING, 0, 0, bytes(9)),), "GOAWAY FRAME_SIZE_ERROR"),
    "PING ack of 9 bytes": ((raw(PING, ACK, 0, bytes(9)),), "GOAWAY FRAME_SIZE_ERROR"),
    "PRIORITY of 4 bytes": (
        (OPEN, raw(PRIORITY, 0, 1, bytes(4))),
        "RST_STREAM FRAME_SIZE_ERROR | GOAWAY FRAME_SIZE_ERROR",
    ),
    "PRIORITY of 6 bytes": (
        (OPEN, raw(PRIORITY, 0, 1, bytes(6))),
        "RST_STREAM FRAME_SIZE_ERROR | GOAWAY FRAME_SIZE_ERROR",
    ),
    "RST_STREAM of 3 bytes": ((OPEN, raw(RST_STREAM, 0, 1, bytes(3))), "GOAWAY FRAME_SIZE_ERROR"),
    "RST_STREAM of 5 bytes": ((OPEN, raw(RST_STREAM, 0, 1, bytes(5))), "GOAWAY FRAME_SIZE_ERROR"),
    "WINDOW_UPDATE of 3 bytes": ((raw(WINDOW_UPDATE, 0, 0, bytes(3)),), "GOAWAY FRAME_SIZE_ERROR"),
    "WINDOW_UPDATE of 5 bytes": ((OPEN, raw(WINDOW_UPDATE, 0, 1, bytes(5))), "GOAWAY FRAME_SIZE_ERROR"),
    "GOAWAY of 7 bytes": ((raw(GOAWAY, 0, 0, bytes(7)),), "GOAWAY FRAME_SIZE_ERROR"),
    "HEADERS without room for priority": (
        (raw(HEADERS, END_HEADERS | HAS_PRIORITY, 1, bytes(4)),),
        "GOAWAY FRAME_SIZE_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
    "HEADERS without room for the padding's length": (
        (raw(HEADERS, END_HEADERS | PADDED, 1),),
        "GOAWAY FRAME_SIZE_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
    "DATA without room for the padding's length": (
        (OPEN, raw(DATA, PADDED, 1)),
        "GOAWAY FRAME_SIZE_ERROR | GOAWAY PROTOCOL_ERROR | RST_STREAM FRAME_SIZE_ERROR",
    ),
    # 4.3
    "PING inside a header block": (
        (raw(HEADERS, 0, 1, block(request())), ping(), raw(CONTINUATION, END_HEADERS, 1)),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "HEADERS of another stream inside a header block": (
        (raw(HEADERS, 0, 1, block(request())), headers(3)),
        "GOAWAY PROTOCOL_ERROR",
    ),
    # 5.1 idle
    "DATA, idle": ((data(1, b"x", True),), "GOAWAY PROTOCOL_ERROR"),
    "RST_STREAM, idle": ((reset(1),), "GOAWAY PROTOCOL_ERROR"),
    "WINDOW_UPDATE, idle": ((window(1, 100),), "GOAWAY PROTOCOL_ERROR"),
    "CONTINUATION, idle": ((raw(CONTINUATION, END_HEADERS, 1, block(request())),), "GOAWAY PROTOCOL_ERROR"),
    "PRIORITY, idle": ((PriorityFrame(1),), "ignored"),
    "DATA, idle, of the server": ((raw(DATA, 0, 2, b"x"),), "GOAWAY PROTOCOL_ERROR"),
    "RST_STREAM, idle, of the server": ((reset(2),), "GOAWAY PROTOCOL_ERROR"),
    "WINDOW_UPDATE, idle, of the server": ((window(2, 1),), "GOAWAY PROTOCOL_ERROR"),
    # 5.1 half-closed
    "DATA, half-closed": ((HELD, data(1, b"x")), "RST_STREAM STREAM_CLOSED | GOAWAY STREAM_CLOSED"),
    "empty DATA, half-closed": ((HELD, data(1, b"", True)), "RST_STREAM STREAM_CLOSED | GOAWAY STREAM_CLOSED"),
    "HEADERS, half-closed": (
        (HELD, headers(1, end=True)),
        "RST_STREAM STREAM_CLOSED | GOAWAY STREAM_CLOSED | GOAWAY PROTOCOL_ERROR",
    ),
    "CONTINUATION, half-closed": (
        (HELD, raw(CONTINUATION, END_HEADERS, 1, block(request()))),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "PRIORITY, half-closed": ((HELD, PriorityFrame(1, depends_on=3)), "ignored"),
    "WINDOW_UPDATE, half-closed": ((HELD, window(1, 10)), "ignored"),
    # 5.1 closed
    "DATA after RST_STREAM": (
        (OPEN, reset(1), data(1, b"x")),
        "ignored | RST_STREAM STREAM_CLOSED | GOAWAY STREAM_CLOSED",
    ),
    "HEADERS after RST_STREAM": (
        (OPEN, reset(1), headers(1, end=True)),
        "ignored | RST_STREAM STREAM_CLOSED | GOAWAY STREAM_CLOSED | GOAWAY PROTOCOL_ERROR",
    ),
    "CONTINUATION after RST_STREAM": (
        (OPEN, reset(1), raw(CONTINUATION, END_HEADERS, 1, block(request()))),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "RST_STREAM twice": ((OPEN, reset(1), reset(1)), "ignored"),
    "WINDOW_UPDATE after RST_STREAM": ((OPEN, reset(1), window(1, 5)), "ignored"),
    "PRIORITY after RST_STREAM": ((OPEN, reset(1), PriorityFrame(1)), "ignored"),
    "RST_STREAM after the end": ((*DONE, reset(1)), "ignored"),
    "WINDOW_UPDATE after the end": ((*DONE, window(1, 5)), "ignored"),
    "PRIORITY after the end": ((*DONE, PriorityFrame(1)), "ignored"),
    "CONTINUATION after the end": (
        (*DONE, raw(CONTINUATION, END_HEADERS, 1, block(request()))),
        "GOAWAY PROTOCOL_ERROR",
    ),
    # 5.1.1
    "even stream": ((headers(2, end=True),), "GOAWAY PROTOCOL_ERROR"),
    "stream 0": ((raw(HEADERS, END_HEADERS | END_STREAM, 0, block(request())),), "GOAWAY PROTOCOL_ERROR"),
    "decreasing stream": ((headers(5), headers(3)), "GOAWAY PROTOCOL_ERROR | GOAWAY STREAM_CLOSED"),
    "the last stream of all": ((headers(HUGE), data(HUGE, message(ask()), True), HUGE), "ignored"),
    # 5.5
    "unknown frame inside a header block": (
        (raw(HEADERS, 0, 1, block(request())), raw(0x16, 0, 1, b"x")),
        "GOAWAY PROTOCOL_ERROR",
    ),
    # 6.1
    "DATA on stream 0": ((raw(DATA, 0, 0, b"x"),), "GOAWAY PROTOCOL_ERROR"),
    "DATA with padding": ((OPEN, data(1, message(ask()), True, padding=200)), "grpc-status 0"),
    "DATA with padding of no bytes": ((OPEN, data(1, message(ask()), True, padding=0)), "grpc-status 0"),
    "DATA of padding only": (
        (OPEN, data(1, b"", padding=255), data(1, message(ask()), True)),
        "grpc-status 0",
    ),
    "DATA shorter than its padding": ((OPEN, raw(DATA, PADDED, 1, b"\5abcd")), "GOAWAY PROTOCOL_ERROR"),
    "DATA with nothing but a padding's length too large": (
        (OPEN, raw(DATA, PADDED, 1, b"\1")),
        "GOAWAY PROTOCOL_ERROR",
    ),
    # 6.2
    "HEADERS with padding": (
        (raw(HEADERS, END_HEADERS | PADDED, 1, b"\7" + block(request()) + bytes(7)), data(1, message(ask()), True)),
        "grpc-status 0",
    ),
    "HEADERS with priority": (
        (
            raw(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"\x80\0\0\3\xff" + block(request())),
            data(1, message(ask()), True),
        ),
        "grpc-status 0",
    ),
    "HEADERS with padding and priority": (
        (
            raw(
                HEADERS,
                END_HEADERS | PADDED | HAS_PRIORITY,
                1,
                b"\xff" + b"\0\0\0\0\0" + block(request()) + bytes(255),
            ),
            data(1, message(ask()), True),
        ),
        "grpc-status 0",
    ),
    "HEADERS shorter than their padding": (
        (raw(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + block(request())),),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "HEADERS shorter than padding and priority": (
        (raw(HEADERS, END_HEADERS | PADDED | HAS_PRIORITY, 1, b"\4" + bytes(7)),),
        "GOAWAY PROTOCOL_ERROR | GOAWAY FRAME_SIZE_ERROR",
    ),
    "HEADERS that depend on themselves": (
        (
            raw(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"\0\0\0\1\xff" + block(request())),
            data(1, message(ask()), True),
        ),
        "grpc-status 0 | RST_STREAM PROTOCOL_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
    # 6.3
    "PRIORITY on stream 0": ((raw(PRIORITY, 0, 0, bytes(5)),), "GOAWAY PROTOCOL_ERROR"),
    "PRIORITY that depends on itself": (
        (OPEN, PriorityFrame(1, depends_on=1)),
        "ignored | RST_STREAM PROTOCOL_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
    # 6.4
    "RST_STREAM on stream 0": ((raw(RST_STREAM, 0, 0, bytes(4)),), "GOAWAY PROTOCOL_ERROR"),
    "RST_STREAM with an unknown code": ((OPEN, raw(RST_STREAM, 0, 1, b"\xff\xff\xff\xff")), "ignored"),
    # 6.5
    "SETTINGS on a stream": ((OPEN, raw(SETTINGS, 0, 1)), "GOAWAY PROTOCOL_ERROR"),
    "SETTINGS ack on a stream": ((OPEN, raw(SETTINGS, ACK, 1)), "GOAWAY PROTOCOL_ERROR"),
    "SETTINGS ack out of the blue": ((raw(SETTINGS, ACK, 0),), "ignored"),
    "unknown setting": ((settings({0xFF: 5, 0: 0, 0xFFFF: 2**32 - 1}),), "ignored"),
    "ENABLE_PUSH 2": ((settings({2: 2}),), "GOAWAY PROTOCOL_ERROR"),
    "ENABLE_PUSH 1": ((settings({2: 1}),), "ignored"),
    "INITIAL_WINDOW_SIZE 2^31": ((settings({4: 2**31}),), "GOAWAY FLOW_CONTROL_ERROR"),
    "INITIAL_WINDOW_SIZE 2^32-1": ((settings({4: 2**32 - 1}),), "GOAWAY FLOW_CONTROL_ERROR"),
    "INITIAL_WINDOW_SIZE 2^31-1": ((settings({4: HUGE}),), "ignored"),
    "MAX_FRAME_SIZE 16383": ((settings({5: 16383}),), "GOAWAY PROTOCOL_ERROR"),
    "MAX_FRAME_SIZE 2^24": ((settings({5: 2**24}),), "GOAWAY PROTOCOL_ERROR"),
    "MAX_FRAME_SIZE 2^24-1": ((settings({5: 2**24 - 1}),), "ignored"),
    "HEADER_TABLE_SIZE 0": ((settings({1: 0}), call(1)), "grpc-status 0"),
    "HEADER_TABLE_SIZE 2^32-1": ((settings({1: 2**32 - 1}), call(1)), "grpc-status 0"),
    "MAX_CONCURRENT_STREAMS 0": ((settings({3: 0}), call(1)), "grpc-status 0"),
    "MAX_HEADER_LIST_SIZE 0": ((settings({6: 0}), call(1, "identity")), "grpc-status 0"),
    # 6.6
    "PUSH_PROMISE": (
        (OPEN, raw(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">L", 2) + block(request()))),
        "GOAWAY PROTOCOL_ERROR",
    ),
    # 6.7
    "PING on a stream": ((OPEN, raw(PING, 0, 1, bytes(8))), "GOAWAY PROTOCOL_ERROR"),
    "PING ack out of the blue": ((raw(PING, ACK, 0, b"whatever"),), "ignored"),
    # 6.8
    "GOAWAY on a stream": ((OPEN, raw(GOAWAY, 0, 1, bytes(8))), "GOAWAY PROTOCOL_ERROR"),
    # 6.9
    "increment 0 of the connection": ((raw(WINDOW_UPDATE, 0, 0, bytes(4)),), "GOAWAY PROTOCOL_ERROR"),
    "increment 0 of a stream": (
        (HELD, raw(WINDOW_UPDATE, 0, 1, bytes(4))),
        "RST_STREAM PROTOCOL_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
    "window of the connection beyond 2^31-1": ((window(0, HUGE - 65535), window(0, 1)), "GOAWAY FLOW_CONTROL_ERROR"),
    "window of the connection of 2^31-1": ((window(0, HUGE - 65535),), "ignored"),
    "window of a stream beyond 2^31-1": (
        (HELD, window(1, HUGE - 65535), window(1, 1)),
        "RST_STREAM FLOW_CONTROL_ERROR | GOAWAY FLOW_CONTROL_ERROR",
    ),
    "window of a stream of 2^31-1": ((HELD, window(1, HUGE - 65535)), "ignored"),
    "window of a stream beyond 2^31-1 by SETTINGS": (
        (HELD, window(1, HUGE - 65535), settings({4: 65536})),
        "GOAWAY FLOW_CONTROL_ERROR | RST_STREAM FLOW_CONTROL_ERROR",
    ),
    # 6.10
    "CONTINUATION after complete HEADERS": (
        (OPEN, raw(CONTINUATION, END_HEADERS, 1, block(request()))),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "CONTINUATION after CONTINUATION with END_HEADERS": (
        (raw(HEADERS, 0, 1, block(request())), raw(CONTINUATION, END_HEADERS, 1), raw(CONTINUATION, END_HEADERS, 1)),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "CONTINUATION after DATA": ((OPEN, data(1, b"\0"), raw(CONTINUATION, END_HEADERS, 1)), "GOAWAY PROTOCOL_ERROR"),
    "CONTINUATION on stream 0": (
        (raw(HEADERS, 0, 1, block(request())), raw(CONTINUATION, END_HEADERS, 0)),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "CONTINUATION on another stream": (
        (raw(HEADERS, 0, 1, block(request())), raw(CONTINUATION, END_HEADERS, 3)),
        "GOAWAY PROTOCOL_ERROR",
    ),
    "empty HEADERS and several CONTINUATION": (
        (
            raw(HEADERS, 0, 1),
            raw(CONTINUATION, 0, 1, block(request())[:5]),
            raw(CONTINUATION, 0, 1),
            raw(CONTINUATION, END_HEADERS, 1, block(request())[5:]),
            data(1, message(ask()), True),
        ),
        "grpc-status 0",
    ),
    "END_STREAM on HEADERS with CONTINUATION": (
        (
            raw(HEADERS, END_STREAM, 1, block(request(STREAM_INFER))[:9]),
            raw(CONTINUATION, END_HEADERS, 1, block(request(STREAM_INFER))[9:]),
        ),
        "grpc-status 0",
    ),
    # 8.1
    "HEADERS again without END_STREAM": (
        (OPEN, headers(1, [("a", "b")])),
        "RST_STREAM PROTOCOL_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
    "trailers": ((OPEN, data(1, message(ask())), headers(1, [("a", "b")], end=True)), "grpc-status 0"),
    "trailers without content": ((OPEN, data(1, message(ask())), headers(1, b"", end=True)), "grpc-status 0"),
    "trailers with a pseudo-header": (
        (headers(1, request(STREAM_INFER)), headers(1, [(":path", "/")], end=True)),
        "RST_STREAM PROTOCOL_ERROR | GOAWAY PROTOCOL_ERROR",
    ),
}


@pytest.mark.parametrize("name", FRAMES)
async def test_frames(server: Server, client: Client, name: str) -> None:
    steps, expected = FRAMES[name]
    for step in steps:
        if isinstance(step, int):
            assert (await client.answer(step)).status == "grpc-status 0"
            await client.pong()
            del client.answers[step]
        else:
            client.send(step)
    allowed = expected.split(" | ")
    outcome = await client.outcome(1, "ignored" in allowed)
    assert outcome in allowed
    if outcome.startswith("GOAWAY"):
        await server.works()
    elif name != "the last stream of all":
        client.send(call(101))
        assert (await client.answer(101)).tensor == b"abcdefgh"


async def test_the_largest_frame_and_one_that_is_too_large(server: Server) -> None:
    for kind in ("DATA", "HEADERS", "PING"):
        async with connected(server.port) as client:
            limit = client.settings.get(SettingsFrame.MAX_FRAME_SIZE, 16384)
            assert 16384 <= limit < 2**24
            if kind == "DATA":
                client.send(OPEN)
                content = message(ask(content=bytes(16384 - 60)))
                client.send(data(1, content[:16384]), data(1, content[16384:], True))
                assert (await client.answer()).status == "grpc-status 0"
                if limit == 2**24 - 1:
                    continue
                client.send(headers(3), raw(DATA, 0, 3, bytes(limit + 1)))
                expected = ("RST_STREAM FRAME_SIZE_ERROR", "GOAWAY FRAME_SIZE_ERROR")
                assert await client.outcome(3) in expected
            elif limit < 2**24 - 1:
                client.send(
                    raw(HEADERS if kind == "HEADERS" else PING, END_HEADERS, kind == "HEADERS", bytes(limit + 1))
                )
                assert await client.end() == "GOAWAY FRAME_SIZE_ERROR"


async def test_a_frame_that_is_too_large_is_refused_by_its_head(client: Client) -> None:
    if client.settings.get(SettingsFrame.MAX_FRAME_SIZE, 16384) < 2**24 - 1:
        client.send(raw(HEADERS, END_HEADERS, 1, length=2**24 - 1))
        assert await client.end() == "GOAWAY FRAME_SIZE_ERROR"


async def test_a_stream_that_is_over_is_not_opened_again(server: Server) -> None:
    for again in (headers(1, end=True), data(1, b"x")):
        async with connected(server.port) as client:
            client.send(call(1))
            await client.answer(1)
            await client.pong()
            del client.answers[1]
            client.send(again)
            allowed = ("RST_STREAM STREAM_CLOSED", "GOAWAY STREAM_CLOSED", "GOAWAY PROTOCOL_ERROR")
            # An endpoint may leave frames on closed streams unanswered.
            outcome = await client.outcome(1, ignores=True)
            assert outcome in (*allowed, "ignored")
            assert len(server.engine.requests) == 1
            server.engine.requests.clear()


async def test_goaway_names_the_last_stream(client: Client) -> None:
    client.send(call(1), call(7), raw(PING, 0, 0, b"short"))
    await client.end()
    assert client.goaway is not None
    assert client.goaway.last_stream_id == 7


async def test_no_frame_is_read_after_an_error_of_the_connection(server: Server, client: Client) -> None:
    client.send(raw(PING, 0, 0, b"short"), call(1))
    assert await client.end() == "GOAWAY FRAME_SIZE_ERROR"
    assert server.engine.requests == []


async def test_an_error_of_the_connection_cancels_its_calls(server: Server, client: Client) -> None:
    client.send(HELD, call(3, "held_decoupled", path=STREAM_INFER))
    calls = [await server.engine.calls.get() for _ in range(2)]
    client.send(raw(PING, 0, 0, b"short"))
    assert await client.end() == "GOAWAY FRAME_SIZE_ERROR"
    async with asyncio.timeout(PATIENCE_S):
        for each in calls:
            await each.cancelled.wait()
            each.echo()  # nobody listens; nothing breaks
    if calls[1].request.model_name == "held_decoupled":
        calls[1].sink.send(None, True)


@pytest.mark.parametrize("code", [ErrorCodes.CANCEL, ErrorCodes.NO_ERROR, ErrorCodes.INTERNAL_ERROR])
async def test_rst_stream_cancels_the_call(server: Server, client: Client, code: ErrorCodes) -> None:
    for stream, model, path in ((1, "held", INFER), (3, "held_decoupled", STREAM_INFER)):
        client.send(call(stream, model, path=path))
        held = await server.engine.calls.get()
        client.send(reset(stream, code))
        async with asyncio.timeout(PATIENCE_S):
            await held.cancelled.wait()
        held.sink.send(InvalidArgument("too late"), True)
        del held
    await client.pong()
    assert client.answers == {}


async def test_goaway_of_the_client_lets_its_calls_finish(server: Server, client: Client) -> None:
    client.send(HELD)
    held = await server.engine.calls.get()
    client.send(GoAwayFrame(last_stream_id=0, additional_data=b"goodbye"))
    await client.pong()
    held.echo()
    assert (await client.answer()).tensor == b"abcdefgh"


async def test_pings_are_answered_in_order(client: Client) -> None:
    contents = [struct.pack(">Q", i) for i in range(2)]
    client.send(HELD, *(ping(content) for content in contents))
    await client.until(lambda: len(client.pongs) == 2)
    assert client.pongs == contents


async def test_every_settings_frame_is_acknowledged(client: Client) -> None:
    client.send(*(settings({4: size}) for size in range(20)))
    await client.until(lambda: client.settings_acknowledged == 21)


# ---------------------------------------------------------------- 8.1, 8.2: malformed requests


def without(name: str, fields: Fields | None = None) -> Fields:
    return [pair for pair in (request() if fields is None else fields) if pair[0] != name]


def changed(name: str, value: str | bytes) -> Fields:
    return [(key, value if key == name else old) for key, old in request()]


MALFORMED: dict[str, Fields] = {
    "upper case": request(INFER, ("X-Test", "a")),
    "upper case in the middle": request(INFER, ("x-Test", "a")),
    "unknown pseudo-header": [(":test", "a"), *request()],
    "pseudo-header of responses": [(":status", "200"), *request()],
    "pseudo-header at the end": [*without(":path"), (":path", INFER)],
    "pseudo-header after another header": [("a", "b"), *request()],
    ":method missing": without(":method"),
    ":scheme missing": without(":scheme"),
    ":path missing": without(":path"),
    ":path empty": changed(":path", ""),
    ":method twice": [(":method", "POST"), *request()],
    ":scheme twice": [(":scheme", "http"), *request()],
    ":path twice": [(":path", INFER), *request()],
    ":authority twice": [(":authority", "localhost"), *request()],
    "connection": request(INFER, ("connection", "keep-alive")),
    "proxy-connection": request(INFER, ("proxy-connection", "keep-alive")),
    "keep-alive": request(INFER, ("keep-alive", "5")),
    "transfer-encoding": request(INFER, ("transfer-encoding", "chunked")),
    "upgrade": request(INFER, ("upgrade", "h2c")),
    "te other than trailers": changed("te", "gzip"),
    "empty name": request(INFER, ("", "a")),
    "space in a name": request(INFER, ("x test", "a")),
    "colon in a name": request(INFER, ("x:test", "a")),
    "control character in a name": request(INFER, (b"x\x01", "a")),
    "DEL in a name": request(INFER, (b"x\x7f", "a")),
    "beyond ASCII in a name": request(INFER, (b"x\xc3\xa4", "a")),
    "NUL in a value": request(INFER, ("x", b"a\0b")),
    "LF in a value": request(INFER, ("x", b"a\nb")),
    "CR in a value": request(INFER, ("x", b"a\rb")),
    "space before a value": request(INFER, ("x", b" a")),
    "tab after a value": request(INFER, ("x", b"a\t")),
    "no headers": [],
    "content-length no number": request(INFER, ("content-length", "x")),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_requests(server: Server, client: Client, name: str) -> None:
    client.send(headers(1, MALFORMED[name]), data(1, message(ask()), True))
    outcome = await client.outcome()
    assert outcome in ("RST_STREAM PROTOCOL_ERROR", "GOAWAY PROTOCOL_ERROR", ":status 400")
    assert server.engine.requests == []
    if not outcome.startswith("GOAWAY"):
        client.send(call(3))
        assert (await client.answer(3)).tensor == b"abcdefgh"


@pytest.mark.parametrize(
    "fields",
    [
        without(":authority"),
        [*without(":authority"), ("host", "localhost")],
        changed(":scheme", "https"),
        without("te"),
        request(INFER, ("cookie", "a=b"), ("cookie", "c=d")),
        request(INFER, ("x-test", "")),
        request(INFER, ("x-obs-text", b"a\xc3\xa4")),
        request(INFER, ("x-latin", b"a\xff")),
        request(INFER, ("x", "a\tb c")),
        request(INFER, ("content-length", str(len(message(ask()))))),
        request(INFER, ("!#$%&'*+-.^_`|~0", "odd but a name")),
        list(reversed(request()[:4])) + request()[4:],
    ],
    ids=lambda fields: str(fields[-1])[:40],
)
async def test_requests_that_are_odd_but_allowed(client: Client, fields: Fields) -> None:
    client.send(headers(1, fields), data(1, message(ask()), True))
    assert await client.outcome() == "grpc-status 0"


# ---------------------------------------------------------------- HPACK

GOOD = block(request())
HPACK: dict[str, bytes] = {
    "index 0": b"\x80",
    "index beyond the tables": b"\xff\x80\x01",
    "index of the empty dynamic table": b"\xbe",
    "index of a name beyond the tables": b"\x7f\x80\x01\x01a",
    "index that never ends": b"\xff" + b"\xff" * 100,
    "index of 2^70": b"\xff" + b"\x80" * 10 + b"\x01",
    "index cut off": b"\xff",
    "name cut off": b"\x40\x0aabc",
    "value missing": b"\x40\x01a",
    "value cut off": b"\x40\x01a\x05abcd",
    "value of 2^31": b"\x40\x01a\x7f\x80\xff\xff\xff\x07",
    "table larger than allowed": b"\x3f\xe2\x1f" + GOOD,
    "table of 2^31": b"\x3f\xe1\xff\xff\xff\x07" + GOOD,
    "three table sizes": b"\x20\x3f\xe1\x1f\x20" + GOOD,
    "table sizes without end": b"\x20" * 16000 + GOOD,
    "table size after a field": GOOD + b"\x20",
    "table size between fields": GOOD[:1] + b"\x20" + GOOD[1:],
    "huffman: padding longer than 7 bits": b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff",
    "huffman: padding of zeros": b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90",
    "huffman: EOS": b"\x00\x85\xf2\xb2\x4a\x87\xff\xff\xff\xfd\x25\x42\x7f",
    "huffman: a code cut off": b"\x00\x01a\x81\xfe",
}


@pytest.mark.parametrize("name", HPACK)
async def test_errors_of_header_compression(server: Server, client: Client, name: str) -> None:
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, HPACK[name]))
    assert await client.end() == "GOAWAY COMPRESSION_ERROR"
    await server.works()


async def test_header_compression_goes_on_on_streams_that_are_refused(client: Client) -> None:
    """Blocks of refused or cancelled streams, and of trailers, change the tables as any other."""
    encode = client.encode
    client.send(headers(1, encode([*request(), ("connection", "close"), ("a", "1")])))
    assert (await client.outcome(1)).endswith(("PROTOCOL_ERROR", "400"))
    client.send(headers(3, encode(request("/no.such/Method", ("b", "2"))), end=True))
    client.send(headers(5, encode(request(INFER, ("c", "3")))), reset(5))
    client.send(headers(7, encode(request(INFER, ("a", "1")))), data(7, message(ask())))
    client.send(headers(7, encode([("d", "4"), ("b", "2")]), end=True))
    assert (await client.answer(7)).tensor == b"abcdefgh"
    fields = request(INFER, ("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"))
    client.send(headers(9, encode(fields)), data(9, message(ask()), True))
    assert (await client.answer(9)).tensor == b"abcdefgh"


async def test_the_table_of_the_client_grows_shrinks_and_overflows(client: Client) -> None:
    encoder = client._encoder
    for stream, size in zip(range(1, 200, 2), [4096, 0, 100, 4096, 57, 4096] * 20, strict=False):
        encoder.header_table_size = size
        fields = request(INFER, (f"x-{stream}", "v" * (stream * 7 % 400)), ("x-same", "same"))
        client.send(headers(stream, encoder.encode(fields)), data(stream, message(ask()), True))
        assert (await client.answer(stream)).status == "grpc-status 0"


async def test_fields_in_every_representation(client: Client) -> None:
    plain = b"".join(
        b"\x10" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in ((name.encode(), value.encode()) for name, value in request())  # type: ignore[union-attr]
    )
    unindexed = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in ((name.encode(), value.encode()) for name, value in request())  # type: ignore[union-attr]
    )
    blocks = (plain, unindexed, Encoder().encode(request(), huffman=False), b"\x20\x3f\xe1\x1f" + GOOD, b"\x20" + plain)
    for stream, fields in zip(range(1, 11, 2), blocks, strict=True):
        client.send(headers(stream, fields), data(stream, message(ask()), True))
        assert (await client.answer(stream)).status == "grpc-status 0"


#: Half a megabyte is more than any client sends in headers, and takes nothing from the server.
MEMORY_LIMIT = 4 << 20


async def memory_while(send: Any) -> int:
    """The most that the server, and the test with it, took meanwhile."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        await send
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


async def flood(client: Client, piece: bytes, count: int) -> None:
    """Sends until the server has had enough of it."""
    for _ in range(count):
        if client.writer.transport.is_closing() or client.reader.at_eof():
            return
        client.writer.write(piece)
        try:
            await client.writer.drain()
        except ConnectionError:
            return


async def test_64_mb_of_headers_take_no_memory(server: Server, client: Client) -> None:
    field = b"\x00\x07x-large\x7f\x81\x7f" + b"v" * 16384
    piece = raw(CONTINUATION, 0, 1, field[:8000]) + raw(CONTINUATION, 0, 1, field[8000:])
    client.send(raw(HEADERS, 0, 1, block(request())))
    assert await memory_while(flood(client, piece, 4096)) < MEMORY_LIMIT
    assert await client.end() in (
        "closed",
        "GOAWAY ENHANCE_YOUR_CALM",
        "GOAWAY COMPRESSION_ERROR",
        "GOAWAY PROTOCOL_ERROR",
    )
    await server.works()


async def test_a_header_list_of_64_mb_in_a_few_bytes(server: Server, client: Client) -> None:
    bomb = b"\x40\x01a\x7f\x81\x1e" + b"v" * 3968 + b"\xbe" * 12000
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, block(request()) + bomb))
    assert await memory_while(client.outcome()) < MEMORY_LIMIT
    assert (await client.outcome()) in (
        "GOAWAY ENHANCE_YOUR_CALM",
        "GOAWAY COMPRESSION_ERROR",
        "GOAWAY PROTOCOL_ERROR",
        "RST_STREAM ENHANCE_YOUR_CALM",
        "RST_STREAM REFUSED_STREAM",
        "RST_STREAM PROTOCOL_ERROR",
        ":status 431",
        "grpc-status 8",
    )
    assert server.engine.requests == []
    await server.works()


async def test_a_flood_of_empty_continuations_is_ended(server: Server, client: Client) -> None:
    client.send(raw(HEADERS, 0, 1, block(request())))
    await flood(client, raw(CONTINUATION, 0, 1) * 1000, 100)
    assert await client.end() in ("closed", "GOAWAY ENHANCE_YOUR_CALM", "GOAWAY PROTOCOL_ERROR")
    await server.works()


async def test_metadata_of_8_kib(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(monkeypatch, caplog, forward="x-.*") as server, connected(server.port) as client:
        value = "v" * 7900
        encoded = block(request(INFER, ("x-large", value)))
        client.send(raw(HEADERS, 0, 1, encoded[:100]), raw(CONTINUATION, END_HEADERS, 1, encoded[100:]))
        client.send(data(1, message(ask()), True))
        assert (await client.answer()).status == "grpc-status 0"
        assert server.engine.requests[-1].parameters == {"x-large": value}


# ---------------------------------------------------------------- 5.2, 6.9: flow control


@pytest.mark.parametrize("initial", [0, 1, 4, 5, 6, 30])
async def test_responses_wait_for_the_window_of_their_stream(server: Server, initial: int) -> None:
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: initial}) as client:
        client.send(call(1))
        await client.pong()
        answer = client.answers[1]
        given = initial
        for increment in (1, 1, 3, 7):
            assert len(answer.content) == given
            client.send(window(1, increment))
            given += increment
            await client.pong()
        assert len(answer.content) == given
        assert not answer.has_ended
        client.send(window(1, 65535))
        assert (await client.answer()).tensor == b"abcdefgh"


async def test_without_a_window_answers_without_content_are_sent(server: Server) -> None:
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}) as client:
        client.send(call(1, "nonesuch"))
        assert (await client.answer()).status == "grpc-status 5"


async def test_responses_wait_for_the_window_of_the_connection(server: Server) -> None:
    content = bytes(range(256)) * 1000
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: HUGE}) as client:
        client.send(HELD, call(3, "held"))
        first, second = [await server.engine.calls.get() for _ in range(2)]
        for each in (first, second):
            each.respond(Tensor("OUTPUT0", DataType.UINT8, (len(content),), content))
        del first, second, each
        await client.pong()
        received = [client.answers[stream].content for stream in (1, 3)]
        assert sum(map(len, received)) == 65535
        for increment in (1, 16384, 100_000):
            before = sum(map(len, received))
            client.send(window(0, increment))
            await client.until(lambda: sum(map(len, received)) == before + increment)  # noqa: B023
        client.send(window(0, 1 << 20))
        for stream in (1, 3):
            answer = await client.answer(stream)
            assert answer.tensor == content
            assert max(answer.sizes) <= 16384


async def test_a_stream_without_window_does_not_hold_up_another(server: Server) -> None:
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: 10}) as client:
        client.send(call(1), call(3), call(5), window(3, 1000))
        assert (await client.answer(3)).tensor == b"abcdefgh"
        assert len(client.answers[1].content) == 10
        client.send(window(5, 1000), window(1, 1000))
        assert (await client.answer(5)).tensor == (await client.answer(1)).tensor == b"abcdefgh"


async def test_a_new_initial_window_size_counts_for_what_is_queued(server: Server) -> None:
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: 10}) as client:
        client.send(call(1))
        await client.pong()
        answer = client.answers[1]
        assert len(answer.content) == 10
        for steps, length in (
            ([settings({4: 12})], 12),
            ([settings({4: 0})], 12),
            ([window(1, 12)], 12),
            ([window(1, 1)], 13),
            ([settings({4: 5})], 18),
            ([settings({4: 3})], 18),  # 2 of the 5 are taken back
            ([window(1, 1)], 18),
            ([window(1, 1)], 18),
            ([window(1, 1)], 19),
            (
                [raw(SETTINGS, 0, 0, struct.pack(">HLHL", 4, 100, 4, 4))],
                20,
            ),  # the last value counts, or each in its turn
        ):
            client.send(*steps)
            await client.pong()
            await client.pong()  # what has room after all that has come is sent behind the first one
            assert len(answer.content) >= length if length == 20 else len(answer.content) == length, steps
        client.send(settings({4: 65535}))
        assert (await client.answer()).tensor == b"abcdefgh"


async def test_grants_cost_the_same_however_many_streams_wait(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    pump = connection.Connection.pump

    def counted(self: connection.Connection, waiting: Any) -> None:
        looked.append(waiting.id)
        pump(self, waiting)

    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}) as client:
        for number in range(1, 101, 2):
            client.send(call(number))
        await client.pong()
        await client.pong()
        monkeypatch.setattr(connection.Connection, "pump", counted)
        client.send(*[window(0, 1) for _ in range(500)], *[settings({4: 0}) for _ in range(500)])
        await client.pong()
        await client.pong()
        assert 50 <= len(looked) <= 50 * 20, "not each of the 1,000 frames looks at the 50 streams"


async def test_a_new_initial_window_size_does_not_count_for_the_connection(server: Server) -> None:
    content = bytes(200_000)
    async with connected(server.port) as client:
        client.send(HELD)
        (await server.engine.calls.get()).respond(Tensor("OUTPUT0", DataType.UINT8, (len(content),), content))
        await client.pong()
        client.send(settings({4: HUGE}))
        await client.pong()
        assert len(client.answers[1].content) == 65535
        client.refills = True
        client.send(window(0, 1 << 20))
        assert (await client.answer()).tensor == content


@pytest.mark.parametrize("limit", [16384, 20_000, 2**24 - 1])
async def test_frames_are_as_large_as_the_client_allows(server: Server, limit: int) -> None:
    content = bytes(100_000)
    given = {SettingsFrame.INITIAL_WINDOW_SIZE: HUGE, SettingsFrame.MAX_FRAME_SIZE: limit}
    async with connected(server.port, given) as client:
        client.send(window(0, 1 << 20), HELD)
        (await server.engine.calls.get()).respond(Tensor("OUTPUT0", DataType.UINT8, (len(content),), content))
        answer = await client.answer()
        assert answer.tensor == content
        assert max(answer.sizes) <= limit


async def test_requests_larger_than_any_window(client: Client) -> None:
    content = random.Random(1).randbytes(3 << 20)
    client.refills = True
    client.send(window(0, 1 << 20), settings({4: 1 << 20}))
    for stream in (1, 3):
        client.send(OPEN if stream == 1 else headers(3))
        await client.send_data(stream, message(ask(content=content)), end=True)
        assert (await client.answer(stream)).tensor == content


async def test_padding_is_given_back_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Several times the window of the stream of it, and then the message."""
    for module in (connection, stream_module):
        monkeypatch.setattr(module, "WINDOW", 50_000)
    async with serving(monkeypatch, caplog) as server, connected(server.port) as client:
        client.send(headers(1))
        for _ in range(1000):
            if client.may_send(1) < 256:
                await client.until(lambda: client.may_send(1) >= 256)
            client.send_within_window(1, b"", padding=255)
        await client.send_data(1, message(ask()), end=True)
        assert (await client.answer()).tensor == b"abcdefgh"


async def test_data_of_streams_that_are_over_are_given_back_to_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that are refused at once, or cancelled, must not eat up the window of the connection."""
    monkeypatch.setattr(connection, "_CONNECTION_WINDOW", 100_000)
    async with serving(monkeypatch, caplog) as server, connected(server.port) as client:
        for stream in range(1, 101, 2):
            await client.until(lambda: client.may_send(0) >= 16384)
            client.send(headers(stream, request("/no.such/Method" if stream % 4 == 1 else INFER)))
            if stream % 4 == 3:
                client.send(reset(stream))
            client.send_within_window(stream, bytes(16384))
        client.send(headers(201))
        await client.send_data(201, message(ask()), end=True)
        assert (await client.answer(201)).tensor == b"abcdefgh"


async def test_a_client_that_reads_no_answers_is_given_no_window(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if it sends all the same, that is an error."""
    monkeypatch.setattr(inference_stream, "_OUTBOX_LIMIT", 4)
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}) as client:
        client.send(headers(1, request(STREAM_INFER)))
        content = message(ask(content=bytes(60_000)))
        sent = idle = 0
        while idle < 5:
            room = min(client.may_send(1), 16384)
            if room > 0:
                start = sent % len(content)
                client.send_within_window(1, content[start : start + room])
                sent += len(content[start : start + room])
                idle = 0
                await client.writer.drain()
            else:
                idle += 1
            await client.pong()
            assert sent < 64 << 20, "no end of it"
        client.send(data(1, bytes(16384)))
        assert await client.outcome() in ("RST_STREAM FLOW_CONTROL_ERROR", "GOAWAY FLOW_CONTROL_ERROR")


async def test_data_beyond_the_window(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In one frame, so that there is no time to give window back."""
    for module in (connection, stream_module):
        monkeypatch.setattr(module, "WINDOW", 99_999)
    monkeypatch.setattr(connection, "_CONNECTION_WINDOW", 120_000)
    async with serving(monkeypatch, caplog) as server:
        for size, outcomes in (
            (99_999, ["ignored"]),
            (100_000, ["RST_STREAM FLOW_CONTROL_ERROR", "GOAWAY FLOW_CONTROL_ERROR"]),
            (120_001, ["GOAWAY FLOW_CONTROL_ERROR"]),
        ):
            async with connected(server.port) as client:
                client.send(headers(1), raw(DATA, 0, 1, message(bytes(size))[:size]))
                assert await client.outcome(1, ignores=True) in outcomes


# ---------------------------------------------------------------- gRPC: requests


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("application/grpc", "grpc-status 0"),
        ("application/grpc+proto", "grpc-status 0"),
        ("application/grpc;charset=utf-8", "grpc-status 0"),
        ("application/grpc-web", ":status 415"),
        ("application/grpcx", ":status 415"),
        ("application/json", ":status 415"),
        ("", ":status 415"),
        (None, ":status 415"),
    ],
)
async def test_content_types(client: Client, kind: str | None, outcome: str) -> None:
    fields = without("content-type") if kind is None else changed("content-type", kind)
    client.send(headers(1, fields), data(1, message(ask()), True))
    assert await client.outcome() == outcome


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "post", "CONNECT", ""])
async def test_other_methods_than_post(server: Server, client: Client, method: str) -> None:
    client.send(headers(1, changed(":method", method), end=True))
    assert await client.outcome() in (":status 405", "RST_STREAM PROTOCOL_ERROR")
    assert server.engine.requests == []


@pytest.mark.parametrize(
    "path", ["/inference.GRPCInferenceService/Nothing", "/x/ModelInfer", "/", "*", "//", INFER[1:]]
)
async def test_paths_that_nobody_serves(client: Client, path: str) -> None:
    client.send(call(1, path=path))
    assert await client.outcome() == "grpc-status 12"


async def test_heads_of_answers(client: Client) -> None:
    client.send(call(1), call(3, "nonesuch"))
    good = await client.answer(1)
    assert good.headers.items() >= {":status": "200", "content-type": "application/grpc"}.items()
    assert good.trailers == {"grpc-status": "0"}
    bad = await client.answer(3)
    assert bad.headers == {}
    assert bad.trailers == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "5",
        "grpc-message": "Request for unknown model: 'nonesuch' is not found",
    }
    client.send(headers(5, request(STREAM_INFER, ("triton_grpc_error", "true"))))
    client.send(data(5, message(ask()) + message(ask("fails")), True))
    late = await client.answer(5)
    assert late.headers.items() >= {":status": "200", "content-type": "application/grpc"}.items()
    assert len(late.messages) == 1
    assert late.trailers == {"grpc-status": "3", "grpc-message": "the model failed"}


async def test_messages_in_two_frames_cut_at_every_byte(client: Client) -> None:
    content = message(ask())
    for cut in range(len(content) + 1):
        stream = 2 * cut + 1
        client.send(headers(stream), data(stream, content[:cut]), data(stream, content[cut:], True))
        assert (await client.answer(stream)).tensor == b"abcdefgh"


async def test_messages_of_a_stream_in_two_frames_cut_at_every_byte(client: Client) -> None:
    content = b"".join(message(ask(content=text, id=str(i))) for i, text in enumerate((b"one.", b"", b"three...")))
    for cut in range(len(content) + 1):
        stream = 2 * cut + 1
        client.send(headers(stream, request(STREAM_INFER)))
        client.send(data(stream, content[:cut]), data(stream, content[cut:], True))
        answer = await client.answer(stream)
        assert answer.status == "grpc-status 0"
        assert [response(each) for each in answer.messages] == [("0", b"one."), ("1", b""), ("2", b"three...")]


def response(content: bytes) -> tuple[str, bytes]:
    """(id, first output) of a message of a stream."""
    whole = pb.ModelStreamInferResponse.FromString(content)
    assert not whole.error_message
    return whole.infer_response.id, bytes(whole.infer_response.raw_output_contents[0])


async def test_a_message_byte_by_byte_with_empty_frames_in_between(client: Client) -> None:
    client.send(headers(1))
    for byte in message(ask()):
        client.send(data(1), data(1, bytes([byte]), padding=byte))
    client.send(data(1, b"", True))
    assert (await client.answer()).tensor == b"abcdefgh"


async def test_the_tcp_stream_cut_at_every_byte(client: Client) -> None:
    for cut in range(1, len(call())):
        stream = 2 * cut + 1
        await client.send_in_pieces(call(stream, content=b"%8d" % cut), [cut])
        assert (await client.answer(stream)).tensor == b"%8d" % cut
    whole = wire(call(1001), call(1003), ping(), headers(1005), data(1005, message(ask()), True, padding=3))
    await client.send_in_pieces(whole, range(1, len(whole)))
    for stream in (1001, 1003, 1005):
        assert (await client.answer(stream)).tensor == b"abcdefgh"


@pytest.mark.parametrize("size", [40_000, 300_000, 1_100_000])
async def test_large_messages_cut_at_odd_places(client: Client, size: int) -> None:
    """What is received in place, by frames and segments of many sizes, padded or not."""
    dice = random.Random(size)
    content = dice.randbytes(size // 4 * 4)
    client.refills = True
    client.send(window(0, HUGE // 2), settings({4: HUGE}))
    for stream, largest in ((1, 16384), (3, client.settings[SettingsFrame.MAX_FRAME_SIZE])):
        whole = message(ask(content=content))
        parts: list[Part] = [headers(stream)]
        while whole:
            length = dice.choice((1, 5, 1000, largest - 300, largest - 256))
            padding = dice.choice((None, None, 0, 1, 255))
            parts.append(data(stream, whole[:length], len(whole) <= length, padding))
            whole = whole[length:]
            if dice.random() < 0.1:
                parts.append(ping())
        sent = wire(*parts)
        cuts = sorted(dice.sample(range(len(sent)), 50))
        await client.send_in_pieces(sent, cuts)
        assert (await client.answer(stream)).tensor == content


async def test_large_messages_get_their_memory_as_they_come(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_AT_ONCE", 1000)
    content = random.Random(1).randbytes(400_000)
    client.refills = True
    for stream, size in ((1, 16384), (3, 900), (5, 300_000)):
        whole = message(ask(content=content))
        frames = [data(stream, whole[at : at + size], at + size >= len(whole)) for at in range(0, len(whole), size)]
        client.send(headers(stream), *frames)
        assert (await client.answer(stream)).tensor == content


async def test_many_calls_in_one_segment(server: Server, client: Client) -> None:
    client.send(*(call(stream, content=b"%8d" % stream) for stream in range(1, 401, 2)))
    for stream in range(1, 401, 2):
        assert (await client.answer(stream)).tensor == b"%8d" % stream


async def test_the_end_in_the_middle_of_a_message(server: Server, client: Client) -> None:
    content = message(ask())
    for cut in range(len(content)):
        for stream, path in ((4 * cut + 1, INFER), (4 * cut + 3, STREAM_INFER)):
            client.send(headers(stream, request(path)), data(stream, content[:cut], True))
            answer = await client.answer(stream)
            assert answer.status == ("grpc-status 0" if path is STREAM_INFER and not cut else "grpc-status 13")
            assert not answer.content
    assert server.engine.requests == []


@pytest.mark.parametrize("rest", [b"\2\0\0\0\0", b"\0\xff\xff\xff\xff", b"\0\0\0\0\7half", b"\0"])
async def test_what_breaks_a_call_off_cancels_it(server: Server, client: Client, rest: bytes) -> None:
    for stream, model, path in ((1, "held", INFER), (3, "held_decoupled", STREAM_INFER)):
        client.send(headers(stream, request(path)), data(stream, message(ask(model)) + rest, True))
        assert (await client.answer(stream)).status in ("grpc-status 13", "grpc-status 8")
        held = await server.engine.calls.get()
        async with asyncio.timeout(PATIENCE_S):
            await held.cancelled.wait()
        held.sink.send(InvalidArgument("cancelled"), True)
        del held


@pytest.mark.parametrize("end", ["HEADERS", "DATA", "trailers"])
async def test_a_call_without_a_message(client: Client, end: str) -> None:
    for stream, path, status in ((1, INFER, "13"), (3, SERVER_LIVE, "13"), (5, STREAM_INFER, "0")):
        client.send(headers(stream, request(path), end=end == "HEADERS"))
        if end == "DATA":
            client.send(data(stream, b"", True))
        elif end == "trailers":
            client.send(headers(stream, [("x", "y")], end=True))
        assert (await client.answer(stream)).status == f"grpc-status {status}"


async def test_an_empty_message_is_a_message(client: Client) -> None:
    client.send(headers(1, request(SERVER_LIVE)), data(1, message(b""), True))
    assert pb.ServerLiveResponse.FromString((await client.answer()).messages[0]).live


async def test_a_call_of_one_message_is_answered_once(server: Server, client: Client) -> None:
    client.send(headers(1), data(1, message(ask()) + message(ask()), True))
    answer = await client.answer()
    assert (answer.status, len(answer.messages)) in (("grpc-status 0", 1), ("grpc-status 12", 0))
    client.send(call(3, "held"))
    held = await server.engine.calls.get()
    client.send(headers(5, request()), data(5, message(ask("held"))))
    second = await server.engine.calls.get()
    client.send(data(5, message(ask("held"))), data(5, b"", True))
    await client.pong()
    held.echo()
    second.echo()
    del held, second
    assert (await client.answer(3)).tensor == b"abcdefgh"
    assert len((await client.answer(5)).messages) <= 1
    assert server.engine.calls.empty()


async def test_an_answer_need_not_wait_for_the_end_of_the_request(client: Client) -> None:
    """What the client still sends is passed over, and does not count against the connection."""
    client.send(headers(1), data(1, message(ask())))
    assert (await client.answer()).tensor == b"abcdefgh"
    client.send(data(1, bytes(1000)), headers(1, [("x", "y")], end=True), call(3))
    assert (await client.answer(3)).tensor == b"abcdefgh"


async def test_a_content_length_that_is_wrong(server: Server, client: Client) -> None:
    for stream, length in ((1, 1000), (3, 1)):
        client.send(headers(stream, request(INFER, ("content-length", str(length)))))
        client.send(data(stream, message(ask("held")), True))
        assert await client.outcome(stream) == "RST_STREAM PROTOCOL_ERROR"


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        (None, message(gzip.compress(ask()), 1), "13"),
        ("identity", message(gzip.compress(ask()), 1), "13"),
        ("gzip", message(ask(), 2), "13"),
        (None, message(ask(), 255), "13"),
        ("gzip", message(b"", 1), "13"),
        ("gzip", message(b"no gzip", 1), "13"),
        ("gzip", message(gzip.compress(ask())[:-1], 1), "13"),
        ("gzip", message(gzip.compress(ask())[:-8] + bytes(8), 1), "13"),
        ("gzip", message(zlib.compress(ask()), 1), "13"),
        ("deflate", message(gzip.compress(ask()), 1), "13"),
        ("deflate", message(zlib.compress(ask())[:-1], 1), "13"),
        ("deflate", message(zlib.compress(random.Random(1).randbytes(9000))[:-1], 1), "13"),
        ("br", message(ask()), "12"),
        ("snappy", message(ask(), 1), "12"),
        ("GZIP", message(ask(), 1), "12"),
        ("gzip", message(ask()), "0"),
        ("gzip", message(gzip.compress(ask()), 1), "0"),
        ("deflate", message(zlib.compress(ask()), 1), "0"),
        ("identity", message(ask()), "0"),
        (None, b"\0\xff\xff\xff\xff", "8"),
        (None, b"\0\x80\0\0\0", "8"),
    ],
)
async def test_encodings(
    server: Server, client: Client, path: str, encoding: str | None, content: bytes, status: str
) -> None:
    fields = request(path) if encoding is None else request(path, ("grpc-encoding", encoding))
    client.send(headers(1, fields), data(1, content, True))
    answer = await client.answer()
    assert answer.status == f"grpc-status {status}"
    assert len(answer.messages) == (status == "0")
    if status == "12":
        accepted = answer.trailers["grpc-accept-encoding"].replace(" ", "").split(",")
        assert {"identity", "gzip", "deflate"} <= set(accepted)
    client.send(call(3))
    assert (await client.answer(3)).tensor == b"abcdefgh"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_messages_of_a_stream_keep_their_order(client: Client, encoding: str) -> None:
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    client.refills = True
    client.send(headers(1, request(STREAM_INFER, ("grpc-encoding", encoding))))
    contents = [random.Random(i).randbytes(size) for i, size in enumerate((40, 20_000, 0, 90_000, 8, 5000, 4))]
    sent = b""
    for i, content in enumerate(contents):
        whole = ask(content=content, id=str(i))
        sent += message(whole) if i == 4 else message(compress(whole), 1)
    await client.send_data(1, sent, end=True)
    assert [response(each) for each in (await client.answer()).messages] == [
        (str(i), content) for i, content in enumerate(contents)
    ]


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
@pytest.mark.parametrize("size", [1 << 20, 64 << 20])
async def test_a_bomb_of_gzip_takes_no_memory(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, path: str, size: int
) -> None:
    monkeypatch.setattr(compression, "MAX_MESSAGE", 1 << 18)
    bomb = message(gzip.compress(bytes(size)), 1)
    client.send(headers(1, request(path, ("grpc-encoding", "gzip"))))

    async def explode() -> None:
        await client.send_data(1, bomb, end=True)
        assert (await client.answer()).status == "grpc-status 8"

    assert await memory_while(explode()) < MEMORY_LIMIT


async def test_messages_that_are_announced_and_do_not_come_take_little_memory(server: Server, client: Client) -> None:
    before = resident_bytes()
    client.send(*(wire(headers(stream), data(stream, b"\0\x7f\xff\xff\xff\1")) for stream in range(1, 201, 2)))
    await client.pong()
    assert resident_bytes() - before < 16 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


# ---------------------------------------------------------------- gRPC: deadlines and metadata


@pytest.mark.parametrize("text", ["1n", "99999999n", "0S", "1u", "1000u", "1m", "50m", "00000001m"])
async def test_deadlines_that_pass(server: Server, client: Client, text: str) -> None:
    for stream, model, path in ((1, "held", INFER), (3, "held_decoupled", STREAM_INFER)):
        client.send(headers(stream, request(path, ("grpc-timeout", text))), data(stream, message(ask(model)), True))
        answer = await client.answer(stream)
        assert answer.status == "grpc-status 4"
        assert answer.trailers["grpc-message"] == "Deadline Exceeded"


async def test_a_deadline_cancels_the_call(server: Server, client: Client) -> None:
    for stream, model, path in ((1, "held", INFER), (3, "held_decoupled", STREAM_INFER)):
        client.send(headers(stream, request(path, ("grpc-timeout", "100m"))), data(stream, message(ask(model))))
        held = await server.engine.calls.get()
        assert (await client.answer(stream)).status == "grpc-status 4"
        async with asyncio.timeout(PATIENCE_S):
            await held.cancelled.wait()
        held.echo()  # nobody listens; nothing breaks
        if path is STREAM_INFER:
            held.sink.send(None, True)
        del held


async def test_a_deadline_passes_before_the_message_has_come(server: Server, client: Client) -> None:
    client.send(headers(1, request(INFER, ("grpc-timeout", "1m"))))
    assert (await client.answer()).status == "grpc-status 4"
    client.send(data(1, message(ask()), True), call(3))
    assert (await client.answer(3)).tensor == b"abcdefgh"
    assert len(server.engine.requests) == 1


@pytest.mark.parametrize("text", ["1H", "1M", "30S", "99999999S", "99999999H", "30000m", "30000000u"])
async def test_deadlines_that_do_not_pass(server: Server, client: Client, text: str) -> None:
    client.send(headers(1, request(INFER, ("grpc-timeout", text))), data(1, message(ask("held")), True))
    held = await server.engine.calls.get()
    await client.pong()
    assert not held.cancelled.is_set()
    held.echo()
    assert (await client.answer()).tensor == b"abcdefgh"


@pytest.mark.parametrize(
    "text", ["", "S", "10", "10s", "-1S", "+1S", "1.5S", "1 S", "123456789S", "1SS", "0x1S", "\u0663S"]
)
async def test_timeouts_that_are_none(server: Server, client: Client, text: str) -> None:
    client.send(headers(1, request(INFER, ("grpc-timeout", text))), data(1, message(ask()), True))
    assert await client.outcome() in ("grpc-status 13", "RST_STREAM PROTOCOL_ERROR")
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([("x-a", "1"), ("x-b", "2"), ("x-a", "3")], [("x-a", "1"), ("x-b", "2"), ("x-a", "3")]),
        ([("x-a", "a, b")], [("x-a", "a, b")]),
        ([("x-a", "")], [("x-a", "")]),
        ([("x-bin", "YWI=")], [("x-bin", b"ab")]),
        ([("x-bin", "YWI")], [("x-bin", b"ab")]),
        ([("x-bin", "")], [("x-bin", b"")]),
        ([("x-bin", "YQ,YWI=,YWJj")], [("x-bin", b"a"), ("x-bin", b"ab"), ("x-bin", b"abc")]),
        ([("x-bin", "YQ==, YWI")], [("x-bin", b"a"), ("x-bin", b"ab")]),
        ([("x-bin", binary(bytes(range(256))))], [("x-bin", bytes(range(256)))]),
        ([("x-bin", binary(bytes(range(256))).rstrip("="))], [("x-bin", bytes(range(256)))]),
    ],
)
async def test_metadata(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: Fields, expected: list[Any]
) -> None:
    got: list[Any] = []

    async def live(data: bytes, metadata: Any, peer: str) -> bytes:
        got.extend(pair for pair in metadata if pair[0].startswith("x-"))
        return b""

    async with serving(monkeypatch, caplog, method=lambda path: live) as server, connected(server.port) as client:
        client.send(headers(1, request(SERVER_LIVE, *sent)), data(1, message(b""), True))
        assert await client.outcome() == "grpc-status 0"
    assert got == expected


@pytest.mark.parametrize("value", ["!", "YW", "Y", "====", "YQ==YQ==", "\u00e4", ",,", "YQ-_"])
async def test_metadata_that_are_no_base64_do_no_harm(client: Client, value: str) -> None:
    client.send(headers(1, request(INFER, ("x-bin", value))), data(1, message(ask()), True))
    await client.answer()
    client.send(call(3))
    assert (await client.answer(3)).tensor == b"abcdefgh"


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("plain ~!\"'", "plain ~!\"'"),
        ("100%", "100%25"),
        ("%41", "%2541"),
        ("a\nb\r\tc\0", "a%0Ab%0D%09c%00"),
        ("\x7f", "%7F"),
        ("K\u00fchler", "K%C3%BChler"),
        ("\u6e29\U0001f321", "%E6%B8%A9%F0%9F%8C%A1"),
        (" a ", " a "),
    ],
)
async def test_texts_of_errors_are_percent_encoded(server: Server, client: Client, text: str, encoded: str) -> None:
    client.send(HELD)
    (await server.engine.calls.get()).sink.send(InvalidArgument(text), True)
    answer = await client.answer()
    # A value may not begin or end with a space (RFC 9113, 8.2.1), which gRPC does not say.
    allowed = {encoded, encoded.replace(" a ", "%20a%20"), encoded.strip()}
    assert answer.trailers["grpc-message"] in allowed


async def test_long_texts_of_errors_are_whole_header_blocks(server: Server, client: Client) -> None:
    client.send(HELD)
    (await server.engine.calls.get()).sink.send(InvalidArgument("\u6e29" * 5000), True)
    answer = await client.answer()
    assert answer.trailers["grpc-message"].startswith("%E6%B8%A9" * 2000)
    client.send(call(3))
    assert (await client.answer(3)).tensor == b"abcdefgh"


# ---------------------------------------------------------------- many, too many, and clients that leave


async def test_thousands_of_calls_at_once(server: Server, client: Client) -> None:
    count = 3000
    client.send(window(0, 1 << 24))
    client.send(*(call(stream, "held", b"%8d" % stream) for stream in range(1, 2 * count, 2)))
    calls = [await server.engine.calls.get() for _ in range(count)]
    random.Random(1).shuffle(calls)
    while calls:
        calls.pop().echo()
    for stream in range(1, 2 * count, 2):
        assert (await client.answer(stream)).tensor == b"%8d" % stream


async def test_no_more_streams_than_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_MAX_STREAMS", 5)
    async with serving(monkeypatch, caplog) as server, connected(server.port) as client:
        assert client.settings[SettingsFrame.MAX_CONCURRENT_STREAMS] == 5
        client.send(*(call(stream, "held") for stream in (1, 3, 5, 7, 9, 11)))
        assert await client.outcome(11) == "RST_STREAM REFUSED_STREAM"
        (await server.engine.calls.get()).echo()
        await client.answer(1)
        client.send(call(13))
        assert (await client.answer(13)).tensor == b"abcdefgh"


@pytest.mark.parametrize("kind", ["head only", "unary", "stream", "malformed", "unknown method"])
async def test_streams_opened_and_reset_by_the_thousands(server: Server, client: Client, kind: str) -> None:
    pieces = {
        "head only": lambda stream: headers(stream).serialize(),
        "unary": lambda stream: call(stream, "held"),
        "stream": lambda stream: call(stream, "held_decoupled", path=STREAM_INFER),
        "malformed": lambda stream: headers(stream, [(":method", "POST")]).serialize(),
        "unknown method": lambda stream: headers(stream, request("/a/b")).serialize(),
    }
    make = pieces[kind]
    for start in range(1, 6001, 600):
        client.send(*(make(stream) + reset(stream).serialize() for stream in range(start, start + 600, 2)))
        await client.writer.drain()
        while not server.engine.calls.empty():
            held = server.engine.calls.get_nowait()
            assert held.cancelled.is_set()
            held.sink.send(InvalidArgument("cancelled"), True)
            del held
    assert await client.outcome(99_999, ignores=True) in ("ignored", "GOAWAY ENHANCE_YOUR_CALM")
    await server.works()


FLOODS: dict[str, bytes] = {
    "PING": wire(ping()),
    "SETTINGS": wire(settings({4: 1})),
    "empty SETTINGS": wire(settings({})),
    "frames on closed streams": wire(data(1, b"")),
    "PRIORITY": wire(PriorityFrame(3)),
    "unknown frames": raw(0x77, 0, 0),
    "empty DATA": wire(data(3, b"")),
}


#: What is answered, and so must be held up when the answers are not read.
ANSWERED = ("PING", "SETTINGS", "empty SETTINGS", "frames on closed streams")


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read stays with the server, and that soon."""

    def bound_with_small_buffers(*given: Any) -> socket.socket:
        made = bound(*given)
        for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            made.setsockopt(socket.SOL_SOCKET, which, 8192)
        return made

    monkeypatch.setattr(listener, "bound", bound_with_small_buffers)
    monkeypatch.setattr(connection, "_WRITE_LIMIT", 65536)


async def pour(port: int, opening: bytes, pieces: Iterable[bytes]) -> int:
    """Sends without reading until the server reads no more, or hangs up; how many bytes it has taken."""
    with socket.socket() as plain:
        for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            plain.setsockopt(socket.SOL_SOCKET, which, 8192)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
        poured = idle = 0
        for piece in chain((opening,), pieces):
            rest = memoryview(piece)
            while rest:
                try:
                    sent = plain.send(rest)
                except BlockingIOError:
                    idle += 1
                    if idle > 50:
                        return poured
                    await asyncio.sleep(0.001)  # the server reads, or has stopped reading: no event says which
                except ConnectionError:
                    return poured
                else:
                    rest = rest[sent:]
                    poured += sent
                    idle = 0
    return poured


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("name", FLOODS)
async def test_floods_by_a_client_that_does_not_read(server: Server, name: str) -> None:
    """The server stops reading, or hangs up, before what it has to say takes memory; others are served meanwhile."""
    limit = 1 << (20 if name in ANSWERED else 18)
    piece = FLOODS[name] * (16384 // len(FLOODS[name]))
    opening = wire(PREFACE, settings({}), call(1), headers(3))
    poured = 0

    async def flood_without_reading() -> None:
        nonlocal poured
        poured = await pour(server.port, opening, [piece] * (limit // len(piece)))

    # Tiny frames are tiny objects, and each of those takes several times its bytes.
    assert await memory_while(flood_without_reading()) < MEMORY_LIMIT
    if name in ANSWERED:
        assert poured < limit - len(piece)
    await server.works()


async def test_pings_without_end_are_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(monkeypatch, caplog, http2_max_ping_strikes=2) as server, connected(server.port) as client:
        client.send(*[ping()] * 10)
        assert await client.end() == "GOAWAY ENHANCE_YOUR_CALM"
        assert client.goaway is not None
        assert client.goaway.additional_data == b"too_many_pings"


@pytest.mark.usefixtures("small_buffers")
async def test_answers_that_nobody_reads_hold_up_who_asks(server: Server) -> None:
    """A client that sends calls and reads no answers: no more are taken than it could be told of."""
    opening = wire(PREFACE, settings({4: HUGE}), window(0, HUGE - 65535))
    content = bytes(8000)
    await pour(server.port, opening, (call(stream, content=content) for stream in range(1, 1000, 2)))
    assert 8 < len(server.engine.requests) < 100
    await server.works()


@pytest.mark.usefixtures("small_buffers")
async def test_a_client_that_reads_again_is_served_again(server: Server) -> None:
    content = random.Random(1).randbytes(3_000_000)
    async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: HUGE}) as client:
        client.send(window(0, HUGE - 65535), HELD, call(3, "held"), call(5))
        for _ in range(2):
            held = await server.engine.calls.get()
            held.respond(Tensor("OUTPUT0", DataType.UINT8, (len(content),), content))
            del held
        await turns(100)
        client.send(call(7))
        for stream in (1, 3):
            assert (await client.answer(stream)).tensor == content
        for stream in (5, 7):
            assert (await client.answer(stream)).tensor == b"abcdefgh"


CONVERSATION = wire(
    PREFACE,
    settings({}),
    call(1),
    call(3, "held"),
    raw(HEADERS, 0, 5, block(request())[:20]),
    raw(CONTINUATION, END_HEADERS, 5, block(request())[20:]),
    data(5, message(ask("held")), padding=5),
    headers(7, request(STREAM_INFER)),
    data(7, message(ask("held_decoupled")) + message(ask()) + message(ask("held"))[:30]),
    call(9, path=SERVER_LIVE, content=b""),
    headers(11, request(STREAM_INFER, ("grpc-encoding", "gzip"))),
    data(11, message(gzip.compress(random.Random(1).randbytes(5000)), 1)),
)


@pytest.mark.parametrize("how", ["end", "reset", "half-close"])
async def test_clients_that_leave_at_any_byte(server: Server, how: str) -> None:
    tasks = asyncio.all_tasks()
    for length in range(0, len(CONVERSATION), 7):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CONVERSATION[:length])
        await turns(length % 5)
        if how == "half-close":
            writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                await reader.read()
        elif how == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await server.forgets(tasks)
    await server.works()


async def test_a_client_that_leaves_while_it_is_answered(server: Server) -> None:
    for length in (0, 9, 70_000, 1_000_000):
        async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: HUGE}) as client:
            client.send(window(0, 1 << 28), HELD, call(3, "held_decoupled", path=STREAM_INFER))
            calls = [await server.engine.calls.get() for _ in range(2)]
            big = Tensor("OUTPUT0", DataType.UINT8, (50 << 20,), bytes(50 << 20))
            for each in calls:
                each.respond(big, final=each.request.model_name == "held")
            del each
            await client.until(lambda: sum(len(a.content) for a in client.answers.values()) >= length)  # noqa: B023
            client.writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await next(call for call in calls if call.request.model_name != "held").cancelled.wait()
        calls.pop().sink.send(None, True)
        calls.clear()
    await server.works()


async def test_stopping_tells_clients_and_waits_for_their_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    frontend = GrpcFrontend(engine, GrpcOptions(address="127.0.0.1", port=0, drain_s=30.0))
    await frontend.__aenter__()
    async with connected(frontend.port) as idle, connected(frontend.port) as busy:
        busy.send(HELD)
        held = await engine.calls.get()
        stopping = asyncio.ensure_future(frontend.__aexit__(None, None, None))
        assert await idle.end() == "GOAWAY NO_ERROR"
        busy.send(call(3))
        assert (await busy.answer(3)).status in ("grpc-status 14", "RST_STREAM REFUSED_STREAM")
        held.echo()
        assert (await busy.answer(1)).tensor == b"abcdefgh"
        assert await busy.end() == "GOAWAY NO_ERROR"
        await stopping


async def test_a_client_that_answers_no_ping_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"keepalive_time_ms": 20, "keepalive_timeout_ms": 20}
    async with serving(monkeypatch, caplog, **options) as server, connected(server.port) as client:
        client.is_alive = False
        client.send(HELD)
        assert await client.end() == "GOAWAY NO_ERROR"
        assert client.goaway is not None
        assert client.goaway.additional_data == b"keepalive_timeout"


@pytest.mark.parametrize("always", [False, True])
async def test_a_client_that_answers_pings_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, always: bool
) -> None:
    options = {
        "keepalive_time_ms": 10,
        "keepalive_timeout_ms": 3_600_000,  # an answer ends the wait
        "keepalive_permit_without_calls": always,
        "http2_max_pings_without_data": 0,
    }
    async with (
        serving(monkeypatch, caplog, **options) as server,
        connected(server.port) as idle,
        connected(server.port) as busy,
    ):
        busy.send(HELD)
        pinged = [idle, busy] if always else [busy]
        await asyncio.gather(*(each.until(lambda each=each: len(each.pings) > 1) for each in pinged))
        await idle.pong()
        assert bool(idle.pings) is always


async def test_pings_without_data_have_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"keepalive_time_ms": 10, "keepalive_timeout_ms": 200, "http2_max_pings_without_data": 1}
    async with (
        serving(monkeypatch, caplog, **options) as server,
        connected(server.port) as client,
        connected(server.port) as clock,
    ):
        client.send(HELD)
        held = await server.engine.calls.get()
        reading = asyncio.ensure_future(client.answer())
        clock.send(headers(1, request(STREAM_INFER)))
        for count in range(1, 4):
            # Answers let the server ping this one again.
            clock.send(data(1, message(ask())))
            await clock.until(lambda: len(clock.pings) >= count)  # noqa: B023
        held.echo()
        del held
        assert (await reading).status == "grpc-status 0"
        assert len(client.pings) == 1


async def test_a_connection_that_is_old_is_given_up_when_its_calls_are_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(monkeypatch, caplog, max_connection_age_ms=50) as server, connected(server.port) as client:
        client.send(HELD)
        held = await server.engine.calls.get()
        await client.until(lambda: client.goaway)
        assert client.goaway is not None
        assert (client.goaway.error_code, client.goaway.last_stream_id) == (0, HUGE)
        client.send(call(3))  # which has been on its way
        assert (await client.answer(3)).tensor == b"abcdefgh"
        held.echo()
        del held
        assert (await client.answer(1)).tensor == b"abcdefgh"
        assert await client.end() == "GOAWAY NO_ERROR"
        assert client.goaway.last_stream_id == 3


async def test_a_connection_that_is_old_has_its_grace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_connection_age_ms": 20, "max_connection_age_grace_ms": 20}
    async with serving(monkeypatch, caplog, **options) as server, connected(server.port) as client:
        client.send(HELD)
        assert await client.end() == "GOAWAY NO_ERROR"


async def test_an_error_of_the_connection_ends_it_also_when_the_client_stays(client: Client) -> None:
    client.hangs_up = False
    client.send(raw(PING, 0, 0, b"short"))
    assert await client.end() == "GOAWAY FRAME_SIZE_ERROR"


# ---------------------------------------------------------------- conversations made by chance


class Conversation:
    """Calls of all kinds as frames, in an order and in pieces that `dice` choose, on one connection."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._encoder = Encoder()
        #: Paths of the streams, and what comes back.
        self.expected: dict[int, tuple[str, list[bytes]]] = {}

    def sent(self) -> bytes:
        """All that the client sends, from the preface on."""
        dice = self._dice
        calls = [self._call() for _ in range(dice.randint(1, 5))]
        sent = PREFACE + wire(settings(dice.choice([{}, {4: 3}, {1: 0, 4: 70_000}, {4: 0, 5: 20_000}])))
        stream = 1
        opened: list[tuple[int, list[tuple[bytes, int | None]]]] = []
        while calls or opened:
            if calls and (not opened or dice.random() < 0.4):
                fields, frames, contents = calls.pop()
                self.expected[stream] = str(fields[2][1]), contents
                sent += self._head(stream, fields, not frames) + wire(window(stream, 100_000))
                opened.append((stream, frames))
                stream += 2 * dice.choice((1, 1, 3))
            else:
                id, frames = dice.choice(opened)
                if frames:
                    content, padding = frames.pop(0)
                    end = not frames and dice.random() < 0.8
                    sent += wire(data(id, content, end, padding))
                    if not frames and not end:
                        # The end in a frame of its own, or in trailers.
                        in_trailers = dice.random() < 0.5
                        sent += self._head(id, [("x-trailer", "1")], True) if in_trailers else wire(data(id, b"", True))
                if not frames:
                    opened.remove((id, frames))
            sent += self._noise(stream)
        return sent

    def _call(self) -> tuple[Fields, list[tuple[bytes, int | None]], list[bytes]]:
        dice = self._dice
        path = dice.choice((INFER, STREAM_INFER))
        count = 1 if path is INFER else dice.randint(0, 4)
        contents = [dice.randbytes(4 * dice.choice((0, 1, 5, 300))) for _ in range(count)]
        encoding = dice.choice(("identity", "gzip", "deflate", None))
        fields = request(path) if encoding is None else request(path, ("grpc-encoding", encoding))
        for i in range(dice.randint(0, 3)):
            fields.append((f"x-{i}", dice.choice(("same", "a" * dice.randint(0, 200), str(dice.random())))))
        whole = b""
        for content in contents:
            plain = ask(content=content)
            if encoding in ("gzip", "deflate") and dice.random() < 0.7:
                whole += message((gzip.compress if encoding == "gzip" else zlib.compress)(plain), 1)
            else:
                whole += message(plain)
        frames: list[tuple[bytes, int | None]] = []
        while whole:
            length = dice.choice((1, 2, 7, 100, 1000, len(whole)))
            frames.append((whole[:length], dice.choice((None, None, 0, 1, 255))))
            whole = whole[length:]
            if dice.random() < 0.1:
                frames.append((b"", dice.choice((None, 9))))
        return fields, frames, contents

    def _head(self, stream: int, fields: Fields, end: bool) -> bytes:
        dice = self._dice
        if dice.random() < 0.1:
            self._encoder.header_table_size = dice.choice((0, 60, 4096))
        whole = self._encoder.encode(fields, huffman=dice.random() < 0.5)
        cuts = sorted(dice.randint(0, len(whole)) for _ in range(dice.choice((0, 0, 1, 3))))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        first = HeadersFrame(stream, pieces[0], flags=["END_STREAM"] if end else [])
        if dice.random() < 0.3:
            first.flags.add("PADDED")
            first.pad_length = dice.choice((0, 5, 255))
        if dice.random() < 0.3:
            first.flags.add("PRIORITY")
            first.depends_on, first.stream_weight, first.exclusive = stream + 2, 7, True
        frames: list[HeadersFrame | ContinuationFrame] = [first]
        frames.extend(ContinuationFrame(stream, piece) for piece in pieces[1:])
        frames[-1].flags.add("END_HEADERS")
        return wire(*frames)

    def _noise(self, next_stream: int) -> bytes:
        noise = (
            ping(self._dice.randbytes(8)),
            PriorityFrame(self._dice.choice((1, next_stream, 99)), depends_on=0),
            raw(self._dice.randint(10, 255), self._dice.randint(0, 255), self._dice.randint(0, 20), b"noise"),
            settings({0x99: 1}),
            settings({4: 50_000}),
            window(0, 1000),
            raw(PING, ACK, 0, bytes(8)),
        )
        return wire(*self._dice.choices(noise, k=self._dice.choice((0, 0, 0, 1, 2))))

    def check(self, client: Client, stream: int) -> None:
        answer = client.answers[stream]
        path, contents = self.expected[stream]
        assert answer.status == "grpc-status 0"
        if path == INFER:
            assert [answer.tensor] == contents
        else:
            assert [response(each)[1] for each in answer.messages] == contents


BY_CHANCE = {
    "derandomize": True,
    "database": None,
    # What hangs would be shrunk for hours.
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@hypothesis_settings(max_examples=400, **BY_CHANCE)  # type: ignore[arg-type]
@given(st.randoms(use_true_random=True))
async def test_any_good_conversation_has_the_same_answers(server: Server, dice: random.Random) -> None:
    conversation = Conversation(dice)
    sent = conversation.sent()
    async with connected(server.port, handshake=False) as client:
        client.refills = True
        cuts = sorted(dice.randint(0, len(sent)) for _ in range(dice.choice((0, 3, 30))))
        await client.send_in_pieces(sent, cuts)
        for stream in conversation.expected:
            await client.answer(stream)
            conversation.check(client, stream)
        await client.pong()
        assert client.goaway is None
        assert client.answers.keys() == conversation.expected.keys()


async def test_good_conversations_over_tls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    certificate.cert_chain_pems[0].write_to_path(chain)
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    authority.configure_trust(context)
    options = {"use_ssl": True, "server_cert": str(chain), "server_key": str(key)}
    async with serving(monkeypatch, caplog, **options) as server:
        over_tls = {"ssl": context, "server_hostname": "localhost"}
        for seed in range(20):
            conversation = Conversation(random.Random(seed))
            sent = conversation.sent()
            async with connected(server.port, handshake=False, **over_tls) as client:
                client.refills = True
                await client.send_in_pieces(sent, [len(sent) // 3, len(sent) // 2])
                for stream in conversation.expected:
                    await client.answer(stream)
                    conversation.check(client, stream)
        async with connected(server.port, {SettingsFrame.INITIAL_WINDOW_SIZE: HUGE}, **over_tls) as client:
            content = random.Random(1).randbytes(1_000_000)
            client.refills = True
            client.send(headers(1))
            await client.send_data(1, message(ask(content=content)), end=True)
            assert (await client.answer()).tensor == content


def mutated(sent: bytes, dice: random.Random) -> bytes:
    """The same with a few accidents behind the preface."""
    broken = bytearray(sent)
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(len(PREFACE) if dice.random() < 0.95 else 0, len(broken))
        match dice.randint(0, 5):
            case 0:
                broken[at : at + 1] = dice.randbytes(1)
            case 1:
                del broken[at : at + dice.randint(1, 30)]
            case 2:
                broken[at:at] = dice.randbytes(dice.randint(1, 30))
            case 3:
                start = dice.randint(0, len(broken))
                broken[at:at] = broken[start : start + dice.randint(1, 100)]
            case 4:
                broken[at:at] = raw(dice.randint(0, 9), dice.randint(0, 255), dice.randint(0, 12), dice.randbytes(8))
            case 5 if at < len(broken):
                broken[at] ^= 1 << dice.randint(0, 7)
    return bytes(broken)


def frames_of_chance(dice: random.Random) -> bytes:
    parts = [PREFACE, wire(settings({}))]
    for _ in range(dice.randint(1, 30)):
        kind = dice.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 1, 0))
        body = dice.choice(
            (b"", bytes(4), bytes(8), block(request()), message(ask()), dice.randbytes(dice.randint(0, 60)))
        )
        flags = dice.choice((0, 1, 4, 5, 8, 0x2D, dice.randint(0, 255)))
        parts.append(raw(kind, flags, dice.choice((0, 1, 1, 1, 3, 5, 2)), body))
    return b"".join(parts)


@hypothesis_settings(max_examples=800, **BY_CHANCE)  # type: ignore[arg-type]
@given(st.randoms(use_true_random=True))
async def test_no_bytes_do_harm(server: Server, dice: random.Random) -> None:
    tasks = asyncio.all_tasks()
    kind = dice.randint(0, 9)
    if kind == 0:
        sent = PREFACE + dice.randbytes(dice.randint(1, 300))
    elif kind < 4:
        sent = frames_of_chance(dice)
    else:
        sent = mutated(dice.choice((CONVERSATION, Conversation(dice).sent())), dice)
    async with connected(server.port, handshake=False) as client:
        await client.send_in_pieces(sent, [dice.randint(0, len(sent))])
        client.writer.write_eof()
        await client.end()
    await server.forgets(tasks)
    await server.works()


# ---------------------------------------------------------------- a client that somebody else has written


async def test_h2_finds_nothing_to_complain_of(server: Server) -> None:
    """Its state machine refuses what a server must not send."""
    peer = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    peer.initiate_connection()
    answers: dict[int, bytes] = {}
    trailers: dict[int, dict[str, str]] = {}
    ended: set[int] = set()
    contents = {2 * i + 1: np.random.default_rng(i).bytes(4 * i * i) for i in range(1, 30)}
    for stream, content in contents.items():
        peer.send_headers(stream, request())
        peer.send_data(stream, message(ask(content=content)), end_stream=True)
    async with asyncio.timeout(PATIENCE_S), connected(server.port, handshake=False) as client:
        while len(ended) < len(contents):
            client.writer.write(peer.data_to_send())
            for event in peer.receive_data(await client.reader.read(65536)):
                match event:
                    case ResponseReceived():
                        assert (":status", "200") in event.headers
                    case DataReceived():
                        answers[event.stream_id] = answers.get(event.stream_id, b"") + event.data
                        peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case TrailersReceived():
                        trailers[event.stream_id] = dict(event.headers)  # type: ignore[arg-type]
                    case StreamEnded():
                        ended.add(event.stream_id)
    for stream, content in contents.items():
        assert trailers[stream] == {"grpc-status": "0"}
        assert pb.ModelInferResponse.FromString(answers[stream][5:]).raw_output_contents[0] == content
