"""Responses kept in a Redis server, shared by all servers that use it. On the event loop; imports `redis`.

An outage is a cache that is empty: requests go on, the log says it once until the server answers again. Only at the
start Redis must be there, since that tells wrong settings from an outage.
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec
import redis.asyncio
from redis.asyncio.connection import SSLConnection
from redis.exceptions import AuthenticationError, RedisError

from naiad.errors import InvalidArgument, Unavailable
from naiad.messages import InferResponse
from naiad.scheduling.cache import pack, unpack

_SETTINGS = frozenset(
    (
        *("host", "port", "user", "password", "db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout"),
        *("tls_enabled", "cert", "key", "cacert", "cacert_dir", "sni", "ttl"),
    )
)


_TLS_OPTIONS = {
    "cert": "ssl_certfile",
    "key": "ssl_keyfile",
    "cacert": "ssl_ca_certs",
    "cacert_dir": "ssl_ca_path",
}

#: How long Redis may take for its first answer.
_CHECK_TIMEOUT_S = 10


class _NamedConnection(SSLConnection):
    """A connection to a server that is known by another name than its host: the name asked for, and in its certificate."""

    def __init__(self, *, sni: str, **options: Any) -> None:
        super().__init__(**options)
        self._sni = sni

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self._sni}


class RedisStore:
    """Keeps responses under `naiad:` and the digest of the request."""

    is_shared = True

    def __init__(self, client: Any, ttl_ms: int, report: Callable[[str, BaseException], None], hint: str = "") -> None:
        self._client = client
        #: What may be wrong if there is no connection.
        self._hint = hint
        self._ttl_ms = ttl_ms
        self._report = report
        self._is_down = False
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, given: Mapping[str, str], report: Callable[[str, BaseException], None]) -> Self:
        """The store of the settings of `--cache-config=redis,...` (reference R14-8). Raises InvalidArgument."""
        unknown = sorted(given.keys() - _SETTINGS)
        if unknown:
            raise InvalidArgument(f"the cache 'redis' has no setting '{unknown[0]}'")
        if "host" not in given or "port" not in given:
            raise InvalidArgument(
                "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify 'host' and 'port' in the "
                "configuration - e.g. naiad --cache-config redis,host=redis --cache-config redis,port=6379 "
                "--model-repository=/models ..."
            )
        try:
            options: dict[str, Any] = {
                "host": given["host"],
                "port": _port(given["port"]),
                "db": int(given.get("db", "0")),
                # Triton gives timeouts in ms, 0 for none.
                "socket_connect_timeout": int(given.get("connect_timeout", "0")) / 1000 or None,
                "socket_timeout": int(given.get("socket_timeout", "0")) / 1000 or None,
            }
            pool_size = max(1, int(given.get("pool_size", "1")))
            wait_s = int(given.get("wait_timeout", "1000")) / 1000
            ttl_ms = round(float(given.get("ttl", "0")) * 1000)
        except ValueError as error:
            raise InvalidArgument(f"a setting of the cache 'redis' is not a number: {error}") from error
        user = os.environ.get("TRITONCACHE_REDIS_USERNAME", given.get("user"))
        password = os.environ.get("TRITONCACHE_REDIS_PASSWORD", given.get("password"))
        if password is not None:
            options |= {"username": user, "password": password}
        if given.get("tls_enabled", "false").lower() in ("true", "on", "1"):
            options |= {"connection_class": SSLConnection}
            options |= {name: given[key] for key, name in _TLS_OPTIONS.items() if key in given}
            if "sni" in given:
                options |= {"connection_class": _NamedConnection, "sni": given["sni"]}
        pool = redis.asyncio.BlockingConnectionPool(max_connections=pool_size, timeout=wait_s, **options)
        hint = "" if given["port"].isdecimal() else f" ('port' is '{given['port']}', which is no number)"
        return cls(redis.asyncio.Redis(connection_pool=pool), ttl_ms, report, hint)

    async def check(self) -> None:
        """Raises Unavailable, with Triton's text, if the server cannot be reached or refuses the credentials."""
        failed = "Failed to initialize RedisCache: Failed to connect to Redis: "
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self._client.ping()
        except TimeoutError:
            raise Unavailable(f"{failed}no answer within {_CHECK_TIMEOUT_S} s{self._hint}") from None
        except (RedisError, OSError) as error:
            has_password = self._client.connection_pool.connection_kwargs.get("password") is not None
            raise Unavailable(f"{failed}{_reason(error, has_password)}{self._hint}") from error

    def lookup(self, key: bytes) -> "asyncio.Future[InferResponse | None]":
        return asyncio.ensure_future(self._get(key))

    def insert(self, key: bytes, response: InferResponse) -> None:
        task = asyncio.ensure_future(self._set(key, pack(response)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _get(self, key: bytes) -> InferResponse | None:
        try:
            data = await self._client.get(_name(key))
            found = None if data is None else unpack(data)
        except (RedisError, OSError, TimeoutError, msgspec.MsgspecError, KeyError) as error:
            self._failed(error)
            return None
        self._is_down = False
        return found

    async def _set(self, key: bytes, data: bytes) -> None:
        try:
            await self._client.set(_name(key), data, px=self._ttl_ms or None)
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            self._report("the response cache in Redis does not answer; going on without it", error)


def _port(text: str) -> int:
    """The digits a port begins with, 0 where there are none: as Triton reads it."""
    digits = re.match(r"\s*(\d*)", text)
    return int(digits[1] or 0) if digits else 0


def _name(key: bytes) -> bytes:
    return b"naiad:" + key


def _reason(error: BaseException, has_password: bool) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLError):
        return str(cause)  # its number is none of the system's
    if isinstance(cause, OSError) and cause.errno:
        # What asyncio and redis say around it names neither host nor reason better.
        return str(cause.strerror) if isinstance(cause, socket.gaierror) else os.strerror(cause.errno)
    if isinstance(error, AuthenticationError):
        # redis-py takes the code off; without a password the rest speaks of its own handshake.
        return f"WRONGPASS {error}" if has_password else "NOAUTH Authentication required"
    return str(error)
