"""What model repositories contain: one complete, frozen picture per scan, and which versions a policy picks.

`scan` blocks (it walks directories) and belongs into a thread. It reads no configuration and decides nothing:
two snapshots are compared, never patched. `versions_for` is pure.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from naiad.errors import InvalidArgument

#: Folders of a model that belong to its configuration and are never versions.
RESERVED_DIRECTORIES = frozenset({"warmup", "initial_state", "configs"})
#: Folders of a repository that somebody else puts there: file systems and Python.
_NO_MODELS = frozenset({"lost+found", "__pycache__"})
#: What of a model folder is nothing but configurations.
_CONFIGURATIONS = frozenset({"config.pbtxt", "configs"})
_LARGEST_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class VersionDirectory:
    """A version folder. `fingerprint` changes with any path, size or modification time below it."""

    version: int
    directory: Path
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model folder. `fingerprint` covers all that is not in a version folder: labels, warm-up data, modules;
    `config_fingerprint` the configurations, which are no part of it. `notes` are warnings for the log about folders that were
    left out."""

    name: str
    repository: str
    directory: Path
    fingerprint: str
    versions: Mapping[int, VersionDirectory]
    notes: tuple[str, ...] = ()
    config_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All repositories at one moment.

    `models` are those that are in exactly one repository; `duplicates` name the folders of the others, which are not
    served. `failures` say, by repository, why it could not be read; nothing is known of the models in it. `notes` are
    warnings for the log about repositories that look like a mistake.
    """

    models: Mapping[str, ModelDirectory] = field(default_factory=dict)
    duplicates: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)


def scan(repositories: Iterable[str | Path], only: Collection[str] | None = None) -> Snapshot:
    """Reads the repositories; with `only`, just the models of these names. Blocks.

    Never raises for what it finds: what vanishes during the scan is not in the snapshot, what cannot be read is in
    `failures` (a repository) or changes the fingerprint (a file).
    """
    found: dict[str, list[ModelDirectory]] = {}
    failures: dict[str, str] = {}
    notes: list[str] = []
    for repository in dict.fromkeys(os.fspath(path) for path in repositories):
        try:
            names = _model_names(repository, only)
        except FileNotFoundError:
            failures[repository] = f"there is no folder '{os.path.abspath(repository)}'"
            continue
        except OSError as error:
            failures[repository] = f"cannot open folder '{os.path.abspath(repository)}': {error.strerror}"
            continue
        for name in [name for name in names if not _is_text(name)]:
            names.remove(name)
            notes.append(f"ignore folder {name!r} of model repository '{repository}' whose name is not UTF-8")
        if only is None and os.path.isfile(os.path.join(repository, "config.pbtxt")):
            notes.append(model_in_place_of_repository(repository))
        elif only is None and not names:
            notes.append(f"there are no models in model repository '{repository}'")
        for name in names:
            model = _read_model(name, repository)
            if model is not None:
                found.setdefault(name, []).append(model)
    return Snapshot(
        models={name: places[0] for name, places in sorted(found.items()) if len(places) == 1},
        duplicates={
            name: tuple(model.directory for model in places)
            for name, places in sorted(found.items())
            if len(places) > 1
        },
        failures=failures,
        notes=tuple(notes),
    )


def model_in_place_of_repository(folder: str | Path) -> str:
    """What to say where a repository has a config.pbtxt."""
    return f"'{folder}' is the folder of a model: --model-repository is the folder above it"


def model_names(repositories: Iterable[str | Path]) -> tuple[Counter[str], frozenset[str]]:
    """The model folders, and in how many repositories each is; and the repositories that cannot be read. Far cheaper than
    a scan. Blocks."""
    names: Counter[str] = Counter()
    unreadable: set[str] = set()
    for repository in dict.fromkeys(os.fspath(path) for path in repositories):
        try:
            names.update(filter(_is_text, _model_names(repository, None)))
        except OSError:
            unreadable.add(repository)
    return names, frozenset(unreadable)


def _model_names(repository: str, only: Collection[str] | None) -> list[str]:
    """The model folders of a repository; hidden ones (.git, .ipynb_checkpoints) and lost+found are not models."""
    if only is not None:
        os.stat(repository)
        return sorted(name for name in only if os.path.isdir(os.path.join(repository, name)))
    with os.scandir(repository) as entries:
        return sorted(entry.name for entry in entries if _may_be_model(entry))


def _may_be_model(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.name not in _NO_MODELS and _is_folder(entry)


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8, as all texts of the protocols are."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _read_model(name: str, repository: str) -> ModelDirectory | None:
    directory = Path(repository, name)
    try:
        with os.scandir(directory) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return None
    except OSError:
        children = []  # loading it will say why it cannot be read
    versions: dict[int, VersionDirectory] = {}
    notes = _misnamed([child.name for child in children], name)
    rest: list[os.DirEntry[str]] = []
    configs: list[os.DirEntry[str]] = []
    for child in children:
        number = _version_number(child, name, notes)
        if number is None:
            (configs if child.name in _CONFIGURATIONS else rest).append(child)
        else:
            path = directory / child.name
            versions[number] = VersionDirectory(number, path, _fingerprint([child]))
    return ModelDirectory(
        name,
        repository,
        directory,
        _fingerprint(rest),
        dict(sorted(versions.items())),
        tuple(notes),
        _fingerprint(configs),
    )


def _misnamed(names: list[str], model: str) -> list[str]:
    """A warning where a model has no configuration, but a file that seems meant to be one."""
    if "config.pbtxt" in names:
        return []
    meant = [name for name in names if re.fullmatch(r"config\.(pb.*|prototxt|txt)", name, re.IGNORECASE)]
    return [f"model '{model}' has a '{name}', which nobody reads: it must be named config.pbtxt" for name in meant]


def _version_number(entry: os.DirEntry[str], model: str, notes: list[str]) -> int | None:
    """The version a folder holds, or None; `notes` gets a warning for folders that look like one and are not."""
    name = entry.name
    if name in RESERVED_DIRECTORIES or name.startswith((".", "__")) or not _is_folder(entry):
        return None
    if not re.fullmatch("[0-9]+", name):
        notes.append(f"ignore version directory '{name}' of model '{model}' which is not a number")
    elif len(name) > 1 and name.startswith("0"):
        notes.append(f"ignore version directory '{name}' of model '{model}' which has leading zeros")
    elif int(name) > _LARGEST_VERSION:
        notes.append(f"ignore version directory '{name}' of model '{model}' which is too large a number")
    else:
        return int(name)
    return None


def _fingerprint(entries: Iterable[os.DirEntry[str]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        _feed(digest, entry, entry.name, frozenset())
    return digest.hexdigest()


def _feed(digest: Any, entry: os.DirEntry[str], path: str, above: frozenset[tuple[int, int]]) -> None:
    """Adds a file, or a folder with all below it. `above` are the folders on the way here: a link back to one of
    them ends there."""
    if entry.name == "__pycache__":
        return  # written by running the model, so no change of the model
    try:
        status = entry.stat()
        if entry.is_dir():
            identity = (status.st_dev, status.st_ino)
            digest.update(f"{path}/\0".encode(errors="surrogateescape"))
            if identity not in above:
                with os.scandir(entry.path) as children:
                    for child in sorted(children, key=lambda child: child.name):
                        _feed(digest, child, f"{path}/{child.name}", above | {identity})
        else:
            line = f"{path}\0{status.st_mtime_ns}\0{status.st_size}\0"
            digest.update(line.encode(errors="surrogateescape"))
    except OSError as error:
        digest.update(f"{path}\0{error.errno}\0".encode(errors="surrogateescape"))


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """The versions that should be served, ascending, and notes for the log."""

    versions: tuple[int, ...]
    notes: tuple[str, ...] = ()


def versions_for(model: str, policy: Any, versions: Iterable[int]) -> VersionChoice:
    """Which of the `versions` present are served under `policy`, a ModelVersionPolicy message or None.

    No policy is the newest version; an empty one is all of them, as in Triton. Raises InvalidArgument, with Triton's text, if none remains.
    """
    present = sorted(set(versions))
    choice = "latest" if policy is None else policy.WhichOneof("policy_choice") or "all"
    notes: list[str] = []
    if choice == "all":
        chosen = present
    elif choice == "specific":
        chosen = []
        for version in sorted(set(policy.specific.versions)):
            if version in present:
                chosen.append(version)
            else:
                notes.append(
                    f"version {version} is specified for model '{model}', but the version directory is not present"
                )
    else:
        count = 1 if policy is None else policy.latest.num_versions
        chosen = present[-count:] if count else []
    if not chosen:
        raise InvalidArgument(f"at least one version must be available under the version policy of model '{model}'")
    return VersionChoice(tuple(chosen), tuple(notes))
