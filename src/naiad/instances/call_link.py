"""A socket on which model code asks the server for something: the server's end, on the event loop.

The thread that asks waits on the socket itself, so that an answer wakes nobody else in the host; a host has as many
of these sockets as it had calls at the same time.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from naiad.errors import Internal, NaiadError, Unavailable
from naiad.instances.channel import LoopChannel
from naiad.instances.frames import Answer, Call, VersionSpec, failure


class Caller(NamedTuple):
    """Who asks the server for something: a model version in one life of one process. `number` tells them apart."""

    model: str
    version: int
    number: int


_caller_numbers: Final = itertools.count(1)


def new_caller(spec: VersionSpec) -> Caller:
    return Caller(spec.name, spec.version, next(_caller_numbers))


#: `reply(value, error)`: `error` None says that `value` is the answer.
OnReply = Callable[[Any, BaseException | None], None]
#: `on_call(caller, method, arguments, reply)`: replies once, now or later, and raises nothing. Memory that the answer
#: refers to need not last longer than `reply`.
OnCall = Callable[[Caller, str, msgspec.Raw, OnReply], None]

_decoder: Final[msgspec.msgpack.Decoder[Call[msgspec.Raw]]] = msgspec.msgpack.Decoder(Call[msgspec.Raw])


class CallLink:
    """Hands calls to `on_call`, one after the other. `caller_of(model)` is None for a model that has left."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_call: OnCall,
        caller_of: Callable[[int], Caller | None],
        on_end: Callable[["CallLink"], None],
    ) -> None:
        self._on_call = on_call
        self._caller_of = caller_of
        self._on_end = on_end
        self._method = ""
        self._channel = LoopChannel(loop, sock, _decoder, self._ask, self._end)

    def _ask(self, call: Call[msgspec.Raw], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        self._method = call.method
        caller = self._caller_of(call.model)
        if caller is None:
            self._reply(None, Unavailable("the model has been unloaded"))
        else:
            # The channel's buffer takes the next message when this one's answer has been sent; a request may outlive it.
            self._on_call(caller, call.method, call.arguments.copy(), self._reply)

    def _reply(self, value: Any, error: BaseException | None) -> None:
        try:
            self._channel.send(Answer(value, None if error is None else failure(error)))
        except (TypeError, NaiadError) as problem:
            self._channel.send(Answer(None, failure(Internal(f"'{self._method}': {problem}"))))

    def _end(self, reason: str | None) -> None:
        self._on_end(self)

    def close(self) -> None:
        self._channel.close()
