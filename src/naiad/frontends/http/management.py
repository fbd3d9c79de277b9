"""Everything that is not inference: health, metadata, repository, statistics, regions, trace and log settings.

Handlers read the request, ask the engine or the object concerned, and write the answer. On the event loop.
"""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from naiad.config.model_config import ModelConfig
from naiad.datatypes import LARGE
from naiad.errors import Internal, InvalidArgument, NaiadError, NotFound, Unsupported
from naiad.frontends.http.connection import Exchange
from naiad.frontends.http.replies import JSON, PLAIN, reply_json
from naiad.metadata import IndexEntry, ModelMetadata, ServerMetadata
from naiad.protocol import documents
from naiad.protocol.cuda_memory import IPC_HANDLE_BYTE_SIZE
from naiad.protocol.json_text import (
    boolean_member,
    dump,
    error_document,
    members,
    parse,
    string_member,
    unsigned_member,
)
from naiad.protocol.regions import Regions, is_local_peer
from naiad.statistics import ModelStatistics


class ManagementEngine(Protocol):
    def is_live(self) -> bool: ...
    async def is_ready(self) -> bool: ...
    def model(self, name: str, version: int = -1) -> Any: ...
    async def model_ready(self, name: str, version: int = -1) -> bool: ...
    def metadata(self) -> ServerMetadata: ...
    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata: ...
    def model_config(self, name: str, version: int = -1) -> ModelConfig: ...
    def statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]: ...
    def index(self, ready: bool = False) -> Awaitable[list[IndexEntry]]: ...
    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None: ...
    async def unload(self, name: str, unload_dependents: bool = False) -> None: ...


class Settings(Protocol):
    """Trace or log settings; `model` None are the server's. `update` leaves out what it does not know."""

    def get(self, model: str | None) -> Mapping[str, Any]: ...

    def update(self, model: str | None, values: Mapping[str, Any]) -> Mapping[str, Any]: ...


class Management:
    def __init__(
        self,
        engine: ManagementEngine,
        regions: Regions | None,
        trace_settings: Settings | None,
        log_settings: Settings | None,
    ) -> None:
        self._engine = engine
        self._regions = regions
        self._trace_settings = trace_settings
        self._log_settings = log_settings

    # --- health

    async def live(self, exchange: Exchange) -> None:
        exchange.response_empty(200 if self._engine.is_live() else 400, PLAIN)

    async def ready(self, exchange: Exchange) -> None:
        exchange.response_empty(200 if await self._engine.is_ready() else 400, PLAIN)

    async def model_ready(self, exchange: Exchange, name: str, version: int) -> None:
        try:
            ready = await self._engine.model_ready(name, version)
        except NotFound:
            ready = False
        if ready:
            exchange.response_empty(200, PLAIN)
        else:
            exchange.response_bytes(400, PLAIN, error_document("Model version not ready"))

    # --- metadata, configuration, statistics

    async def server_metadata(self, exchange: Exchange) -> None:
        reply_json(exchange, documents.server_metadata(self._engine.metadata()))

    async def model_metadata(self, exchange: Exchange, name: str, version: int) -> None:
        reply_json(exchange, documents.model_metadata(self._engine.model_metadata(name, version)))

    async def model_config(self, exchange: Exchange, name: str, version: int) -> None:
        reply_json(exchange, self._engine.model_config(name, version).json)

    async def statistics(self, exchange: Exchange, name: str = "", version: int = -1) -> None:
        reply_json(exchange, documents.statistics(self._engine.statistics(name, version)))

    # --- repository

    async def index(self, exchange: Exchange) -> None:
        ready = False
        document = _object(_small(exchange)) if exchange.body else {}
        if "ready" in document:
            ready = boolean_member(document, "ready")
        reply_json(exchange, documents.index(await self._engine.index(ready)))

    async def load(self, exchange: Exchange, name: str) -> None:
        if len(exchange.body) < LARGE:
            parameters = _load_parameters(exchange)
        else:
            parameters = await asyncio.to_thread(_load_parameters, exchange)
        await self._engine.load(name, parameters)
        exchange.response_empty(200, JSON)

    async def unload(self, exchange: Exchange, name: str) -> None:
        unload_dependents = False
        # Triton does without a body that it cannot read, and takes anything but true for false.
        with suppress(NaiadError):
            parameters = _object(_small(exchange)).get("parameters")
            unload_dependents = type(parameters) is dict and parameters.get("unload_dependents") is True
        await self._engine.unload(name, unload_dependents)
        exchange.response_empty(200, JSON)

    async def named_repository(self, exchange: Exchange) -> None:
        raise Unsupported("'repository_name' specification is not supported")

    # --- shared memory; an empty name is all regions

    async def system_status(self, exchange: Exchange, name: str) -> None:
        reply_json(exchange, documents.system_regions(self._region_registry().status_system(name)))

    async def system_register(self, exchange: Exchange, name: str) -> None:
        _expect_region_name(name, "system")
        document = _small(exchange)
        if type(document) is not dict or "key" not in document:
            raise InvalidArgument("Shared memory register request has no 'key' field")
        key = string_member(document, "key")
        offset = unsigned_member(document, "offset") if "offset" in document else 0
        if "byte_size" not in document:
            raise InvalidArgument("Shared memory register request has no 'byte_size' field")
        byte_size = unsigned_member(document, "byte_size")
        self._region_registry().register_system(name, key, offset, byte_size, is_local_peer(exchange.client))
        exchange.response_empty(200, JSON)

    async def system_unregister(self, exchange: Exchange, name: str) -> None:
        self._region_registry().unregister_system(name)
        exchange.response_empty(200, JSON)

    async def cuda_status(self, exchange: Exchange, name: str) -> None:
        reply_json(exchange, documents.cuda_regions(self._region_registry().status_cuda(name)))

    async def cuda_register(self, exchange: Exchange, name: str) -> None:
        _expect_region_name(name, "cuda")
        document = _small(exchange)
        if type(document) is not dict or "raw_handle" not in document:
            raise InvalidArgument("Shared memory register request has no 'raw_handle' field")
        text = string_member(document["raw_handle"], "b64")
        byte_size = unsigned_member(document, "byte_size")
        device_id = unsigned_member(document, "device_id")
        complaint = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        raw_handle = _from_base64(text, complaint)
        if len(raw_handle) != IPC_HANDLE_BYTE_SIZE:
            raise InvalidArgument(complaint)
        local = is_local_peer(exchange.client)
        await self._region_registry().register_cuda(name, raw_handle, device_id, byte_size, local)
        exchange.response_empty(200, JSON)

    async def cuda_unregister(self, exchange: Exchange, name: str) -> None:
        await self._region_registry().unregister_cuda(name)
        exchange.response_empty(200, JSON)

    def _region_registry(self) -> Regions:
        if self._regions is None:
            raise Unsupported("this server has no shared memory regions")
        return self._regions

    # --- settings

    async def trace_setting(self, exchange: Exchange, name: str | None = None) -> None:
        if name is not None:
            try:
                self._engine.model(name)
            except NotFound as error:
                raise InvalidArgument(f"Request for unknown model : {name}") from error
        await _settings(self._trace_settings, "trace", name, exchange)

    async def logging(self, exchange: Exchange) -> None:
        await _settings(self._log_settings, "logging", None, exchange)


async def _settings(settings: Settings | None, what: str, model: str | None, exchange: Exchange) -> None:
    if settings is None:
        raise Unsupported(f"this server has no {what} settings")
    if exchange.method == "POST":
        document = _small(exchange)
        reply_json(exchange, dump(settings.update(model, _object(document))))
    else:
        reply_json(exchange, dump(settings.get(model)))


def _small(exchange: Exchange) -> Any:
    """The value in a body that is read on the loop and so may not be large. Raises Internal for what is no JSON."""
    size = len(exchange.body)
    if size > LARGE:
        raise InvalidArgument(f"the body of this request may not be larger than {LARGE} bytes, got: {size}")
    return parse(exchange.body)


def _object(value: Any) -> Mapping[str, Any]:
    """What is no object is an empty one."""
    return value if type(value) is dict else {}


def _load_parameters(exchange: Exchange) -> dict[str, str | bytes]:
    """The configuration and the files that come with a load request."""
    parameters: dict[str, str | bytes] = {}
    document = _object(parse(exchange.body)) if exchange.body else {}
    if "parameters" in document:
        given = members(document["parameters"])
        for key in given:
            text = string_member(given, key)
            if key == "config":
                parameters[key] = text
            elif key.startswith("file:"):
                # As Triton's decoder: without its padding, and among characters that mean nothing.
                parameters[key] = _from_base64(text + "==", f"'{key}' must be valid base64", strict=False)
            else:
                raise Internal("unexpected error on creating Triton parameter")
    return parameters


def _expect_region_name(name: str, kind: str) -> None:
    # Over gRPC the empty name is one like others.
    if not name:
        raise InvalidArgument(f"'region name' is necessary to register {kind} shared memory region")


def _from_base64(text: str, complaint: str, strict: bool = True) -> bytes:
    try:
        return base64.b64decode(text, validate=strict)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(complaint) from error
