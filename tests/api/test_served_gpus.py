"""A server on a machine of which NVML says that it has two GPUs: where models are placed, labels, limits."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Repository, Server, error_of

NVML = """
from types import SimpleNamespace

class NVMLError(Exception):
    pass

def unsupported(handle):
    raise NVMLError("not supported")

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid[-1])
nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=100, used=50)
nvmlDeviceGetUtilizationRates = nvmlDeviceGetPowerUsage = unsupported
nvmlDeviceGetPowerManagementLimit = nvmlDeviceGetTotalEnergyConsumption = unsupported
"""
#: What a model's class remembers of where it is.
PLACE = 'globals()["PLACE"] = args["model_instance_kind"] + args["model_instance_device_id"]'


@pytest.fixture
def server(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    repository.doer("anywhere", initialize=PLACE)
    for gpu in 0, 1:
        repository.doer(f"on{gpu}", initialize=PLACE, config=f"instance_group {{ kind: KIND_GPU gpus: {gpu} }}")
    repository.doer("on2", config="instance_group { kind: KIND_GPU gpus: 2 }")
    with Server(repository, flags=("--model-control-mode=explicit", "--model-load-gpu-limit=1:0.4")) as server:
        yield server.started()


def test_models_on_gpus(server: Server) -> None:
    http = server.http
    http.load("on0")
    assert http.do("on0", "result = PLACE") == "GPU0"
    assert (
        "instance group on2_0 of model on2 specifies invalid or unsupported gpu id 2. GPUs with at least the minimum "
        "required CUDA compute compatibility of 6.000000 are: 0, 1"
    ) in error_of(http.load, "on2")
    metrics = server.metrics()
    assert re.search(r'^nv_inference_count\{gpu_uuid="GPU-0",model="on0",version="1"\} 1$', metrics, re.MULTILINE)
    assert re.search(r'^nv_gpu_memory_used_bytes\{gpu_uuid="GPU-1"\} 50$', metrics, re.MULTILINE)


def test_a_gpu_that_is_too_full(server: Server) -> None:
    refused = "memory limit set for GPU 1 has exceeded, model loading is rejected."
    assert f"can not create model 'on1_0_0': {refused}" in error_of(server.http.load, "on1")
    # Without a wish of its own a model gets an instance on each.
    assert f"can not create model 'anywhere_0_gpu1': {refused}" in error_of(server.http.load, "anywhere")
    assert not server.named("on1") + server.named("anywhere")
