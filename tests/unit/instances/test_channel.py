"""Frames over real sockets, in pieces and with descriptors."""

import asyncio
import os
import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.instances.channel import BlockingChannel, BrokenFrame, FrameReader, LoopChannel, encode

ANY = msgspec.msgpack.Decoder()


@pytest.fixture
def pair():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield mine, theirs


@given(messages=st.lists(st.binary(max_size=300_000), max_size=5), cut=st.integers(1, 70_000))
def test_frames_survive_any_cutting(messages, cut):
    mine, theirs = socket.socketpair()
    with mine, theirs:
        data = b"".join(bytes(encode(message)) for message in messages)
        sender = threading.Thread(target=lambda: [mine.sendall(data[at : at + cut]) for at in range(0, len(data), cut)])
        sender.start()
        reader = FrameReader(ANY)
        received = []
        while len(received) < len(messages):
            while (frame := reader.next()) is not None:
                received.append(frame[0])
            if len(received) < len(messages):
                assert reader.receive(theirs)
        sender.join()
        assert received == messages


@pytest.mark.parametrize("count", [1, 250, 251, 600])
def test_descriptors_arrive_with_their_frame(pair, count):
    mine, theirs = pair
    sender, receiver = BlockingChannel(mine, ANY), BlockingChannel(theirs, ANY)
    fds = [os.memfd_create("test") for _ in range(count)]
    inodes = [os.fstat(fd).st_ino for fd in fds]
    sender.send("before")
    sender.send(list(range(count)), fds)
    sender.send("after", fds[:1])
    messages = [receiver.receive() for _ in range(3)]
    assert [message for message, _ in messages] == ["before", list(range(count)), "after"]
    assert messages[0][1] == []
    assert [os.fstat(fd).st_ino for fd in messages[1][1]] == inodes
    assert [os.fstat(fd).st_ino for fd in messages[2][1]] == inodes[:1]
    assert not any(os.get_inheritable(fd) for fd in messages[1][1])
    for fd in fds + messages[1][1] + messages[2][1]:
        os.close(fd)


def test_the_end_of_the_peer_is_none(pair):
    pair[0].close()
    assert BlockingChannel(pair[1], ANY).receive() is None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff" * 64, id="a huge message"),
        pytest.param(b"\x01\0\0\0\0\0\0\0\xc1", id="no msgpack"),
        pytest.param(b"\x01\0\0\0\x01\0\0\0\x01", id="a descriptor that never came"),
    ],
)
def test_what_is_no_frame_is_noticed(pair, data):
    pair[0].sendall(data)
    reader = FrameReader(ANY)
    reader.receive(pair[1])
    with pytest.raises(BrokenFrame):
        reader.next()


async def test_the_loop_keeps_what_the_socket_does_not_take(pair):
    mine, theirs = pair
    ended = asyncio.get_running_loop().create_future()
    channel = LoopChannel(asyncio.get_running_loop(), mine, ANY, lambda *_: None, ended.set_result)
    fd = os.memfd_create("test")
    for number in range(200):
        channel.send([number, b"x" * 20_000])
    channel.send("with a descriptor", [fd])
    os.close(fd)
    receiver = BlockingChannel(theirs, ANY)
    received = [await asyncio.to_thread(receiver.receive) for _ in range(201)]
    assert [message for message, _ in received[:200]] == [[number, b"x" * 20_000] for number in range(200)]
    assert received[200][0] == "with a descriptor"
    os.close(received[200][1][0])
    theirs.close()
    assert await ended is None
    assert not channel.is_open


async def test_a_broken_peer_ends_the_channel_with_the_reason(pair):
    mine, theirs = pair
    ended = asyncio.get_running_loop().create_future()
    LoopChannel(asyncio.get_running_loop(), mine, ANY, lambda *_: None, ended.set_result)
    theirs.sendall(b"\xff" * 64)
    assert "no frame" in await ended
