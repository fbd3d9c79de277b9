"""Inference requests and responses of the HTTP protocol: a JSON header and, after it, binary tensors. Pure.

Bytes in, `(InferRequest, OutputPlan)` out, and an `InferResponse` back into bytes. Texts, kinds of error and the order
of checks are Triton's (reference 3.3 to 3.5); what depends on the model's configuration is checked by the engine.
Nothing here touches the event loop, so large texts may be decoded in a thread.
"""

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from naiad.config.model_config import ModelConfig
from naiad.datatypes import BY_NAME, BY_NUMBER, Buffer, DataType
from naiad.errors import Internal, InvalidArgument
from naiad.messages import NO_SEQUENCE, InferRequest, InferResponse, ParameterValue, SequenceControl, Tensor, Unread
from naiad.protocol.correlation import correlation_text
from naiad.protocol.json_arrays import DEFAULT_MAX_INPUT_SIZE, json_data, tensor_data
from naiad.protocol.json_numbers import parse_request
from naiad.protocol.json_templates import LONGEST, recall, remember
from naiad.protocol.json_text import (
    IS_UNSIGNED,
    array_member,
    boolean_member,
    dump,
    members,
    string_member,
    unsigned_member,
)
from naiad.protocol.outputs import ALL_BINARY, OutputPlan, OutputSpec, classify, plan_of
from naiad.protocol.templates import LARGEST, MOST, RequestTemplate

RegionInput = Callable[[str, int, int], Buffer | Unread]
RegionOutput = Callable[[Tensor], None]
#: What `parse_request` does, and `dump`.
Read = Callable[[Buffer], Any]
Write = Callable[[Any], bytes]
Headers = list[tuple[str, str]]

_LARGEST_COUNT: Final = 2**63 - 1
_TOO_MANY: Final = 2**63
_LENGTH: Final = struct.Struct("<I")
_LEADING_INTEGER: Final = re.compile(r"\s*([+-]?\d+)")

JSON_HEADERS: Final[Headers] = [("content-type", "application/json")]


# --- requests

#: What was read from JSON all of whose data are binary and lie behind it, which is the same for many requests: how to
#: answer, and how much data there is.
_templates: Final[dict[tuple[bytes, str, int], tuple[RequestTemplate, OutputPlan, int]]] = {}


def header_length(given: str | None, body_size: int) -> int:
    """How many bytes of the body are JSON: `given` is the header Inference-Header-Content-Length. 0 is a raw request."""
    if given is None:
        return body_size
    try:
        if given.isdecimal():
            length = int(given)
        else:
            match = _LEADING_INTEGER.match(given)
            length = int(match[1]) if match else 0
    except ValueError:  # more digits than Python reads
        length = -1
    if not 0 <= length <= body_size:
        raise InvalidArgument(f"inference header size should be in range (0, {body_size}), got: {given}")
    return length


def decode_request(
    body: bytes | memoryview,
    json_size: int,
    model_name: str,
    model_version: int = -1,
    region: RegionInput | None = None,
    forwarded: Mapping[str, ParameterValue] | None = None,
    max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
    read: Read = parse_request,
) -> tuple[InferRequest, OutputPlan]:
    """The request in a body whose first `json_size` bytes are JSON and whose rest are binary tensors.

    Data of binary tensors are views of the body. `region` gets the bytes of a shared-memory region by name, offset and
    size; `forwarded` are parameters made of HTTP headers; `read` reads JSON that is not known. Raises Internal for JSON
    that is malformed or of a wrong type, as Triton does, else InvalidArgument.
    """
    if json_size > max_input_size:
        raise InvalidArgument(
            f"request JSON size of {json_size} bytes exceeds the maximum allowed input size of {max_input_size} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    key: tuple[bytes, str, int] | None = None
    text = b""
    if json_size == len(body) <= LONGEST and not forwarded:
        text = body if type(body) is bytes else bytes(body)
        recalled = recall(text, model_name, model_version, max_input_size)
        if recalled is not None:
            return recalled
    elif json_size <= LARGEST and json_size < len(body) and not forwarded:
        key = (bytes(body[:json_size]), model_name, model_version)
        known = _templates.get(key)
        if known is not None and known[2] == len(body) - json_size:
            again = known[0].fill(body, json_size)
            if again is not None:
                return again, known[1]
    document = read(body if json_size == len(body) else memoryview(body)[:json_size])
    if type(document) is not dict:
        document = {}
    request_id = ""
    if "id" in document:
        request_id = string_member(document, "id", "Unable to parse 'id': ")
    parameters: dict[str, ParameterValue] = {}
    sequence: SequenceControl | None = None
    priority = timeout_us = 0
    binary_default = False
    if "parameters" in document:
        sequence, priority, timeout_us, binary_default = _read_parameters(document["parameters"], parameters)
    if forwarded:
        parameters.update(forwarded)

    tail = memoryview(body)
    at = json_size
    inputs: list[Tensor] = []
    counts: list[int] = []
    entries = document.get("inputs")
    if type(entries) is not list:
        entries = array_member(document, "inputs", "Unable to parse 'inputs': ")
    for item in entries:
        if type(item) is not dict:
            item = {}
        given = item.get("parameters")
        if given is not None and type(given) is not dict:
            given = None
        if given or "data" not in item:
            _check_source(item, given)
        # The checks of these members take longer than their access does, and are done for what is wrong only.
        name = item.get("name")
        if type(name) is not str:
            name = string_member(item, "name", "Unable to parse 'name': ")
        datatype_name = item.get("datatype")
        if type(datatype_name) is not str:
            datatype_name = string_member(item, "datatype", "Unable to parse 'datatype': ")
        extents = item.get("shape")
        if type(extents) is not list:
            extents = array_member(item, "shape", "Unable to parse 'shape': ")
        shape, count = _read_shape(name, extents)
        datatype = BY_NAME.get(datatype_name)
        if datatype is None:
            raise InvalidArgument(f"invalid datatype for input {name}")
        data: Buffer | Unread
        if given and "binary_data_size" in given:
            size = given["binary_data_size"]
            if type(size) is not int or size < 0:
                raise Internal(f"Unable to parse 'binary_data_size': {IS_UNSIGNED}")
            end = at + size
            if end > len(tail):
                raise InvalidArgument(
                    f"unexpected size for input '{name}', expecting {end - len(tail)} additional bytes "
                    f"for model '{model_name}'"
                )
            data = tail[at:end]
            at = end
        elif given and "shared_memory_region" in given:
            data = _read_region(given, region)
        else:
            data = tensor_data(name, datatype, count, item["data"], max_input_size)
            if type(item["data"]) is list:
                counts.append(count)
        inputs.append(Tensor(name, datatype, shape, data))
    if at != len(tail):
        raise InvalidArgument(f"unexpected additional input data for model '{model_name}'")

    specs: list[OutputSpec] = []
    if "outputs" in document:
        specs = [_read_output(item) for item in array_member(document, "outputs", "Unable to parse 'outputs': ")]
    plan = plan_of(specs, binary_default)
    outputs = tuple([spec.name for spec in specs])
    request = InferRequest(
        model_name, tuple(inputs), model_version, request_id, outputs, parameters, sequence, priority, timeout_us
    )
    if text and inputs and len(counts) == len(inputs):
        remember(text, request, plan, counts, max_input_size)
    elif key is not None and sum([len(tensor.contents) for tensor in inputs]) == len(tail) - json_size:
        if len(_templates) >= MOST:
            _templates.clear()
        _templates[key] = (RequestTemplate(request, [b""] * len(inputs)), plan, len(tail) - json_size)
    return request, plan


def decode_raw_request(
    body: bytes | memoryview,
    config: ModelConfig,
    model_version: int = -1,
    forwarded: Mapping[str, ParameterValue] | None = None,
    max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
) -> tuple[InferRequest, OutputPlan]:
    """The request whose whole body is the data of the model's only input, as a batch of one."""
    who = "[request id: <id_unknown>] "
    if len(body) > max_input_size:
        raise InvalidArgument(
            f"Raw input has a byte_size ({len(body)} bytes) that exceeds the maximum allowed value of {max_input_size} "
            "bytes. Use --http-max-input-size to increase the limit."
        )
    if len(config.inputs) != 1:
        raise InvalidArgument(
            f"{who}Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs "
            f"in '{config.name}' model configuration"
        )
    (tensor,) = config.inputs.values()
    dims = list(tensor.dims)
    data: Buffer = body
    if tensor.datatype is DataType.BYTES:
        if dims != [1]:
            raise InvalidArgument(
                f"{who}For BYTE datatype raw input '{tensor.name}', the model must have input shape [1]"
            )
        data = b"".join((_LENGTH.pack(len(body)), body))
    else:
        if dims.count(-1) > 1:
            raise InvalidArgument(
                f"{who}The shape of the raw input '{tensor.name}' can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        fixed = 1
        for extent in dims:
            if extent != -1:
                fixed *= extent
        row = fixed * tensor.datatype.byte_size
        if -1 in dims:
            dims[dims.index(-1)] = len(body) // row if row else 0
        expected = tensor.datatype.byte_size
        for extent in dims:
            expected *= extent
        if expected != len(body):
            # Triton's name for what it deduces; the engine would call it by the name it has in the configuration.
            raise InvalidArgument(
                f"{who}input byte size mismatch for input 'raw_input' for model '{config.name}'. "
                f"Expected {expected}, got {len(body)}"
            )
    shape = (1, *dims) if config.batching else tuple(dims)
    request = InferRequest(
        config.name,
        (Tensor(tensor.name, tensor.datatype, shape, data),),
        model_version,
        parameters=dict(forwarded) if forwarded else {},
    )
    return request, ALL_BINARY


def _read_parameters(
    value: Any, parameters: dict[str, ParameterValue]
) -> tuple[SequenceControl | None, int, int, bool]:
    """(sequence, priority, timeout in us, whether outputs are binary); the free ones are added to `parameters`."""
    given = members(value, "failed to get request params.: ")
    correlation_id: int | str = 0
    start = end = binary_default = in_sequence = False
    priority = timeout_us = 0
    for key, item in given.items():
        lead = f"Unable to parse '{key}': "
        if key == "sequence_id":
            in_sequence = True
            unsigned = type(item) is int and item >= 0
            correlation_id = item if unsigned else correlation_text(string_member(given, key, lead))
        elif key == "sequence_start":
            in_sequence = True
            start = boolean_member(given, key, lead)
        elif key == "sequence_end":
            in_sequence = True
            end = boolean_member(given, key, lead)
        elif key == "priority":
            priority = unsigned_member(given, key, lead)
        elif key == "timeout":
            timeout_us = unsigned_member(given, key, lead)
        elif key == "binary_data_output":
            binary_default = boolean_member(given, key, lead)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            parameters[key] = parameter_value(key, item)
    sequence = SequenceControl(correlation_id, start, end) if in_sequence else None
    return sequence, priority, timeout_us, binary_default


def parameter_value(key: str, value: Any) -> ParameterValue:
    """A free parameter. Raises InvalidArgument for null, arrays and objects."""
    if isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, int):
        return value if value <= _LARGEST_COUNT else float(value)
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _check_source(item: dict[str, Any], given: Any) -> None:
    """Exactly one of the three places that data can be in must be given."""
    if type(given) is not dict:
        given = {}
    if ("data" in item) + ("binary_data_size" in given) + ("shared_memory_region" in given) != 1:
        found = ["data"] if "data" in item else []
        found += [key for key in ("binary_data_size", "shared_memory_region") if key in given]
        what = f"But set {' '.join(repr(key) for key in found)}" if found else "But no field is set"
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. {what}"
        )


def _read_shape(name: str, extents: list[Any]) -> tuple[tuple[int, ...], int]:
    """(the shape, its number of elements; none for the empty shape)."""
    count = 1 if extents else 0
    for extent in extents:
        if type(extent) is not int or extent < 0:
            raise Internal(f"Unable to parse 'shape': {IS_UNSIGNED}")
        count *= extent
        if count > _LARGEST_COUNT:
            count = _TOO_MANY  # the product of many extents would grow for seconds
    if count == _TOO_MANY or (count == 0 and any(extent > _LARGEST_COUNT for extent in extents)):
        shape = ",".join(map(str, extents))
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape [{shape}] causes total element count to exceed maximum size of "
            f"{_LARGEST_COUNT}"
        )
    return tuple(extents), count


def _read_region(given: Mapping[str, Any], region: RegionInput | None) -> Buffer | Unread:
    name = string_member(given, "shared_memory_region", "Unable to parse 'shared_memory_region': ")
    offset, byte_size = _read_region_part(given)
    if region is None:
        raise InvalidArgument(f"shared memory region '{name}' cannot be used here")
    return region(name, offset, byte_size)


def _read_region_part(given: Mapping[str, Any]) -> tuple[int, int]:
    offset = 0
    if "shared_memory_offset" in given:
        offset = unsigned_member(given, "shared_memory_offset", "Unable to parse 'shared_memory_offset': ")
    byte_size = 0
    if "shared_memory_byte_size" in given:
        byte_size = unsigned_member(given, "shared_memory_byte_size", "Unable to parse 'shared_memory_byte_size': ")
    return offset, byte_size


def _read_output(item: Any) -> OutputSpec:
    name = string_member(item, "name", "Unable to parse 'name': ")
    given = item.get("parameters")
    if not given or type(given) is not dict:
        return OutputSpec(name)
    classification = 0
    if "classification" in given:
        classification = unsigned_member(given, "classification", "Unable to set 'classification': ")
    region: str | None = None
    offset = byte_size = 0
    if "shared_memory_region" in given:
        region = string_member(given, "shared_memory_region", "Unable to parse 'shared_memory_region': ")
        if "classification" in given:
            raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
        if given.get("binary_data") is True:
            raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
        offset, byte_size = _read_region_part(given)
    binary = False
    if "binary_data" in given:
        binary = boolean_member(given, "binary_data", "Unable to parse 'binary_data': ")
    return OutputSpec(name, binary, classification, region, offset, byte_size)


# --- responses


def encode_response(
    response: InferResponse,
    plan: OutputPlan,
    labels: Mapping[str, list[str]],
    batched: bool,
    regions: Mapping[str, RegionOutput],
    write: Write = dump,
) -> tuple[Headers, bytes]:
    """(HTTP headers, body) of a response.

    `labels` are the model's, by output; `batched` says whether the first dimension is the batch; `regions` take the
    outputs that go to shared memory, by output; `write` writes the JSON. The response's buffers are not needed
    afterwards.
    """
    if plan.is_binary and not response.id and (not response.parameters or response.parameters is NO_SEQUENCE):
        return _encode_binary(response, plan)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = str(response.model_version)
    if response.parameters:
        document["parameters"] = response.parameters
    outputs: list[dict[str, Any]] = []
    document["outputs"] = outputs
    wanted = plan.outputs
    binary = plan.binary_default
    tail: list[Buffer] = []
    for tensor in response.outputs:
        if wanted:
            spec = wanted.get(tensor.name)
            if spec is None:
                continue
            binary = spec.binary
            if spec.classification:
                tensor = classify(tensor, spec.classification, labels.get(tensor.name, []), batched)
            elif spec.region is not None:
                regions[tensor.name](tensor)
                outputs.append({"name": tensor.name, "datatype": tensor.datatype.protocol_name, "shape": tensor.shape})
                continue
        if binary:
            data = tensor.data
            size = len(data) if type(data) is bytes else memoryview(data).nbytes
            tail.append(data)
            outputs.append(
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype.protocol_name,
                    "shape": tensor.shape,
                    "parameters": {"binary_data_size": size},
                }
            )
        else:
            outputs.append(
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype.protocol_name,
                    "shape": tensor.shape,
                    "data": json_data(tensor),
                }
            )
    head = write(document)
    if not tail:
        return JSON_HEADERS, head
    body = b"".join((head, *tail))
    if len(body) == len(head):
        # Only empty tensors: Triton then answers as if there were none.
        return JSON_HEADERS, head
    return _binary_headers(len(head)), body


def _binary_headers(json_size: int) -> Headers:
    return [("content-type", "application/octet-stream"), ("inference-header-content-length", str(json_size))]


#: The JSON before the binary outputs of a response, and its headers, by all that they say. Most responses of a model
#: say the same.
_binary_heads: Final[dict[tuple[object, ...], tuple[Headers, bytes]]] = {}


def _encode_binary(response: InferResponse, plan: OutputPlan) -> tuple[Headers, bytes]:
    """A response without id, and without parameters but NO_SEQUENCE, all outputs of which are binary."""
    wanted = plan.outputs
    parameters = response.parameters
    key: list[object] = [response.model_name, response.model_version, parameters is NO_SEQUENCE]
    tail: list[Buffer] = []
    for tensor in response.outputs:
        if wanted and tensor.name not in wanted:
            continue
        data = tensor.data
        key.append(tensor.name)
        key.append(tensor.datatype.number)
        key.append(tensor.shape)
        key.append(len(data) if type(data) is bytes else memoryview(data).nbytes)
        tail.append(data)
    sign = tuple(key)
    kept = _binary_heads.get(sign)
    if kept is None:
        outputs = [
            {
                "name": name,
                "datatype": BY_NUMBER[number].name,
                "shape": shape,
                "parameters": {"binary_data_size": size},
            }
            for name, number, shape, size in zip(*[iter(sign[3:])] * 4, strict=True)
        ]
        document: dict[str, Any] = {"model_name": response.model_name, "model_version": str(response.model_version)}
        if parameters:
            document["parameters"] = parameters
        document["outputs"] = outputs
        head = dump(document)
        kept = (_binary_headers(len(head)), head)
        if len(head) <= LARGEST:
            if len(_binary_heads) >= MOST:
                _binary_heads.clear()
            _binary_heads[sign] = kept
    headers, head = kept
    body = b"".join([head, *tail])
    # Only empty tensors: Triton then answers as if there were none.
    return (headers if len(body) > len(head) else JSON_HEADERS), body
