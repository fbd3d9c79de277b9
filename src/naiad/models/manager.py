"""The life of models: what is wanted, what is there, and the steps from one to the other. On the event loop.

The manager alone changes the table of models. It learns what is wanted from the repositories (control modes none and
poll) or from load and unload requests (explicit), asks `plan` after every event, and carries out the steps: loads run
as tasks beside each other, a model that fails never takes another along, and what fails leaves its reason here.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from itertools import takewhile
from typing import Any, Literal, Protocol

from naiad.config.read import Draft
from naiad.errors import (
    Internal,
    InvalidArgument,
    NaiadError,
    Unavailable,
)
from naiad.models.advice import advice
from naiad.models.model import InstanceUpdate, Model
from naiad.models.placement import needs_only_instances
from naiad.models.plan import Abandon, Block, Retire, Update, Wanted, plan
from naiad.models.table import ModelTable, Record, Source, load_failed, with_kind
from naiad.repository.overrides import check_model_name
from naiad.repository.snapshot import ModelDirectory, Snapshot, versions_for
from naiad.telemetry.log import Log

#: What differs in the texts of an error that is the same: addresses, sizes, process ids.
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")
#: Polling spends a tenth of its time at most on what takes long to fail: an environment to install, a file of gigabytes.
_LONG_S = 1.0
_RESTS_FOR = 9


class Sources(Protocol):
    """Reads repositories and configurations, away from the loop."""

    async def scan(self, only: list[str] | None = None) -> Snapshot: ...
    async def names(self) -> tuple[Counter[str], frozenset[str]]: ...
    async def read(self, directory: ModelDirectory, override: str | None = None) -> Source: ...
    async def materialise(self, name: str, parameters: Mapping[str, str | bytes]) -> Source: ...
    async def discard(self, source: Source) -> None: ...


class Loader(Protocol):
    """Loads one version, or readies one that serves for other instances; raises NaiadError."""

    async def load(self, source: Source, version: int) -> Model: ...
    async def update(self, model: Model, source: Source) -> InstanceUpdate: ...


class ModelManager:
    """Keeps the wanted models loaded. Enter it to load the first ones; leaving it unloads everything."""

    def __init__(
        self,
        table: ModelTable,
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
        self.table = table
        self._records = table.records
        #: What each version is made of that serves or is being closed.
        self._made_of: dict[Model, Source] = {}
        self._changed = asyncio.Event()
        #: How often something about the models has changed.
        self.changes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        #: Those of them that load something.
        self._loads: set[asyncio.Task[None]] = set()
        self._accepting = True
        #: The models of each request that loads or unloads, in the order the requests came.
        self._requests: list[set[str]] = []
        self._takeovers = 0

    def __repr__(self) -> str:
        return f"<ModelManager {self.mode}, {len(self._records)} models>"

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
                record = self.table.record(name)
                record.error = Internal(f"failed to load '{name}', failed to poll from model repository")
                self._log.error(f"failed to poll model '{name}': model not found in any model repository.")
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
            if (source := self.table.record(name).source) is None or not _same_files(source.directory, directory)
        ]
        await self._want(changed, snapshot)
        self._reconcile()

    async def retry(self) -> None:
        """Loads what failed to load again (mode poll): what was in its way may have gone, though its files are the same.
        What took long waits some times as long."""
        now = asyncio.get_running_loop().time()
        failed = [
            (record, record.source)
            for record in self._records.values()
            if record.source is not None
            and record.failed is not None
            and record.loading is None
            and now >= record.retry_at
        ]
        for record, source in failed:
            if isinstance(source.draft, NaiadError):
                source.draft = (await self._sources.read(source.directory)).draft
            record.failed = None
        if failed:
            self._reconcile()

    def _note_snapshot(self, snapshot: Snapshot) -> None:
        for repository, reason in snapshot.failures.items():
            self._log.error(f"failed to read model repository '{repository}': {reason}")
        for note in snapshot.notes:
            self._log.warning(note)
        for name, places in snapshot.duplicates.items():
            where = ", ".join(map(str, places))
            self._log.error(f"failed to poll model '{name}': not unique across all model repositories ({where})")
        for directory in snapshot.models.values():
            for note in directory.notes:
                self._log.warning(note)

    async def _want(self, names: list[str], snapshot: Snapshot) -> None:
        sources = await asyncio.gather(*(self._sources.read(snapshot.models[name]) for name in names))
        for name, source in zip(names, sources, strict=True):
            record = self.table.record(name)
            record.explicit = True
            self._take_source(record, source)
        for source in sources:
            await self._want_members(source)
        self._reconcile()

    async def _want_members(self, source: Source) -> None:
        """In explicit mode an ensemble brings its members along, those of nested ensembles too."""
        for name in source.members:
            if self._is_wanted(name):
                continue
            snapshot = await self._sources.scan([name])
            if name in snapshot.models:
                member = await self._sources.read(snapshot.models[name])
                if not self._is_wanted(name):  # nobody else has read it meanwhile
                    self._take_source(self.table.record(name), member)
                await self._want_members(member)

    def _is_wanted(self, name: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.source is not None

    async def names(self) -> Mapping[str, int]:
        """The model folders, and in how many repositories each is. In one that cannot be read are those that were last
        found there."""
        places, unreadable = await self._sources.names()
        if unreadable:
            sources = [record.source for record in self._records.values() if record.source is not None]
            places.update(each.directory.name for each in sources if each.directory.repository in unreadable)
        return places

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Loads or reloads a model and returns when it serves. Raises with the reason when it does not."""
        self._require_explicit()
        check_model_name(name)
        models = self._begin_request(name)
        try:
            record = await self._load(name, parameters, models)
        finally:
            self._end_request(models)
        # As in Triton: what has gone is gone when the answer comes, memory included.
        if record.leaving:
            await asyncio.wait(record.leaving)

    async def _load(self, name: str, parameters: Mapping[str, str | bytes], models: set[str]) -> Record:
        await self._turn(models)
        source = await self._source_for(name, parameters)
        source.uses += 1
        try:
            record = self.table.record(name)
            if isinstance(source.draft, NaiadError):
                record.error = source.draft
                self._log.error(f"failed to poll model '{name}': {source.draft.message}")
                if not record.states and record.source is None:
                    record.error = None
                    self.table.put_away(record)
                raise Internal(f"failed to load '{name}', failed to poll from model repository") from source.draft
            models |= self._with_members(source.members)
            await self._turn(models)
            record.explicit = True
            brings_override = source.override is not None and source is not record.source
            if brings_override or record.failed is not None or record.blocked or record.is_lost:
                record.insisted += 1
            record.error = None
            record.blocked = False
            self._take_source(record, source)
        finally:
            self._release(source)
        await self._want_members(source)
        models |= self._with_members(source.members)
        self._reconcile()
        # Until the model rests, its members, and the ensembles that are made anew because of it.
        while record.source is not None and (
            self._is_pending(record) or self._any_loads(self._with_members([name])) or self._above_loads(name)
        ):
            await self.next_change()
        if record.source is None:
            # The server is stopping.
            raise Internal(f"failed to load '{name}', no version is available")
        if record.error is not None:
            raise record.error
        return record

    async def _source_for(self, name: str, parameters: Mapping[str, str | bytes]) -> Source:
        if parameters:
            return await self._sources.materialise(name, parameters)
        snapshot = await self._sources.scan([name])
        directory = snapshot.models.get(name)
        if directory is None:
            why = "not unique across all model repositories"
            if name not in snapshot.duplicates:
                why = "model not found in any model repository."
            self._log.error(f"failed to poll model '{name}': {why}")
            raise Internal(f"failed to load '{name}', failed to poll from model repository")
        record = self.table.record(name)
        kept = record.source
        if (
            kept is not None
            and kept.override is not None
            and not kept.made_of_request
            and record.failed is None
            and not record.is_lost
            and _same_files(kept.directory, directory)
        ):
            # A configuration that came with a load stays until there is something new in the repository.
            return kept
        return await self._sources.read(directory)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Takes a model out of service, after the loads of it that were asked for before; the version goes when its
        last request has been answered. Unknown and unloaded models are fine."""
        self._require_explicit()
        models = self._begin_request(name)
        try:
            await self._turn(models)
            record = self._records.get(name)
            if record is None or record.source is None:
                return
            members = record.source.members if unload_dependents else ()
            self._drop(record)
            for member in members:
                self._drop_unused(member)
            self._reconcile()
        finally:
            self._end_request(models)

    # ---------------------------------------------------------------- the order of requests

    def _begin_request(self, name: str) -> set[str]:
        """A place behind the requests that are here. A load keeps its model and the members of that to itself until it
        has ended, as in Triton (core/src/model_repository_manager, LockNodes); here also in the order they came."""
        models = {name}
        self._requests.append(models)
        return models

    def _end_request(self, models: set[str]) -> None:
        self._requests = [other for other in self._requests if other is not models]
        self._note_change()

    async def _turn(self, models: set[str]) -> None:
        """Returns when no earlier request is about one of the models. Raises Unavailable when the server stops."""
        while self._accepting and any(
            not models.isdisjoint(earlier) for earlier in takewhile(lambda other: other is not models, self._requests)
        ):
            await self.next_change()
        self._require_explicit()

    def _with_members(self, names: Iterable[str]) -> set[str]:
        """The models, and all that those of them are made of that are ensembles."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                record = self._records.get(name)
                if record is not None and record.source is not None:
                    waiting += record.source.members
        return found

    def _any_loads(self, names: Iterable[str]) -> bool:
        return any(name in self._records and self._records[name].loading is not None for name in names)

    def _above_loads(self, name: str) -> bool:
        """Whether an ensemble made of the model is being loaded."""
        return any(
            record.loading is not None and name in self._with_members(record.source.members)
            for record in self._records.values()
            if record.source is not None and record.source.members
        )

    def _drop(self, record: Record) -> None:
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

    def _take_source(self, record: Record, source: Source) -> None:
        old = record.source
        if old is not None and old.override is None and source.override is None and _same(old, source):
            return
        self._set_source(record, source)

    def _set_source(self, record: Record, source: Source | None) -> None:
        old, record.source = record.source, source
        record.failures = 0
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
                wanted[name] = Wanted(self._generation(record, record.source), record.source.members)
        return wanted

    def _generation(self, record: Record, source: Source) -> object:
        """What makes a load a different one: configuration, files, and what serves of the members. A member that gets
        other instances is still the one its ensembles were made of."""
        directory = source.directory
        members = [self._records[member].takeover for member in source.members if member in self._records]
        versions = [(number, version.fingerprint) for number, version in directory.versions.items()]
        files = (directory.fingerprint, directory.config_fingerprint, tuple(versions))
        return (record.insisted, files, source.override, tuple(members))

    def _is_pending(self, record: Record) -> bool:
        """Whether a step for this model is still to come, because members are on their way."""
        if record.source is None or record.blocked:
            return False
        generation = self._generation(record, record.source)
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
        self._note_change()
        if any(isinstance(step, Block | Retire) for step in steps):
            self._reconcile()

    def _begin_update(self, record: Record) -> None:
        assert record.source is not None, "this is a bug: an update without a source"
        record.loading = self._generation(record, record.source)
        record.abandoned = False
        record.blocked = False
        record.source.uses += 1
        load = self._spawn(self._update(record, record.source, record.loading), f"load {record.name}")
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)

    async def _update(self, record: Record, source: Source, generation: object) -> None:
        """Loads all wanted versions of a model; they take over together or not at all. Versions that serve and need
        other instances only get those."""
        loaded: dict[int, Model] = {}
        updates: dict[int, InstanceUpdate] = {}
        errors: dict[int, NaiadError] = {}
        versions: tuple[int, ...] = ()
        in_place: dict[int, Model] = {}
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            draft, versions = await self._choose(source)
            for version in versions:
                if _is_worth_a_line(record.failures + 1):
                    self._log.info(f"loading: {record.name}:{version}")
                model = record.models.get(version)
                if model is None:
                    # Triton begins to load an ensemble when it has found that it can be served.
                    if not draft.is_ensemble:
                        record.states[version] = ("LOADING", "")
                elif self._needs_only_instances(model, source):
                    in_place[version] = model
            results = await self._all_of([self._load_version(source, v, in_place.get(v)) for v in versions])
            for version, result in zip(versions, results, strict=True):
                if isinstance(result, Model):
                    loaded[version] = result
                elif isinstance(result, InstanceUpdate):
                    updates[version] = result
                elif isinstance(result, NaiadError):
                    errors[version] = result
                else:
                    self._log.exception(f"loading '{record.name}' version {version} failed", result)
                    errors[version] = Internal(f"{result!r}. This is a bug.")
            if errors and draft.is_ensemble:
                raise next(iter(errors.values()))
            if errors:
                raise InvalidArgument(
                    "".join(
                        f"version {version} is at {'READY' if version in in_place else 'UNAVAILABLE'} state: "
                        f"{with_kind(error)};\n"
                        for version, error in errors.items()
                    )
                )
        except Exception as error:
            took_s = clock() - began
            record.retry_at = clock() + _RESTS_FOR * took_s if took_s >= _LONG_S else 0.0
            self._update_failed(record, source, generation, versions, in_place, errors, error)
            for model in loaded.values():
                self._discard(model)
            for update in updates.values():
                self._discard(update)
        else:
            self._update_done(record, source, generation, loaded, updates)
        finally:
            self._release(source)
        self.table.put_away(record)
        self._reconcile()

    async def _choose(self, source: Source) -> tuple[Draft, tuple[int, ...]]:
        """The configuration of a model and which versions of it to serve. Raises NaiadError."""
        try:
            if isinstance(source.draft, NaiadError):
                raise source.draft
            choice = versions_for(source.directory.name, source.draft.version_policy, source.directory.versions)
        except NaiadError as error:
            error.advice = await asyncio.to_thread(advice, source, error)
            raise
        for note in choice.notes:
            self._log.warning(note)
        return source.draft, choice.versions

    def _needs_only_instances(self, model: Model, source: Source) -> bool:
        return (
            model.instances is not None
            and model.failure is None
            and needs_only_instances(model.config, self._made_of[model], source, model.version)
        )

    async def _all_of(
        self, loads: list[Coroutine[Any, Any, Model | InstanceUpdate]]
    ) -> list[Model | InstanceUpdate | BaseException]:
        """The outcomes of loads beside each other. When it is cancelled nothing is left of them."""
        tasks = [asyncio.ensure_future(load) for load in loads]
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    self._discard(task.result())
            raise

    def _discard(self, result: Model | InstanceUpdate) -> None:
        """Puts away what nobody has seen."""
        if isinstance(result, InstanceUpdate):
            self._spawn(result.abort(), f"unload new instances of {result.model.name}")
        else:
            self._spawn(result.close(), f"close {result.name}")

    async def _load_version(self, source: Source, version: int, serving: Model | None) -> Model | InstanceUpdate:
        """`serving` is the version as it serves, where it needs other instances only."""
        attempt = 0
        while True:
            try:
                async with self._load_slots:
                    if serving is not None:
                        return await self._loader.update(serving, source)
                    return await self._loader.load(source, version)
            except NaiadError as error:
                attempt += 1
                if attempt > self._load_retry_count:
                    error.advice = await asyncio.to_thread(advice, source, error, version)
                    raise

    def _update_failed(
        self,
        record: Record,
        source: Source,
        generation: object,
        versions: tuple[int, ...],
        in_place: Mapping[int, Model],
        errors: dict[int, NaiadError],
        error: Exception,
    ) -> None:
        record.loading = None
        if isinstance(error, NaiadError):
            problem: NaiadError = load_failed(record.name, error.message)
        else:
            problem = Internal(f"load failed for model '{record.name}': {error!r}. This is a bug.")
        record.failures = record.failures + 1 if _is_same(problem, record.error) else 1
        if not isinstance(error, NaiadError):
            if record.failures == 1:
                self._log.exception(f"loading model '{record.name}' failed", error)
        elif not versions:
            self._log_failure(record, f"failed to load model '{record.name}': {error.message}{_advised(error)}")
        if not record.abandoned:
            record.failed = generation
            record.error = problem
        for version in versions:
            reason = with_kind(errors[version]) if version in errors else "unloaded"
            if version in errors:
                text = f"failed to load '{record.name}' version {version}: {reason}{_advised(errors[version])}"
                self._log_failure(record, text)
            if version not in record.models and not source.members:
                record.states[version] = ("UNAVAILABLE", reason)
            elif version in errors and version in in_place:
                record.states[version] = ("READY", reason)
        if versions:
            if record.failures == 1:
                self._log.info(f"failed to load '{record.name}'")
        elif isinstance(source.draft, Draft):
            record.has_no_version = True

    def _log_failure(self, record: Record, text: str) -> None:
        """The same failure is told in full once, and then in a line, the more seldom the more often it occurs."""
        if record.failures == 1:
            self._log.error(text)
        elif _is_worth_a_line(record.failures):
            first, _, _ = text.partition("\n")
            self._log.error(f"{first} ({record.failures} times in a row)")

    def _update_done(
        self,
        record: Record,
        source: Source,
        generation: object,
        loaded: dict[int, Model],
        updates: dict[int, InstanceUpdate],
    ) -> None:
        record.loading = None
        for model in loaded.values():
            self._made_of[model] = source
            source.uses += 1
        if record.abandoned:
            for update in updates.values():
                self._discard(update)
            for version, model in loaded.items():
                if version not in record.models:
                    record.states[version] = ("UNLOADING", "")
                self._spawn(self._close(record, model), f"close {record.name}")
            return
        old = record.models
        now = loaded | {version: update.model for version, update in updates.items()}
        for version, update in updates.items():
            self._log.info(f"updated '{record.name}' version {version}: {update.summary}")
            self._commit(record, source, update)
        if now != old:
            self._takeovers += 1
            record.takeover = self._takeovers
        self._serve(record, now)
        record.serving = generation
        record.failed = None
        record.failures = 0
        record.error = None
        record.has_no_version = False
        for version in now:
            record.states[version] = ("READY", "")
        self._log.info(f"successfully loaded '{record.name}'")
        for version, model in old.items():
            if version in updates:
                continue
            if version not in loaded:
                record.states[version] = ("UNLOADING", "")
            self._spawn(self._close(record, model), f"close {record.name}")

    def _commit(self, record: Record, source: Source, update: InstanceUpdate) -> None:
        model = update.model
        leaving = update.commit()
        self._release(self._made_of[model])
        self._made_of[model] = source
        source.uses += 1
        # Nobody can say how long the sequences of an instance that leaves go on.
        if model.config.scheduling != "sequence":
            record.leaving |= leaving
            for task in leaving:
                task.add_done_callback(record.leaving.discard)

    def _serve(self, record: Record, models: dict[int, Model]) -> None:
        record.models = models
        record.latest = models[max(models)] if models else None

    def _block(self, record: Record, unavailable: tuple[str, ...]) -> None:
        """An ensemble without its members does not serve, and says why."""
        reason = self.table.why_blocked(record.name, unavailable)
        self._retire(record)
        record.blocked = True
        record.error = load_failed(record.name, reason)
        self._log.error(f"failed to load '{record.name}': {reason}")

    def _retire(self, record: Record) -> None:
        models = record.models
        self._serve(record, {})
        record.serving = None
        record.failed = None
        record.blocked = False
        for version, model in models.items():
            record.states[version] = ("UNLOADING", "")
            self._spawn(self._close(record, model), f"close {record.name}")
        self.table.put_away(record)

    async def _close(self, record: Record, model: Model) -> None:
        try:
            await model.close()
        finally:
            self._release(self._made_of.pop(model))
        is_last = not any(other.name == model.name and other.version == model.version for other in self._made_of)
        if is_last and record.states.get(model.version, ("",))[0] == "UNLOADING":
            record.states[model.version] = ("UNAVAILABLE", "unloaded")
        self._log.info(f"successfully unloaded '{model.name}' version {model.version}")
        self.table.put_away(record)
        self._note_change()

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

    def _note_change(self) -> None:
        self.changes += 1
        self._changed.set()

    async def next_change(self) -> None:
        """Returns when something about the models has changed since it was called."""
        self._changed.clear()
        await self._changed.wait()

    async def _settle(self) -> None:
        """Waits until no load is under way and none is still to come."""
        while any(record.loading is not None or self._is_pending(record) for record in self._records.values()):
            await self.next_change()

    def in_flight(self) -> list[tuple[str, int, int]]:
        """Name, version and number of requests, or of sequences, of all versions that have some."""
        counts = [(model.name, model.version, model.in_flight) for model in self._made_of]
        return sorted(found for found in counts if found[2])

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
            await asyncio.wait(self._tasks, timeout=timeout_s)
        given_up = [model for model in self._made_of if model.has_requests]
        for model in given_up:
            model.give_up()
        while self._tasks:
            await asyncio.wait(self._tasks)
        return not given_up


def _advised(error: NaiadError) -> str:
    return f" ({error.advice})" if error.advice else ""


def _is_same(one: NaiadError, other: NaiadError | None) -> bool:
    return other is not None and _NUMBER.sub("", one.message) == _NUMBER.sub("", other.message)


def _is_worth_a_line(times: int) -> bool:
    """Of all times the 1st, 2nd, 4th, 8th..."""
    return times & (times - 1) == 0


def _same_files(one: ModelDirectory, other: ModelDirectory) -> bool:
    return (one.fingerprint, one.config_fingerprint, one.versions) == (
        other.fingerprint,
        other.config_fingerprint,
        other.versions,
    )


def _same(one: Source, other: Source) -> bool:
    return (
        _same_files(one.directory, other.directory) and isinstance(one.draft, Draft) and isinstance(other.draft, Draft)
    )
