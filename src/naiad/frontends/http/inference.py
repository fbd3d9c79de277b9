"""POST .../infer: reads a request, hands it to the engine, writes the response as soon as it is there. On the loop.

Errors found while a request is read are labelled application/json, those of routing and of models text/plain: so
Triton does it.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Protocol

from naiad.config.model_config import ModelConfig
from naiad.errors import InvalidArgument, NaiadError, NotFound, Unsupported
from naiad.frontends.http.compression import ENCODINGS, choose, compress, decompress
from naiad.frontends.http.disconnects import Cancellable, Disconnects
from naiad.frontends.http.replies import JSON, PLAIN, Headers, HttpProtocol, RequestHeaders, Scope, reply_error
from naiad.messages import InferRequest, InferResponse, ParameterValue, ResponseSink, Result, Tensor
from naiad.protocol.json_codec import (
    DEFAULT_MAX_INPUT_SIZE,
    RegionInput,
    RegionOutput,
    decode_raw_request,
    decode_request,
    encode_response,
    header_length,
)
from naiad.protocol.outputs import OutputPlan
from naiad.protocol.regions import Regions, is_local_peer

#: JSON texts from this many bytes on are read and written in a thread, so that the loop goes on.
LARGE = 1 << 20
_UNKNOWN_ENCODING: Headers = [*PLAIN, ("accept-encoding", "gzip, deflate")]


class ServedModel(Protocol):
    """What front ends ask of a model version."""

    name: str
    version: int
    config: ModelConfig
    labels: dict[str, list[str]]


class InferenceEngine(Protocol):
    def model(self, name: str, version: int = -1) -> Any: ...

    def infer(self, request: InferRequest, sink: ResponseSink) -> Cancellable: ...


class HeaderForwarding:
    """Which HTTP headers become request parameters: those with a name in which `pattern` is found."""

    def __init__(self, pattern: str) -> None:
        # RE2 and Python disagree about where flags may stand, and Triton begins every pattern with (?i).
        flags = re.IGNORECASE
        if pattern.startswith("(?-i)"):
            pattern = pattern.removeprefix("(?-i)")
            flags = re.RegexFlag(0)
        try:
            self._search = re.compile(pattern, flags).search if pattern else None
        except re.error as error:
            raise InvalidArgument(f"invalid header forward pattern '{pattern}': {error}") from error

    def __call__(self, headers: RequestHeaders) -> Mapping[str, ParameterValue] | None:
        """The parameters, or None. Names are in Train-Case: the connection does not keep the case they were sent in."""
        if self._search is None:
            return None
        parameters: dict[str, ParameterValue] = {}
        for name, value in headers.items():
            if self._search(name) is None and self._search(_train_case(name)) is None:
                continue
            if name.startswith("triton_"):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters[_train_case(name)] = value
        return parameters


def _train_case(name: str) -> str:
    return "-".join([part.capitalize() for part in name.split("-")])


class _Reply:
    """Where the response goes: encoded and sent before `send` returns, since its buffers are used again afterwards."""

    __slots__ = ("_batched", "_encoding", "_labels", "_plan", "_proto", "_regions", "done", "large", "waiter")

    def __init__(
        self,
        proto: HttpProtocol,
        plan: OutputPlan,
        model: ServedModel,
        regions: Mapping[str, RegionOutput],
        encoding: str | None,
    ) -> None:
        self._proto = proto
        self._plan = plan
        self._labels = model.labels
        self._batched = model.config.batching
        self._regions = regions
        self._encoding = encoding
        #: A response to be encoded in a thread; its tensors are copies.
        self.large: InferResponse | None = None
        self.done = False
        self.waiter: asyncio.Future[None] | None = None

    def send(self, result: Result | None, final: bool) -> None:
        try:
            if isinstance(result, InferResponse):
                if self._is_large(result):
                    self.large = _copied(result)
                else:
                    self._proto.response_bytes(200, *self.encode(result))
            elif result is not None:
                reply_error(self._proto, result, PLAIN)
        except NaiadError as error:
            reply_error(self._proto, error, PLAIN)
        finally:
            self.done = True
            waiter = self.waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def encode(self, response: InferResponse) -> tuple[Headers, bytes]:
        headers, body = encode_response(response, self._plan, self._labels, self._batched, self._regions)
        if self._encoding is not None:
            headers = [*headers, ("content-encoding", self._encoding)]
            body = compress(self._encoding, body)
        return headers, body

    def _is_large(self, response: InferResponse) -> bool:
        """Whether it is slow to write; bytes that go out as they are are not."""
        binary = self._encoding is None and (self._plan.binary_default and not self._plan.outputs)
        size = 0
        for tensor in response.outputs:
            if not binary:
                spec = self._plan.outputs.get(tensor.name)
                if spec is None or not (spec.binary or spec.region) or self._encoding is not None:
                    size += len(tensor.data) if type(tensor.data) is bytes else memoryview(tensor.data).nbytes
        return size >= LARGE


def _copied(response: InferResponse) -> InferResponse:
    outputs = tuple([Tensor(item.name, item.datatype, item.shape, bytes(item.data)) for item in response.outputs])
    return InferResponse(response.model_name, response.model_version, response.id, outputs, response.parameters)


class Inference:
    """The handler of inference requests."""

    def __init__(
        self,
        engine: InferenceEngine,
        disconnects: Disconnects,
        regions: Regions | None,
        forwarding: HeaderForwarding,
        max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
    ) -> None:
        self._engine = engine
        self._disconnects = disconnects
        self._regions = regions
        self._forwarding = forwarding
        self._max_input_size = max_input_size
        self._loop: asyncio.AbstractEventLoop | None = None

    async def infer(self, scope: Scope, proto: HttpProtocol, name: str, version: int) -> None:
        model: ServedModel = self._engine.model(name, version)
        if model.config.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        headers = scope.headers
        body = await proto()
        encoding = headers.get("content-encoding")
        if encoding is not None and encoding != "identity":
            if encoding not in ENCODINGS:
                reply_error(proto, Unsupported("Unsupported compression type"), _UNKNOWN_ENCODING)
                return
            if len(body) >= LARGE:
                body = await asyncio.to_thread(decompress, body, self._max_input_size)
            else:
                body = decompress(body, self._max_input_size)
        json_size = header_length(headers.get("inference-header-content-length"), len(body))
        regions: dict[str, RegionOutput] = {}
        accepted = headers.get("accept-encoding")
        reply: _Reply | None = None
        try:
            forwarded = self._forwarding(headers)
            if json_size == 0:
                request, plan = decode_raw_request(body, model.config, version, forwarded, self._max_input_size)
            elif json_size >= LARGE:
                # Regions are only looked up and read there, which no change on the loop can tear.
                request, plan = await asyncio.to_thread(
                    decode_request,
                    body,
                    json_size,
                    name,
                    version,
                    self._region_input(scope),
                    forwarded,
                    self._max_input_size,
                )
            else:
                request, plan = decode_request(
                    body, json_size, name, version, self._region_input(scope), forwarded, self._max_input_size
                )
            for spec in plan.outputs.values():
                if spec.region is not None:
                    regions[spec.name] = self._region_output(
                        scope, spec.region, spec.region_offset, spec.region_byte_size
                    )
            reply = _Reply(proto, plan, model, regions, None if accepted is None else choose(accepted))
            call = self._engine.infer(request, reply)
        except NaiadError as error:
            reply_error(proto, error, JSON)
            return
        if not reply.done:
            await self._answered(proto, reply, call)
        if reply.large is not None:
            try:
                reply_headers, text = await asyncio.to_thread(reply.encode, reply.large)
            except NaiadError as error:
                reply_error(proto, error, PLAIN)
            else:
                proto.response_bytes(200, reply_headers, text)

    async def _answered(self, proto: HttpProtocol, reply: _Reply, call: Cancellable) -> None:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        reply.waiter = loop.create_future()
        waiting = self._disconnects.add(proto, call)
        try:
            await reply.waiter
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._disconnects.remove(waiting)

    def _region_input(self, scope: Scope) -> RegionInput | None:
        regions = self._regions
        if regions is None or not len(regions):
            return _no_region
        local = is_local_peer(scope.client)
        return lambda name, offset, byte_size: regions.input(name, offset, byte_size, local)

    def _region_output(self, scope: Scope, name: str, offset: int, byte_size: int) -> RegionOutput:
        if self._regions is None:
            _no_region(name, offset, byte_size)
        assert self._regions is not None
        return self._regions.output(name, offset, byte_size, is_local_peer(scope.client)).write


def _no_region(name: str, offset: int, byte_size: int) -> bytes:
    raise NotFound(f"Unable to find shared memory region: '{name}'")
