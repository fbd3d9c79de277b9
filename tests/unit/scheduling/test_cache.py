"""The response cache: what is equal, what is kept, and one execution for equal requests under way."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from scheduling_fakes import Meddler

from naiad.datatypes import DataType
from naiad.errors import Cancelled, InvalidArgument, NotFound, Unavailable
from naiad.messages import InferRequest, InferResponse, Result, Tensor
from naiad.options import Setting
from naiad.scheduling.cache import CachingScheduler, LocalStore, families, key_of, pack, store_of, unpack
from naiad.scheduling.scheduler import Call
from naiad.statistics import ModelStatistics


def tensor(name: str = "A", data: bytes = b"\1\2", shape: tuple[int, ...] = (2,)) -> Tensor:
    return Tensor(name, DataType.INT8, shape, data)


def request(*inputs: Tensor, **fields: Any) -> InferRequest:
    return InferRequest("m", inputs or (tensor(),), **fields)


def response(data: bytes = b"\7", id: str = "") -> InferResponse:
    return InferResponse("m", 1, id, (Tensor("O", DataType.INT8, (len(data),), data),))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (request(), request(), True),
        (request(), request(id="x", priority=3, timeout_us=9), True),
        (request(tensor("A"), tensor("B")), request(tensor("B"), tensor("A")), True),
        (request(), request(tensor(data=memoryview(b"\1\2"))), True),  # type: ignore[arg-type]
        (request(), request(tensor(data=b"\1\3")), False),
        (request(), request(tensor("B")), False),
        (request(tensor(data=b"123456", shape=(2, 3))), request(tensor(data=b"123456", shape=(3, 2))), False),
        (request(), request(outputs=("O",)), False),
        (request(), request(parameters={"p": 1}), False),
        (request(parameters={"a": 1, "b": 2}), request(parameters={"b": 2, "a": 1}), True),
    ],
)
def test_what_makes_requests_equal(one: InferRequest, other: InferRequest, equal: bool) -> None:
    assert (key_of(one, 1) == key_of(other, 1)) is equal
    assert key_of(one, 1) != key_of(one, 2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_used_goes_first() -> None:
    store = LocalStore(3 * 513)
    for key in (b"a", b"b", b"c"):
        store.insert(key, response())
    assert store.lookup(b"a") is not None
    store.insert(b"d", response())
    assert [key for key in (b"a", b"b", b"c", b"d") if store.lookup(key)] == [b"a", b"c", b"d"]
    assert store.statistics.evictions == 1
    assert store.used == 3 * 513


def test_what_does_not_fit_is_not_kept() -> None:
    told: list[str] = []
    store = store_of((Setting("local", "size", "600"),), no_report, told.append)
    assert store is not None
    store.insert(b"a", response(bytes(10)))
    assert not told
    for _ in range(2):
        store.insert(b"b", response(bytes(100)))
    assert store.lookup(b"a") is not None
    assert store.lookup(b"b") is None
    assert told == [
        "Failed to insert key [62] into response cache: a response of model 'm' takes 612 bytes, the cache has 600. "
        "Responses that are too large are not told of again"
    ]


def test_replacing_gives_the_old_space_back() -> None:
    store = LocalStore(600)
    for _ in range(3):
        store.insert(b"a", response())
    assert (len(store), store.used) == (1, 513)


def test_a_time_to_live_ends() -> None:
    clock = Clock()
    store = LocalStore(5000, ttl_s=10, clock=clock)
    store.insert(b"a", response())
    clock.now = 9.9
    assert store.lookup(b"a") is not None
    clock.now = 10
    assert store.lookup(b"a") is None
    assert store.used == 0


def test_a_response_survives_packing() -> None:
    kept = response(b"\1\2\3")
    assert unpack(pack(kept)) == kept


def test_the_metrics_of_a_store() -> None:
    store = LocalStore(5130)
    store.insert(b"a", response())
    store.lookup(b"a")
    store.lookup(b"b")
    values = {family.name: family.samples[0].value for family in families(store)}
    assert values["nv_cache_util"] == pytest.approx(0.1)
    assert (values["nv_cache_num_lookups"], values["nv_cache_num_hits"], values["nv_cache_num_misses"]) == (2, 1, 1)
    assert values["nv_cache_num_entries"] == 1


def no_report(text: str, error: BaseException) -> None:
    raise AssertionError(text) from error


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([("local", "size", "0")], "didn't contain a valid 'size'"),
        ([("local", "ttl", "1")], "didn't contain a valid 'size'"),
        ([("local", "size", "1"), ("local", "ttl", "-1")], "didn't contain a valid 'size'"),
        ([("local", "sise", "1")], "has no setting 'sise'"),
        ([("local", "size", "512")], "a 'size' of 512 bytes holds no response; give more than 512"),
        ([("local", "size", "1000000000000000")], "failed to allocate buffer: .* memory of this machine"),
        ([("local", "size", "1"), ("redis", "host", "h")], "only a single cache is currently supported"),
        ([("disk", "size", "1")], "unable to find cache 'disk'"),
    ],
)
def test_wrong_settings_are_refused(settings: list[tuple[str, str, str]], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        store_of([Setting(*setting) for setting in settings], no_report)


class Lease:
    def __init__(self) -> None:
        self.statistics = ModelStatistics("m", "1")
        self.held = 0

    def lease(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1


class Sink:
    def __init__(self) -> None:
        self.results: list[Result | None] = []

    def send(self, result: Result | None, final: bool) -> None:
        assert final
        self.results.append(result)


class Inner:
    """Holds the calls it gets until the test answers them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.withdrawn: list[Call] = []
        self.pending = 0

    def submit(self, call: Call) -> None:
        self.calls.append(call)

    def withdraw(self, call: Call) -> None:
        self.withdrawn.append(call)

    async def close(self) -> None:
        pass


class Bench:
    def __init__(self, store: Any = None) -> None:
        self.inner = Inner()
        self.lease = Lease()
        self.store = LocalStore(10_000) if store is None else store
        self.cache = CachingScheduler(self.inner, self.store, 1, self.lease.statistics, no_report)

    def submit(self, asked: InferRequest, sink: Sink | None = None) -> tuple[Call, Sink]:
        sink = sink or Sink()
        self.lease.lease()
        call = Call(asked, 1, None, sink, self.lease, self.cache)
        self.cache.submit(call)
        return call, sink


def test_a_hit_needs_no_execution_and_keeps_its_own_id() -> None:
    bench = Bench()
    _, first = bench.submit(request(id="a"))
    bench.inner.calls[0].deliver(response(id="a"), True)
    _, second = bench.submit(request(id="b"))
    assert len(bench.inner.calls) == 1
    assert [result.id for result in (*first.results, *second.results)] == ["a", "b"]  # type: ignore[union-attr]
    infer = bench.lease.statistics.infer
    assert (infer.cache_miss.count, infer.cache_hit.count, infer.success.count) == (1, 1, 1)
    assert bench.lease.held == 0


def test_equal_requests_under_way_share_one_execution() -> None:
    bench = Bench()
    sinks = [bench.submit(request(id=str(n)))[1] for n in range(3)]
    assert len(bench.inner.calls) == 1
    bench.inner.calls[0].deliver(response(), True)
    assert [sink.results[0].id for sink in sinks] == ["0", "1", "2"]  # type: ignore[union-attr]
    assert bench.lease.held == 0


def test_an_error_is_for_all_and_is_not_kept() -> None:
    bench = Bench()
    sinks = [bench.submit(request())[1] for _ in range(2)]
    bench.inner.calls[0].deliver(NotFound("x"), True)
    assert [str(sink.results[0]) for sink in sinks] == ["x", "x"]
    bench.submit(request())
    assert len(bench.inner.calls) == 2


def test_the_buffers_kept_are_the_caches_own() -> None:
    bench = Bench()
    bench.submit(request())
    arena = bytearray(b"\5")
    bench.inner.calls[0].deliver(response(memoryview(arena)), True)  # type: ignore[arg-type]
    arena[0] = 9
    _, sink = bench.submit(request())
    assert sink.results[0].outputs[0].data == b"\5"  # type: ignore[union-attr]


def test_a_client_that_leaves_takes_only_itself_out() -> None:
    bench = Bench()
    leaving, gone = bench.submit(request())
    staying, served = bench.submit(request())
    leaving.cancel()
    assert bench.inner.withdrawn == []
    bench.inner.calls[0].deliver(response(), True)
    assert len(gone.results) == 1
    assert isinstance(served.results[0], InferResponse)
    assert staying.ended
    assert bench.lease.held == 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_client_takes_the_execution_along(fails: bool) -> None:
    bench = Bench()
    reported: list[str] = []
    bench.cache.report = lambda text, error: reported.append(text)
    meddler: Any = Meddler(fails=fails)
    call, _ = bench.submit(request(), meddler)
    call.cancel()
    assert bench.inner.withdrawn == bench.inner.calls
    assert reported == ["an error of model 'm' could not be passed on"] * fails


class SlowStore(LocalStore):
    """Answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(10_000)
        self.lookups: list[asyncio.Future[InferResponse | None]] = []

    def lookup(self, key: bytes) -> Any:
        self.lookups.append(asyncio.get_running_loop().create_future())
        return self.lookups[-1]


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_what_is_refused_after_the_lookup_is_answered() -> None:
    bench = Bench(store := SlowStore())
    sinks = [bench.submit(request())[1] for _ in range(2)]

    def refuse(call: Call) -> None:
        raise Unavailable("Exceeds maximum queue size")

    bench.inner.submit = refuse  # type: ignore[method-assign]
    store.lookups[0].set_result(None)
    await turns()
    assert [str(sink.results[0]) for sink in sinks] == ["Exceeds maximum queue size"] * 2
    assert bench.lease.held == 0
    assert bench.lease.statistics.refused == 2
    assert bench.lease.statistics.infer.fail.count == 0
    bench.submit(request())
    assert len(store.lookups) == 2


@pytest.mark.parametrize("found", [response(), None, NotFound("x"), Unavailable("full")])
async def test_calls_that_leave_while_the_others_are_answered_are_answered_once(found: Result | None) -> None:
    bench = Bench(store := SlowStore())
    meddler: Any = Meddler()
    bench.submit(request(), meddler)
    meddler.other, leaving = bench.submit(request())
    _, last = bench.submit(request())

    def refuse(call: Call) -> None:
        raise Unavailable("full")

    if isinstance(found, Unavailable):
        bench.inner.submit = refuse  # type: ignore[method-assign]
    store.lookups[0].set_result(found if isinstance(found, InferResponse) else None)
    await turns()
    if bench.inner.calls:
        bench.inner.calls[0].deliver(found or response(), True)
    assert [len(sink.results) for sink in (meddler, leaving, last)] == [1, 1, 1]
    assert bench.lease.held == 0


def test_a_response_that_cannot_be_kept_is_answered() -> None:
    class Full(LocalStore):
        def insert(self, key: bytes, response: InferResponse) -> None:
            raise ValueError("does not fit")

    bench = Bench(Full(10_000))
    reported: list[str] = []
    bench.cache.report = lambda text, error: reported.append(text)
    _, sink = bench.submit(request())
    bench.inner.calls[0].deliver(response(), True)
    assert isinstance(sink.results[0], InferResponse)
    assert reported == ["a response of model 'm' could not be kept in the cache"]
    assert bench.lease.held == 0


async def test_a_lookup_that_fails_is_a_miss() -> None:
    bench = Bench(store := SlowStore())
    reported: list[str] = []
    bench.cache.report = lambda text, error: reported.append(text)
    _, sink = bench.submit(request())
    store.lookups[0].set_exception(ValueError("broken entry"))
    await turns()
    bench.inner.calls[0].deliver(response(), True)
    assert isinstance(sink.results[0], InferResponse)
    assert len(reported) == 1
    await bench.cache.close()


def test_nobody_joins_an_execution_that_all_its_clients_have_left() -> None:
    bench = Bench()
    leaving, gone = bench.submit(request())
    leaving.cancel()
    _, sink = bench.submit(request())
    assert len(bench.inner.calls) == 2
    bench.inner.calls[0].deliver(Cancelled(""), True)
    assert sink.results == []
    bench.inner.calls[1].deliver(response(), True)
    assert isinstance(sink.results[0], InferResponse)
    assert len(gone.results) == 1
    assert bench.lease.held == 0


def test_a_late_answer_to_clients_that_have_left_is_kept_all_the_same() -> None:
    bench = Bench()
    leaving, _ = bench.submit(request())
    leaving.cancel()
    bench.inner.calls[0].deliver(response(), True)
    _, sink = bench.submit(request())
    assert isinstance(sink.results[0], InferResponse)
    assert bench.lease.held == 0


def test_texts_that_are_not_utf8_can_be_compared() -> None:
    assert key_of(request(parameters={"p": "\udcff"}), 1) != key_of(request(parameters={"p": "\udcfe"}), 1)


def test_versions_that_were_loaded_separately_share_no_answers() -> None:
    assert key_of(request(), 1, b"one load") != key_of(request(), 1, b"another")


# ---- Redis: a real server ----------------------------------------------------------------------------------------


@pytest.fixture
async def redis_port(tmp_path: Path) -> AsyncIterator[int]:
    async with redis_server(tmp_path, "--port") as port:
        yield port


@asynccontextmanager
async def redis_server(directory: Path, port_option: str, *more: str) -> AsyncIterator[int]:
    pytest.importorskip("redis", reason="the Python package redis is not installed (extra 'redis')")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server (Debian package redis-server)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [program, port_option, str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(directory), *more],
        stdout=subprocess.DEVNULL,
    )
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                break
    try:
        yield port
    finally:
        server.terminate()
        server.wait(10)


def redis_settings(number: int, **more: str) -> list[Setting]:
    given = {"host": "127.0.0.1", "port": str(number), **more}
    return [Setting("redis", key, value) for key, value in given.items()]


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no events
            await asyncio.sleep(0.005)


async def test_redis_is_shared_between_servers(redis_port: int) -> None:
    stores = [store_of(redis_settings(redis_port), no_report) for _ in range(2)]
    one, other = (Bench(store) for store in stores)
    one.submit(request())
    await until(lambda: one.inner.calls)
    one.inner.calls[0].deliver(response(), True)
    await stores[0].close()  # type: ignore[union-attr]
    _, sink = other.submit(request(id="r"))
    await until(lambda: sink.results)
    assert sink.results == [response(id="r")]
    assert other.inner.calls == []
    await stores[1].close()  # type: ignore[union-attr]


async def test_redis_is_checked_before_its_first_use(redis_port: int) -> None:
    good: Any = store_of(redis_settings(redis_port), no_report)
    await good.check()
    await good._client.config_set("requirepass", "secret")
    for settings, text in (({}, "NOAUTH Authentication required"), ({"password": "x"}, "WRONGPASS")):
        refused = store_of(redis_settings(redis_port, **settings), no_report)
        assert refused is not None
        with pytest.raises(Unavailable, match=rf"^Failed to initialize RedisCache: Failed to connect to Redis: {text}"):
            await refused.check()
        await refused.close()
    allowed = store_of(redis_settings(redis_port, password="secret"), no_report)
    assert allowed is not None
    await allowed.check()
    await allowed.close()
    await good.close()


async def test_redis_behind_tls_may_have_another_name_than_its_host(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("cache.example")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    files = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "ca.pem"}
    options = [text for key, name in files.items() for text in (f"--tls-{key}-file", str(tmp_path / name))]
    secure = {"tls_enabled": "true", "cacert": str(tmp_path / "ca.pem")}
    async with redis_server(tmp_path, "--tls-port", "--port", "0", "--tls-auth-clients", "no", *options) as port:
        for settings, is_known in ((secure, False), ({**secure, "sni": "cache.example"}, True)):
            store = store_of(redis_settings(port, **settings), no_report)
            assert store is not None
            if is_known:
                await store.check()
            else:
                with pytest.raises(Unavailable, match="certificate"):
                    await store.check()
            await store.close()


async def test_redis_that_is_not_there_is_said_at_the_start() -> None:
    pytest.importorskip("redis", reason="the Python package redis is not installed (extra 'redis')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        store = store_of(redis_settings(taken.getsockname()[1]), no_report)
        assert store is not None
        with pytest.raises(Unavailable) as raised:
            await store.check()
        await store.close()
    assert raised.value.message == "Failed to initialize RedisCache: Failed to connect to Redis: Connection refused"


async def test_a_redis_port_that_is_no_number_is_asked_as_triton_reads_it() -> None:
    pytest.importorskip("redis", reason="the Python package redis is not installed (extra 'redis')")
    store = store_of(redis_settings(6379, port="nonexistent"), no_report)
    assert store is not None
    with pytest.raises(Unavailable) as raised:
        await store.check()
    await store.close()
    assert raised.value.message == (
        "Failed to initialize RedisCache: Failed to connect to Redis: Connection refused ('port' is 'nonexistent', which is"
        " no number)"
    )


async def test_without_redis_requests_go_on_and_the_log_says_it_once() -> None:
    pytest.importorskip("redis", reason="the Python package redis is not installed (extra 'redis')")
    reports: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        settings = redis_settings(taken.getsockname()[1])
        store = store_of(settings, lambda text, error: reports.append(text))
        bench = Bench(store)
        for data in (b"12", b"34"):
            _, sink = bench.submit(request(tensor(data=data)))
            await until(lambda: bench.inner.calls)
            bench.inner.calls.pop().deliver(response(), True)
            assert isinstance(sink.results[0], InferResponse)
        await store.close()  # type: ignore[union-attr]
    assert reports == ["the response cache in Redis does not answer; going on without it"]


@pytest.mark.parametrize(
    ("more", "text"), [({"db": "x"}, "is not a number"), ({"colour": "red"}, "has no setting 'colour'")]
)
def test_wrong_redis_settings_are_refused(more: dict[str, str], text: str) -> None:
    pytest.importorskip("redis", reason="the Python package redis is not installed (extra 'redis')")
    with pytest.raises(InvalidArgument, match=text):
        store_of(redis_settings(6379, **more), no_report)


def test_redis_without_an_address_is_refused() -> None:
    pytest.importorskip("redis", reason="the Python package redis is not installed (extra 'redis')")
    with pytest.raises(InvalidArgument, match="Must at a minimum specify 'host' and 'port'"):
        store_of([Setting("redis", "port", "6379")], no_report)
