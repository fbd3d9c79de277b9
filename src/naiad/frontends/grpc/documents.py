"""What management calls answer: the values of `naiad.messages` as protocol messages. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from naiad.metadata import IndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from naiad.statistics import Duration, ModelStatistics

Message = Any


def server_metadata(metadata: ServerMetadata) -> Message:
    return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=list(metadata.extensions))


def model_metadata(metadata: ModelMetadata) -> Message:
    return pb.ModelMetadataResponse(
        name=metadata.name,
        versions=list(metadata.versions),
        platform=metadata.platform,
        inputs=[_tensor(tensor) for tensor in metadata.inputs],
        outputs=[_tensor(tensor) for tensor in metadata.outputs],
    )


def _tensor(tensor: TensorMetadata) -> Message:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=list(tensor.shape))


def index(entries: Iterable[IndexEntry]) -> Message:
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version or "", state=entry.state or "", reason=entry.reason or ""
            )
            for entry in entries
        ]
    )


_INFER = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
_BATCH = ("compute_input", "compute_infer", "compute_output")
_RESPONSE = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


def statistics(models: Iterable[ModelStatistics]) -> Message:
    return pb.ModelStatisticsResponse(model_stats=[_model_statistics(model) for model in models])


def _model_statistics(model: ModelStatistics) -> Message:
    return pb.ModelStatistics(
        name=model.name,
        version=model.version,
        last_inference=model.last_inference_ms,
        inference_count=model.inference_count,
        execution_count=model.execution_count,
        inference_stats=pb.InferStatistics(**_durations(model.infer, _INFER)),
        batch_stats=[
            pb.InferBatchStatistics(batch_size=size, **_durations(batch, _BATCH))
            for size, batch in sorted(model.batches.items())
        ],
        response_stats={
            response: pb.InferResponseStatistics(**_durations(times, _RESPONSE))
            for response, times in model.responses.items()
        },
    )


def _durations(statistics: Any, names: Sequence[str]) -> dict[str, Message]:
    durations: dict[str, Duration] = {name: getattr(statistics, name) for name in names}
    return {name: pb.StatisticDuration(count=each.count, ns=each.ns) for name, each in durations.items()}


def system_regions(regions: Iterable[tuple[str, str, int, int]]) -> Message:
    response = pb.SystemSharedMemoryStatusResponse()
    for name, key, offset, byte_size in regions:
        region = response.regions[name]
        region.name, region.key, region.offset, region.byte_size = name, key, offset, byte_size
    return response


def cuda_regions(regions: Iterable[tuple[str, int, int]]) -> Message:
    response = pb.CudaSharedMemoryStatusResponse()
    for name, device_id, byte_size in regions:
        region = response.regions[name]
        region.name, region.device_id, region.byte_size = name, device_id, byte_size
    return response


def trace_settings(settings: Mapping[str, str | Sequence[str]]) -> Message:
    response = pb.TraceSettingResponse()
    for key, value in settings.items():
        response.settings[key].value.extend([value] if isinstance(value, str) else value)
    return response


def log_settings(settings: Mapping[str, bool | int | str]) -> Message:
    response = pb.LogSettingsResponse()
    for key, value in settings.items():
        setting = response.settings[key]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        else:
            setting.string_param = value
    return response
