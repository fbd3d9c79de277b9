"""Long JSON texts are read and written in processes of their own: neither releases the GIL, so that all other clients
would wait for tens of ms, and one core would do it all.

A process is started when texts come one after the other, and ended when none has come for a while; until it is there,
and where it fails, a thread of this process does the same. On the event loop; the work in threads.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from naiad.datatypes import LARGE, Buffer
from naiad.frontends.http.text_program import (
    Answer,
    Job,
    Read,
    WasRead,
    Write,
    Written,
    put,
    take_apart,
)
from naiad.instances.channel import BlockingChannel, BrokenFrame
from naiad.protocol import json_numbers
from naiad.protocol.json_text import dump, parse

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A process, and the memory that reading takes here, are kept so long after a text; one is started for texts that come
#: sooner one after the other.
_KEPT_S = 10.0
#: A process that has failed so often without any work is not started again.
_MOST_FAILURES = 3
#: One that takes longer than this, and than it takes to do so many bytes a second on a busy machine, hangs.
_HANGS_AFTER_S = 10
_SLOWEST = 5_000_000
#: Longer texts are not copied to it; of shorter ones, so much memory is kept for the next.
_LONGEST = 1 << 30
_KEPT_MEMORY = 64 << 20


class Texts(Protocol):
    """Reads and writes JSON, as `json_numbers.parse_request` and `json_text.dump` do."""

    def read(self, text: Buffer) -> Any: ...

    def write(self, document: Any) -> bytes: ...


class _Here:
    read = staticmethod(json_numbers.parse_request)
    write = staticmethod(dump)


HERE = _Here()


class _Failed(Exception):
    """The process has ended, or there is no memory for it."""


class TextProcess:
    """One process, for one thread at a time. What it cannot do is done here. Starting it raises OSError."""

    def __init__(self) -> None:
        self.has_failed = self.has_worked = False
        self._lock = threading.Lock()
        mine, theirs = socket.socketpair()
        self._memory = os.memfd_create("naiad-texts", os.MFD_CLOEXEC)
        # Also where it does not take what is sent to it, for so long.
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _HANGS_AFTER_S, 0))
        self._deadline = 0.0
        self._channel: BlockingChannel[Answer] = BlockingChannel(
            mine, msgspec.msgpack.Decoder(Answer), before_sleep=self._end_if_late
        )
        fds = (theirs.fileno(), self._memory)
        command = [sys.executable, "-P", "-m", "naiad.frontends.http.text_program", *map(str, fds)]
        # Its libraries need no threads.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            with theirs:
                # Ctrl-C at a terminal is for the server alone.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment, process_group=0
                )
        except OSError:
            self._close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, text: Buffer) -> Any:
        if len(text) > _LONGEST:
            return HERE.read(text)
        with self._lock:
            try:
                answer = self._ask(Read(len(text)), [(text, 0)])
                if isinstance(answer, WasRead):
                    document = parse(answer.document)
                    for place in answer.arrays:
                        data = self._fetch(place.byte_size, place.offset)
                        document["inputs"][place.index]["data"] = np.frombuffer(data, np.dtype(place.dtype))
                    return document
            except _Failed:
                return HERE.read(text)
        # Nothing for simdjson.
        return parse(text)

    def write(self, document: Any) -> bytes:
        outputs, places, data = take_apart(document["outputs"])
        # What else there is would be written twice.
        if LARGE <= sum(map(len, data)) <= _LONGEST:
            with self._lock, contextlib.suppress(_Failed):
                job = Write(dump({**document, "outputs": outputs}), places)
                answer = self._ask(job, [(array, place.offset) for array, place in zip(data, places, strict=True)])
                if isinstance(answer, Written):
                    return self._fetch(answer.size)
        return HERE.write(document)

    def _ask(self, job: Job, data: list[tuple[Buffer, int]]) -> Answer:
        if self.has_failed:
            raise _Failed
        try:
            if os.fstat(self._memory).st_size > _KEPT_MEMORY:
                os.ftruncate(self._memory, 0)
            for array, offset in data:
                put(self._memory, array, offset)
        except OSError:
            raise _Failed from None
        self._deadline = time.monotonic() + _HANGS_AFTER_S + sum(len(array) for array, _ in data) / _SLOWEST
        try:
            self._channel.send(job)
            received = self._channel.receive()
        except (OSError, BrokenFrame):
            received = None
        if received is None:
            self.has_failed = True
            raise _Failed
        self.has_worked = True
        return received[0]

    def _end_if_late(self) -> bool:
        """Looked at once a second while its answer is waited for."""
        if time.monotonic() > self._deadline:
            self._process.kill()
        return True

    def _fetch(self, byte_size: int, offset: int = 0) -> bytes:
        data = os.pread(self._memory, byte_size, offset)
        while len(data) < byte_size:
            more = os.pread(self._memory, byte_size - len(data), offset + len(data))
            assert more, "this is a bug: a text process announced more than it wrote"
            data += more
        return data

    def end(self) -> None:
        """Returns when it is no more."""
        # It has nothing to lose, and who may be waiting for it learns so that it has ended.
        self._process.kill()
        self._process.wait()
        with self._lock:
            self.has_failed = True
            self._close()

    def _close(self) -> None:
        self._channel.close()
        os.close(self._memory)


class TextProcesses:
    """Up to `most` processes; with none, a thread of this process does it all."""

    def __init__(self, most: int, kept_s: float = _KEPT_S) -> None:
        self._kept_s = kept_s
        self._places = [_Place() for _ in range(most)]
        #: The last one that was used comes first.
        self._free: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        for place in self._places:
            self._free.put_nowait(place)
        #: Texts under way, and when the last one began.
        self._running = 0
        self._last = -kept_s
        self._release: asyncio.TimerHandle | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<TextProcesses {self.pids} of {len(self._places)}>"

    @property
    def pids(self) -> list[int]:
        """Of those that there are."""
        return [place.process.pid for place in self._places if place.process is not None]

    def begin(self, answer: Coroutine[Any, Any, None]) -> None:
        """Runs an answer that takes long."""
        task = asyncio.get_running_loop().create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def run(self, work: Callable[[Texts], T]) -> T:
        """What `work` returns, called in a thread; it waits where all places are taken."""
        place = await self._free.get() if self._places else None
        loop = asyncio.get_running_loop()
        now = loop.time()
        is_frequent = now - self._last < self._kept_s and not self._is_closed
        self._last = now
        self._running += 1
        if self._release is not None:
            self._release.cancel()
            self._release = None
        working = loop.run_in_executor(None, work, HERE if place is None else place.texts(is_frequent))
        working.add_done_callback(lambda _: self._done(place))
        # The thread goes on, and needs its place, when nobody waits for it any more.
        return await asyncio.shield(working)

    def _done(self, place: "_Place | None") -> None:
        self._running -= 1
        if place is not None:
            self._free.put_nowait(place)
        if not self._running:
            if self._is_closed:
                self._give_back()
            else:
                self._release = asyncio.get_running_loop().call_later(self._kept_s, self._give_back)

    def _give_back(self) -> None:
        self._release = None
        json_numbers.release()
        for place in self._places:
            place.give_back()

    async def close(self) -> None:
        """Ends the processes; who is still at work is done without."""
        self._is_closed = True
        if self._release is not None:
            self._release.cancel()
        self._give_back()
        await asyncio.gather(*[place.ended() for place in self._places])


class _Place:
    """Where a process can be."""

    def __init__(self) -> None:
        self.process: TextProcess | None = None
        #: The start of the next process, or the end of the last one.
        self._change: asyncio.Future[None] | None = None
        #: How often in a row it has not come to work.
        self._failures = 0

    def texts(self, start: bool) -> Texts:
        """What is there to read and write; a process is started if there is none and there shall be one."""
        process = self.process
        if process is not None:
            if process.has_worked:
                self._failures = 0
            if process.has_failed:
                self._failed("it keeps dying")
                self.give_back()
        if self.process is None and self._change is None and start and self._failures < _MOST_FAILURES:
            self._change = asyncio.ensure_future(self._start())
        return self.process or HERE

    def _failed(self, why: object) -> None:
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            logger.warning("there is no process for large JSON any more, which a thread reads and writes now: %s", why)

    async def _start(self) -> None:
        try:
            self.process = await asyncio.to_thread(TextProcess)
        except OSError as error:
            self._failed(error)
        finally:
            self._change = None

    def give_back(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            self._change = asyncio.ensure_future(self._end(process))

    async def _end(self, process: TextProcess) -> None:
        await asyncio.to_thread(process.end)
        self._change = None

    async def ended(self) -> None:
        # One that was starting a moment ago may be there now.
        self.give_back()
        while self._change is not None:
            await self._change
            self.give_back()
