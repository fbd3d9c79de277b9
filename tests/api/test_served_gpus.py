"""A server on a machine of which CUDA and NVML say that it has two GPUs, each in an order of its own: where models are
placed, labels, limits."""

import os
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
UUIDS = "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
nvmlDeviceGetHandleByUUID = UUIDS.index
nvmlDeviceGetUUID = UUIDS.__getitem__
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=100, used=(50, 20)[handle])
nvmlDeviceGetUtilizationRates = nvmlDeviceGetPowerUsage = unsupported
nvmlDeviceGetPowerManagementLimit = nvmlDeviceGetTotalEnergyConsumption = unsupported
"""
FIRST, SECOND = "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b", "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a"
#: What a model's class remembers of where it is.
PLACE = 'globals()["PLACE"] = args["model_instance_kind"] + args["model_instance_device_id"]'


@pytest.fixture
def server(
    repository: Repository, tmp_path: Path, cuda_libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_libraries))
    monkeypatch.setenv("FAKE_CUDA_GPUS", "0b0a")
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
    assert re.search(rf'^nv_inference_count\{{gpu_uuid="{FIRST}",model="on0",version="1"\}} 1$', metrics, re.MULTILINE)
    assert re.search(rf'^nv_gpu_memory_used_bytes\{{gpu_uuid="{SECOND}"\}} 50$', metrics, re.MULTILINE)


def test_a_gpu_that_is_too_full(server: Server) -> None:
    refused = "memory limit set for GPU 1 has exceeded, model loading is rejected."
    assert f"can not create model 'on1_0_0': {refused}" in error_of(server.http.load, "on1")
    # Without a wish of its own a model gets an instance on each.
    assert f"can not create model 'anywhere_0_gpu1': {refused}" in error_of(server.http.load, "anywhere")
    assert not server.named("on1") + server.named("anywhere")
