"""GET /v2/openapi.json: an OpenAPI 3.1 document of the routes, for tools that make clients and requests from it. Pure.

The paths, methods and statuses are those of the table of routes; what is here besides are the shapes of the bodies.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from naiad import __version__
from naiad.datatypes import DataType

JsonObject = dict[str, Any]


class Described(NamedTuple):
    """A path with its parameters in braces, its methods, and the header that opens it where it is restricted.

    `operation` names what happens there; two paths may have the same one.
    """

    path: str
    operation: str
    methods: frozenset[str]
    restricted_by: str | None


def _object(required: Iterable[str] = (), **properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: JsonObject) -> JsonObject:
    return {"type": "array", "items": items}


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: JsonObject = {"type": "string"}
_COUNT: JsonObject = {"type": "integer", "minimum": 0}
_BOOLEAN: JsonObject = {"type": "boolean"}
_PARAMETERS: JsonObject = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
_DURATION = _object(("count", "ns"), count=_COUNT, ns=_COUNT)
_IN_REGION = {"shared_memory_region": _TEXT, "shared_memory_offset": _COUNT, "shared_memory_byte_size": _COUNT}


def _tensors(parameters: dict[str, JsonObject], data: str) -> JsonObject:
    """Tensors with their `data`, or with as many bytes behind the JSON as binary_data_size says."""
    return _list(
        _object(
            ("name", "shape", "datatype"),
            name=_TEXT,
            shape=_list(_COUNT),
            datatype={"type": "string", "enum": [datatype.name for datatype in DataType]},
            parameters=_object(binary_data_size=_COUNT, **parameters),
            data={"type": "array", "description": data},
        )
    )


_SCHEMAS: dict[str, JsonObject] = {
    "Error": _object(("error",), error=_TEXT),
    "InferRequest": _object(
        ("inputs",),
        id=_TEXT,
        parameters=_PARAMETERS,
        inputs=_tensors(_IN_REGION, "the elements, flat or nested"),
        outputs=_list(
            _object(
                ("name",), name=_TEXT, parameters=_object(classification=_COUNT, binary_data=_BOOLEAN, **_IN_REGION)
            )
        ),
    ),
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        id=_TEXT,
        model_name=_TEXT,
        model_version=_TEXT,
        parameters=_PARAMETERS,
        outputs=_tensors({}, "the elements, flat"),
    ),
    "GenerateRequest": {
        "type": "object",
        "properties": {"id": _TEXT, "parameters": _PARAMETERS},
        "description": "besides these, the model's inputs by name, each an element or a list of elements",
    },
    "GenerateResponse": _object(("model_name", "model_version"), model_name=_TEXT, model_version=_TEXT),
    "ServerMetadata": _object(("name", "version", "extensions"), name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "ModelMetadata": _object(
        ("name", "platform", "inputs", "outputs"),
        name=_TEXT,
        versions=_list(_TEXT),
        platform=_TEXT,
        inputs=_list(_ref("TensorMetadata")),
        outputs=_list(_ref("TensorMetadata")),
    ),
    "TensorMetadata": _object(
        ("name", "datatype", "shape"), name=_TEXT, datatype=_TEXT, shape=_list({"type": "integer", "minimum": -1})
    ),
    "ModelConfig": _object(("name",), name=_TEXT),
    "Statistics": _object(
        ("model_stats",),
        model_stats=_list(
            _object(
                ("name", "version", "inference_stats"),
                name=_TEXT,
                version=_TEXT,
                inference_count=_COUNT,
                execution_count=_COUNT,
                inference_stats={"type": "object", "additionalProperties": _DURATION},
            )
        ),
    ),
    "IndexRequest": _object(ready=_BOOLEAN),
    "Index": _list(_object(("name",), name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT)),
    "LoadRequest": _object(parameters={"type": "object", "additionalProperties": _TEXT}),
    "UnloadRequest": _object(parameters=_object(unload_dependents=_BOOLEAN)),
    "RegionsStatus": _list(_object(("name", "byte_size"), name=_TEXT, byte_size=_COUNT)),
    "SystemRegion": _object(("key", "byte_size"), key=_TEXT, offset=_COUNT, byte_size=_COUNT),
    "CudaRegion": _object(
        ("raw_handle", "byte_size", "device_id"),
        raw_handle=_object(("b64",), b64=_TEXT),
        byte_size=_COUNT,
        device_id=_COUNT,
    ),
    "TraceSettings": {"type": "object"},
    "LogSettings": {"type": "object"},
    "Document": {"type": "object"},
}

#: Operation -> (summary, schema of the request or "", schema of the answer or "" where it has no body).
_OPERATIONS: dict[str, tuple[str, str, str]] = {
    "server_metadata": ("About the server", "", "ServerMetadata"),
    "live": ("Whether the server answers", "", ""),
    "ready": ("Whether the server can infer", "", ""),
    "openapi": ("This document", "", "Document"),
    "statistics": ("What models have done", "", "Statistics"),
    "trace_setting": ("How requests are traced", "TraceSettings", "TraceSettings"),
    "logging": ("How the server logs", "LogSettings", "LogSettings"),
    "model_metadata": ("About a model", "", "ModelMetadata"),
    "infer": ("Inference", "InferRequest", "InferResponse"),
    "infer_stream": ("Inference, answered response by response", "InferRequest", "InferResponse"),
    "generate": ("Inference with flat JSON", "GenerateRequest", "GenerateResponse"),
    "generate_stream": (
        "Inference with flat JSON, answered response by response",
        "GenerateRequest",
        "GenerateResponse",
    ),
    "model_ready": ("Whether a model can infer", "", ""),
    "model_config": ("The configuration of a model", "", "ModelConfig"),
    "index": ("The models of the repositories", "IndexRequest", "Index"),
    "named_repository": ("The models of one repository, which has no name here", "IndexRequest", "Index"),
    "load": ("Load or reload a model", "LoadRequest", ""),
    "unload": ("Unload a model", "UnloadRequest", ""),
    "system_status": ("The system shared memory", "", "RegionsStatus"),
    "system_register": ("Register system shared memory", "SystemRegion", ""),
    "system_unregister": ("Forget system shared memory", "", ""),
    "cuda_status": ("The CUDA shared memory", "", "RegionsStatus"),
    "cuda_register": ("Register CUDA shared memory", "CudaRegion", ""),
    "cuda_unregister": ("Forget CUDA shared memory", "", ""),
}
_STREAMS = {
    "infer_stream": ("text/event-stream", "application/x-ndjson"),
    "generate_stream": ("text/event-stream",),
}
#: JSON of as many bytes as Inference-Header-Content-Length says, and behind it the binary tensors.
_BINARY: JsonObject = {}
_ERRORS = {
    400: "The request is wrong",
    403: "The API is restricted, and the request lacks the key",
    404: "There is no such model or region",
    413: "The body is larger than the server takes",
    500: "The model failed, or the JSON is not what it should be",
    501: "The server does not do this",
    503: "The server or the model cannot do this now",
}


def document(routes: Iterable[Described]) -> JsonObject:
    """The document, as values of JSON."""
    paths: dict[str, JsonObject] = {}
    keys: dict[str, JsonObject] = {}
    for route in routes:
        path = paths.setdefault(route.path, {})
        parameters = [_parameter(name) for name in re.findall(r"{(\w+)}", route.path)]
        if parameters:
            path["parameters"] = parameters
        for method in sorted(route.methods):
            path[method.lower()] = operation = _operation(route, method)
            if route.restricted_by is not None:
                keys[route.restricted_by] = {"type": "apiKey", "in": "header", "name": route.restricted_by}
                operation["security"] = [{route.restricted_by: []}]
    components: JsonObject = {"schemas": _SCHEMAS}
    if keys:
        components["securitySchemes"] = keys
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Naiad",
            "version": __version__,
            "description": "The KServe v2 protocol with Triton's extensions",
        },
        "paths": paths,
        "components": components,
    }


def _parameter(name: str) -> JsonObject:
    schema: JsonObject = {"type": "string", "pattern": "^[0-9]+$" if name == "version" else "^[^/]+$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _operation(route: Described, method: str) -> JsonObject:
    summary, request, answer = _OPERATIONS[route.operation]
    name = "_".join(re.findall(r"\w+", f"{method.lower()} {route.path.removeprefix('/v2')}"))
    errors: Mapping[str, JsonObject] = {"application/json": {"schema": _ref("Error")}, "text/plain": {}}
    responses: JsonObject = {"200": {"description": "Done"}}
    if answer:
        content: JsonObject = {"application/json": {"schema": _ref(answer)}}
        if route.operation == "infer":
            content["application/octet-stream"] = _BINARY
        for stream in _STREAMS.get(route.operation, ()):
            content[stream] = {}
        responses["200"]["content"] = content
    for status, meaning in _ERRORS.items():
        responses[str(status)] = {"description": meaning, "content": dict(errors)}
    operation: JsonObject = {"operationId": name, "summary": summary, "responses": responses}
    if request and method == "POST":
        body: JsonObject = {"application/json": {"schema": _ref(request)}}
        if request == "InferRequest":
            body["application/octet-stream"] = _BINARY
        operation["requestBody"] = {"required": "required" in _SCHEMAS[request], "content": body}
    return operation
