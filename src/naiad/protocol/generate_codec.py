"""The requests and responses of the generate extension: flat JSON objects instead of tensors. Pure."""

from collections.abc import Mapping
from typing import Any

from naiad.config.model_config import ModelConfig, TensorConfig
from naiad.errors import Internal, InvalidArgument, NaiadError
from naiad.messages import InferRequest, InferResponse, ParameterValue, Tensor
from naiad.protocol.json_arrays import DEFAULT_MAX_INPUT_SIZE, json_data, tensor_data
from naiad.protocol.json_codec import parameter_value
from naiad.protocol.json_text import members, members_as_given, parse, string_member

_NESTED = "parameters"


def decode_generate(
    body: bytes | memoryview,
    config: ModelConfig,
    model_version: int = -1,
    forwarded: Mapping[str, ParameterValue] | None = None,
    max_input_size: int = DEFAULT_MAX_INPUT_SIZE,
) -> InferRequest:
    """Keys that are inputs become tensors, `id` the id, all others parameters; `parameters` is read like the top."""
    if len(body) > max_input_size:
        raise InvalidArgument(
            f"request JSON size of {len(body)} bytes exceeds the maximum allowed input size of {max_input_size} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    document = members(parse(body))
    given = members_as_given(bytes(body), document)
    document = dict(reversed(given))  # of members with one name, the first counts
    request_id = string_member(document, "id", "Unable to parse 'id': ") if "id" in document else ""
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, ParameterValue] = {}

    def take(key: str, value: Any) -> None:
        config_of_input = config.inputs.get(key)
        if config_of_input is None:
            parameters.setdefault(key, parameter_value(key, value))
            return
        tensor = _tensor(config_of_input, value, max_input_size)
        if key in tensors:
            raise InvalidArgument(
                f"[request id: {request_id or '<id_unknown>'}] input '{key}' already exists in request"
            )
        tensors[key] = tensor

    nested: Mapping[str, Any] | None = None
    for key, value in given:
        if key == _NESTED:
            if nested is not None:
                continue
            nested = _nested(value, config)
            try:
                for inner, inner_value in nested.items():
                    take(inner, inner_value)
            except NaiadError as error:
                raise type(error)(f"Converting keyword: '{_NESTED}': {error}") from error
        else:
            # The request's id too: a model may have an input of that name, and else finds it among its parameters.
            take(key, value)
    if forwarded:
        parameters.update(forwarded)
    return InferRequest(config.name, tuple(tensors.values()), model_version, request_id, parameters=parameters)


def _nested(nested: Any, config: ModelConfig) -> Mapping[str, Any]:
    if _NESTED in config.inputs:
        raise InvalidArgument(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    if type(nested) is not dict:
        raise Internal(f"Expected JSON object for keyword: '{_NESTED}': attempt to access JSON non-object as object")
    given: dict[str, Any] = nested
    return given


def _tensor(config: TensorConfig, value: Any, max_input_size: int) -> Tensor:
    data = value if type(value) is list else [value]
    shape = _shape(config, len(data))
    return Tensor(
        config.name,
        config.datatype,
        shape,
        tensor_data(config.name, config.datatype, len(data), data, max_input_size),
    )


def _shape(config: TensorConfig, count: int) -> tuple[int, ...]:
    """The shape for `count` elements: the innermost variable dimension takes what the fixed ones leave, others are 1."""
    left = count
    for extent in config.shape:
        if extent != -1:
            if extent == 0 or left % extent:
                raise _no_shape(config)
            left //= extent
    shape: list[int] = []
    for extent in reversed(config.shape):
        if extent == -1:
            extent, left = left, 1
        shape.append(extent)
    if left != 1:
        raise _no_shape(config)
    return tuple(reversed(shape))


def _no_shape(config: TensorConfig) -> InvalidArgument:
    return InvalidArgument(f"The schema can not convert input '{config.name}' to tensor with proper shape")


def generate_document(response: InferResponse) -> dict[str, Any]:
    """The flat object of a response: outputs by name, one element without its list, and the response's parameters,
    all in the order of their names."""
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = str(response.model_version)
    for tensor in response.outputs:
        data = json_data(tensor)
        document[tensor.name] = data[0] if len(data) == 1 else data
    document.update(response.parameters)
    return dict(sorted(document.items()))
