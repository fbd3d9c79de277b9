"""Which GPUs CUDA will see."""

import sys
import types

import pytest

from naiad.errors import Unavailable
from naiad.telemetry.gpus import gpus, used_share, visible

A, B, C = UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, UUIDS),
        ("0,1,2", UUIDS),
        ("2", [C]),
        ("2,0", [C, A]),
        (" 1 , 0 ", [B, A]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [A]),
        ("0,9,1", [A]),
        ("0,0", []),
        ("GPU-cc", [C]),
        ("GPU-aa", []),
        ("GPU-aaaa-1,GPU-aabb-2", [A, B]),
        ("MIG-x,MIG-y", ["MIG-x", "MIG-y"]),
    ],
)
def test_visible(chosen, seen):
    assert visible(UUIDS, chosen) == seen


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two GPUs, of which this container has the second, and without NVML."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for minor in (0, 1):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t x\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia1").touch()
    return tmp_path


def test_the_driver_is_asked_where_there_is_no_nvml(machine):
    assert gpus({}, machine) == ("GPU-1",)
    assert gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, machine) == ("GPU-1",)
    assert gpus({"CUDA_VISIBLE_DEVICES": "GPU-0"}, machine) == ()
    (machine / "dev" / "nvidia0").touch()
    assert gpus({}, machine) == ("GPU-0", "GPU-1")
    assert gpus({"CUDA_VISIBLE_DEVICES": "1,0"}, machine) == ("GPU-1", "GPU-0")


def test_a_machine_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus({}, tmp_path) == ()


def test_how_much_of_a_gpu_is_in_use(monkeypatch):
    class Error(Exception):
        pass

    def info(handle):
        if handle != "GPU-1":
            raise Error("lost")
        return types.SimpleNamespace(total=80, used=60)

    nvml = types.ModuleType("pynvml")
    nvml.open = 0
    nvml.NVMLError = Error
    nvml.nvmlInit = lambda: setattr(nvml, "open", nvml.open + 1)
    nvml.nvmlShutdown = lambda: setattr(nvml, "open", nvml.open - 1)
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetMemoryInfo = info
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert used_share("GPU-1") == 0.75
    with pytest.raises(Unavailable, match="NVML does not say how much of the memory of GPU-2 is in use: lost"):
        used_share("GPU-2")
    assert nvml.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unavailable, match=r"pip install 'naiad\[gpu\]'"):
        used_share("GPU-1")
