"""Which GPUs CUDA will see."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

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
        ("MIG-x", ["MIG-x"]),
        ("MIG-x,MIG-y", ["MIG-x"]),
        ("1,MIG-x", [B]),
    ],
)
def test_visible(chosen, seen):
    assert visible(UUIDS, chosen) == seen


def test_gpus_of_which_the_driver_does_not_know_the_uuids_yet():
    unknown = "GPU-????????-????-????-????-????????????"
    assert visible([unknown, unknown], "1,0") == [unknown, unknown]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    source = Path(__file__).parents[2] / "api" / "fake_cuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


GPU = "GPU-{0}{0}{0}{0}-{0}{0}-{0}{0}-{0}{0}-{0}{0}{0}{0}{0}{0}"
MIG = GPU.replace("GPU", "MIG")


@pytest.mark.parametrize(
    ("environment", "seen", "warns"),
    [
        ({"FAKE_CUDA_GPUS": "b0a1"}, [GPU.format("b0"), GPU.format("a1")], False),
        ({"FAKE_CUDA_GPUS": "b0", "FAKE_CUDA_PART": "c2"}, [MIG.format("c2")], False),
        ({"FAKE_CUDA_GPUS": ""}, [], False),
        # The driver's files are read then, where there is none.
        ({}, [], True),
    ],
)
def test_cuda_is_asked_itself(environment, seen, warns, libraries, tmp_path):
    ask = (
        "import sys, pathlib; sys.modules['pynvml'] = None; from naiad.telemetry.gpus import gpus; "
        f"print(*gpus(root=pathlib.Path({str(tmp_path)!r})))"
    )
    given = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "CUDA_VISIBLE_DEVICES": "0", **environment}
    done = subprocess.run([sys.executable, "-c", ask], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == seen
    warning = "CUDA does not say which GPUs there are, NVML or the driver's files do: error 3 of CUDA\n"
    assert done.stderr == (warning if warns else "")


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr("naiad.telemetry.gpus._from_cuda", lambda environment: None)


@pytest.fixture
def machine(no_cuda, tmp_path, monkeypatch):
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


def test_a_machine_without_gpus(no_cuda, tmp_path, monkeypatch):
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
