"""The life of models: what is wanted, what is there, and the steps from one to the other. On the event loop.

The manager owns the table of loaded versions. It learns what is wanted from the repositories (control modes none and
poll) or from load and unload requests (explicit), asks `plan` after every event, and carries out the steps: loads run
as tasks beside each other, a model that fails never takes another along, and what fails leaves its reason here.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from naiad.config.read import Draft
from naiad.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NaiadError,
    NotFound,
    Unavailable,
    Unknown,
    Unsupported,
)
from naiad.messages import IndexEntry
from naiad.models.model import Model
from naiad.models.plan import Abandon, Actual, Block, Retire, Update, Wanted, plan
from naiad.repository.overrides import check_model_name
from naiad.repository.snapshot import ModelDirectory, Snapshot, versions_for
from naiad.telemetry.log import Log

#: What versions whose requests have ended get in any case, to unload when the server ends.
_UNLOAD_S = 1.0

State = Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]

#: How Triton prefixes the text of an error that became a version's state.
_KIND_NAMES: Mapping[type[NaiadError], str] = {
    Internal: "Internal",
    InvalidArgument: "Invalid argument",
    NotFound: "Not found",
    Unavailable: "Unavailable",
    Unsupported: "Unsupported",
    AlreadyExists: "Already exists",
    Cancelled: "Cancelled",
    Unknown: "Unknown",
}


def with_kind(error: BaseException) -> str:
    """The text of an error behind the name of its kind, as Triton writes it into states and logs."""
    if not isinstance(error, NaiadError):
        return f"Internal: {error}"
    for kind in type(error).__mro__:
        if kind in _KIND_NAMES:
            return f"{_KIND_NAMES[kind]}: {error.message}"
    return f"Unknown: {error.message}"


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


class Sources(Protocol):
    """Reads repositories and configurations, away from the loop."""

    async def scan(self, only: list[str] | None = None) -> Snapshot: ...
    async def names(self) -> Mapping[str, int]: ...
    async def read(self, directory: ModelDirectory, override: str | None = None) -> Source: ...
    async def materialise(self, name: str, parameters: Mapping[str, str | bytes]) -> Source: ...
    async def discard(self, source: Source) -> None: ...


class Loader(Protocol):
    """Loads one version; raises NaiadError."""

    async def load(self, source: Source, version: int) -> Model: ...


@dataclass(slots=True)
class _Record:
    """Everything known of one model."""

    name: str
    source: Source | None = None
    explicit: bool = False
    #: Counts insisted loads, so that a load request after a failure is a new generation.
    insisted: int = 0
    serving: object = None
    loading: object = None
    failed: object = None
    blocked: bool = False
    abandoned: bool = False
    #: Why the last load failed, as the caller of `load` is told.
    error: NaiadError | None = None
    models: dict[int, Model] = field(default_factory=dict)
    #: The newest of them: what a request without a version gets.
    latest: Model | None = None
    states: dict[int, tuple[State, str]] = field(default_factory=dict)

    @property
    def is_lost(self) -> bool:
        """Whether a version that should serve has no instance left that can."""
        return any(model.failure is not None for model in self.models.values())

    @property
    def actual(self) -> Actual:
        return Actual(self.serving, self.loading, self.failed, self.blocked)


class ModelManager:
    """Keeps the wanted models loaded. Enter it to load the first ones; leaving it unloads everything."""

    def __init__(
        self,
        *,
        sources: Sources,
        loader: Loader,
        log: Log,
        mode: Literal["none", "poll", "explicit"] = "none",
        startup_models: tuple[str, ...] = (),
        load_thread_count: int = 4,
        load_retry_count: int = 0,
    ) -> None:
        self._sources = sources
        self._loader = loader
        self._log = log
        self.mode = mode
        self._startup_models = startup_models
        self._load_slots = asyncio.Semaphore(load_thread_count)
        self._load_retry_count = load_retry_count
        #: The picture of the repositories that `start` loaded from.
        self.first_snapshot = Snapshot()
        self._records: dict[str, _Record] = {}
        #: What each version is made of that serves or is being closed.
        self._made_of: dict[Model, Source] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Those of them that load something.
        self._loads: set[asyncio.Task[None]] = set()
        self._accepting = True
        #: Serialises what reads the repository for a request, so that two of them do not read in between each other.
        self._requests = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ModelManager {self.mode}, {len(self._records)} models>"

    # ---------------------------------------------------------------- looking up

    def lookup(self, name: str, version: int = -1) -> Model:
        """The version that serves; -1 is the newest. Raises NotFound or Unavailable with Triton's texts (R1-51)."""
        record = self._records.get(name)
        if record is not None:
            model = record.latest if version < 0 else record.models.get(version)
            if model is not None:
                return model
        if record is None or (record.source is None and not record.states):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version < 0:
            raise NotFound(f"Request for unknown model: '{name}' has no available versions")
        if version in record.states:
            raise Unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a request for it would find a version that can compute."""
        try:
            return self.lookup(name, version).failure is None
        except NaiadError:
            return False

    def versions(self, name: str) -> tuple[str, ...]:
        record = self._records.get(name)
        return tuple(str(version) for version in sorted(record.models)) if record else ()

    def models(self) -> Iterator[Model]:
        """All versions that serve, by name and version."""
        for name in sorted(self._records):
            models = self._records[name].models
            for version in sorted(models):
                yield models[version]

    def all_ready(self) -> bool:
        """What `--strict-readiness` asks: every known version is READY and able, or was unloaded cleanly, and every
        wanted model has one (R1-69)."""
        for record in self._records.values():
            if record.source is not None and not record.states:
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
            for name, record in self._records.items()
            if not record.models and (record.source is not None or record.error is not None)
        )

    async def index(self, ready: bool = False) -> list[IndexEntry]:
        """The models in the repositories, with the states of their versions; not those that came with a load request
        or whose folder is gone, which Triton does not list either."""
        places = await self._sources.names()
        entries: list[IndexEntry] = []
        for name in sorted(places):
            if places[name] > 1:
                if not ready:
                    reason = "model appears in two or more repositories"
                    entries.append(IndexEntry(name, state="UNAVAILABLE", reason=reason))
                continue
            record = self._records.get(name)
            shown = False
            for version, (state, reason) in sorted(record.states.items()) if record else ():
                if state == "READY":
                    failure = record.models[version].failure if record else None
                    if failure is not None:
                        state, reason = "UNAVAILABLE", failure
                if not ready or state == "READY":
                    entries.append(IndexEntry(name, str(version), state, reason or None))
                shown = True
            if not shown and not ready:
                entries.append(IndexEntry(name))
        return entries

    # ---------------------------------------------------------------- what is wanted

    async def start(self) -> None:
        """Loads what is wanted at the start and returns when each has either turned READY or failed."""
        snapshot = self.first_snapshot = await self._sources.scan()
        self._note_snapshot(snapshot)
        if self.mode == "explicit":
            names = list(self._startup_models)
            if names == ["*"]:
                names = sorted(snapshot.models)
            missing = [name for name in names if name not in snapshot.models]
            for name in missing:
                record = self._record(name)
                record.error = Internal(f"failed to load '{name}', failed to poll from model repository")
                self._log.error(f"{record.error.message}: there is no such model in the repositories")
            await self._want([name for name in names if name in snapshot.models], snapshot)
        else:
            await self._want(sorted(snapshot.models), snapshot)
        await self._settle()

    async def follow(self, snapshot: Snapshot) -> None:
        """Takes a new picture of the repositories (mode poll): loads, reloads and unloads what has changed."""
        self._note_snapshot(snapshot)
        gone = [name for name, record in self._records.items() if record.source and name not in snapshot.models]
        for name in gone:
            if not snapshot.failures:  # an unreadable repository says nothing about its models
                self._drop(self._records[name])
        changed = [
            name
            for name, directory in snapshot.models.items()
            if (source := self._record(name).source) is None or not _same_files(source.directory, directory)
        ]
        await self._want(changed, snapshot)
        self._reconcile()

    def _note_snapshot(self, snapshot: Snapshot) -> None:
        for repository, reason in snapshot.failures.items():
            self._log.error(f"failed to read model repository '{repository}': {reason}")
        for name in snapshot.duplicates:
            self._log.error(f"failed to poll model '{name}': not unique across all model repositories")
        for directory in snapshot.models.values():
            for note in directory.notes:
                self._log.warning(note)

    async def _want(self, names: list[str], snapshot: Snapshot) -> None:
        sources = await asyncio.gather(*(self._sources.read(snapshot.models[name]) for name in names))
        for name, source in zip(names, sources, strict=True):
            record = self._record(name)
            record.explicit = True
            self._take_source(record, source)
        for source in sources:
            await self._want_members(source)
        self._reconcile()

    async def _want_members(self, source: Source) -> None:
        """In explicit mode an ensemble brings its members along, those of nested ensembles too."""
        for name in source.members:
            record = self._record(name)
            if record.source is None:
                snapshot = await self._sources.scan([name])
                if name in snapshot.models:
                    member = await self._sources.read(snapshot.models[name])
                    self._take_source(record, member)
                    await self._want_members(member)

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Loads or reloads a model and returns when it serves. Raises with the reason when it does not."""
        self._require_explicit()
        check_model_name(name)
        async with self._requests:
            source = await self._source_for(name, parameters)
            record = self._record(name)
            if isinstance(source.draft, NaiadError):
                await self._sources.discard(source)
                record.error = source.draft
                self._log.error(f"failed to poll model '{name}': {source.draft.message}")
                if not record.states and record.source is None:
                    del self._records[name]
                raise Internal(f"failed to load '{name}', failed to poll from model repository") from source.draft
            record.explicit = True
            if source.override is not None or record.failed is not None or record.blocked or record.is_lost:
                record.insisted += 1
            record.error = None
            record.blocked = False
            self._take_source(record, source)
            await self._want_members(source)
            self._reconcile()
        # Until the model rests. Another load of it meanwhile is joined: its outcome is that of this one too.
        while record.source is not None and (record.loading is not None or self._is_pending(record)):
            await self._next_change()
        if record.source is None:
            raise Unavailable(f"the load of model '{name}' was given up: the model was unloaded meanwhile")
        if record.error is not None:
            raise record.error

    async def _source_for(self, name: str, parameters: Mapping[str, str | bytes]) -> Source:
        if parameters:
            return await self._sources.materialise(name, parameters)
        snapshot = await self._sources.scan([name])
        directory = snapshot.models.get(name)
        if directory is None:
            if name in snapshot.duplicates:
                self._log.error(f"failed to poll model '{name}': not unique across all model repositories")
            raise Internal(f"failed to load '{name}', failed to poll from model repository")
        return await self._sources.read(directory)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Takes a model out of service; returns at once, the version goes when its last request has been answered.
        Unknown and unloaded models are fine."""
        self._require_explicit()
        async with self._requests:
            record = self._records.get(name)
            if record is None or record.source is None:
                return
            members = record.source.members if unload_dependents else ()
            self._drop(record)
            for member in members:
                self._drop_unused(member)
            self._reconcile()

    def _drop(self, record: _Record) -> None:
        self._set_source(record, None)
        record.explicit = False
        record.error = None

    def _drop_unused(self, name: str) -> None:
        """Unloads a member that nobody asked for by name and no other wanted ensemble uses."""
        record = self._records.get(name)
        if record is None or record.source is None or record.explicit:
            return
        if any(name in other.source.members for other in self._records.values() if other.source is not None):
            return
        members = record.source.members
        self._drop(record)
        for member in members:
            self._drop_unused(member)

    def _require_explicit(self) -> None:
        if self.mode != "explicit":
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        if not self._accepting:
            raise Unavailable("Server is stopping, models are neither loaded nor unloaded any more")

    def _record(self, name: str) -> _Record:
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record(name)
        return record

    def _take_source(self, record: _Record, source: Source) -> None:
        old = record.source
        if old is not None and old.override is None and source.override is None and _same(old, source):
            return
        self._set_source(record, source)

    def _set_source(self, record: _Record, source: Source | None) -> None:
        old, record.source = record.source, source
        if source is not None:
            source.uses += 1
        if old is not None:
            self._release(old)

    def _release(self, source: Source) -> None:
        """One use less of a source; a folder that came with a load request goes with the last."""
        source.uses -= 1
        if not source.uses and source.made_of_request:
            self._spawn(self._sources.discard(source), f"remove the files of '{source.directory.name}'")

    # ---------------------------------------------------------------- steps

    def _wanted(self) -> dict[str, Wanted]:
        wanted: dict[str, Wanted] = {}
        for name, record in self._records.items():
            if record.source is not None:
                wanted[name] = Wanted(self._generation(record, ()), record.source.members)
        return wanted

    def _generation(self, record: _Record, above: tuple[str, ...]) -> object:
        """What makes a load a different one: configuration, files, members. An ensemble that contains itself ends the
        walk; validation has refused it with the cycle named."""
        source = record.source
        if source is None:
            return None
        directory = source.directory
        members = [
            self._generation(self._records[member], (*above, record.name))
            for member in source.members
            if member in self._records and member not in above and member != record.name
        ]
        versions = [(number, version.fingerprint) for number, version in directory.versions.items()]
        return (record.insisted, directory.fingerprint, tuple(versions), source.override, tuple(members))

    def _is_pending(self, record: _Record) -> bool:
        """Whether a step for this model is still to come, because members are on their way."""
        if record.source is None or record.blocked:
            return False
        generation = self._generation(record, ())
        return generation not in (record.serving, record.failed)

    def _reconcile(self) -> None:
        """Carries out the steps that can be taken now. Called after every event."""
        steps = plan(self._wanted(), {name: record.actual for name, record in self._records.items()})
        for step in steps:
            record = self._records[step.name]
            match step:
                case Update():
                    self._begin_update(record)
                case Block():
                    self._block(record, step.unavailable)
                case Abandon():
                    record.abandoned = True
                case Retire():
                    self._retire(record)
        self._changed.set()
        if any(isinstance(step, Block | Retire) for step in steps):
            self._reconcile()

    def _begin_update(self, record: _Record) -> None:
        assert record.source is not None, "this is a bug: an update without a source"
        record.loading = self._generation(record, ())
        record.abandoned = False
        record.blocked = False
        record.source.uses += 1
        load = self._spawn(self._update(record, record.source, record.loading), f"load {record.name}")
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)

    async def _update(self, record: _Record, source: Source, generation: object) -> None:
        """Loads all wanted versions of a model; they take over together or not at all."""
        loaded: dict[int, Model] = {}
        errors: dict[int, NaiadError] = {}
        versions: tuple[int, ...] = ()
        try:
            if isinstance(source.draft, NaiadError):
                raise source.draft
            choice = versions_for(record.name, source.draft.version_policy, source.directory.versions)
            for note in choice.notes:
                self._log.warning(note)
            versions = choice.versions
            for version in versions:
                if version not in record.models:
                    record.states[version] = ("LOADING", "")
            results = await asyncio.gather(*(self._load_version(source, v) for v in versions), return_exceptions=True)
            for version, result in zip(versions, results, strict=True):
                if isinstance(result, Model):
                    loaded[version] = result
                elif isinstance(result, NaiadError):
                    errors[version] = result
                else:
                    self._log.exception(f"loading '{record.name}' version {version} failed", result)
                    errors[version] = Internal(f"{result!r}. This is a bug.")
            if errors and source.draft.is_ensemble:
                raise next(iter(errors.values()))
            if errors:
                raise InvalidArgument(
                    "".join(
                        f"version {version} is at UNAVAILABLE state: {with_kind(error)};\n"
                        for version, error in errors.items()
                    )
                )
            for model in loaded.values():
                self._made_of[model] = source
                source.uses += 1
        except Exception as error:
            self._update_failed(record, generation, versions, loaded, errors, error)
        else:
            self._update_done(record, source, generation, loaded)
        finally:
            self._release(source)
        self._reconcile()

    async def _load_version(self, source: Source, version: int) -> Model:
        attempt = 0
        while True:
            try:
                async with self._load_slots:
                    return await self._loader.load(source, version)
            except NaiadError:
                attempt += 1
                if attempt > self._load_retry_count:
                    raise

    def _update_failed(
        self,
        record: _Record,
        generation: object,
        versions: tuple[int, ...],
        loaded: dict[int, Model],
        errors: dict[int, NaiadError],
        error: Exception,
    ) -> None:
        record.loading = None
        if isinstance(error, NaiadError):
            problem: NaiadError = _load_failed(record.name, error.message)
        else:
            problem = Internal(f"load failed for model '{record.name}': {error!r}. This is a bug.")
            self._log.exception(f"loading model '{record.name}' failed", error)
        if not record.abandoned:
            record.failed = generation
            record.error = problem
        for version in versions:
            reason = with_kind(errors[version]) if version in errors else "unloaded"
            if version in errors:
                self._log.error(f"failed to load '{record.name}' version {version}: {reason}")
            if version not in record.models:
                record.states[version] = ("UNAVAILABLE", "unloaded" if record.abandoned else reason)
        if not versions:
            self._log.error(f"failed to load '{record.name}': {with_kind(problem)}")
        for model in loaded.values():
            self._spawn(model.close(), f"close {model.name}")

    def _update_done(self, record: _Record, source: Source, generation: object, loaded: dict[int, Model]) -> None:
        record.loading = None
        if record.abandoned:
            for version, model in loaded.items():
                if version not in record.models:
                    record.states[version] = ("UNLOADING", "")
                self._spawn(self._close(record, model), f"close {record.name}")
            return
        old = record.models
        self._serve(record, loaded)
        record.serving = generation
        record.failed = None
        record.error = None
        for version in loaded:
            record.states[version] = ("READY", "")
            self._log.info(f"successfully loaded '{record.name}' version {version}")
        for version in list(record.states):
            if version not in loaded and version not in old and version not in source.directory.versions:
                del record.states[version]
        for version, model in old.items():
            if version not in loaded:
                record.states[version] = ("UNLOADING", "")
            self._spawn(self._close(record, model), f"close {record.name}")

    def _serve(self, record: _Record, models: dict[int, Model]) -> None:
        record.models = models
        record.latest = models[max(models)] if models else None

    def _block(self, record: _Record, unavailable: tuple[str, ...]) -> None:
        """An ensemble without its members does not serve, and says why."""
        reasons: list[str] = []
        unknown: list[str] = []
        for name in unavailable:
            member = self._records.get(name)
            if member is None or member.source is None or isinstance(member.source.draft, NaiadError):
                unknown.append(name)
            elif member.error is not None:
                reasons.append(
                    f"ensemble '{record.name}' depends on '{name}' which has no loaded version. Model '{name}' loading "
                    f"failed with error: {member.error.message}"
                )
            else:
                reasons.append(f"ensemble '{record.name}' depends on '{name}' which has no loaded version.")
        if unknown:
            text = f"ensemble {record.name} contains models that are not available or ambiguous: {', '.join(unknown)}"
            reasons.insert(0, text)
        reason = "; ".join(reasons)
        self._retire(record, reason)
        record.blocked = True
        record.error = _load_failed(record.name, reason)
        for version in record.source.directory.versions if record.source else ():
            record.states.setdefault(version, ("UNAVAILABLE", reason))
        self._log.error(f"failed to load '{record.name}': {reason}")

    def _retire(self, record: _Record, reason: str = "unloaded") -> None:
        models = record.models
        self._serve(record, {})
        record.serving = None
        record.failed = None
        record.blocked = False
        for version, (state, _) in list(record.states.items()):
            if state == "UNAVAILABLE":
                record.states[version] = ("UNAVAILABLE", reason)
        for version, model in models.items():
            record.states[version] = ("UNLOADING", "")
            self._spawn(self._close(record, model, reason), f"close {record.name}")

    async def _close(self, record: _Record, model: Model, reason: str = "unloaded") -> None:
        try:
            await model.close()
        finally:
            self._release(self._made_of.pop(model))
        is_last = not any(other.name == model.name and other.version == model.version for other in self._made_of)
        if is_last and record.states.get(model.version, ("",))[0] == "UNLOADING":
            record.states[model.version] = ("UNAVAILABLE", reason)
        if reason == "unloaded":
            self._log.info(f"successfully unloaded '{model.name}' version {model.version}")
        self._changed.set()

    # ---------------------------------------------------------------- tasks

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._log.exception(f"{name} failed", error)

        task = asyncio.get_running_loop().create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _settle(self) -> None:
        """Waits until no load is under way and none is still to come."""
        while any(record.loading is not None or self._is_pending(record) for record in self._records.values()):
            await self._next_change()

    async def close(self, timeout_s: float) -> bool:
        """Unloads everything; versions whose requests do not end within `timeout_s` are closed all the same. Whether
        there were none."""
        self._accepting = False
        for record in self._records.values():
            self._drop(record)
        self._reconcile()
        for load in self._loads:
            load.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s + _UNLOAD_S)
        given_up = [model for model in self._made_of if model.is_leased]
        for model in given_up:
            model.give_up()
        while self._tasks:
            await asyncio.wait(self._tasks)
        return not given_up


def _load_failed(name: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"load failed for model '{name}': {reason.rstrip()}\n")


def _same_files(one: ModelDirectory, other: ModelDirectory) -> bool:
    return one.fingerprint == other.fingerprint and one.versions == other.versions


def _same(one: Source, other: Source) -> bool:
    return (
        _same_files(one.directory, other.directory) and isinstance(one.draft, Draft) and isinstance(other.draft, Draft)
    )
