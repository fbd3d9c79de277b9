"""Frames between the engine's process and a front end: whatever texts are in them, they arrive as they were."""

import asyncio
import socket

import msgspec
import pytest

from naiad.errors import InvalidArgument, NotFound
from naiad.frontends.processes import frames
from naiad.frontends.processes.frames import Ask, Asks, SentTensor, ToEngine, Transcoded, failure_of
from naiad.instances.channel import LoopChannel
from naiad.models.check import BrokenContents
from naiad.options import Restriction, ServerOptions, Setting


def ask(id: str) -> Ask:
    inputs = [SentTensor("IN", 13, (1,), b"\x01\x00\x00\x00\xff")]
    parameters = {"key " + id: id, "number": 1.5}
    return Ask(7, True, False, "model", -1, inputs, id, (id,), parameters, ("corr", True, False), 1, 2, None)


@pytest.mark.parametrize("id", ["", "plain", "ünïcode", "not UTF-8 \udcff\udc80 ä"])
async def test_any_text_arrives(id: str) -> None:
    mine, theirs = socket.socketpair()
    received: asyncio.Future[ToEngine] = asyncio.get_running_loop().create_future()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    loop = asyncio.get_running_loop()
    sender = LoopChannel(loop, mine, decoder, lambda frame, fds: None, lambda reason: None)
    receiver = LoopChannel(loop, theirs, decoder, lambda frame, fds: received.set_result(frame), lambda reason: None)
    sent = Asks([ask(id)], [1], [4096])
    frames.send(sender, sent)
    frame = await received
    if isinstance(frame, Transcoded):
        frame = frames.restored(frame, ToEngine)
    assert frame == sent
    sender.close()
    receiver.close()


def test_options_arrive() -> None:
    options = ServerOptions(
        model_repository=("models",),
        http_restricted_api=(Restriction(frozenset(("health", "trace")), "key", "value"),),
        trace_config=(Setting("", "rate", "1"),),
        frontends=3,
    )
    frame = msgspec.msgpack.encode(frames.Start(options))
    assert msgspec.msgpack.decode(frame, type=frames.Start).options == options


@pytest.mark.parametrize(
    ("error", "kind"), [(NotFound("x"), NotFound), (BrokenContents("x"), InvalidArgument)], ids=["own", "derived"]
)
def test_errors_keep_their_kind(error: NotFound, kind: type) -> None:
    received = failure_of(error).error()
    assert type(received) is kind
    assert received.message == "x"
