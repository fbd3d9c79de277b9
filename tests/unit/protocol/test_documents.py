import json

from naiad.metadata import IndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from naiad.protocol import documents
from naiad.statistics import BatchStatistics, Duration, ModelStatistics, ResponseStatistics


def test_metadata() -> None:
    assert json.loads(documents.server_metadata(ServerMetadata("triton", "2.51.0", ("a", "b")))) == {
        "name": "triton",
        "version": "2.51.0",
        "extensions": ["a", "b"],
    }
    metadata = ModelMetadata("m", ("1", "3"), "python", (TensorMetadata("IN", "FP32", (-1, 2)),), ())
    assert json.loads(documents.model_metadata(metadata)) == {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "python",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [],
    }


def test_index_leaves_out_what_is_not_there() -> None:
    entries = [IndexEntry("a"), IndexEntry("b", "1", "READY", ""), IndexEntry("c", "2", "UNAVAILABLE", "unloaded")]
    assert json.loads(documents.index(entries)) == [
        {"name": "a"},
        {"name": "b", "version": "1", "state": "READY"},
        {"name": "c", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"},
    ]


def test_statistics() -> None:
    model = ModelStatistics("m", "1", 1234, 7, 3)
    model.infer.success.add(99, 3)
    model.batches = {4: BatchStatistics(Duration(1, 10)), 1: BatchStatistics(Duration(2, 20))}
    model.responses = {"0": ResponseStatistics(success=Duration(5, 50))}
    (document,) = json.loads(documents.statistics([model]))["model_stats"]
    none = {"count": 0, "ns": 0}
    assert document == {
        "name": "m",
        "version": "1",
        "last_inference": 1234,
        "inference_count": 7,
        "execution_count": 3,
        "inference_stats": {
            "success": {"count": 3, "ns": 99},
            "fail": none,
            "queue": none,
            "compute_input": none,
            "compute_infer": none,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "response_stats": {
            "0": {
                "compute_infer": none,
                "compute_output": none,
                "success": {"count": 5, "ns": 50},
                "fail": none,
                "empty_response": none,
                "cancel": none,
            }
        },
        "batch_stats": [
            {"batch_size": 1, "compute_input": {"count": 2, "ns": 20}, "compute_infer": none, "compute_output": none},
            {"batch_size": 4, "compute_input": {"count": 1, "ns": 10}, "compute_infer": none, "compute_output": none},
        ],
        "memory_usage": [],
    }


def test_regions() -> None:
    assert json.loads(documents.system_regions([("r", "/k", 0, 64)])) == [
        {"name": "r", "key": "/k", "offset": 0, "byte_size": 64}
    ]
    assert json.loads(documents.cuda_regions([("r", 1, 64)])) == [{"name": "r", "device_id": 1, "byte_size": 64}]
