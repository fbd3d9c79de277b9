"""Where a model is looked at before it has instances. Runs in hosts."""

from naiad.backends.api import InstanceContext, ModelContext


def first_instance(model: ModelContext) -> InstanceContext:
    """Where the first instance of the configuration will run: what a model needs may be there only, and on no other
    GPU than its own is memory taken."""
    for group in model.config.get("instance_group", ()):
        kind = group["kind"]
        devices = group.get("gpus", ()) if kind == "KIND_GPU" else ()
        return InstanceContext(model.name, kind, int(devices[0]) if devices else 0)
    return InstanceContext(model.name, "KIND_CPU")
