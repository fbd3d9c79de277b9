"""Filling in what a model configuration leaves out, as Triton does: from the files, from the backend, by default.

Pure. Every function changes the message it is given; nothing is checked here except what a backend proposes.
"""

from collections.abc import Mapping, Sequence

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config import platforms
from naiad.config.parse import ConfigDict, from_dict
from naiad.errors import Internal

_KIND = model_config_pb2.ModelInstanceGroup

#: How long a sequence may rest when the configuration does not say.
DEFAULT_SEQUENCE_IDLE_US = 1_000_000


def from_files(config: Proto, name: str, entries: Mapping[str, bool] | None) -> None:
    """Fills in name, platform, backend and default file name for the model in the folder `name`.

    `entries` are the names in the first version directory, with whether each is a directory; None without one.
    Raises InvalidArgument when nothing says what the backend is.
    """
    if not config.name:
        config.name = name
    given = platforms.Choice(config.platform, config.backend, config.default_model_filename)
    choice = platforms.infer(name, given, entries)
    config.platform, config.backend, config.default_model_filename = choice.platform, choice.backend, choice.filename


def defaults(config: Proto) -> None:
    """Fills in what does not depend on machine or backend: version policy, preferred batch sizes, pinned memory."""
    if config.version_policy.WhichOneof("policy_choice") is None and not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    preferred = [config.max_batch_size] if config.max_batch_size > 0 else []
    scheduling = config.WhichOneof("scheduling_choice")
    if scheduling == "dynamic_batching":
        if not config.dynamic_batching.preferred_batch_size:
            config.dynamic_batching.preferred_batch_size.extend(preferred)
    elif scheduling == "sequence_batching":
        batching = config.sequence_batching
        if batching.max_sequence_idle_microseconds == 0:
            batching.max_sequence_idle_microseconds = DEFAULT_SEQUENCE_IDLE_US
        if batching.HasField("oldest") and not batching.oldest.preferred_batch_size:
            batching.oldest.preferred_batch_size.extend(preferred)
    if scheduling != "ensemble_scheduling":
        for field in ("input_pinned_memory", "output_pinned_memory"):
            if not config.optimization.HasField(field):
                getattr(config.optimization, field).enable = True


def instance_groups(config: Proto, gpus: Sequence[int], *, uses_gpus: bool = True) -> None:
    """Fills in the instance groups: one if there is none, and the name, kind, count and GPUs of each.

    `gpus` are the ids of the machine's GPUs. A backend that cannot use them (`uses_gpus`) gets none unless the
    configuration says KIND_GPU.
    """
    if config.HasField("ensemble_scheduling"):
        return
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        if not group.name:
            group.name = f"{config.name}_{index}"
        if group.kind == _KIND.KIND_AUTO:
            usable = uses_gpus and bool(gpus) and all(gpu in gpus for gpu in group.gpus)
            group.kind = _KIND.KIND_GPU if usable else _KIND.KIND_CPU
        if group.count < 1:
            two = group.kind == _KIND.KIND_CPU and config.backend in platforms.TWO_CPU_INSTANCES
            group.count = 2 if two else 1
        if group.kind == _KIND.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)


def merge(config: Proto, proposal: ConfigDict) -> None:
    """Takes over what a backend's `autocomplete` may say: batch size, inputs, outputs, a scheduler, decoupled.

    Everything else in `proposal` is ignored, and what it leaves out stays. Raises InvalidArgument if it is not a
    configuration, Internal if it asks for another scheduler than the configuration has.
    """
    proposed = from_dict(proposal)
    if "max_batch_size" in proposal:
        config.max_batch_size = proposed.max_batch_size
    for field in ("input", "output"):
        if field in proposal:
            config.ClearField(field)
            getattr(config, field).extend(getattr(proposed, field))
    has, wants = config.WhichOneof("scheduling_choice"), proposed.WhichOneof("scheduling_choice")
    if has is None and wants is not None:
        getattr(config, wants).CopyFrom(getattr(proposed, wants))
    elif wants is not None and wants != has:
        number = {field.name: field.number for field in Proto.DESCRIPTOR.fields}
        raise Internal(
            f"Cannot update scheduling choice from {number[has]} to {number[wants]} when auto-completing. "
            f"(The configuration says {has}, the backend {wants}.)"
        )
    if proposed.HasField("model_transaction_policy"):
        config.model_transaction_policy.decoupled = proposed.model_transaction_policy.decoupled
