"""The GPUs that models may use, found without any framework: importing one takes seconds, and asking CUDA in a process
that forks breaks its children."""

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from naiad.errors import Unavailable


def gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """The UUIDs of the GPUs of this machine; CUDA will know them by their places here."""
    uuids = _from_nvml()
    if uuids is None:
        uuids = _from_driver(root)
    return tuple(visible(uuids, environment.get("CUDA_VISIBLE_DEVICES")))


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
    no GPU, and sees none at all where one is named twice. Parts of GPUs ("MIG-...") are believed.
    """
    if chosen is None:
        return list(uuids)
    found: list[str] = []
    for entry in chosen.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            match = name
        elif name.isdigit():
            if int(name) >= len(uuids):
                break
            match = uuids[int(name)]
        else:
            matches = [uuid for uuid in uuids if name.startswith("GPU-") and uuid.startswith(name)]
            if len(matches) != 1:
                break
            match = matches[0]
        if match in found:
            return []
        found.append(match)
    return found


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
