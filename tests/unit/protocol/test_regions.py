"""Shared-memory regions: what may be registered, what may be read and written, who may, and for how long."""

import asyncio
import ctypes
import gc
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from naiad.datatypes import DataType
from naiad.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NaiadError,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from naiad.messages import InferRequest, InferResponse, ResponseSink, Result, Tensor, Unread
from naiad.protocol import cuda_memory
from naiad.protocol.cuda_memory import CudaRuntime, CudaThread, cuda_thread
from naiad.protocol.regions import CopyingCall, OutputRegion, Regions, RegionUse, is_local_peer
from tests.unit.fake_cuda import HANDLE, OTHER, FakeCuda

INVALID = "failed to register shared memory region 'r': invalid args"
UNMAPPABLE = "failed to register shared memory region 'r': unable to process address spaceInvalid argument"
NO_CUDA = "failed to register shared memory region: invalid args"


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "small").write_bytes(bytes(range(64)))
    (tmp_path / "pages").write_bytes(bytes(4096) + bytes(range(64)) + bytes(4032))
    (tmp_path / "link").symlink_to(tmp_path / "small")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.fixture
def regions(shm: Path) -> Regions:
    return Regions(directory=str(shm))


def test_a_region_is_registered_shown_and_forgotten(regions: Regions) -> None:
    regions.register_system("r", "/small", 0, 64)
    assert regions.status_system() == [("r", "/small", 0, 64)] == regions.status_system("r")
    regions.unregister_system("r")
    assert regions.status_system() == []
    regions.register_system("r", "small", 0, 64)  # as shm_open, without the slash too


def test_regions_are_listed_by_name(regions: Regions) -> None:
    for name in ("b", "c", "a"):
        regions.register_system(name, "/small", 0, 8)
    assert [name for name, *_ in regions.status_system()] == ["a", "b", "c"]
    regions.unregister_system("")
    assert not regions.names


@pytest.mark.parametrize(
    ("key", "offset", "byte_size", "error", "text"),
    [
        ("/absent", 0, 64, Internal, "Unable to open shared memory region: '/absent'"),
        ("/../small", 0, 64, Internal, "Unable to open shared memory region: '/../small'"),
        ("/folder/x", 0, 64, Internal, "Unable to open shared memory region: '/folder/x'"),
        ("/folder", 0, 64, Internal, "Unable to open shared memory region: '/folder'"),
        ("/link", 0, 64, Internal, "Unable to open shared memory region: '/link'"),
        ("/pipe", 0, 64, Internal, "Unable to open shared memory region: '/pipe'"),
        ("/..", 0, 64, Internal, "Unable to open shared memory region: '/..'"),
        ("/", 0, 64, Internal, "Unable to open shared memory region: '/'"),
        ("/a\0b", 0, 64, Internal, "Unable to open shared memory region: '/a\0b'"),
        ("/\ud800", 0, 64, Internal, "Unable to open shared memory region: '/\ud800'"),
        ("/small", 0, 65, InvalidArgument, INVALID),
        ("/small", 1, 64, InvalidArgument, INVALID),
        ("/small", -4096, 64, InvalidArgument, INVALID),
        ("/small", 0, 2**63, InvalidArgument, INVALID),
        ("/small", 0, -1, InvalidArgument, INVALID),
        ("/small", 0, 0, InvalidArgument, UNMAPPABLE),
        ("/pages", 64, 64, InvalidArgument, UNMAPPABLE),
        (
            "/triton_python_backend_shm_region_1",
            0,
            64,
            InvalidArgument,
            "cannot register shared memory region 'r' with key '/triton_python_backend_shm_region_1' as the key "
            "contains the reserved prefix 'triton_python_backend_shm_region_'",
        ),
    ],
)
def test_what_cannot_be_registered(
    regions: Regions, key: str, offset: int, byte_size: int, error: type[NaiadError], text: str
) -> None:
    with pytest.raises(error) as caught:
        regions.register_system("r", key, offset, byte_size)
    assert (type(caught.value), caught.value.message) == (error, text)
    assert regions.status_system() == []


def test_a_name_is_taken_once(regions: Regions) -> None:
    regions.register_system("r", "/small", 0, 64)
    with pytest.raises(AlreadyExists, match=r"^shared memory region 'r' already in manager$"):
        regions.register_system("r", "/pages", 0, 64)


def test_keys_can_be_limited_to_prefixes(shm: Path) -> None:
    regions = Regions(directory=str(shm), key_prefixes=["/sm"])
    regions.register_system("r", "/small", 0, 64)
    with pytest.raises(InvalidArgument, match="keys must begin with one of sm"):
        regions.register_system("p", "/pages", 0, 64)


def test_the_number_of_regions_is_limited(shm: Path) -> None:
    regions = Regions(directory=str(shm), limit=1)
    regions.register_system("a", "/small", 0, 64)
    with pytest.raises(ResourceExhausted, match="'b' is one more than the 1 that can be registered"):
        regions.register_system("b", "/small", 0, 64)


def test_no_file_stays_open_after_refusals_and_unregistering(regions: Regions) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument):
        regions.register_system("r", "/small", 0, 65)
    regions.register_system("r", "/small", 0, 64)
    regions.unregister_system("r")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_input_reads_relative_to_the_region(regions: Regions) -> None:
    regions.register_system("r", "/pages", 4096, 64)
    assert bytes(RegionUse(regions, True).input("r", 4, 3)) == bytes((4, 5, 6))


def out(data: bytes | memoryview) -> Tensor:
    return Tensor("OUT", DataType.UINT8, (len(data),), data)


def test_output_writes_there_and_only_there(regions: Regions, shm: Path) -> None:
    regions.register_system("r", "/small", 0, 64)
    output = RegionUse(regions, True).output("OUT", "r", 8, 4)
    output.write(out(memoryview(b"abc")))
    assert (shm / "small").read_bytes()[7:12] == b"\x07abc\x0b"
    output.write(out(b""))
    with pytest.raises(Internal) as caught:
        output.write(out(b"abcde"))
    assert caught.value.message == (
        "shared memory size specified with the request for output 'OUT' (4 bytes) should be at least 5 bytes to hold "
        "the results"
    )


@pytest.mark.parametrize(
    ("offset", "byte_size", "text"),
    [
        (64, 1, "Invalid offset for shared memory region: 'r'"),
        (-1, 1, "Invalid offset for shared memory region: 'r'"),
        (60, 5, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, -1, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 0, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, 2**63, "Invalid offset + byte size for shared memory region: 'r'"),
    ],
)
def test_parts_outside_of_a_region_are_refused(regions: Regions, offset: int, byte_size: int, text: str) -> None:
    regions.register_system("r", "/small", 0, 64)
    use = RegionUse(regions, True)
    for part in (use.input, partial(use.output, "OUT")):
        with pytest.raises(InvalidArgument) as caught:
            part("r", offset, byte_size)
        assert caught.value.message == text


def test_unknown_regions(regions: Regions) -> None:
    regions.unregister_system("ghost")
    with pytest.raises(NotFound, match=r"^Unable to find shared memory region: 'ghost'$"):
        RegionUse(regions, True).input("ghost", 0, 1)
    with pytest.raises(NotFound, match=r"^Unable to find system shared memory region: 'ghost'$"):
        regions.status_system("ghost")
    with pytest.raises(NotFound, match=r"^Unable to find cuda shared memory region: 'ghost'$"):
        regions.status_cuda("ghost")


def test_a_region_that_is_forgotten_stays_open_for_what_writes_to_it(regions: Regions, shm: Path) -> None:
    regions.register_system("r", "/small", 0, 64)
    output = RegionUse(regions, True).output("OUT", "r", 0, 4)
    regions.unregister_system("r")
    output.write(out(b"late"))
    assert (shm / "small").read_bytes()[:4] == b"late"


class Sink:
    """Keeps results, and what could not be unregistered when they came."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.results: list[tuple[Result | None, bool]] = []

    def send(self, result: Result | None, final: bool) -> None:
        with pytest.raises(Internal):
            self.regions.unregister_system("a")
        self.results.append((result, final))


def unregister_refusal(unregister: Callable[[str], None], name: str = "") -> str:
    with pytest.raises(Internal) as caught:
        unregister(name)
    return caught.value.message


REQUEST = InferRequest("m", ())


async def test_regions_in_use_are_not_unregistered_before_the_last_result(regions: Regions) -> None:
    for name in ("unused", "b", "a"):
        regions.register_system(name, "/small", 0, 64)
    use = RegionUse(regions, True)
    use.output("OUT", "b", 0, 4)
    for offset in (0, 4):
        use.input("a", offset, 4)
    sink = Sink(regions)
    running = use.during(lambda request, sink, model: sink, REQUEST, sink)
    assert unregister_refusal(regions.unregister_system, "a") == (
        "Cannot unregister shared memory region 'a', it is currently in use."
    )
    await regions.unregister_cuda()
    assert unregister_refusal(regions.unregister_system) == (
        "Failed to unregister the following system shared memory regions: a ,b ,"
    )
    assert [name for name, *_ in regions.status_system()] == ["a", "b"]
    running.send(None, False)
    running.send(None, True)
    assert sink.results == [(None, False), (None, True)]
    regions.unregister_system()
    assert not regions.names


def test_regions_are_free_again_when_an_inference_is_refused_or_its_result_cannot_be_sent(regions: Regions) -> None:
    regions.register_system("r", "/small", 0, 64)
    use = RegionUse(regions, True)
    use.input("r", 0, 4)

    def refuse(request: InferRequest, sink: ResponseSink, model: object) -> None:
        unregister_refusal(regions.unregister_system, "r")
        raise InvalidArgument("refused")

    class Broken:
        def send(self, result: Result | None, final: bool) -> None:
            raise OSError("gone")

    with pytest.raises(InvalidArgument, match="refused"):
        use.during(refuse, REQUEST, Broken())
    with pytest.raises(OSError, match="gone"):
        use.during(lambda request, sink, model: sink.send(None, True), REQUEST, Broken())
    regions.unregister_system("r")
    assert not regions.names


def test_a_request_that_uses_no_region_is_passed_on_as_it_is(regions: Regions) -> None:
    sink = Sink(regions)
    assert RegionUse(regions, True).during(lambda request, sink, model: sink, REQUEST, sink) is sink


def test_an_object_that_shrinks_is_an_error_and_does_not_grow_again(regions: Regions, shm: Path) -> None:
    regions.register_system("r", "/small", 0, 64)
    output = RegionUse(regions, True).output("OUT", "r", 32, 8)
    os.truncate(shm / "small", 16)
    with pytest.raises(InvalidArgument, match="'/small' has become smaller"):
        RegionUse(regions, True).input("r", 12, 8)
    with pytest.raises(InvalidArgument, match="'/small' has become smaller"):
        output.write(out(bytes(8)))
    assert (shm / "small").stat().st_size == 16


LARGE = bytes(range(256)) * 512


@pytest.fixture
def large(regions: Regions, shm: Path) -> RegionUse:
    (shm / "large").write_bytes(bytes(64) + LARGE + bytes(64))
    regions.register_system("large", "/large", 0, 128 + len(LARGE))
    return RegionUse(regions, True)


class Kept:
    """Keeps results."""

    def __init__(self) -> None:
        self.results: list[tuple[Result | None, bool]] = []

    def send(self, result: Result | None, final: bool) -> None:
        self.results.append((result, final))


def test_a_large_input_is_read_when_a_batch_is_made(large: RegionUse, shm: Path) -> None:
    part = large.input("large", 64, len(LARGE))
    assert isinstance(part, Unread)
    assert len(part) == len(LARGE)
    (shm / "large").write_bytes(bytes(64) + LARGE[::-1] + bytes(64))
    target = bytearray(len(LARGE))
    part.read_into_batch(memoryview(target))
    assert target == part.for_batch() == part.read() == LARGE[::-1]
    assert part.failure is None


def test_a_large_input_that_was_looked_at_does_not_change(large: RegionUse, shm: Path) -> None:
    tensor = Tensor("IN", DataType.UINT8, (len(LARGE),), large.input("large", 64, len(LARGE)))
    assert tensor.data == LARGE
    (shm / "large").write_bytes(bytes(128 + len(LARGE)))
    assert tensor.contents == tensor.data == LARGE


@pytest.mark.parametrize("into", [True, False])
def test_a_region_that_shrinks_before_the_batch_is_made_is_an_error_of_its_request(
    large: RegionUse, shm: Path, into: bool
) -> None:
    part = large.input("large", 64, len(LARGE))
    assert isinstance(part, Unread)
    kept = Kept()
    holding = large.during(lambda request, sink, model: sink, REQUEST, kept)
    os.truncate(shm / "large", 100_000)
    if into:
        target = memoryview(bytearray(b"x" * len(LARGE)))
        part.read_into_batch(target)
        assert not any(target)
    else:
        assert part.for_batch() == bytes(len(LARGE))
    with pytest.raises(InvalidArgument, match="'/large' has become smaller"):
        part.read()
    response = InferResponse("m", 1, "", ())
    holding.send(response, False)
    holding.send(None, True)
    (first, final), ended = kept.results
    assert isinstance(first, InvalidArgument)
    assert (final, ended) == (False, (None, True))


def test_a_large_output_may_be_written_by_its_model(large: RegionUse, shm: Path) -> None:
    size = len(LARGE)
    output = large.output("OUT", "large", 64, size)
    other = large.output("OTHER", "large", 0, size, as_it_is=False)
    large.output("SMALL", "large", 0, 64)
    request = InferRequest("m", ())
    large.during(lambda request, sink, model: None, request, Kept())
    assert request.destinations is not None
    assert list(request.destinations) == ["OUT"]
    place = request.destinations["OUT"]
    assert (place.position, place.byte_size) == (64, size)
    os.pwrite(place.fd, b"made", place.position)
    made = b"made" + LARGE[4:]
    written = Tensor("OUT", DataType.UINT8, (size,), place.written(size))
    output.write(written)
    assert (shm / "large").read_bytes() == bytes(64) + made + bytes(64)
    # Written elsewhere, or looked at, it is copied.
    other.write(written)
    assert (shm / "large").read_bytes()[:size] == made
    assert written.data == made
    assert InferResponse("m", 1, "", (written,)).owned().outputs[0].data == made


def test_a_large_input_that_is_not_there_any_more_is_refused(large: RegionUse, shm: Path) -> None:
    os.truncate(shm / "large", 100_000)
    with pytest.raises(InvalidArgument, match="'/large' has become smaller"):
        large.input("large", 64, len(LARGE))


@pytest.mark.parametrize(
    ("allow", "local", "permitted"),
    [
        ("true", True, True),
        ("true", False, True),
        ("local", True, True),
        ("local", False, False),
        ("false", True, False),
        ("false", False, False),
    ],
)
async def test_who_may_use_shared_memory(shm: Path, allow: str, local: bool, permitted: bool) -> None:
    regions = Regions(allow, directory=str(shm))  # type: ignore[arg-type]
    if permitted:
        regions.register_system("r", "/small", 0, 64, local=local)
        RegionUse(regions, local).input("r", 0, 4)
        RegionUse(regions, local).output("OUT", "r", 0, 4)
        return
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    with pytest.raises(Unsupported) as caught:
        regions.register_system("r", "/small", 0, 64, local=local)
    assert caught.value.message == text
    with pytest.raises(Unsupported) as caught:
        await regions.register_cuda("r", bytes(64), 0, 64, local=local)
    assert caught.value.message == text
    assert regions.status_system() == []


def test_regions_of_local_clients_are_not_for_others(regions: Regions) -> None:
    regions.register_system("r", "/small", 0, 64)
    with pytest.raises(Unsupported):
        RegionUse(regions, False).input("r", 0, 4)
    with pytest.raises(Unsupported):
        RegionUse(regions, False).output("OUT", "r", 0, 4)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("unix:", True),
        ("unix:/tmp/x", True),
        ("127.0.0.1:8", True),
        ("ipv4:127.0.0.1:8", True),
        ("ipv4:127.9.9.9:8", True),
        ("ipv6:[::1]:8", True),
        ("ipv6:%5B::1%5D:8", True),
        ("::1", True),
        ("127.0.0.1", True),
        ("ipv6:[::ffff:127.0.0.1]:8", True),
        ("192.0.2.1:8", False),
        ("ipv4:192.0.2.1:8", False),
        ("ipv6:[2001:db8::1]:8", False),
        ("0.0.0.0:8", False),
        ("", False),
        ("localhost.example:80", False),
    ],
)
def test_which_peers_are_on_this_machine(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local


def tensor(name: str, data: bytes | memoryview) -> Tensor:
    return Tensor(name, DataType.UINT8, (len(data),), data)


class Engine:
    """Begins inferences: keeps the requests, and the sinks for their results."""

    def __init__(self) -> None:
        self.inputs: list[bytes] = []
        self.models: list[object] = []
        self.cancelled = 0
        self.sink: ResponseSink
        self.refusal: Exception | None = None

    def infer(self, request: InferRequest, sink: ResponseSink, model: object) -> "Engine":
        if self.refusal is not None:
            raise self.refusal
        self.inputs += [bytes(tensor.data) for tensor in request.inputs]
        self.models.append(model)
        self.sink = sink
        return self

    def cancel(self) -> None:
        self.cancelled += 1


class Client:
    """Encodes responses as front ends do; `outputs` are those in regions, by name."""

    def __init__(self, outputs: dict[str, OutputRegion] | None = None) -> None:
        self.outputs = outputs or {}
        self.results: list[object] = []
        self.changed = asyncio.Event()

    def send(self, result: Result | None, final: bool) -> None:
        if isinstance(result, InferResponse):
            for output in result.outputs:
                if output.name in self.outputs:
                    self.outputs[output.name].write(output)
            self.results.append((result.id, final))
        elif result is not None:
            self.results.append((type(result), result.message, result.refused))
        else:
            self.results.append((None, final))
        self.changed.set()

    async def got(self, count: int) -> list[object]:
        while len(self.results) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 20)
        return self.results


async def begun(call: object) -> None:
    assert isinstance(call, CopyingCall)
    await call.begun


async def test_cuda_regions_are_read_and_written_by_another_thread(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    assert regions.status_cuda() == [("c", 0, 64)]
    assert regions.status_system() == []
    cuda.memory[HANDLE][:8] = b"abcdefgh"
    use = RegionUse(regions, True)
    data = use.input("c", 2, 4)
    engine, client = Engine(), Client({"OUT": use.output("OUT", "c", 8, 4)})
    cuda.free.clear()
    call = use.during(engine.infer, InferRequest("m", (tensor("IN", data),)), client, "model")
    await asyncio.sleep(0)
    # The loop goes on while CUDA is at it.
    assert engine.inputs == []
    cuda.free.set()
    await begun(call)
    assert engine.inputs == [b"cdef"]
    # It is asked for again: what it was may have been unloaded.
    assert engine.models == [None]
    arena = bytearray(b"WXYZ")
    engine.sink.send(InferResponse("m", 1, "1", (tensor("OUT", memoryview(arena)),)), True)
    # The arena is used again at once.
    arena[:] = b"...."
    assert await client.got(1) == [("1", True)]
    assert bytes(cuda.memory[HANDLE][6:14]) == b"ghWXYZ\0\0"
    assert cuda.threads == {"cuda"}
    await regions.unregister_cuda("c")
    # Who has sent it may still hold on to where it went.
    assert regions.status_cuda() == []


async def test_memory_is_closed_when_unregistering_is_done(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    await regions.register_cuda("d", OTHER, 0, 32)
    await regions.unregister_cuda("c")
    assert list(cuda.open_handles.values()) == [OTHER]
    await regions.unregister_cuda()
    assert cuda.open_handles == {}


async def test_a_request_that_was_read_before_its_region_was_unregistered(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    use.input("c", 0, 4)
    await regions.unregister_cuda("c")
    assert cuda.open_handles == {}
    client = Client()
    use.during(Engine().infer, REQUEST, client)
    assert await client.got(1) == [(Internal, "CUDA shared memory has been unregistered", True)]
    assert cuda.calls == ["open", "close"]


async def test_results_keep_their_order(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    engine, client = Engine(), Client({"OUT": use.output("OUT", "c", 0, 4)})
    await begun(use.during(engine.infer, REQUEST, client))
    cuda.free.clear()
    for number in range(3):
        outputs = () if number == 1 else (tensor("OUT", bytes([number] * 4)),)
        engine.sink.send(InferResponse("m", 1, str(number), outputs), False)
    engine.sink.send(Internal("failed"), False)
    engine.sink.send(None, True)
    assert client.results == []
    cuda.free.set()
    failed = (Internal, "failed", False)
    assert await client.got(5) == [("0", False), ("1", False), ("2", False), failed, (None, True)]
    assert bytes(cuda.memory[HANDLE][:4]) == bytes([2] * 4)


async def test_responses_without_outputs_on_gpus_do_not_wait(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    engine, client = Engine(), Client()
    data = use.input("c", 0, 4)
    await begun(use.during(engine.infer, InferRequest("m", (tensor("IN", data),)), client))
    engine.sink.send(InferResponse("m", 1, "1", (tensor("OUT", b"1234"),)), True)
    assert client.results == [("1", True)]


async def test_what_cannot_be_copied_is_an_error(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    cuda.error = OSError(700, "an illegal memory access was encountered")
    text = "failed to copy data from CUDA shared memory: an illegal memory access was encountered"
    use = RegionUse(regions, True)
    client = Client()
    data = use.input("c", 0, 4)
    use.during(Engine().infer, InferRequest("m", (tensor("IN", data),)), client)
    assert await client.got(1) == [(Internal, text, True)]
    cuda.error = None
    use = RegionUse(regions, True)
    engine, client = Engine(), Client({"OUT": use.output("OUT", "c", 0, 4)})
    await begun(use.during(engine.infer, REQUEST, client))
    cuda.error = OSError(700, "an illegal memory access was encountered")
    engine.sink.send(InferResponse("m", 1, "1", (tensor("OUT", b"1234"),)), True)
    assert await client.got(1) == [(Internal, text.replace("from", "to"), False)]
    cuda.error = None
    await regions.unregister_cuda("c")


async def test_an_output_larger_than_its_part_is_not_written(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    engine, client = Engine(), Client({"OUT": use.output("OUT", "c", 0, 3)})
    await begun(use.during(engine.infer, REQUEST, client))
    engine.sink.send(InferResponse("m", 1, "1", (tensor("OUT", b"1234"),)), True)
    text = (
        "shared memory size specified with the request for output 'OUT' (3 bytes) should be at least 4 bytes to hold the "
        "results"
    )
    assert await client.got(1) == [(Internal, text, False)]
    assert bytes(cuda.memory[HANDLE]) == bytes(64)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (InvalidArgument("refused"), (InvalidArgument, "refused", True)),
        (KeyError("bug"), (Internal, "unexpected error: 'bug'", False)),
    ],
)
async def test_what_is_refused_after_its_inputs_were_copied(
    regions: Regions, cuda: FakeCuda, refusal: Exception, error: object
) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    use.input("c", 0, 4)
    engine, client = Engine(), Client()
    engine.refusal = refusal
    use.during(engine.infer, REQUEST, client)
    assert await client.got(1) == [error]
    await regions.unregister_cuda("c")


async def test_a_client_that_leaves_before_and_during_its_inference(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    for early in True, False:
        use = RegionUse(regions, True)
        use.input("c", 0, 4)
        engine, client = Engine(), Client()
        call = use.during(engine.infer, REQUEST, client)
        if early:
            call.cancel()
            assert await client.got(1) == [(Cancelled, "", True)]
            assert engine.models == []
        else:
            await begun(call)
            call.cancel()
            assert engine.cancelled == 1
            engine.sink.send(Cancelled(""), True)
    await regions.unregister_cuda("c")


async def test_cuda_regions_in_use_are_not_unregistered(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    engine, client = Engine(), Client({"OUT": use.output("OUT", "c", 0, 4)})
    cuda.free.clear()
    call = use.during(engine.infer, REQUEST, client)

    async def refusals() -> list[str]:
        texts = []
        for name in "c", "":
            with pytest.raises(Internal) as caught:
                await regions.unregister_cuda(name)
            texts.append(caught.value.message)
        return texts

    in_use = [
        "Cannot unregister shared memory region 'c', it is currently in use.",
        "Failed to unregister the following cuda shared memory regions: c ,",
    ]
    assert await refusals() == in_use  # while inputs are copied
    cuda.free.set()
    await begun(call)
    assert await refusals() == in_use
    regions.unregister_system()
    assert regions.status_cuda() == [("c", 0, 64)]
    cuda.free.clear()
    engine.sink.send(InferResponse("m", 1, "1", (tensor("OUT", b"1234"),)), True)
    assert await refusals() == in_use  # while outputs are copied
    cuda.free.set()
    await client.got(1)
    await regions.unregister_cuda("c")


async def test_a_region_that_is_dropped_stays_open_for_what_is_copied(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    use = RegionUse(regions, True)
    engine, client = Engine(), Client({"OUT": use.output("OUT", "c", 0, 4)})
    await begun(use.during(engine.infer, REQUEST, client))
    cuda.free.clear()
    engine.sink.send(InferResponse("m", 1, "1", (tensor("OUT", b"late"),)), True)
    closed = regions.drop(["c"])
    assert closed is not None
    cuda.free.set()
    await client.got(1)
    await closed
    assert bytes(cuda.memory[HANDLE][:4]) == b"late"
    assert regions.drop(["c"]) is None


async def test_the_two_kinds_share_one_namespace(regions: Regions, cuda: FakeCuda) -> None:
    await regions.register_cuda("c", HANDLE, 0, 64)
    with pytest.raises(AlreadyExists):
        regions.register_system("c", "/small", 0, 64)
    with pytest.raises(NotFound) as caught:
        regions.status_system("c")
    assert caught.value.message == (
        "The region named 'c' is registered as CUDA shared memory, not system shared memory"
    )
    regions.unregister_system("c")
    regions.unregister_system("")
    assert regions.status_cuda("c") == [("c", 0, 64)]


async def test_of_two_that_register_a_name_at_once_one_gets_it(regions: Regions, cuda: FakeCuda) -> None:
    both = [regions.register_cuda("c", handle, 0, 64) for handle in (HANDLE, OTHER)]
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), AlreadyExists]
    del results, both
    gc.collect()
    await cuda_thread.settled()
    assert list(cuda.open_handles.values()) == [HANDLE]


@pytest.mark.parametrize(
    ("handle", "device", "byte_size", "text"),
    [
        (b"x" * 64, 0, 64, NO_CUDA),
        (b"short", 0, 64, NO_CUDA),
        (b"h" * 64, 1, 64, NO_CUDA),
        (b"h" * 64, -1, 64, NO_CUDA),
        (b"h" * 64, 0, 65, "failed to register shared memory region 'c': invalid args"),
    ],
)
async def test_cuda_memory_that_cannot_be_opened(
    regions: Regions, cuda: FakeCuda, handle: bytes, device: int, byte_size: int, text: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await regions.register_cuda("c", handle, device, byte_size)
    assert caught.value.message == text
    assert regions.status_cuda() == []
    assert cuda.open_handles == {}


async def test_why_memory_cannot_be_opened_is_in_the_verbose_log(
    regions: Regions, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(InvalidArgument):
        await regions.register_cuda("c", b"x" * 64, 0, 64)
    (record,) = [record for record in caplog.records if record.name == cuda_memory.__name__]
    text = "the memory of region 'c' on GPU 0 cannot be opened: [Errno 1] invalid resource handle"
    assert (record.levelname, record.getMessage()) == ("DEBUG", text)


async def test_a_region_of_another_process_can_be_used_at_once(regions: Regions, cuda: FakeCuda) -> None:
    cuda.free.clear()
    uses: list[bool] = []
    opened = regions.adopt_cuda("c", HANDLE, 0, 64, uses.append)
    use = RegionUse(regions, True)
    data = use.input("c", 0, 4)
    engine, client = Engine(), Client()
    call = use.during(engine.infer, InferRequest("m", (tensor("IN", data),)), client)
    assert uses == [True]
    cuda.free.set()
    await begun(call)
    await opened
    assert engine.inputs == [bytes(4)]
    engine.sink.send(None, True)
    assert uses == [True, False]


async def test_a_region_of_another_process_that_cannot_be_opened_here(regions: Regions, cuda: FakeCuda) -> None:
    opened = regions.adopt_cuda("c", b"x" * 64, 0, 64, lambda used: None)
    use = RegionUse(regions, True)
    data = use.input("c", 0, 4)
    client = Client()
    use.during(Engine().infer, InferRequest("m", (tensor("IN", data),)), client)
    with pytest.raises(InvalidArgument):
        await opened
    assert await client.got(1) == [(Internal, f"CUDA shared memory could not be opened: {NO_CUDA}", True)]


async def test_without_cuda_nothing_can_be_registered(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "cuda_runtime", lambda: None)
    with pytest.raises(InvalidArgument) as caught:
        await regions.register_cuda("c", bytes(64), 0, 64)
    assert caught.value.message == NO_CUDA


async def test_a_job_whose_caller_is_gone_is_left_out() -> None:
    thread, free, done = CudaThread(), threading.Event(), []
    thread.do(free.wait)
    left = thread.do(done.append, "left")
    thread.do(done.append, "next")
    assert left.cancel()
    free.set()
    await thread.settled()
    assert done == ["next"]


class FakeFunction:
    """A C function: remembers its arguments and does what `act` says."""

    def __init__(self, act: object = None) -> None:
        self.act = act
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *args: object) -> object:
        self.calls.append(args)
        return self.act(*args) if callable(self.act) else self.act


class FakeLibrary:
    """libcudart with host memory for device memory."""

    def __init__(self, own: int = 12080, driver: int = 12040) -> None:
        self.memory = ctypes.create_string_buffer(b"device memory", 64)
        self.cudaSetDevice = FakeFunction(0)
        self.cudaIpcOpenMemHandle = FakeFunction(self.open)
        self.cudaIpcCloseMemHandle = FakeFunction(0)
        self.cudaMemcpy = FakeFunction(self.copy)
        self.cudaStreamSynchronize = FakeFunction(0)
        self.cudaRuntimeGetVersion = FakeFunction(lambda version: self.set(version, own))
        self.cudaDriverGetVersion = FakeFunction(lambda version: self.set(version, driver))
        self.cudaGetErrorString = FakeFunction(b"out of memory")
        self.cuMemGetAddressRange_v2 = FakeFunction(self.range)

    def open(self, pointer: object, handle: object, flags: int) -> int:
        pointer._obj.value = ctypes.addressof(self.memory)  # type: ignore[attr-defined]
        return 0

    def set(self, version: object, value: int) -> int:
        version._obj.value = value  # type: ignore[attr-defined]
        return 0

    def range(self, base: object, size: object, address: int) -> int:
        if address != ctypes.addressof(self.memory):
            return 1
        size._obj.value = len(self.memory)  # type: ignore[attr-defined]
        return 0

    def copy(self, target: object, source: object, size: int, kind: int) -> int:
        ctypes.memmove(target, source, size)  # type: ignore[arg-type]
        return 0 if size < 40 else 2


def test_the_cuda_runtime_is_called_as_its_interface_says(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(cuda_memory, "cuda_driver", lambda: library)
    runtime = CudaRuntime(library)
    address = runtime.open(3, bytes(64))
    assert library.cudaSetDevice.calls == [(3,)]
    data = bytearray(6)
    runtime.read(3, address, memoryview(data))
    assert data == b"device"
    assert not library.cudaStreamSynchronize.calls
    assert runtime.allocated(address) == 64
    with pytest.raises(OSError, match="no allocation"):
        runtime.allocated(address + 1)
    runtime.write(3, address + 7, b"MEMORY")
    assert library.memory.value == b"device MEMORY"
    assert library.cudaStreamSynchronize.calls == [(None,)]  # the default stream, in which cudaMemcpy works
    assert [call[3] for call in library.cudaMemcpy.calls] == [2, 1]  # device to host, host to device
    with pytest.raises(OSError, match="out of memory"):
        runtime.read(3, address, memoryview(bytearray(50)))
    runtime.close(3, address)
    assert library.cudaIpcCloseMemHandle.calls == [(address,)]


@pytest.mark.parametrize(
    ("libraries", "taken", "warning"),
    [
        ({"libcudart.so": FakeLibrary(13000, 13010), "libcudart.so.12": FakeLibrary()}, "libcudart.so", ""),
        # Within a major version each driver takes each runtime.
        ({"libcudart.so.13": FakeLibrary(13000, 12040), "libcudart.so.12": FakeLibrary()}, "libcudart.so.12", ""),
        (
            {"libcudart.so.13": FakeLibrary(13000, 12040)},
            None,
            "libcudart.so.13 is of CUDA 13, and the driver knows 12",
        ),
        ({"libcudart.so.12": FakeLibrary(12080, 0)}, None, "libcudart.so.12 is of CUDA 12, and there is no driver"),
        (
            {},
            None,
            r"no libcudart is in LD_LIBRARY_PATH or came with a package \(pip install nvidia-cuda-runtime-cu12\)",
        ),
    ],
)
def test_which_cuda_runtime_is_taken(
    libraries: dict[str, FakeLibrary],
    taken: str | None,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load(name: str) -> FakeLibrary:
        if name in libraries:
            return libraries[name]
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", load)
    cuda_memory.cuda_runtime.cache_clear()
    try:
        runtimes = [cuda_memory.cuda_runtime() for _ in range(2)]
    finally:
        cuda_memory.cuda_runtime.cache_clear()
    assert {runtime and runtime._library for runtime in runtimes} == {taken and libraries[taken]}
    expected = [f"clients cannot register memory of GPUs: {warning}"] if warning else []
    assert len(caplog.messages) == len(expected)
    assert all(map(re.fullmatch, expected, caplog.messages))
