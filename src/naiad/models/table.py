"""What is known of models: the table of records, and what is read from it. On the event loop.

Changed by the manager only. Look-ups are on the way of every request.
"""

import asyncio
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from naiad.config.read import Draft
from naiad.errors import InvalidArgument, NaiadError, NotFound, Unavailable
from naiad.metadata import IndexEntry
from naiad.models.model import Model
from naiad.models.plan import Actual, circle
from naiad.repository.snapshot import ModelDirectory

_NOTHING = Actual()

State = Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]
_UNLOADED: tuple[State, str] = ("UNAVAILABLE", "unloaded")

#: How Triton prefixes the text of an error that became a version's state, by its code.
_KIND_NAMES: Mapping[str, str] = {
    "INTERNAL": "Internal",
    "INVALID_ARG": "Invalid argument",
    "NOT_FOUND": "Not found",
    "UNAVAILABLE": "Unavailable",
    "UNSUPPORTED": "Unsupported",
    "ALREADY_EXISTS": "Already exists",
    "CANCELLED": "Cancelled",
}


def with_kind(error: BaseException) -> str:
    """The text of an error behind the name of its kind, as Triton writes it into states and logs."""
    if not isinstance(error, NaiadError):
        return f"Internal: {error}"
    return f"{_KIND_NAMES.get(error.triton_code, 'Unknown')}: {error.message}"


@dataclass(slots=True)
class Source:
    """Where a wanted model comes from: its folder (on disk or made of a load request), and its configuration as read
    from there, or why it could not be read."""

    directory: ModelDirectory
    draft: Draft | NaiadError
    #: The configuration in the load request, JSON; it makes every such load a new generation.
    override: str | None = None
    #: The folder was written for this load and goes with it.
    made_of_request: bool = False
    #: How many need the folder: the record that wants it, loads, and the versions made of it.
    uses: int = 0

    @property
    def members(self) -> tuple[str, ...]:
        return self.draft.members if isinstance(self.draft, Draft) else ()


@dataclass(slots=True)
class Record:
    """Everything known of one model."""

    name: str
    source: Source | None = None
    explicit: bool = False
    #: Counts insisted loads, so that a load request after a failure is a new generation.
    insisted: int = 0
    #: Which of all the times that other versions began to serve, of whatever model, was the last one of this.
    takeover: int = 0
    serving: object = None
    loading: object = None
    failed: object = None
    blocked: bool = False
    abandoned: bool = False
    #: Why the last load failed, as the caller of `load` is told.
    error: NaiadError | None = None
    #: How often in a row the source could not be loaded for that reason.
    failures: int = 0
    #: Loop time before which polling does not load it again.
    retry_at: float = 0.0
    models: dict[int, Model] = field(default_factory=dict)
    #: Instances that an update took out and that end what they have begun; not those of sequences.
    leaving: set[asyncio.Task[None]] = field(default_factory=set)
    #: The newest of them: what a request without a version gets.
    latest: Model | None = None
    #: Of all versions that ever were to be loaded. What failed says so until it has been loaded, as in Triton.
    states: dict[int, tuple[State, str]] = field(default_factory=dict)
    #: It was to be loaded and had no version to load.
    has_no_version: bool = False

    @property
    def is_on_its_way(self) -> bool:
        """Whether it is wanted, and neither serves nor has failed."""
        return self.source is not None and not self.blocked and not self.models and self.error is None

    @property
    def is_lost(self) -> bool:
        """Whether a version that should serve has no instance left that can."""
        return any(model.failure is not None for model in self.models.values())

    @property
    def is_known(self) -> bool:
        """Whether it ever was to be loaded. What cannot be read never was, nor what cannot be served with its members."""
        return self.has_no_version or bool(self.states)

    @property
    def is_past(self) -> bool:
        """Whether there is nothing to know of it but that it was loaded and is unloaded."""
        return (
            self.source is None
            and self.actual == _NOTHING
            and self.error is None
            and not self.has_no_version
            and not self.leaving
            and all(state == _UNLOADED for state in self.states.values())
        )

    @property
    def actual(self) -> Actual:
        return Actual(self.serving, self.loading, self.failed, self.blocked)


class ModelTable:
    """The records of all models that were ever wanted, by name; of those that are unloaded only the versions are kept,
    since whoever gives each model a new name shall not make all that looks at the others slower."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        #: Versions of unloaded models. None of them is in `records`.
        self._past: dict[str, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"<ModelTable of {len(self.records)} models, {len(self._past)} unloaded>"

    def record(self, name: str) -> Record:
        """The record of a model that is, or will be, wanted."""
        record = self.records.get(name)
        if record is None:
            record = self.records[name] = self.past_record(name)
            self._past.pop(name, None)
        return record

    def past_record(self, name: str) -> Record:
        """What there is to know of a model that is not in `records`."""
        return Record(name, states=dict.fromkeys(self._past.get(name, ()), _UNLOADED))

    def put_away(self, record: Record) -> None:
        """Takes out the record of a model that is unloaded, or was never loaded."""
        if record.is_past and self.records.pop(record.name, None) is not None and record.states:
            self._past[record.name] = tuple(sorted(record.states))

    def lookup(self, name: str, version: int = -1) -> Model:
        """The version that serves; -1 is the newest. Raises NotFound or Unavailable."""
        record = self.records.get(name)
        if record is not None:
            model = record.latest if version < 0 else record.models.get(version)
            if model is not None:
                return model
        else:
            record = self.past_record(name)
        raise missing(name, version, record.is_known, record.states)

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a request for it would find a version that can compute."""
        try:
            return self.lookup(name, version).failure is None
        except NaiadError:
            return False

    def versions(self, name: str) -> tuple[str, ...]:
        record = self.records.get(name)
        return tuple(str(version) for version in sorted(record.models)) if record else ()

    def models(self) -> Iterator[Model]:
        """All versions that serve, by name and version."""
        for name in sorted(self.records):
            models = self.records[name].models
            for version in sorted(models):
                yield models[version]

    def all_ready(self) -> bool:
        """What `--strict-readiness` asks: every version that was ever to be loaded is READY and able, or was unloaded
        cleanly, and every model that was has one (R1-69). What has failed to load is among them until it has been
        loaded, wanted or not; a model whose configuration cannot be read is not, nor an ensemble that cannot be served
        with its members: all that as in Triton."""
        for record in self.records.values():
            if not record.states and (record.has_no_version or record.is_on_its_way):
                return False
            for version, (state, reason) in record.states.items():
                if state == "READY":
                    if record.models[version].failure is not None:
                        return False
                elif reason != "unloaded":
                    return False
        return True

    def failures(self) -> list[str]:
        """Names of wanted models that have nothing that serves."""
        return sorted(
            name
            for name, record in self.records.items()
            if not record.models and (record.source is not None or record.error is not None)
        )

    def reasons(self) -> dict[str, str]:
        """Why models could not be loaded, by name."""
        return {
            name: record.error.message.removeprefix(load_failed(name, "").message.rstrip("\n"))
            for name, record in self.records.items()
            if record.error is not None
        }

    def index(self, places: Mapping[str, int], ready: bool = False) -> list[IndexEntry]:
        """The models in the repositories, with the states of their versions; not those that came with a load request
        or whose folder is gone, which Triton does not list either. `places` are the model folders, and in how many
        repositories each is."""
        entries: list[IndexEntry] = []
        for name in sorted(places):
            if places[name] > 1:
                # Whoever asks for what is ready hears of them too, as from Triton.
                reason = "model appears in two or more repositories"
                entries.append(IndexEntry(name, state="UNAVAILABLE", reason=reason))
                continue
            record = self.records.get(name) or self.past_record(name)
            shown = False
            for version, (state, reason) in sorted(record.states.items()):
                if state == "READY":
                    failure = record.models[version].failure
                    if failure is not None:
                        state, reason = "UNAVAILABLE", failure
                if not ready or state == "READY":
                    entries.append(IndexEntry(name, str(version), state, reason or None))
                shown = True
            if not shown and not ready and not record.has_no_version:
                entries.append(IndexEntry(name))
        return entries

    def why_blocked(self, ensemble: str, unavailable: tuple[str, ...]) -> str:
        """Why an ensemble cannot serve: it is a member of itself, or because of these of its members."""
        if last := circle(ensemble, self._members_of):
            return f"circular dependency between ensembles: {ensemble} -> ... -> {last} -> {ensemble}"
        reasons: list[str] = []
        unknown: list[str] = []
        for name in unavailable:
            member = self.records.get(name)
            if member is None or member.source is None or isinstance(member.source.draft, NaiadError):
                unknown.append(name)
            elif member.error is not None:
                reasons.append(
                    f"ensemble '{ensemble}' depends on '{name}' which has no loaded version. Model '{name}' loading "
                    f"failed with error: {member.error.message}"
                )
            else:
                reasons.append(f"ensemble '{ensemble}' depends on '{name}' which has no loaded version.")
        if unknown:
            text = f"ensemble {ensemble} contains models that are not available or ambiguous: {', '.join(unknown)}"
            reasons.insert(0, text)
        return "; ".join(reasons)

    def _members_of(self, name: str) -> tuple[str, ...]:
        record = self.records.get(name)
        return record.source.members if record is not None and record.source is not None else ()


def missing(name: str, version: int, known: bool, stated: Container[int]) -> NaiadError:
    """Why no version serves, in Triton's texts (R1-51); `stated` are the versions that have a state."""
    if not known:
        return NotFound(f"Request for unknown model: '{name}' is not found")
    if version < 0:
        return NotFound(f"Request for unknown model: '{name}' has no available versions")
    if version in stated:
        return Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
    return NotFound(f"Request for unknown model: '{name}' version {version} is not found")


def load_failed(name: str, reason: str) -> InvalidArgument:
    """The error of a load, as Triton words it."""
    return InvalidArgument(f"load failed for model '{name}': {reason.rstrip()}\n")
