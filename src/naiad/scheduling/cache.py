"""The response cache: a scheduler around another one that answers what has been answered before. On the event loop.

Equal requests share one execution also while it is under way: the first starts a flight, the others join it. What is
equal: model, version, inputs (names, data types, shapes, bytes), requested outputs and parameters; ids, priorities and
timeouts are not. Triton leaves out shapes, outputs and parameters, so that different requests can collide there.
Only single, successful responses are kept. A store that fails is like one that is empty.
"""

import asyncio
import hashlib
import importlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from naiad.datatypes import BY_NUMBER
from naiad.errors import InvalidArgument, NaiadError
from naiad.messages import InferRequest, InferResponse, ParameterValue, Result, Tensor
from naiad.options import Setting
from naiad.scheduling.scheduler import Call, Scheduler
from naiad.statistics import ModelStatistics
from naiad.telemetry.exposition import Family, Sample

#: What an entry takes in memory besides its tensors, about.
_ENTRY_OVERHEAD = 512


class Store(Protocol):
    """Where responses are kept. An answer that is not there at once comes as an awaitable."""

    #: Other servers use it too: keys must be the same there.
    is_shared: bool

    def lookup(self, key: bytes) -> "InferResponse | asyncio.Future[InferResponse | None] | None": ...

    def insert(self, key: bytes, response: InferResponse) -> None:
        """Keeps a response with buffers of its own."""

    async def check(self) -> None:
        """Before the first use. Raises Unavailable if the responses cannot be kept."""

    async def close(self) -> None: ...


class StoreStatistics(msgspec.Struct):
    """What a store has done; durations in ns."""

    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0


class LocalStore:
    """Responses in this process, up to `byte_size` bytes; the one not used for longest goes first.

    `ttl_s` 0 is for ever. `clock` gives seconds. `tell` hears of the first response that is larger than the store.
    """

    is_shared = False

    def __init__(
        self,
        byte_size: int,
        ttl_s: float = 0,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.byte_size = byte_size
        self.used = 0
        self.statistics = StoreStatistics()
        self._ttl_s = ttl_s
        self._clock = clock
        self._tell = tell
        self._entries: OrderedDict[bytes, tuple[InferResponse, int, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<LocalStore {len(self._entries)} responses, {self.used} of {self.byte_size} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: bytes) -> InferResponse | None:
        start = time.perf_counter_ns()
        entry = self._entries.get(key)
        if entry is not None and entry[2] and entry[2] <= self._clock():
            self._remove(key)
            entry = None
        statistics = self.statistics
        statistics.lookups += 1
        if entry is not None:
            self._entries.move_to_end(key)
            statistics.hits += 1
        statistics.lookup_ns += time.perf_counter_ns() - start
        return entry[0] if entry is not None else None

    def insert(self, key: bytes, response: InferResponse) -> None:
        start = time.perf_counter_ns()
        size = _ENTRY_OVERHEAD + sum([len(tensor.data) for tensor in response.outputs])
        if size <= self.byte_size:
            if key in self._entries:
                self._remove(key)
            while self.used + size > self.byte_size:
                self._remove(next(iter(self._entries)))
                self.statistics.evictions += 1
            expires = self._clock() + self._ttl_s if self._ttl_s else 0.0
            self._entries[key] = (response, size, expires)
            self.used += size
        elif self._tell is not None:
            self._tell(
                f"Failed to insert key [{key.hex()}] into response cache: a response of model '{response.model_name}' takes"
                f" {size} bytes, the cache has {self.byte_size}. Responses that are too large are not told of again"
            )
            self._tell = None
        self.statistics.insertion_ns += time.perf_counter_ns() - start

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        self._entries.clear()
        self.used = 0

    def _remove(self, key: bytes) -> None:
        self.used -= self._entries.pop(key)[1]


class _Stored(msgspec.Struct, array_like=True):
    """A response as it is kept outside of this process."""

    model_name: str
    model_version: int
    outputs: list[tuple[str, int, tuple[int, ...], bytes]]
    parameters: dict[str, ParameterValue]


_decoder = msgspec.msgpack.Decoder(_Stored)


def pack(response: InferResponse) -> bytes:
    outputs = [(t.name, t.datatype.number, t.shape, bytes(t.data)) for t in response.outputs]
    return msgspec.msgpack.encode(_Stored(response.model_name, response.model_version, outputs, response.parameters))


def unpack(data: bytes) -> InferResponse:
    """Raises msgspec.DecodeError or KeyError for what `pack` did not make."""
    stored = _decoder.decode(data)
    outputs = tuple(Tensor(name, BY_NUMBER[number], shape, data) for name, number, shape, data in stored.outputs)
    return InferResponse(stored.model_name, stored.model_version, "", outputs, stored.parameters)


def key_of(request: InferRequest, version: int, load: bytes = b"") -> bytes:
    """The same for requests that get the same answer of the version that was loaded as `load`."""
    digest = hashlib.blake2b(load, digest_size=16)
    parameters = sorted(request.parameters.items())
    head = (request.model_name, version, sorted(request.outputs), parameters)
    try:
        digest.update(msgspec.msgpack.encode(head))
    except UnicodeEncodeError:
        # Parameters are what clients send.
        digest.update(repr(head).encode())
    for tensor in sorted(request.inputs, key=lambda tensor: tensor.name):
        digest.update(msgspec.msgpack.encode((tensor.name, tensor.datatype.number, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()


class CachingScheduler:
    """Answers from `store` what is there, and passes the rest on to `inner`."""

    def __init__(
        self,
        inner: Scheduler,
        store: Store,
        version: int,
        statistics: ModelStatistics,
        report: Callable[[str, BaseException], None],
        load: bytes = b"",
    ) -> None:
        self.inner = inner
        self.statistics = statistics
        self.report = report
        self._store = store
        self._version = version
        self._load = load
        self._flights: dict[bytes, _Flight] = {}
        self._lookups: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<CachingScheduler of {self.inner!r}>"

    @property
    def pending(self) -> int:
        return self.inner.pending

    @property
    def sequences(self) -> int:
        return self.inner.sequences

    def stopped(self, request: InferRequest) -> NaiadError | None:
        return self.inner.stopped(request)

    def submit(self, call: Call) -> None:
        # What is kept, and what others get, shall not lie in memory of a client's.
        call.request.destinations = None
        key = key_of(call.request, self._version, self._load)
        flight = self._flights.get(key)
        if flight is not None:
            flight.join(call)
            return
        start = time.monotonic_ns()
        found = self._store.lookup(key)
        if isinstance(found, asyncio.Future):
            flight = self._flights[key] = _Flight(self, key, call)
            task = asyncio.get_running_loop().create_task(self._after_lookup(flight, found, start))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)
        elif found is not None:
            self.hit(call, found, time.monotonic_ns() - start)
        else:
            self.statistics.infer.cache_miss.add(time.monotonic_ns() - start)
            flight = self._flights[key] = _Flight(self, key, call)
            flight.start()

    async def _after_lookup(
        self, flight: "_Flight", lookup: "asyncio.Future[InferResponse | None]", start_ns: int
    ) -> None:
        try:
            found = await lookup
        except Exception as error:
            self.report("looking for a cached response failed; going on without it", error)
            found = None
        elapsed_ns = time.monotonic_ns() - start_ns
        if found is not None:
            del self._flights[flight.key]
            for call in flight.let_go():
                self.hit(call, found, elapsed_ns)
        elif flight.waiting:
            self.statistics.infer.cache_miss.add(elapsed_ns)
            try:
                flight.start()
            except NaiadError as error:
                for call in flight.let_go():
                    self.statistics.refused += 1
                    self.deliver(call, error)
        else:
            del self._flights[flight.key]

    def hit(self, call: Call, response: InferResponse, lookup_ns: int) -> None:
        """Answers a call from the cache; it counts as a success that waited and was found (reference R14-6)."""
        infer = self.statistics.infer
        elapsed_ns = time.monotonic_ns() - call.queued_ns
        infer.success.add(elapsed_ns)
        infer.queue.add(elapsed_ns)
        self.statistics.latencies.add_cached(elapsed_ns)
        infer.cache_hit.add(lookup_ns)
        self.deliver(call, response.to(call.request.id))

    def deliver(self, call: Call, result: Result) -> None:
        try:
            call.deliver(result, True)
        except Exception as error:
            self.report(f"a response of model '{call.request.model_name}' could not be passed on", error)

    def fail_cancelled(self, call: Call) -> None:
        """Ends a call whose client has left and that nothing has answered."""
        try:
            call.fail_cancelled()
        except Exception as problem:
            self.report(f"an error of model '{call.request.model_name}' could not be passed on", problem)

    def close_flight(self, flight: "_Flight") -> None:
        """Nobody joins it any more."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def landed(self, flight: "_Flight", result: Result | None) -> None:
        """The execution of a flight has ended."""
        self.close_flight(flight)
        if isinstance(result, InferResponse):
            result = result.owned().to("")
            start = time.monotonic_ns()
            try:
                self._store.insert(flight.key, result)
            except Exception as error:
                self.report(f"a response of model '{result.model_name}' could not be kept in the cache", error)
            self.statistics.infer.cache_miss.ns += time.monotonic_ns() - start

    def withdraw(self, call: Call) -> None:
        call.execution.leave(call)

    async def close(self) -> None:
        while self._lookups:
            await asyncio.wait(self._lookups)
        await self.inner.close()


class _Flight:
    """Calls that wait for one execution. The execution is a call of its own: a client that leaves takes only itself
    out, and the last one takes the execution along."""

    def __init__(self, scheduler: CachingScheduler, key: bytes, first: Call) -> None:
        self.key = key
        self.waiting: list[Call] = []
        self._scheduler = scheduler
        self._first = first
        self._inner: Call | None = None
        self._started_ns = time.monotonic_ns()
        self.join(first)

    def join(self, call: Call) -> None:
        call.execution = self
        self.waiting.append(call)

    def start(self) -> None:
        """Hands the execution to the inner scheduler. Raises what that raises; then there is no flight."""
        first = self._first
        first.lease.lease()
        inner = Call(
            first.request, first.rows, first.signature, self, first.lease, self._scheduler.inner, first.progress
        )
        inner.is_late = first.is_late
        self._inner = inner
        try:
            self._scheduler.inner.submit(inner)
        except NaiadError:
            inner.ended = True
            first.lease.release()
            self._scheduler.close_flight(self)
            raise

    def let_go(self) -> list[Call]:
        """Those who wait, to be answered now. Who leaves meanwhile, since another's answer made it, is answered too."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def leave(self, call: Call) -> None:
        if call not in self.waiting:
            return
        self.waiting.remove(call)
        self._scheduler.fail_cancelled(call)
        if not self.waiting and self._inner is not None:
            # What comes of it is that of a cancelled request: not for those who ask now.
            self._scheduler.close_flight(self)
            self._inner.cancel()

    def send(self, result: Result | None, final: bool) -> None:
        """The result of the execution, for all who wait. The execution itself has been counted."""
        scheduler = self._scheduler
        scheduler.landed(self, result)
        assert result is not None, "this is a bug: a model with a cache ended without a response"
        elapsed_ns = time.monotonic_ns() - self._started_ns
        for call in self.let_go():
            if isinstance(result, InferResponse):
                if call is self._first:
                    scheduler.deliver(call, result.to(call.request.id))
                else:
                    scheduler.hit(call, result, elapsed_ns)
            else:
                scheduler.deliver(call, result)


def store_of(
    settings: Sequence[Setting],
    report: Callable[[str, BaseException], None],
    tell: Callable[[str], None] | None = None,
) -> Store | None:
    """The store that `--cache-config` describes; None without one. Raises InvalidArgument."""
    names = list(dict.fromkeys(setting.scope for setting in settings))
    if not names:
        return None
    if len(names) > 1:
        raise InvalidArgument(
            f"found multiple cache configurations, but only a single cache is currently supported: {', '.join(names)}"
        )
    given = {setting.key: setting.value for setting in settings}
    if names[0] == "local":
        return _local(given, tell)
    if names[0] != "redis":
        raise InvalidArgument(f"unable to find cache '{names[0]}'; there are 'local' and 'redis'")
    try:
        redis_store = importlib.import_module("naiad.scheduling.redis_store")
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"the cache 'redis' needs the Python module '{error.name}': install it with pip install 'naiad[redis]'"
        ) from error
    store: Store = redis_store.RedisStore.of(given, report)
    return store


def _local(given: dict[str, str], tell: Callable[[str], None] | None) -> LocalStore:
    unknown = sorted(given.keys() - {"size", "ttl"})
    if unknown:
        raise InvalidArgument(f"the cache 'local' has no setting '{unknown[0]}'; it has 'size' and 'ttl'")
    try:
        size = int(given.get("size", ""))
        ttl_s = float(given.get("ttl", "0"))
    except ValueError:
        size, ttl_s = 0, 0.0
    if size < 1 or not 0 <= ttl_s < math.inf:
        raise InvalidArgument(
            "Failed to initialize LocalCache: config didn't contain a valid 'size' (bytes; 'ttl', if given, is in "
            f"seconds, 0 for ever), got {given}"
        )
    if size <= _ENTRY_OVERHEAD:
        raise InvalidArgument(
            f"Failed to initialize LocalCache: a 'size' of {size} bytes holds no response; give more than {_ENTRY_OVERHEAD}"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise InvalidArgument(
            f"Failed to initialize LocalCache: failed to allocate buffer: a 'size' of {size} bytes is more than the {memory} "
            "bytes of memory of this machine"
        )
    return LocalStore(size, ttl_s, tell=tell)


def families(store: LocalStore) -> list[Family]:
    """The metrics of the local cache, as Triton names them (reference R12-12); durations in us."""
    statistics = store.statistics
    rows = (
        ("nv_cache_util", "Cache utilization [0.0 - 1.0]", store.used / store.byte_size),
        ("nv_cache_num_entries", "Number of responses stored in response cache", len(store)),
        ("nv_cache_num_lookups", "Number of cache lookups in response cache", statistics.lookups),
        ("nv_cache_num_hits", "Number of cache hits in response cache", statistics.hits),
        ("nv_cache_num_misses", "Number of cache misses in response cache", statistics.lookups - statistics.hits),
        ("nv_cache_num_evictions", "Number of cache evictions in response cache", statistics.evictions),
        (
            "nv_cache_lookup_duration",
            "Total cache lookup duration (hit and miss), in microseconds",
            statistics.lookup_ns // 1000,
        ),
        (
            "nv_cache_insertion_duration",
            "Total cache insertion duration, in microseconds",
            statistics.insertion_ns // 1000,
        ),
    )
    return [Family(name, "gauge", help, [Sample({}, value)]) for name, help, value in rows]
