"""The JSON documents of the HTTP protocol that are not inference: metadata, index, statistics, regions. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from naiad.metadata import IndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from naiad.protocol.json_text import dump
from naiad.statistics import Duration, ModelStatistics


def server_metadata(metadata: ServerMetadata) -> bytes:
    return dump({"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions})


def model_metadata(metadata: ModelMetadata) -> bytes:
    return dump(
        {
            "name": metadata.name,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "inputs": _tensors(metadata.inputs),
            "outputs": _tensors(metadata.outputs),
        }
    )


def _tensors(tensors: Iterable[TensorMetadata]) -> list[dict[str, Any]]:
    return [{"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape} for tensor in tensors]


def index(entries: Iterable[IndexEntry]) -> bytes:
    """A list; what an entry does not have is left out, an empty reason too."""
    document = []
    for entry in entries:
        item = {"name": entry.name}
        if entry.version is not None:
            item["version"] = entry.version
        if entry.state is not None:
            item["state"] = entry.state
        if entry.reason:
            item["reason"] = entry.reason
        document.append(item)
    return dump(document)


def statistics(models: Iterable[ModelStatistics]) -> bytes:
    return orjson.dumps({"model_stats": [_model_statistics(model) for model in models]})


def _model_statistics(model: ModelStatistics) -> dict[str, Any]:
    infer = model.infer
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {
            "success": _duration(infer.success),
            "fail": _duration(infer.fail),
            "queue": _duration(infer.queue),
            "compute_input": _duration(infer.compute_input),
            "compute_infer": _duration(infer.compute_infer),
            "compute_output": _duration(infer.compute_output),
            "cache_hit": _duration(infer.cache_hit),
            "cache_miss": _duration(infer.cache_miss),
        },
        "response_stats": {
            key: {
                "compute_infer": _duration(item.compute_infer),
                "compute_output": _duration(item.compute_output),
                "success": _duration(item.success),
                "fail": _duration(item.fail),
                "empty_response": _duration(item.empty_response),
                "cancel": _duration(item.cancel),
            }
            for key, item in model.responses.items()
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(item.compute_input),
                "compute_infer": _duration(item.compute_infer),
                "compute_output": _duration(item.compute_output),
            }
            for size, item in sorted(model.batches.items())
        ],
        "memory_usage": [],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def system_regions(regions: Sequence[tuple[str, str, int, int]]) -> bytes:
    """`regions` are `(name, key, offset, byte_size)`."""
    return dump(
        [
            {"name": name, "key": key, "offset": offset, "byte_size": byte_size}
            for name, key, offset, byte_size in regions
        ]
    )


def cuda_regions(regions: Sequence[tuple[str, int, int]]) -> bytes:
    """`regions` are `(name, device_id, byte_size)`."""
    return dump(
        [{"name": name, "device_id": device_id, "byte_size": byte_size} for name, device_id, byte_size in regions]
    )
