"""The GPUs that models may use, found without any framework: importing one takes seconds, and asking CUDA in a process
that forks breaks its children, so that is done in a process of its own."""

import ctypes
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from naiad.errors import Unavailable

_LOGGER = logging.getLogger(__name__)

#: CUDA takes seconds for GPUs that nobody has used for a while.
_PROBE_TIMEOUT_S = 60


def gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """The UUIDs of the GPUs of this machine; CUDA knows them by their places here. Blocks, for seconds at most."""
    uuids = _from_cuda(environment)
    if uuids is None:
        uuids = _from_nvml()
        if uuids is None:
            uuids = _from_driver(root)
        uuids = visible(uuids, environment.get("CUDA_VISIBLE_DEVICES"))
    return tuple(uuids)


def used_share(uuid: str) -> float:
    """The share, 0 to 1, of a GPU's memory that is in use, by whomever. Blocks for milliseconds. Raises Unavailable where
    NVML cannot say."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # NVML has an exception class for each
        raise Unavailable(f"cannot ask NVML for the memory of {uuid} (pip install 'naiad[gpu]'): {error}") from error
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
        return float(memory.used / memory.total)
    except nvml.NVMLError as error:
        raise Unavailable(f"NVML does not say how much of the memory of {uuid} is in use: {error}") from error
    finally:
        nvml.nvmlShutdown()


def visible(uuids: Sequence[str], chosen: str | None) -> list[str]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES, `chosen`, on a machine with these GPUs; it counts them anew from 0.

    Entries are numbers or beginnings of UUIDs ("GPU-1d7e"). CUDA ignores everything from the first entry on that is
    no GPU, and sees none at all where one is named twice. Of parts of GPUs ("MIG-..."), which are believed, a process
    sees one. CUDA alone knows its order: that of the PCI bus is assumed.
    """
    if chosen is None:
        return list(uuids)
    places: list[int] = []
    for entry in chosen.split(","):
        name = entry.strip()
        if name.startswith("MIG-") and not places:
            return [name]
        if name.isdigit():
            matches = [int(name)] if int(name) < len(uuids) else []
        else:
            matches = [place for place, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        if len(matches) != 1:
            break
        if matches[0] in places:
            return []
        places += matches
    return [uuids[place] for place in places]


def _from_cuda(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA says itself; None where it cannot be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    command = [sys.executable, "-I", str(Path(__file__).with_name("cuda_devices.py"))]
    try:
        done = subprocess.run(
            command, env=environment, timeout=_PROBE_TIMEOUT_S, capture_output=True, text=True, check=True
        )
        return done.stdout.split()
    except subprocess.CalledProcessError as error:
        problem = (error.stderr or str(error)).splitlines()[-1]
    except subprocess.TimeoutExpired as error:
        problem = str(error)
    _LOGGER.warning("CUDA does not say which GPUs there are, NVML or the driver's files do: %s", problem)
    return None


def _from_nvml() -> list[str] | None:
    """The UUIDs in the order of the PCI bus; None without NVML's module, library or driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # NVML has an exception class for each
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _from_driver(root: Path) -> list[str]:
    """What the driver says; containers see all GPUs there, but have the devices only of those that are theirs."""
    found = []
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        try:
            lines = (line.partition(":") for line in file.read_text().splitlines())
        except OSError:
            continue
        facts = {key.strip(): value.strip() for key, _, value in lines}
        if (root / "dev" / f"nvidia{facts.get('Device Minor', '')}").exists():
            found.append(facts.get("GPU UUID", ""))
    return found
