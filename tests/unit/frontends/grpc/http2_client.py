"""A raw HTTP/2 client for gRPC: sends any bytes at all, and keeps what the server says until a test asks for it.

It acknowledges nothing and gives no window unless told to; it never waits for a clock, except for its patience's end.
"""

import asyncio
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from h2.errors import ErrorCodes
from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from tritonclient.grpc import service_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
SERVER_LIVE = "/inference.GRPCInferenceService/ServerLive"

#: Longer than anything takes on the busiest machine; only a server that hangs is found out by it.
PATIENCE_S = 30.0

Fields = list[tuple[str | bytes, str | bytes]]
Part = Frame | bytes


# ---------------------------------------------------------------- what is sent


def request(path: str = INFER, *more: tuple[str | bytes, str | bytes]) -> Fields:
    """The header list of a call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


def block(fields: Fields) -> bytes:
    """A header block for which it does not matter what was sent before: it refers to its own entries only."""
    return Encoder().encode(fields)


def raw(kind: int, flags: int, stream: int, body: bytes = b"", length: int | None = None) -> bytes:
    """Any frame, also one that must not be."""
    size = len(body) if length is None else length
    return struct.pack(">BHBBL", size >> 16, size & 0xFFFF, kind, flags, stream) + body


def headers(stream: int, fields: Fields | bytes | None = None, *flags: str, end: bool = False) -> HeadersFrame:
    frame = HeadersFrame(stream, flags=["END_HEADERS", *flags, *(["END_STREAM"] if end else [])])
    frame.data = fields if isinstance(fields, bytes) else block(request() if fields is None else fields)
    return frame


def data(stream: int, content: bytes = b"", end: bool = False, padding: int | None = None) -> DataFrame:
    frame = DataFrame(stream, content, flags=["END_STREAM"] if end else [])
    if padding is not None:
        frame.flags.add("PADDED")
        frame.pad_length = padding
    return frame


def settings(values: dict[int, int]) -> SettingsFrame:
    return SettingsFrame(settings=values)


def window(stream: int, increment: int) -> WindowUpdateFrame:
    return WindowUpdateFrame(stream, increment)


def reset(stream: int, code: ErrorCodes = ErrorCodes.CANCEL) -> RstStreamFrame:
    return RstStreamFrame(stream, code)


def ping(content: bytes = b"12345678") -> PingFrame:
    return PingFrame(opaque_data=content)


def message(content: bytes, compressed: int = 0) -> bytes:
    """A length-prefixed message of gRPC."""
    return struct.pack(">BL", compressed, len(content)) + content


def ask(model: str = "identity", content: bytes = b"abcdefgh", id: str = "") -> bytes:
    """A ModelInferRequest with one FP32 tensor."""
    shape = [1, len(content) // 4]
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=shape)
    whole = pb.ModelInferRequest(model_name=model, id=id, inputs=[tensor], raw_input_contents=[content])
    return bytes(whole.SerializeToString())


def call(stream: int = 1, model: str = "identity", content: bytes = b"abcdefgh", path: str = INFER) -> bytes:
    """A whole call of one message."""
    return wire(headers(stream, request(path)), data(stream, message(ask(model, content)), end=True))


def wire(*parts: Part) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts)


def binary(value: bytes) -> str:
    return b64encode(value).decode()


# ---------------------------------------------------------------- what is received


@dataclass
class Answer:
    """What came on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)
    #: Lengths of DATA frames.
    sizes: list[int] = field(default_factory=list)
    has_ended: bool = False
    reset: ErrorCodes | None = None

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.reset is not None

    @property
    def messages(self) -> list[bytes]:
        """The messages, which must be whole and not compressed."""
        found, rest = [], bytes(self.content)
        while rest:
            compressed, length = struct.unpack_from(">BL", rest)
            assert not compressed, "a compressed message"
            assert len(rest) >= 5 + length, "half a message"
            found.append(rest[5 : 5 + length])
            rest = rest[5 + length :]
        return found

    @property
    def tensor(self) -> bytes:
        """The first output of the only message of a unary call."""
        (only,) = self.messages
        return bytes(pb.ModelInferResponse.FromString(only).raw_output_contents[0])

    @property
    def status(self) -> str:
        """In one line, as tables have it."""
        if self.reset is not None and not self.has_ended:
            return f"RST_STREAM {self.reset.name}"
        if not self.has_ended:
            return "unfinished"
        if (code := self.trailers.get("grpc-status")) is not None:
            return f"grpc-status {code}"
        return f":status {self.trailers[':status']}"


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._decoder = Decoder(max_header_list_size=1 << 20)
        self._encoder = Encoder()
        self._block: bytearray | None = None
        #: Gives back the window of what it receives.
        self.refills = False
        #: Answers pings.
        self.is_alive = True
        #: After an error of the connection it sends no more, so that the server need not wait for what is on its way.
        self.hangs_up = True
        self.answers: dict[int, Answer] = {}
        self.settings: dict[int, int] = {}
        self.settings_acknowledged = 0
        self.pongs: list[bytes] = []
        self.pings: list[bytes] = []
        self.goaway: GoAwayFrame | None = None
        self.is_closed = False
        #: What the server lets us send: of the connection (0) and, beyond the initial one, of streams.
        self.window = {0: 65535}
        self._sent: dict[int, int] = {}

    @classmethod
    async def connect(cls, port: int, **options: Any) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, **options))

    def send(self, *parts: Part) -> None:
        self.writer.write(wire(*parts))

    async def send_in_pieces(self, content: bytes, cuts: Iterable[int]) -> None:
        """In TCP segments of their own, as far as the system lets them be."""
        start = 0
        for cut in [*cuts, len(content)]:
            if content[start:cut]:
                self.writer.write(content[start:cut])
                await turns(2)
            start = cut

    def may_send(self, stream: int) -> int:
        """How many bytes of DATA the server's windows leave; of the connection's alone for stream 0."""
        of_connection = self.window[0] - self._sent.get(0, 0)
        if not stream:
            return of_connection
        initial = self.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, 65535)
        return min(of_connection, initial + self.window.get(stream, 0) - self._sent.get(stream, 0))

    async def send_data(self, stream: int, content: bytes, end: bool = False) -> None:
        """As much as the windows allow at a time."""
        start = 0
        while start < len(content):
            await self.until(lambda: self.may_send(stream) > 0 or self.is_closed)
            size = min(self.may_send(stream), 16384, len(content) - start)
            self.send_within_window(stream, content[start : start + size], end and start + size == len(content))
            start += size
            await self.writer.drain()

    def send_within_window(self, stream: int, content: bytes, end: bool = False, padding: int | None = None) -> None:
        self.send(data(stream, content, end, padding))
        for each in (0, stream):
            self._sent[each] = self._sent.get(each, 0) + len(content) + (0 if padding is None else padding + 1)

    async def until(self, condition: Callable[[], object]) -> None:
        """Reads until it is true. Fails when the connection ends first."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert not self.is_closed, f"the server closed the connection: {self.summary()}"
                await self.read_frame()

    def summary(self) -> str:
        streams = {stream: answer.status for stream, answer in self.answers.items()}
        return f"goaway {self.goaway}, streams {streams}"

    async def answer(self, stream: int = 1) -> Answer:
        """What came on a stream, when it is over."""
        await self.until(lambda: stream in self.answers and self.answers[stream].is_over)
        return self.answers[stream]

    async def pong(self, content: bytes = b"are you?") -> None:
        """Everything sent before has been read, and what the server said to it at once has come."""
        self.send(ping(content))
        await self.until(lambda: content in self.pongs)
        self.pongs.remove(content)

    async def end(self) -> str:
        """How the server ends the connection: `GOAWAY code` and then closing, or `closed` without a word."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_closed:
                await self.read_frame()
        return "closed" if self.goaway is None else f"GOAWAY {ErrorCodes(self.goaway.error_code).name}"

    async def outcome(self, stream: int = 1, ignores: bool = False) -> str:
        """The first of: the end of the connection, as `end`; the end of the stream, as `Answer.status`; `ignored`, where
        that is allowed."""
        probe = b"ignored?"
        if ignores:
            self.send(ping(probe))
        answers = self.answers
        await self.until(
            lambda: (
                self.is_closed
                or (self.goaway is not None and self.goaway.error_code)
                or (stream in answers and answers[stream].is_over)
                or probe in self.pongs
            )
        )
        if self.goaway is not None and self.goaway.error_code:
            return await self.end()
        if stream in answers and answers[stream].is_over:
            return answers[stream].status
        return "closed" if self.is_closed else "ignored"

    async def read_frame(self) -> None:
        try:
            head = await self.reader.readexactly(9)
            frame, size = Frame.parse_frame_header(memoryview(head))
            body = await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
            return
        if head[3] & 0x1 and isinstance(frame, SettingsFrame):
            assert not size
        frame.parse_body(memoryview(body))
        self._take(frame)

    def _take(self, frame: Frame) -> None:
        match frame:
            case SettingsFrame():
                if "ACK" in frame.flags:
                    self.settings_acknowledged += 1
                else:
                    self.settings |= frame.settings
            case PingFrame():
                (self.pongs if "ACK" in frame.flags else self.pings).append(frame.opaque_data)
                if self.is_alive and "ACK" not in frame.flags:
                    self.send(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
            case WindowUpdateFrame():
                self.window[frame.stream_id] = self.window.get(frame.stream_id, 0) + frame.window_increment
            case GoAwayFrame():
                self.goaway = frame
                if frame.error_code and self.hangs_up and self.writer.can_write_eof():
                    with suppress(OSError):
                        self.writer.write_eof()
            case RstStreamFrame():
                self.answers.setdefault(frame.stream_id, Answer()).reset = ErrorCodes(frame.error_code)
            case HeadersFrame() | ContinuationFrame():
                self._take_headers(frame)
            case DataFrame():
                self._take_data(frame)
            case PushPromiseFrame():
                raise AssertionError("a push to a client of gRPC")

    def _take_headers(self, frame: HeadersFrame | ContinuationFrame) -> None:
        assert (self._block is None) == isinstance(frame, HeadersFrame), "a broken header block"
        answer = self.answers.setdefault(frame.stream_id, Answer())
        assert not answer.is_over, "HEADERS after the end"
        self._block = (self._block or bytearray()) + frame.data
        if isinstance(frame, HeadersFrame):
            self._ends = "END_STREAM" in frame.flags
        if "END_HEADERS" in frame.flags:
            fields = dict(self._decoder.decode(bytes(self._block)))
            self._block = None
            if self._ends:
                # An answer may consist of trailers only.
                answer.trailers, answer.has_ended = fields, True
            else:
                assert not answer.headers, "headers twice"
                answer.headers = fields

    def _take_data(self, frame: DataFrame) -> None:
        answer = self.answers[frame.stream_id]
        assert answer.headers, "DATA before HEADERS"
        assert not answer.is_over, "DATA after the end"
        answer.content += frame.data
        answer.sizes.append(len(frame.data))
        answer.has_ended = "END_STREAM" in frame.flags
        if self.refills and frame.flow_controlled_length:
            for stream in (0, frame.stream_id):
                self.send(window(stream, frame.flow_controlled_length))

    def encode(self, fields: Fields) -> bytes:
        """With the state of the connection, as a real client does: no `block` may be sent beside it."""
        return self._encoder.encode(fields)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def turns(count: int) -> None:
    """Lets the event loop, which the server shares, look at its sockets so often."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def connected(
    port: int, initial: dict[int, int] | None = None, handshake: bool = True, **options: Any
) -> AsyncIterator[Client]:
    """A connection on which the settings of both sides are known to both. `options` are asyncio's."""
    client = await Client.connect(port, **options)
    try:
        if handshake:
            client.send(PREFACE, settings(initial or {}))
            await client.until(lambda: client.settings_acknowledged)
            client.send(raw(4, 1, 0))
        yield client
    finally:
        await client.close()
