"""A process that reads and writes long JSON texts: `python -m naiad.frontends.http.text_program SOCKET MEMORY`.

Texts and arrays lie in a memory file that the server has too, one job at a time; what is said over the socket is small.
It ends when the server closes the socket, or is no more.
"""

import mmap
import os
import signal
import socket
import sys
from typing import Any

import msgspec
import numpy as np

from naiad.datatypes import Buffer
from naiad.instances.channel import BlockingChannel
from naiad.instances.process_name import name_process
from naiad.protocol.json_numbers import parse_numbers
from naiad.protocol.json_text import dump, parse

#: Of arrays in the memory file.
_ALIGNMENT = 64


class Placed(msgspec.Struct, array_like=True):
    """The array that belongs to a tensor, the `index`th of the document: `count` elements of `dtype`, `offset` bytes
    into the memory file."""

    index: int
    dtype: str
    count: int
    offset: int

    @property
    def byte_size(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize


class Read(msgspec.Struct, tag=True):
    """The first `size` bytes of the memory file are a request's JSON."""

    size: int


class Write(msgspec.Struct, tag=True):
    """A response's JSON is to be written; `document` is what it is without the data of `arrays`."""

    document: bytes
    arrays: list[Placed]


class WasRead(msgspec.Struct, tag=True):
    """The JSON of the request without the data of `arrays`."""

    document: bytes
    arrays: list[Placed]


class Written(msgspec.Struct, tag=True):
    """The text is the first `size` bytes of the memory file."""

    size: int


class Unable(msgspec.Struct, tag=True):
    """It is the server's: few numbers, malformed, too large for the memory there is."""


Job = Read | Write
Answer = WasRead | Written | Unable


def take_apart(tensors: Any) -> tuple[list[Any], list[Placed], list[Buffer]]:
    """(tensors without data that are arrays, where those are to be, their bytes)."""
    rest: list[Any] = []
    places: list[Placed] = []
    data: list[Buffer] = []
    end = 0
    for index, tensor in enumerate(tensors):
        array = tensor.get("data") if type(tensor) is dict else None
        if isinstance(array, np.ndarray):
            # Not None: `dump` writes what has a null slowly, as it may stand for NaN.
            tensor = {**tensor, "data": 0}
            places.append(Placed(index, array.dtype.str, array.size, end))
            data.append(array.data.cast("B"))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        rest.append(tensor)
    return rest, places, data


def put(memory: int, data: Buffer, offset: int = 0) -> None:
    """Writes all of it to the memory file. Raises OSError where there is not enough memory."""
    view = memoryview(data)
    while view:
        count = os.pwrite(memory, view, offset)
        offset += count
        view = view[count:]


def _read(job: Read, memory: int) -> Answer:
    with mmap.mmap(memory, job.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped, memoryview(mapped) as text:
        document = parse_numbers(text)
    if document is None or type(document.get("inputs")) is not list:
        return Unable()
    document["inputs"], places, data = take_apart(document["inputs"])
    if not places:
        return Unable()
    for place, array in zip(places, data, strict=True):
        put(memory, array, place.offset)
    return WasRead(dump(document), places)


def _write(job: Write, memory: int) -> Answer:
    document = parse(job.document)
    mapped = mmap.mmap(memory, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    for place in job.arrays:
        array = np.frombuffer(mapped, np.dtype(place.dtype), place.count, place.offset)
        document["outputs"][place.index]["data"] = array
    text = dump(document)
    put(memory, text)
    return Written(len(text))


def main() -> None:
    sock, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    name_process("naiad-json")
    # A service manager sends it to all processes; this one ends with the server.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel: BlockingChannel[Job] = BlockingChannel(sock, msgspec.msgpack.Decoder(Job))
    while (received := channel.receive()) is not None:
        job = received[0]
        try:
            answer = _read(job, memory) if isinstance(job, Read) else _write(job, memory)
        except (OSError, ValueError, MemoryError):
            answer = Unable()
        try:
            channel.send(answer)
        except OSError:
            return


if __name__ == "__main__":
    main()
