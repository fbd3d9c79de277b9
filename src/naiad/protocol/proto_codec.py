"""Inference messages of the gRPC protocol: bytes -> `(InferRequest, Reply)` and `InferResponse` -> bytes.

The messages are tritonclient's. Large tensors are not given to the protobuf library, which would copy each of them
twice: requests are split at the wire level, and responses are a small message followed by the tensors. Pure but for
the regions that a request names; runs on the event loop.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any, Final

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from naiad.config.model_config import ModelConfig
from naiad.datatypes import AT_ONCE, BY_NAME, LARGE, Buffer, DataType, TakesLong
from naiad.errors import Internal, InvalidArgument, NaiadError
from naiad.messages import InferRequest, InferResponse, ParameterValue, SequenceControl, Tensor, Unread
from naiad.packed import pack_bytes
from naiad.protocol.correlation import correlation_text
from naiad.protocol.outputs import ALL_BINARY, OutputPlan, OutputSpec, classify, plan_of
from naiad.protocol.regions import OutputRegion, Regions, RegionUse, is_local_peer
from naiad.protocol.templates import LARGEST, MOST, RequestTemplate

#: A message of tritonclient's, which ships no type information.
Message = Any


@dataclass(init=False)
class Reply:
    """How to answer a request: the wishes for its outputs, and where those go that are to go to regions.

    `empty_final` asks for a last response without outputs where a decoupled model ends without one. `use` holds the
    regions of inputs and outputs until it is answered; None where there are none.
    """

    plan: OutputPlan
    regions: dict[str, OutputRegion]
    empty_final: bool
    use: RegionUse | None

    def __init__(
        self,
        plan: OutputPlan,
        regions: dict[str, OutputRegion],
        empty_final: bool = False,
        use: RegionUse | None = None,
    ) -> None:
        self.plan = plan
        self.regions = regions
        self.empty_final = empty_final
        self.use = use


_PLAIN: Final = Reply(ALL_BINARY, {})
_PLAIN_EMPTY_FINAL: Final = Reply(ALL_BINARY, {}, True)

# ---------------------------------------------------------------- versions

_LEADING_INTEGER: Final = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_NOT_A_VERSION: Final = "version should be an integral value > 0"


def parse_version(text: str) -> int:
    """The version in a message: -1, the newest, for "". As C does, `stol` reads a number and ignores what follows."""
    if not text:
        return -1
    found = _LEADING_INTEGER.match(text)
    version = int(found[1]) if found else None
    if version is None or not -(2**63) <= version < 2**63:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), {_NOT_A_VERSION}"
        )
    if version < 0:
        raise InvalidArgument(f"invalid model version specified '{text}' , {_NOT_A_VERSION}")
    return version


# ---------------------------------------------------------------- wire format

#: From this size on a request is split at the wire level. Below, copying is cheaper than reading fields in Python.
SPLIT_BYTE_SIZE: Final = 32 * 1024

_RAW_INPUT_TAG: Final = 7 << 3 | 2
_RAW_OUTPUT_TAG: Final = bytes((6 << 3 | 2,))
_RESPONSE_ID_TAG: Final = bytes((3 << 3 | 2,))
_RESPONSE_OUTPUT_TAG: Final = bytes((5 << 3 | 2,))
_STREAM_ERROR_TAG: Final = bytes((1 << 3 | 2,))
_STREAM_RESPONSE_TAG: Final = bytes((2 << 3 | 2,))
_EMPTY_RAW_OUTPUT: Final = _RAW_OUTPUT_TAG + b"\0"
#: What no number on the wire exceeds: ten bytes of seven bits each.
_VARINT_BITS: Final = 70


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """`(value, where it ends)` of a number. Raises IndexError at the end of the data, and where it does not end in ten bytes."""
    value = shift = 0
    while shift < _VARINT_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError


def _split(data: bytes | memoryview) -> tuple[bytes, list[memoryview]] | None:
    """A ModelInferRequest without its raw_input_contents, and those as views; None where it has unusual fields."""
    view = memoryview(data)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    at, end = 0, len(data)
    try:
        while at < end:
            start = at
            tag = data[at]
            if tag & 7 != 2 or tag >= 0x80:
                return None
            size, at = _read_varint(data, at + 1)
            if at + size > end:
                return None
            if tag == _RAW_INPUT_TAG:
                raw.append(view[at : at + size])
            else:
                rest.append(view[start : at + size])
            at += size
    except IndexError:
        return None
    return b"".join(rest), raw


def unreadable() -> NaiadError:
    """What the gRPC library that Triton uses says of bytes that are no message."""
    return Internal("Unable to parse request")


def parse_request(data: bytes | memoryview, in_thread: bool = False) -> tuple[Message, Sequence[Buffer]]:
    """A ModelInferRequest and its raw_input_contents. Raises Internal for what is not such a message, and TakesLong where
    it is LARGE without them and this is not `in_thread`; then `decode` takes long, too."""
    raw = None
    if len(data) >= SPLIT_BYTE_SIZE:
        split = _split(data)
        if split is not None:
            data, raw = split
        if len(data) >= LARGE and not in_thread:
            raise TakesLong
    try:
        message = pb.ModelInferRequest.FromString(data if type(data) is bytes else bytes(data))
    except Exception as error:  # protobuf's DecodeError, whose class differs between its implementations
        raise unreadable() from error
    return message, message.raw_input_contents if raw is None else raw


# ---------------------------------------------------------------- requests

#: What was read from messages all of whose raw_input_contents stand at their end, by what stands before them, and how to
#: answer; how long that is in messages of a length.
_templates: Final[dict[bytes, tuple[RequestTemplate, Reply]]] = {}
_template_sizes: Final[dict[int, int]] = {}


def recall(data: bytes | memoryview) -> tuple[InferRequest, Reply] | None:
    """What `decode` would make of a ModelInferRequest, if one like it was given to `remember`; else None."""
    size = _template_sizes.get(len(data))
    if size is None:
        return None
    known = _templates.get(data[:size] if type(data) is bytes else bytes(data[:size]))
    if known is None:
        return None
    request = known[0].fill(data, size)
    return None if request is None else (request, known[1])


def remember(data: bytes | memoryview, request: InferRequest, reply: Reply) -> None:
    """Keeps what `decode` made of a message, where the next one like it would differ in its data only."""
    if request.id or request.sequence is not None or reply.use is not None:
        return
    heads: list[bytes] = []
    size = len(data)
    for tensor in request.inputs:
        if tensor.datatype is DataType.BYTES:
            return
        head = _raw_input_head(len(tensor.contents))
        heads.append(head)
        size -= len(head) + len(tensor.contents)
    if not 0 < size <= LARGEST:
        return
    template = RequestTemplate(request, heads)
    # Data may also stand in the inputs themselves, or before other fields.
    if template.fill(data, size) != request:
        return
    if len(_templates) >= MOST or len(_template_sizes) >= MOST:
        _templates.clear()
        _template_sizes.clear()
    _templates[bytes(data[:size])] = (template, reply)
    _template_sizes[len(data)] = size


def _raw_input_head(size: int) -> bytes:
    return bytes((_RAW_INPUT_TAG,)) + _varint(size)


def decode(
    message: Message, raw: Sequence[Buffer], config: ModelConfig, regions: Regions, version: int = -1, peer: str = ""
) -> tuple[InferRequest, Reply]:
    """The request in a ModelInferRequest for the model of `config`, and how to answer it.

    `raw` are the raw_input_contents. `peer` decides whether shared memory may be used. Raises Triton's errors.
    """
    parameters, sequence, priority, timeout_us, empty_final = _NO_PARAMETERS
    if message.parameters:
        parameters, sequence, priority, timeout_us, empty_final = _request_parameters(message.parameters)
    try:
        inputs, names, reply = _tensors(message, raw, config, regions, peer, empty_final)
    except NaiadError:
        _refuse_twice(message)
        raise
    request = InferRequest(
        message.model_name,
        tuple(inputs),
        version,
        message.id,
        names,
        parameters,
        sequence,
        priority,
        timeout_us,
    )
    return request, reply


def _tensors(
    message: Message, raw: Sequence[Buffer], config: ModelConfig, regions: Regions, peer: str, empty_final: bool
) -> tuple[list[Tensor], tuple[str, ...], Reply]:
    """(inputs, names of the outputs asked for, how to answer)."""
    inputs: list[Tensor] = []
    invalid: str | None = None
    use: RegionUse | None = None
    used = 0
    # Slices of repeated fields are lists, which take half the time to walk through that the fields take themselves.
    for tensor in message.inputs[:]:
        name = tensor.name
        data: Buffer | Unread
        if tensor.parameters and (region := _region(name, tensor.parameters)) is not None:
            if tensor.HasField("contents"):
                raise InvalidArgument(
                    f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model "
                    f"'{config.name}'"
                )
            if use is None:
                use = RegionUse(regions, is_local_peer(peer))
            data = use.input(*region)
        elif tensor.HasField("contents"):
            if raw:
                raise InvalidArgument(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for model "
                    f"'{config.name}'"
                )
            data = _typed_contents(tensor, config)
        elif used < len(raw):
            data = raw[used]
            used += 1
        else:
            raise InvalidArgument(
                f"unable to find data for input tensor '{name}' for model '{config.name}' in request."
            )
        datatype = BY_NAME.get(tensor.datatype)
        if datatype is None:
            invalid = name
        else:
            inputs.append(Tensor(name, datatype, tuple(tensor.shape[:]), data))
    reply = _PLAIN_EMPTY_FINAL if empty_final else _PLAIN
    names: tuple[str, ...] = ()
    outputs = message.outputs[:]
    if outputs:
        names = tuple([output.name for output in outputs])
        for output in outputs:
            if output.parameters:
                reply = _reply(outputs, regions, peer, empty_final, use)
                break
    if use is not None and reply.use is None:
        reply = Reply(reply.plan, reply.regions, reply.empty_final, use)
    if invalid is not None:
        raise _invalid_datatype(message.id, invalid, config)
    return inputs, names, reply


def _refuse_twice(message: Message) -> None:
    """Raises InvalidArgument for two inputs of one name, which Triton finds before it looks for the data of any."""
    names: set[str] = set()
    for tensor in message.inputs:
        if tensor.name in names:
            raise InvalidArgument(
                f"[request id: {message.id or '<id_unknown>'}] input '{tensor.name}' already exists in request"
            )
        names.add(tensor.name)


_Parameters = tuple[dict[str, ParameterValue], SequenceControl | None, int, int, bool]

_NO_PARAMETERS: Final[_Parameters] = ({}, None, 0, 0, False)


def _wrong_type(key: str, expected: str) -> InvalidArgument:
    return InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}.")


def _choice(key: str, value: Message, *expected: str) -> Any:
    """The value of an InferParameter that must have one of the types `expected`."""
    choice = value.WhichOneof("parameter_choice")
    if choice not in expected:
        raise _wrong_type(key, " or ".join(expected[:2]))
    return getattr(value, choice)


def _request_parameters(given: Mapping[str, Message]) -> _Parameters:
    free: dict[str, ParameterValue] = {}
    sequence_id: int | str = 0
    start = end = empty_final = False
    priority = timeout_us = 0
    for key, value in given.items():
        if key == "sequence_id":
            # Triton 2.51 does not take, nor name, the last one; later ones take it.
            sequence_id = _choice(key, value, "int64_param", "string_param", "uint64_param")
            if isinstance(sequence_id, int):
                sequence_id %= 2**64
            else:
                correlation_text(sequence_id)
        elif key == "sequence_start":
            start = _choice(key, value, "bool_param")
        elif key == "sequence_end":
            end = _choice(key, value, "bool_param")
        elif key == "priority":
            priority = _choice(key, value, "int64_param", "uint64_param")
            if priority < 0:
                raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
        elif key == "timeout":
            timeout_us = _choice(key, value, "int64_param") % 2**64
        elif key == "triton_enable_empty_final_response":
            empty_final = _choice(key, value, "bool_param")
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                "starting with 'triton_' are allowed: triton_enable_empty_final_response"
            )
        else:
            choice = value.WhichOneof("parameter_choice")
            if choice is None:
                raise _wrong_type(key, "int64_param, bool_param, or string_param")
            free[key] = getattr(value, choice)
    sequence = SequenceControl(sequence_id, start, end) if sequence_id or start or end else None
    return free, sequence, priority, timeout_us, empty_final


def _region(name: str, parameters: Mapping[str, Message]) -> tuple[str, int, int] | None:
    """`(region, offset, byte size)` in the parameters of a tensor, None where there is no region."""
    if "shared_memory_region" not in parameters:
        for key in ("shared_memory_offset", "shared_memory_byte_size"):
            if key in parameters:
                raise InvalidArgument(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{name}'"
                )
        return None
    region = _tensor_parameter(name, parameters, "shared_memory_region", "string_param")
    offset = _tensor_parameter(name, parameters, "shared_memory_offset", "int64_param")
    byte_size = _tensor_parameter(name, parameters, "shared_memory_byte_size", "int64_param")
    if byte_size is None:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
            f"'{name}'"
        )
    return region or "", offset or 0, byte_size


def _tensor_parameter(name: str, parameters: Mapping[str, Message], key: str, expected: str) -> Any:
    if key not in parameters:
        return None
    value = parameters[key]
    if value.WhichOneof("parameter_choice") != expected:
        raise InvalidArgument(f"invalid value type for '{key}' parameter for tensor '{name}', expected {expected}.")
    return getattr(value, expected)


def _reply(outputs: Sequence[Message], regions: Regions, peer: str, empty_final: bool, use: RegionUse | None) -> Reply:
    """How to answer; `use` is that of the inputs, if they have one."""
    specs: dict[str, OutputSpec] = {}
    written: dict[str, OutputRegion] = {}
    for output in outputs:
        name = output.name
        region = _region(name, output.parameters)
        count = 0
        if "classification" in output.parameters:
            value = output.parameters["classification"]
            if value.WhichOneof("parameter_choice") != "int64_param":
                raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
            count = value.int64_param
            if count <= 0:
                raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
            if region is not None:
                raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
        if name in specs and (specs[name].classification or specs[name].region is not None):
            # Of several wishes the first that is one counts, as in Triton.
            continue
        if region is None:
            specs[name] = OutputSpec(name, True, count)
        else:
            specs[name] = OutputSpec(name, True, 0, *region)
            if use is None:
                use = RegionUse(regions, is_local_peer(peer))
            written[name] = use.output(name, *region)
    return Reply(plan_of(specs.values(), True), written, empty_final, use)


def _pack_block(contents: Any, datatype: DataType) -> bytes:
    """Elements that protobuf packs on the wire as the tensor has them: taken from there as one block."""
    wire: bytes = contents.SerializeToString()
    size, at = _read_varint(wire, 1)
    return wire[at : at + size]


def _pack_texts(contents: Any, datatype: DataType) -> bytes:
    elements = contents.bytes_contents
    pieces: list[bytes] = []
    # In pieces, which takes a third of the time, and between which other threads can run.
    for at in range(0, len(elements), AT_ONCE):
        if at:
            sleep(0)
        pieces.append(pack_bytes(elements[at : at + AT_ONCE]))
    return b"".join(pieces)


def _pack_as(field: str) -> Callable[[Any, DataType], bytes]:
    def pack(contents: Any, datatype: DataType) -> bytes:
        # Through the widest type of the kind, so that values outside of a narrow one wrap around, as Triton's do.
        wide = np.uint64 if field.startswith("uint") else np.int64
        elements = getattr(contents, field)
        # In pieces, between which other threads can run.
        pieces = [
            np.array(elements[at : at + AT_ONCE], dtype=wide).astype(datatype.numpy).tobytes()
            for at in range(0, len(elements), AT_ONCE)
        ]
        return b"".join(pieces)

    return pack


_D = DataType
#: Field of InferTensorContents -> (name of the type in error texts, the data types it may hold, its packing).
_CONTENTS: Final[dict[str, tuple[str, frozenset[DataType], Callable[[Any, DataType], bytes]]]] = {
    "bool_contents": ("BOOL", frozenset((_D.BOOL,)), _pack_block),
    "int_contents": ("INT32", frozenset((_D.INT8, _D.INT16, _D.INT32)), _pack_as("int_contents")),
    "int64_contents": ("INT64", frozenset((_D.INT64,)), _pack_as("int64_contents")),
    "uint_contents": ("UINT32", frozenset((_D.UINT8, _D.UINT16, _D.UINT32)), _pack_as("uint_contents")),
    "uint64_contents": ("UINT64", frozenset((_D.UINT64,)), _pack_as("uint64_contents")),
    "fp32_contents": ("FP32", frozenset((_D.FP32,)), _pack_block),
    "fp64_contents": ("FP64", frozenset((_D.FP64,)), _pack_block),
    "bytes_contents": ("BYTES", frozenset((_D.BYTES,)), _pack_texts),
}


def _typed_contents(tensor: Message, config: ModelConfig) -> bytes:
    contents = tensor.contents
    datatype = BY_NAME.get(tensor.datatype)
    packed = b""
    for field, _ in contents.ListFields():
        if field.name not in _CONTENTS:
            continue
        named, allowed, pack = _CONTENTS[field.name]
        if packed:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{config.name}', binary data "
                "was already supplied."
            )
        if datatype is None or datatype not in allowed:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{config.name}' of type "
                f"'{named}', expected datatype '{'<invalid>' if datatype is None else datatype.name}'"
            )
        packed = pack(contents, datatype)
    return packed


def _invalid_datatype(id: str, name: str, config: ModelConfig) -> NaiadError:
    spec = config.inputs.get(name)
    if spec is None:
        return InvalidArgument(f"unexpected inference input '{name}' for model '{config.name}'")
    return InvalidArgument(
        f"[request id: {id or '<id_unknown>'}] inference input '{name}' data-type is '<invalid>', but model "
        f"'{config.name}' expects '{spec.datatype.name}'"
    )


# ---------------------------------------------------------------- responses

#: Encoded heads of responses and outputs: the same few for all responses of a model. Emptied when full.
_MODEL_HEADS: Final[dict[tuple[str, int], bytes]] = {}
_OUTPUT_HEADS: Final[dict[tuple[str, int, tuple[int, ...]], bytes]] = {}
_HEADS_LIMIT: Final = 4096


def _model_head(name: str, version: int) -> bytes:
    head: bytes = pb.ModelInferResponse(model_name=name, model_version=str(version)).SerializeToString()
    if len(_MODEL_HEADS) >= _HEADS_LIMIT:
        _MODEL_HEADS.clear()
    _MODEL_HEADS[(name, version)] = head
    return head


def _output_head(name: str, datatype: DataType, shape: tuple[int, ...]) -> bytes:
    output = pb.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype.protocol_name, shape=shape)
    message = output.SerializeToString()
    head: bytes = _RESPONSE_OUTPUT_TAG + _varint(len(message)) + message
    if len(_OUTPUT_HEADS) >= _HEADS_LIMIT:
        _OUTPUT_HEADS.clear()
    _OUTPUT_HEADS[(name, datatype.number, shape)] = head
    return head


def _id(id: str) -> bytes:
    text = id.encode()
    return _RESPONSE_ID_TAG + _varint(len(text)) + text


def _parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    message = pb.ModelInferResponse()
    for key, value in parameters.items():
        parameter = message.parameters[key]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            if value < 2**63:
                parameter.int64_param = value
            else:
                parameter.uint64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value
    encoded: bytes = message.SerializeToString()
    return encoded


_FINAL: Final = {final: _parameters({"triton_final_response": final}) for final in (False, True)}


def encode(
    response: InferResponse,
    reply: Reply,
    config: ModelConfig,
    labels: Mapping[str, Sequence[str]],
    tail: bytes = b"",
    in_thread: bool = False,
) -> bytes:
    """A ModelInferResponse; `tail` are more of its fields. Outputs that go to regions are written there.

    Raises Internal where a region is too small, InvalidArgument where an output cannot be classified, TakesLong where a
    LARGE one is to be and this is not `in_thread`.
    """
    head = _MODEL_HEADS.get((response.model_name, response.model_version))
    parts: list[Buffer] = [head or _model_head(response.model_name, response.model_version)]
    if response.id:
        parts.append(_id(response.id))
    if response.parameters:
        parts.append(_parameters(response.parameters))
    if tail:
        parts.append(tail)
    raw: list[Buffer] = []
    special = reply.plan.outputs
    for output in response.outputs:
        data: Buffer
        if special and (spec := special.get(output.name)) is not None:
            if spec.classification:
                if len(output.contents) >= LARGE and not in_thread:
                    raise TakesLong
                output = classify(output, spec.classification, list(labels.get(output.name, ())), config.batching)
                data = output.data
            elif spec.region is not None:
                reply.regions[output.name].write(output)
                data = b""
            else:
                data = output.data
        else:
            data = output.data
        shape = output.shape
        head = _OUTPUT_HEADS.get((output.name, output.datatype.number, shape))
        parts.append(head or _output_head(output.name, output.datatype, shape))
        size = len(data) if type(data) is bytes else memoryview(data).nbytes
        if size:
            raw.append(_RAW_OUTPUT_TAG + _varint(size))
            raw.append(data)
        else:
            raw.append(_EMPTY_RAW_OUTPUT)
    return b"".join(parts + raw)


def stream_response(encoded: bytes, error: str = "") -> bytes:
    """A ModelStreamInferResponse around an encoded ModelInferResponse."""
    parts = []
    if error:
        text = error.encode(errors="replace")
        parts += [_STREAM_ERROR_TAG, _varint(len(text)), text]
    parts += [_STREAM_RESPONSE_TAG, _varint(len(encoded)), encoded]
    return b"".join(parts)


def encode_stream(
    response: InferResponse,
    reply: Reply,
    config: ModelConfig,
    labels: Mapping[str, Sequence[str]],
    final: bool,
    in_thread: bool = False,
) -> bytes:
    """A ModelStreamInferResponse with a response. Raises like `encode`."""
    return stream_response(encode(response, reply, config, labels, _FINAL[final], in_thread))


def encode_stream_end(model_name: str, id: str) -> bytes:
    """The last, empty response of a decoupled model."""
    message = pb.ModelInferResponse(model_name=model_name, id=id)
    return stream_response(message.SerializeToString() + _FINAL[True])


def encode_stream_error(error: str, id: str, model_name: str = "", final: bool | None = None) -> bytes:
    """An error of one request; the model and `final` are said where the model was asked at all."""
    message: bytes = pb.ModelInferResponse(model_name=model_name, id=id).SerializeToString()
    return stream_response(message if final is None else message + _FINAL[final], error)
