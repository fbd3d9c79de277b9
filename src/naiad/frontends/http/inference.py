"""POST .../infer: reads a request, hands it to the engine, writes the response as soon as it is there. On the loop.

Errors found while a request is read are labelled application/json, those of routing and of models text/plain: so
Triton does it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, KeysView, Mapping
from typing import Any, Final, Never, Protocol

from naiad.datatypes import LARGE
from naiad.errors import Internal, InvalidArgument, NaiadError, NotFound, Unsupported
from naiad.frontends.http.compression import ENCODINGS, choose, compress, decompress
from naiad.frontends.http.connection import Exchange, Headers
from naiad.frontends.http.head import RequestHeaders
from naiad.frontends.http.replies import JSON, PLAIN, reply_error
from naiad.frontends.http.text_processes import HERE, TextProcesses, Texts
from naiad.messages import InferRequest, InferResponse, ParameterValue, ResponseSink, Result
from naiad.options import forward_pattern
from naiad.protocol.json_arrays import DEFAULT_MAX_INPUT_SIZE
from naiad.protocol.json_codec import (
    RegionOutput,
    decode_raw_request,
    decode_request,
    encode_response,
    header_length,
)
from naiad.protocol.outputs import OutputPlan
from naiad.protocol.regions import Regions, RegionUse, is_local_peer
from naiad.protocol.served import ServedModel
from naiad.telemetry.trace import TraceSettings, off

logger = logging.getLogger(__name__)

#: A request, how to answer it, and its way to the regions where there are any.
Decoded = tuple[InferRequest, OutputPlan, RegionUse | None]
_DECOUPLED: Final = "HTTP end point doesn't support models with decoupled transaction policy"
UNKNOWN_ENCODING: Final[Headers] = [*PLAIN, ("accept-encoding", "gzip, deflate")]


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class InferenceEngine(Protocol):
    def model(self, name: str, version: int = -1) -> Any: ...

    def infer(self, request: InferRequest, sink: ResponseSink, model: Any = None) -> Cancellable: ...


class HeaderForwarding:
    """Which HTTP headers become request parameters: those with a name in which `pattern` is found."""

    def __init__(self, pattern: str) -> None:
        try:
            self._search = forward_pattern(pattern).search if pattern else None
        except re.error as error:
            raise InvalidArgument(f"invalid header forward pattern '{pattern}': {error}") from error

    def __call__(self, headers: RequestHeaders) -> Mapping[str, ParameterValue] | None:
        """The parameters, or None. Names are as they were sent."""
        if self._search is None:
            return None
        return {name: _text(value) for name, value in headers.items() if self._search(name) is not None}


def _text(value: str) -> str:
    """The value of a header as its client meant it: in UTF-8 where it is that."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


class _Facts:
    """What the headers of a request say to this handler: read once from a head that comes again and again."""

    __slots__ = ("accepted", "encoding", "forwarded", "header_length")

    def __init__(self, headers: RequestHeaders, forwarding: HeaderForwarding) -> None:
        encoding = headers.get("content-encoding")
        #: That of the body; None for a plain one.
        self.encoding = None if encoding == "identity" else encoding
        self.header_length = headers.get("inference-header-content-length")
        accepted = headers.get("accept-encoding")
        #: The encoding of the reply; None for a plain one.
        self.accepted = None if accepted is None else choose(accepted)
        self.forwarded = forwarding(headers)


class _Reply:
    """Where the response goes: encoded and sent before `send` returns, since its buffers are used again afterwards."""

    __slots__ = ("_batched", "_encoding", "_exchange", "_labels", "_plan", "_regions", "_texts")

    def __init__(
        self,
        exchange: Exchange,
        plan: OutputPlan,
        model: ServedModel,
        regions: Mapping[str, RegionOutput],
        encoding: str | None,
        texts: TextProcesses,
    ) -> None:
        self._exchange = exchange
        self._plan = plan
        self._labels = model.labels
        self._batched = model.batching
        self._regions = regions
        self._encoding = encoding
        self._texts = texts

    def send(self, result: Result | None, final: bool) -> None:
        try:
            if isinstance(result, InferResponse):
                if self._is_large(result):
                    self._texts.begin(self._send_large(result.owned()))
                else:
                    written = self._encode(result, HERE)
                    if self._encoding is not None:
                        written = self._compress(*written)
                    self._exchange.response_bytes(200, *written)
            elif result is not None:
                reply_error(self._exchange, result, JSON if result.refused else PLAIN)
        except NaiadError as error:
            reply_error(self._exchange, error, PLAIN)

    async def _send_large(self, response: InferResponse) -> None:
        """Encodes in a thread what takes long to encode."""
        try:
            if self._plan.is_binary:
                written = await asyncio.to_thread(self._encode, response, HERE)
            else:
                written = await self._texts.run(lambda texts: self._encode(response, texts))
            if self._encoding is not None:
                written = await asyncio.to_thread(self._compress, *written)
        except NaiadError as error:
            reply_error(self._exchange, error, PLAIN)
        except Exception as error:
            logger.exception("unexpected error in writing the response to %s", self._exchange.path)
            reply_error(self._exchange, Internal(f"unexpected error: {error!r}"), PLAIN)
        else:
            self._exchange.response_bytes(200, *written)

    def _encode(self, response: InferResponse, texts: Texts) -> tuple[Headers, bytes]:
        return encode_response(response, self._plan, self._labels, self._batched, self._regions, texts.write)

    def _compress(self, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
        assert self._encoding is not None
        return [*headers, ("content-encoding", self._encoding)], compress(self._encoding, body)

    def _is_large(self, response: InferResponse) -> bool:
        """Whether it is slow to write; bytes that go out as they are are not."""
        if self._encoding is None and self._plan.is_binary:
            return False
        size = 0
        for tensor in response.outputs:
            spec = self._plan.outputs.get(tensor.name)
            as_it_is = spec is not None and (spec.binary or spec.region is not None) and not spec.classification
            if not as_it_is or self._encoding is not None:
                size += len(tensor.contents)
        return size >= LARGE


class Inference:
    """The handler of inference requests."""

    def __init__(
        self,
        engine: InferenceEngine,
        regions: Regions | None,
        forwarding: HeaderForwarding,
        max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
        traces: TraceSettings | None = None,
        texts: TextProcesses | None = None,
    ) -> None:
        self.engine = engine
        # Each request would look them up and bind them.
        self._engine_model = engine.model
        self._engine_infer = engine.infer
        self._regions = regions
        self._registered: KeysView[str] | tuple[()] = () if regions is None else regions.names
        self._forwarding = forwarding
        self._max_input_size = max_input_size
        self.traces = off() if traces is None else traces
        self._texts = texts or TextProcesses(0)

    def infer(self, exchange: Exchange, name: str, version: int) -> Coroutine[Any, Any, None] | None:
        """Submits the request; the reply is sent when the model has answered. What takes long to read is read in a
        thread, by the coroutine that is returned then."""
        model: ServedModel = self._engine_model(name, version)
        if model.decoupled:
            raise Unsupported(_DECOUPLED)
        facts = self._facts(exchange)
        body = exchange.body
        if facts.encoding is not None:
            if facts.encoding not in ENCODINGS:
                reply_error(exchange, Unsupported("Unsupported compression type"), UNKNOWN_ENCODING)
                return None
            if len(body) >= LARGE:
                return self._infer_slowly(exchange, model, version)
            try:
                body = decompress(body, min(LARGE, self._max_input_size))
            except InvalidArgument:
                # A little can be much of the same.
                return self._infer_slowly(exchange, model, version)
        json_size = header_length(facts.header_length, len(body))
        if json_size >= LARGE:
            return self._infer_slowly(exchange, model, version)
        try:
            start_ns = time.monotonic_ns() if self.traces.active else 0
            request, plan, use = self._decode(exchange, model, version, body, json_size, HERE)
            self._submit(exchange, model, request, plan, use, start_ns)
        except NaiadError as error:
            reply_error(exchange, error, JSON)
        return None

    async def _infer_slowly(self, exchange: Exchange, model: ServedModel, version: int) -> None:
        body, json_size = await self._text(exchange)
        try:
            start_ns = time.monotonic_ns() if self.traces.active else 0
            request, plan, use = await self._decode_text(exchange, model, version, body, json_size)
            exchange.require_client()
            # It may be another one by now.
            model = self.engine.model(model.name, version)
            if model.decoupled:
                raise Unsupported(_DECOUPLED)
            self._submit(exchange, model, request, plan, use, start_ns)
        except NaiadError as error:
            reply_error(exchange, error, JSON)

    async def read(self, exchange: Exchange, model: ServedModel, version: int) -> Decoded:
        """The request of an exchange whose content-encoding is known, for handlers that answer in their own way."""
        body, json_size = await self._text(exchange)
        return await self._decode_text(exchange, model, version, body, json_size)

    async def _decode_text(
        self, exchange: Exchange, model: ServedModel, version: int, body: bytes | memoryview, json_size: int
    ) -> Decoded:
        if json_size < LARGE:
            return self._decode(exchange, model, version, body, json_size, HERE)
        # Regions are only looked up and read in the thread, which no change on the loop can tear.
        return await self._texts.run(lambda texts: self._decode(exchange, model, version, body, json_size, texts))

    async def _text(self, exchange: Exchange) -> tuple[bytes | memoryview, int]:
        """(the body, decompressed; how much of it is JSON)"""
        facts = self._facts(exchange)
        body = exchange.body
        if facts.encoding in ENCODINGS:
            body = await asyncio.to_thread(decompress, body, self._max_input_size)
        return body, header_length(facts.header_length, len(body))

    def _facts(self, exchange: Exchange) -> _Facts:
        head = exchange.head
        facts: _Facts | None = head.facts
        if facts is None:
            facts = head.facts = _Facts(head.headers, self._forwarding)
        return facts

    def _decode(
        self,
        exchange: Exchange,
        model: ServedModel,
        version: int,
        body: bytes | memoryview,
        json_size: int,
        texts: Texts,
    ) -> Decoded:
        read = texts.read
        forwarded = self._facts(exchange).forwarded
        limit = self._max_input_size
        use = None
        if json_size == 0:
            request, plan = decode_raw_request(body, model.config, version, forwarded, limit)
        elif self._regions is None or not self._registered:
            request, plan = decode_request(body, json_size, model.name, version, _no_region, forwarded, limit, read)
        else:
            use = RegionUse(self._regions, is_local_peer(exchange.client))
            request, plan = decode_request(body, json_size, model.name, version, use.input, forwarded, limit, read)
        return request, plan, use

    def _submit(
        self,
        exchange: Exchange,
        model: ServedModel,
        request: InferRequest,
        plan: OutputPlan,
        use: RegionUse | None,
        start_ns: int,
    ) -> None:
        regions = output_regions(plan, use) if plan.has_regions else _NO_REGIONS
        if start_ns:
            request = self.traces.follow(request, "HTTP", start_ns, exchange.headers.get)
        reply = _Reply(exchange, plan, model, regions, self._facts(exchange).accepted, self._texts)
        infer = self._engine_infer
        call = infer(request, reply, model) if use is None else use.during(infer, request, reply, model)
        if not exchange.is_answered:
            exchange.on_disconnect = call.cancel


def output_regions(plan: OutputPlan, use: RegionUse | None) -> dict[str, RegionOutput]:
    """What writes the outputs that are to go to shared memory, by output. Raises NotFound, InvalidArgument."""
    regions = _NO_REGIONS
    for spec in plan.outputs.values():
        if spec.region is not None:
            if use is None:
                _no_region(spec.region, spec.region_offset, spec.region_byte_size)
            else:
                if regions is _NO_REGIONS:
                    regions = {}
                place = (spec.region, spec.region_offset, spec.region_byte_size)
                output = use.output(spec.name, *place, as_it_is=not spec.classification)
                regions[spec.name] = output.write
    return regions


_NO_REGIONS: Final[dict[str, RegionOutput]] = {}


def _no_region(name: str, offset: int, byte_size: int) -> Never:
    raise NotFound(f"Unable to find shared memory region: '{name}'")
