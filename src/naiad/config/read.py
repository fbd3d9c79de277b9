"""From a model directory to a `ModelConfig`, in the stages in which Triton finds out what is wrong. Does the I/O;
called in a thread.

1. `read_draft` reads the configuration (override, `configs/<name>.pbtxt`, `config.pbtxt`, in this order), completes
   it from the files and by default and checks what needs no backend. With auto-completion off inputs and outputs
   are checked too, and the file must exist. What it raises is the reason, for the log; Triton tells a client only
   "failed to load 'X', failed to poll from model repository" (INTERNAL).
2. The caller picks the versions by `draft.version_policy` (`repository.snapshot.versions_for`).
3. `prepare` fills in and checks the instance groups; it answers what the backend's `autocomplete` gets to see.
4. `finish` merges what the backend proposed, completes, checks everything and makes the `ModelConfig`.
5. `read_labels` reads the label files.

What 3 to 5 raise is text for the client; the caller puts it into "load failed for model 'X': version N is at
UNAVAILABLE state: <kind>: <text>;" and a line end. For an ensemble, leave out 3 and call `validate.resolve_ensemble`
after 4, with the configurations of its models.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.config import complete, validate
from naiad.config.model_config import ModelConfig
from naiad.config.parse import ConfigDict, parse_json, parse_text, to_dict
from naiad.errors import Internal, InvalidArgument, NotFound, Unsupported


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A configuration that has passed what can be checked without its backend. `proto` is for reading only.

    `provided` says that somebody wrote a configuration; without one the backend must bring it. `source` is the
    file it came from, "override" or "".
    """

    name: str
    directory: Path
    proto: Proto
    provided: bool
    source: str
    gpus: tuple[int, ...] = ()

    @property
    def backend(self) -> str:
        return str(self.proto.backend)

    @property
    def is_ensemble(self) -> bool:
        return bool(self.proto.HasField("ensemble_scheduling"))

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the models that an ensemble's steps use, each once."""
        return tuple(dict.fromkeys(step.model_name for step in self.proto.ensemble_scheduling.step))

    @property
    def version_policy(self) -> Any:
        """The ModelVersionPolicy message, filled in."""
        return self.proto.version_policy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draft) and bool(self.proto == other.proto)

    __hash__ = None  # type: ignore[assignment]


def config_path(directory: Path, config_name: str = "") -> Path:
    """The file to read: `configs/<config_name>.pbtxt` if there is one, else `config.pbtxt`. It may not exist."""
    if config_name:
        path = directory / "configs" / f"{config_name}.pbtxt"
        if path.exists():
            return path
    return directory / "config.pbtxt"


def read_draft(
    directory: Path,
    name: str,
    *,
    config_name: str = "",
    override: str | bytes | None = None,
    auto_complete: bool = True,
    gpus: Sequence[int] = (),
) -> Draft:
    """Reads and checks the configuration of the model `name` in `directory`.

    `config_name` is `--model-config-name`, `override` the JSON of a load request, `auto_complete` the opposite of
    `--disable-auto-complete-config`, `gpus` the ids of this machine's GPUs. Raises InvalidArgument with
    everything that is wrong, Internal for files that cannot be read.
    """
    try:
        proto, source = _read(directory, config_name, override, auto_complete)
        complete.from_files(proto, name, _first_version_entries(directory))
        complete.defaults(proto)
        problems = list(validate.config_problems(proto))
        if not auto_complete:
            problems += validate.io_problems(proto)
        if proto.name != name:
            problems.append(
                f"unexpected directory name '{name}' for model '{proto.name}', directory name must equal model name"
            )
        validate.require(problems)
    except OSError as error:
        raise Internal(f"failed to read {error.filename or directory}: {error.strerror}") from error
    return Draft(name, directory, proto, bool(source), source, tuple(gpus))


def _read(directory: Path, config_name: str, override: str | bytes | None, auto_complete: bool) -> tuple[Proto, str]:
    if override is not None:
        try:
            return parse_json(override), "override"
        except InvalidArgument as error:
            raise InvalidArgument(f"Invalid config override: {error.message}") from error
    path = config_path(directory, config_name)
    if auto_complete and not path.exists():
        return Proto(), ""
    return parse_text(_read_text(path), str(path)), str(path)


def _read_text(path: Path) -> str:
    """The file as UTF-8, with or without the mark that editors on Windows begin it with. Triton takes comments in other
    encodings."""
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise Internal(f"failed to open text file for read {path}: {error.strerror}") from error


def _first_version_entries(directory: Path) -> dict[str, bool] | None:
    """The names in the first version folder, in the order of the alphabet, and whether each is a directory."""
    with os.scandir(directory) as entries:
        versions = sorted(entry.name for entry in entries if entry.name[:1].isdigit() and entry.is_dir())
    if not versions:
        return None
    with os.scandir(directory / versions[0]) as entries:
        return {entry.name: entry.is_dir() for entry in entries}


def prepare(draft: Draft, *, uses_gpus: bool = True) -> ConfigDict:
    """The configuration as the backend's `autocomplete` gets it: with its instance groups. Raises InvalidArgument.

    Does no I/O, so it may run on the loop.
    """
    return to_dict(_with_instance_groups(draft, uses_gpus))


def finish(
    draft: Draft,
    proposal: ConfigDict | None = None,
    *,
    uses_gpus: bool = True,
) -> ModelConfig:
    """The configuration with what the backend proposed (None: nothing), complete and checked.

    Raises InvalidArgument, NotFound when there is no configuration at all, Internal for a proposal that is not
    allowed. Does no I/O, so it may run on the loop.
    """
    proto = _with_instance_groups(draft, uses_gpus)
    if proposal is not None:
        complete.merge(proto, proposal)
        complete.defaults(proto)
    elif not draft.provided and draft.backend != "python":
        # Triton's Python backend always brings a configuration, even one without inputs and outputs.
        raise NotFound(f"model configuration is not provided for model '{draft.name}'")
    validate.require(
        [
            *validate.config_problems(proto),
            *validate.io_problems(proto),
            *validate.scheduling_problems(proto),
        ]
    )
    return ModelConfig(proto)


def with_instances_of(running: ModelConfig, draft: Draft, *, uses_gpus: bool = True) -> ModelConfig:
    """The complete configuration of a loaded model with the instance groups and the version policy of another draft.

    Raises InvalidArgument. Does no I/O, so it may run on the loop.
    """
    changed = _with_instance_groups(draft, uses_gpus)
    proto = Proto()
    proto.CopyFrom(running.proto)
    proto.ClearField("instance_group")
    proto.instance_group.extend(changed.instance_group)
    proto.version_policy.CopyFrom(changed.version_policy)
    return ModelConfig(proto)


def _with_instance_groups(draft: Draft, uses_gpus: bool) -> Proto:
    proto = Proto()
    proto.CopyFrom(draft.proto)
    complete.instance_groups(proto, draft.gpus, uses_gpus=uses_gpus)
    validate.require(validate.instance_group_problems(proto, draft.gpus))
    return proto


def read_labels(directory: Path, config: ModelConfig) -> dict[str, list[str]]:
    """The lines of the label files, by output name. Raises Unsupported for a file outside of `directory`, Internal
    for one that cannot be read."""
    labels: dict[str, list[str]] = {}
    for output in config.outputs.values():
        if not output.label_filename:
            continue
        path = directory / output.label_filename
        if not path.resolve().is_relative_to(directory.resolve()):
            raise Unsupported(
                f"label file path '{path}' for output '{output.name}' in model '{config.name}' is outside model "
                "directory"
            )
        lines = _read_text(path).split("\n")
        labels[output.name] = lines[:-1] if lines[-1] == "" else lines
    return labels
