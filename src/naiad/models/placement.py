"""Which instances a version has, and what a new configuration changes of them: pure.

    placed_instances(config)         every instance that the instance groups ask for, named
    only_gpu(config)                 the GPU where all of them are
    exchange(there, wanted)          which stay as they are, which go, and which are new
    needs_only_instances(...)        whether that is all it takes to follow a change of the repository

An instance stays if its group is the same but for name and count, on the same device, as in Triton
(core/src/backend_model.cc, PrepareInstances). It keeps its name, and new ones get names that nobody has.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from naiad.backends.api import InstanceContext
from naiad.config.model_config import InstanceGroup, ModelConfig, only_instances_differ
from naiad.config.read import Draft
from naiad.scheduling.rate_limit import Placed

if TYPE_CHECKING:
    from naiad.models.table import Source


class Exchange(NamedTuple):
    """`kept` and `removed` are positions among the instances that are there."""

    kept: list[int]
    removed: list[int]
    added: list[Placed]


def placed_instances(config: ModelConfig) -> list[Placed]:
    """The instances that the instance groups ask for, named as Triton names them (reference R2-66): `count` of each
    group, on each GPU it lists; passive ones take no requests and are not loaded. Neighbours are on different GPUs, as
    in Triton: who has the first ones work has all GPUs work."""
    placed: list[Placed] = []
    names: set[str] = set()
    for group in config.instance_groups:
        if group.passive:
            continue
        for number in range(group.count):
            for device in group.gpus or (0,):
                device_id = device if group.kind == "KIND_GPU" else 0
                context = InstanceContext(_name(group, number, device), group.kind, device_id)
                # Groups may have the same name, and list a GPU twice; hosts tell instances by their names.
                context = _with_free_name(group, context, names)
                names.add(context.name)
                placed.append((group, context))
    return placed


def only_gpu(config: ModelConfig) -> int | None:
    """The GPU on which all instances are; None where they are on several, or any is elsewhere."""
    devices = {(context.kind, context.device_id) for _, context in placed_instances(config)}
    kind, device = devices.pop() if len(devices) == 1 else ("", 0)
    return device if kind == "KIND_GPU" else None


def _name(group: InstanceGroup, number: int, device: int) -> str:
    return f"{group.name}_{number}_gpu{device}" if len(group.gpus) > 1 else f"{group.name}_{number}"


def _signature(placed: Placed) -> tuple[InstanceGroup, int]:
    """What makes two instances the same to a client and to their model."""
    group, context = placed
    return replace(group, name="", count=0), context.device_id


def exchange(there: Sequence[Placed], wanted: Sequence[Placed], lost: Container[int] = ()) -> Exchange:
    """What turns the instances that are there into those that are wanted. Of several that could stay, those that have
    the name stay, then the first ones; `lost` are positions of those that serve no more and never stay."""
    usable = [position for position in range(len(there)) if position not in lost]
    taken_by: dict[int, int] = {}
    for same_name in (True, False):
        for number, placed in enumerate(wanted):
            if number in taken_by.values():
                continue
            for position in usable:
                same = _signature(there[position]) == _signature(placed)
                if position not in taken_by and same and (not same_name or there[position][1].name == placed[1].name):
                    taken_by[position] = number
                    break
    kept = sorted(taken_by)
    names = {there[position][1].name for position in kept}
    added: list[Placed] = []
    for number, (group, context) in enumerate(wanted):
        if number not in taken_by.values():
            context = _with_free_name(group, context, names)
            names.add(context.name)
            added.append((group, context))
    return Exchange(kept, [position for position in range(len(there)) if position not in taken_by], added)


def _with_free_name(group: InstanceGroup, context: InstanceContext, names: Container[str]) -> InstanceContext:
    number = 0
    while context.name in names:
        context = replace(context, name=_name(group, number, context.device_id))
        number += 1
    return context


def needs_only_instances(running: ModelConfig, old: "Source", new: "Source", version: int) -> bool:
    """Whether a version made of `old`, with the complete configuration `running`, becomes that of `new` by other
    instances alone: the files are those it was loaded from, and nothing of the configuration differs that a loaded
    version depends on. Files that come with a request are always new ones."""
    if not isinstance(old.draft, Draft) or not isinstance(new.draft, Draft):
        return False
    if old.made_of_request or new.made_of_request:
        return False
    one, other = old.directory, new.directory
    if (one.directory, one.fingerprint) != (other.directory, other.fingerprint):
        return False
    if one.versions.get(version) != other.versions.get(version):
        return False
    # The second: whoever edits what `GET .../config` says sends what the backend has completed.
    return any(only_instances_differ(each, new.draft.proto) for each in (old.draft.proto, running.proto))
