"""The order of requests to load and unload: over real folders, with a loader that waits until it is told to go on."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

from naiad.config.read import Draft, finish
from naiad.errors import Internal, InvalidArgument, NaiadError, NotFound, Unavailable
from naiad.metadata import IndexEntry
from naiad.models import manager
from naiad.models.manager import ModelManager
from naiad.models.model import Model
from naiad.models.sources import RepositorySources
from naiad.models.table import ModelTable, Source
from naiad.repository.snapshot import scan
from naiad.statistics import ModelStatistics
from naiad.telemetry.log import Log


class Idle:
    """A scheduler that has nothing to do."""

    async def close(self) -> None: ...


class SlowLoader:
    """Loads what `go` names, in any order; `begun` is every load that has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.errors: dict[str, NaiadError] = {}
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._began = asyncio.Event()

    def _gate(self, name: str) -> asyncio.Semaphore:
        return self._gates.setdefault(name, asyncio.Semaphore(0))

    async def next_begun(self) -> None:
        self._began.clear()
        await self._began.wait()

    def go(self, *names: str) -> None:
        """One more load of each may end."""
        for name in names:
            self._gate(name).release()

    async def load(self, source: Source, version: int) -> Any:
        name = source.directory.name
        self.begun.append(name)
        self._began.set()
        await self._gate(name).acquire()
        if name in self.errors:
            raise self.errors[name]
        assert isinstance(source.draft, Draft)
        statistics = ModelStatistics(name, str(version))
        return Model(finish(source.draft), version, Idle(), statistics, {}, None)  # type: ignore[arg-type]

    async def update(self, model: Any, source: Source) -> Any:
        raise AssertionError("nothing here has instances")


def tensors(one: str, other: str) -> str:
    """An input and an output, as a configuration says it."""
    tensor = "data_type: TYPE_FP32 dims: [ 1 ]"
    return f'input [ {{ name: "{one}" {tensor} }} ] output [ {{ name: "{other}" {tensor} }} ]'


class Models:
    """A manager, over models in a folder."""

    def __init__(self, path: Path, mode: Literal["explicit", "poll"] = "explicit") -> None:
        self.path = path
        self.loader = SlowLoader()
        sources = RepositorySources([str(path)], config_name="", auto_complete=True, gpus=())
        self.log = Log()
        self.log.configure(info=False, error=False)
        self.manager = ModelManager(ModelTable(), sources=sources, loader=self.loader, log=self.log, mode=mode)
        self.ended: list[str] = []

    def write(self, name: str, text: str = "") -> None:
        (self.path / name / "1").mkdir(parents=True, exist_ok=True)
        (self.path / name / "1" / "model.py").write_text(text)
        (self.path / name / "config.pbtxt").write_text(f'backend: "python" {tensors("I", "O")}')

    def write_ensemble(self, name: str, *members: str) -> None:
        steps = ", ".join(
            f'{{ model_name: "{member}" model_version: -1 input_map {{ key: "I" value: "{number}" }} '
            f'output_map {{ key: "O" value: "{number + 1}" }} }}'
            for number, member in enumerate(members)
        )
        (self.path / name / "1").mkdir(parents=True)
        (self.path / name / "config.pbtxt").write_text(
            f'platform: "ensemble" {tensors("0", str(len(members)))}ensemble_scheduling {{ step [ {steps} ] }}'
        )

    def load(self, name: str) -> asyncio.Task[None]:
        return self._ask(self.manager.load(name, {}), f"load {name}")

    def unload(self, name: str, dependents: bool = False) -> asyncio.Task[None]:
        return self._ask(self.manager.unload(name, dependents), f"unload {name}")

    def _ask(self, request: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        async def ask() -> None:
            try:
                await request
                self.ended.append(what)
            except NaiadError:
                self.ended.append(f"{what}: error")
                raise

        return asyncio.get_running_loop().create_task(ask())

    async def loading(self, *names: str) -> None:
        """Until exactly these loads have begun, in all."""
        async with asyncio.timeout(30):
            while len(self.loader.begun) < len(names):
                await self.loader.next_begun()
        assert self.loader.begun == list(names)

    def ready(self) -> list[str]:
        return [model.name for model in self.manager.table.models()]


@pytest.fixture
async def models(tmp_path: Path) -> AsyncIterator[Models]:
    models = Models(tmp_path)
    for name in ("a", "b"):
        models.write(name)
    yield models
    assert await models.manager.close(0)


async def test_an_unload_waits_for_the_load_before_it_and_a_load_for_both(models: Models) -> None:
    requests = [models.load("a")]
    await models.loading("a")
    requests += [models.unload("a"), models.load("a")]
    models.loader.go("a", "a")
    await asyncio.gather(*requests)
    assert models.ended == ["load a", "unload a", "load a"]
    assert models.loader.begun == ["a", "a"]
    assert models.ready() == ["a"]


async def test_loads_of_what_has_not_changed_are_one(models: Models) -> None:
    requests = [models.load("a"), models.load("a")]
    await models.loading("a")
    models.loader.go("a")
    await asyncio.gather(*requests)
    assert models.loader.begun == ["a"]


async def test_a_load_after_one_that_failed_tries_again(models: Models) -> None:
    models.loader.errors["a"] = InvalidArgument("no weights")
    first, second, unload = models.load("a"), models.load("a"), models.unload("a")
    await models.loading("a")
    models.loader.go("a")
    with pytest.raises(InvalidArgument, match="no weights"):
        await first
    del models.loader.errors["a"]
    models.loader.go("a")
    await asyncio.gather(second, unload)
    assert models.ended == ["load a: error", "load a", "unload a"]
    assert models.ready() == []


async def test_what_to_do_is_for_the_log(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    models.log.configure(error=True)
    models.loader.errors["a"] = Internal("ModuleNotFoundError: No module named 'cv2'")
    request = models.load("a")
    await models.loading("a")
    models.loader.go("a")
    with pytest.raises(InvalidArgument) as told:
        await request
    assert told.value.message.endswith("No module named 'cv2';\n")
    advised = f"No module named 'cv2' (install what has 'cv2' where naiad is, or list it in '{models.path}/a/require"
    assert advised in capsys.readouterr().err
    assert models.manager.table.reasons() == {
        "a": "version 1 is at UNAVAILABLE state: Internal: ModuleNotFoundError: No module named 'cv2';\n"
    }


async def test_what_is_wrong_with_repositories_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [tmp_path / "x", tmp_path / "y"]
    for place in places:
        (place / "m" / "1").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    paths = [*map(str, places), str(tmp_path / "empty"), str(tmp_path / "missing")]
    sources = RepositorySources(paths, config_name="", auto_complete=True, gpus=())
    manager = ModelManager(ModelTable(), sources=sources, loader=SlowLoader(), log=Log(), mode="none")
    await manager.start()
    error = capsys.readouterr().err
    assert f"'m': not unique across all model repositories ({places[0] / 'm'}, {places[1] / 'm'})" in error
    assert f"there are no models in model repository '{tmp_path}/empty'" in error
    assert f"failed to read model repository '{tmp_path}/missing': there is no folder '{tmp_path}/missing'" in error
    assert await manager.close(0)


async def test_a_load_of_newer_files_waits_for_the_load_of_the_older_ones(models: Models) -> None:
    first = models.load("a")
    await models.loading("a")
    models.write("a", "# new")
    second = models.load("a")
    models.loader.go("a")
    await first
    assert not second.done()
    models.loader.go("a")
    await second
    assert models.loader.begun == ["a", "a"]


async def test_other_models_do_not_wait(models: Models) -> None:
    slow = models.load("a")
    await models.loading("a")
    models.loader.go("b")
    await models.load("b")
    await models.unload("b")
    assert not slow.done()
    models.loader.go("a")
    await slow


async def test_a_member_is_unloaded_when_the_ensemble_has_loaded(models: Models) -> None:
    models.write_ensemble("e", "a", "b")
    load = models.load("e")
    await models.loading("a", "b")
    unload = models.unload("a")
    models.loader.go("a", "b", "e")
    await asyncio.gather(load, unload)
    assert models.ended == ["load e", "unload a"]
    assert models.ready() == ["b"]
    assert models.manager.table.all_ready()


async def test_an_ensemble_waits_for_the_load_of_a_member_that_was_asked_for_before(models: Models) -> None:
    models.write_ensemble("e", "a", "b")
    member = models.load("a")
    await models.loading("a")
    requests = [models.unload("a"), models.load("e")]
    models.loader.go("a", "a", "b", "e")
    await asyncio.gather(member, *requests)
    assert models.ended == ["load a", "unload a", "load e"]
    assert models.ready() == ["a", "b", "e"]


async def test_a_load_of_a_member_ends_when_its_ensembles_are_made_of_the_new_one(models: Models) -> None:
    models.write_ensemble("e", "a")
    models.write_ensemble("outer", "e", "b")
    models.loader.go("a", "b", "e", "outer")
    await models.load("outer")
    assert models.loader.begun == ["a", "b", "e", "outer"]
    models.write("a", "# new")
    models.loader.go("a")
    load = models.load("a")
    await models.loading("a", "b", "e", "outer", "a", "e")
    assert not load.done()
    models.loader.go("e", "outer")
    await load
    assert models.loader.begun[-1] == "outer"


async def test_a_member_that_failed_to_load_again_changes_no_ensemble(models: Models) -> None:
    models.write_ensemble("e", "a")
    models.loader.go("a", "e")
    await models.load("e")
    models.write("a", "# new")
    models.loader.errors["a"] = InvalidArgument("no weights")
    models.loader.go("a")
    with pytest.raises(InvalidArgument):
        await models.load("a")
    assert models.loader.begun == ["a", "e", "a"]


async def test_a_request_that_is_given_up_lets_the_next_one_go_on(models: Models) -> None:
    first = models.load("a")
    await models.loading("a")
    second, third = models.load("a"), models.unload("a")
    await asyncio.sleep(0)
    second.cancel()
    models.loader.go("a")
    await asyncio.gather(first, third)
    assert models.ready() == []


async def test_of_an_unloaded_model_only_its_versions_are_kept(models: Models) -> None:
    table = models.manager.table
    models.write_ensemble("e", "a", "unknown")
    models.loader.go("a", "a")
    await models.load("a")
    with pytest.raises(InvalidArgument, match="not available or ambiguous: unknown"):
        await models.load("e")
    await models.unload("e")
    await models.unload("a")
    while table.records:
        await models.manager.next_change()
    assert table.index({"a": 1, "b": 1}) == [IndexEntry("a", "1", "UNAVAILABLE", "unloaded"), IndexEntry("b")]
    with pytest.raises(NotFound, match="'a' has no available versions"):
        table.lookup("a")
    with pytest.raises(Unavailable, match="'a' version 1 is not at ready state"):
        table.lookup("a", 1)
    with pytest.raises(NotFound, match="'b' is not found"):
        table.lookup("b")
    await models.load("a")
    assert models.ready() == ["a"]
    assert table.index({"a": 1}) == [IndexEntry("a", "1", "READY")]


async def test_what_has_failed_says_so_until_it_has_been_loaded(models: Models) -> None:
    table = models.manager.table
    failed = [IndexEntry("a", "1", "UNAVAILABLE", "Invalid argument: no weights")]
    models.loader.errors["a"] = InvalidArgument("no weights")
    models.loader.go("a", "a")
    with pytest.raises(InvalidArgument):
        await models.load("a")
    assert (table.index({"a": 1}), table.all_ready()) == (failed, False)
    await models.unload("a")
    assert (table.index({"a": 1}), table.all_ready()) == (failed, False)
    with pytest.raises(NotFound, match="'a' has no available versions"):
        table.lookup("a")
    del models.loader.errors["a"]
    await models.load("a")
    assert table.all_ready()
    await models.unload("a")
    while table.records:
        await models.manager.next_change()
    assert table.index({"a": 1}) == [IndexEntry("a", "1", "UNAVAILABLE", "unloaded")]
    assert table.all_ready()


async def test_a_version_that_has_failed_is_listed_when_its_folder_is_gone(models: Models) -> None:
    table = models.manager.table
    models.loader.go("a", "a", "a")
    await models.load("a")
    (models.path / "a" / "2").mkdir()
    models.loader.errors["a"] = InvalidArgument("no weights")
    with pytest.raises(InvalidArgument):
        await models.load("a")
    (models.path / "a" / "2").rmdir()
    (models.path / "a" / "1").rename(models.path / "a" / "3")
    del models.loader.errors["a"]
    await models.load("a")
    while any(entry.state == "UNLOADING" for entry in table.index({"a": 1})):
        await models.manager.next_change()
    assert table.index({"a": 1}) == [
        IndexEntry("a", "1", "UNAVAILABLE", "unloaded"),
        IndexEntry("a", "2", "UNAVAILABLE", "Invalid argument: no weights"),
        IndexEntry("a", "3", "READY"),
    ]
    assert not table.all_ready()


@pytest.mark.parametrize("name", ["a", "e"])
async def test_a_model_that_had_no_version_to_load_is_not_listed_and_not_forgotten(models: Models, name: str) -> None:
    table = models.manager.table
    models.write_ensemble("e", "b")
    models.loader.go("b", name)
    (models.path / name / "1").rename(models.path / name / "x")
    with pytest.raises(InvalidArgument, match="at least one version must be available"):
        await models.load(name)
    for _ in range(2):
        assert (table.index({name: 1}), table.all_ready()) == ([], False)
        with pytest.raises(NotFound, match=f"'{name}' has no available versions"):
            table.lookup(name)
        await models.unload(name)
    (models.path / name / "x").rename(models.path / name / "1")
    await models.load(name)
    assert (table.index({name: 1}), table.all_ready()) == ([IndexEntry(name, "1", "READY")], True)


@pytest.mark.parametrize("fails", ["not there", "refused"])
async def test_an_ensemble_that_cannot_be_served_was_never_to_be_loaded(models: Models, fails: str) -> None:
    table = models.manager.table
    models.write_ensemble("e", "a", "nobody" if fails == "not there" else "b")
    models.loader.errors["e"] = InvalidArgument("shapes differ")
    models.loader.go("a", "b", "e")
    with pytest.raises(InvalidArgument):
        await models.load("e")
    # Its members have been loaded when the answer comes.
    assert table.index({"a": 1, "e": 1}) == [IndexEntry("a", "1", "READY"), IndexEntry("e")]
    assert table.all_ready()
    with pytest.raises(NotFound, match="'e' is not found"):
        table.lookup("e", 1)
    await models.unload("e")
    assert table.index({"e": 1}) == [IndexEntry("e")]


@pytest.mark.parametrize("ready", [False, True])
async def test_what_is_in_two_repositories_is_listed_in_any_case(models: Models, ready: bool) -> None:
    models.loader.go("a")
    await models.load("a")
    assert models.manager.table.index({"a": 1, "b": 2}, ready) == [
        IndexEntry("a", "1", "READY"),
        IndexEntry("b", state="UNAVAILABLE", reason="model appears in two or more repositories"),
    ]


async def test_models_of_a_repository_that_cannot_be_read_any_more_are_listed(models: Models) -> None:
    models.loader.go("a")
    await models.load("a")
    models.path.rename(models.path.with_name("gone"))
    assert await models.manager.names() == {"a": 1}


async def test_an_ensemble_whose_member_has_gone_is_unloaded(models: Models) -> None:
    table = models.manager.table
    models.write_ensemble("e", "a")
    models.loader.go("a", "e")
    await models.load("e")
    await models.unload("a")
    unloaded = [IndexEntry(name, "1", "UNAVAILABLE", "unloaded") for name in ("a", "e")]
    while table.index({"a": 1, "e": 1}) != unloaded:
        await models.manager.next_change()
    assert table.all_ready()


@pytest.fixture
async def polled(tmp_path: Path) -> AsyncIterator[Models]:
    models = Models(tmp_path, "poll")
    for name in ("a", "b"):
        models.write(name, "pass")
    models.write_ensemble("e", "a")
    yield models
    assert await models.manager.close(0)


async def started(polled: Models, **errors: str) -> None:
    polled.loader.errors = {name: InvalidArgument(text) for name, text in errors.items()}
    polled.loader.go("a", "b", "e")
    await polled.manager.start()


async def poll(polled: Models) -> None:
    """A look at the repository that has found no change, and what follows from it."""
    await polled.manager.retry()
    await rest(polled)


async def rest(polled: Models) -> None:
    records = polled.manager.table.records.values()
    while any(record.loading is not None for record in records):
        await polled.manager.next_change()


async def test_polling_loads_what_failed_again_and_then_the_ensemble_that_waits_for_it(polled: Models) -> None:
    await started(polled, a="no memory")
    for _ in range(2):
        polled.loader.go("a")
        await poll(polled)
        assert not polled.manager.table.all_ready()
    assert polled.loader.begun == ["a", "b", "a", "a"]
    del polled.loader.errors["a"]
    polled.loader.go("a")
    await poll(polled)
    assert polled.ready() == ["a", "b", "e"]
    assert polled.manager.table.all_ready()
    await poll(polled)
    assert polled.loader.begun == ["a", "b", "a", "a", "a", "e"]


async def test_polling_leaves_what_takes_long_to_fail_alone_for_some_time(
    polled: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_LONG_S", 0.0)
    monkeypatch.setattr(manager, "_RESTS_FOR", 1_000_000)
    await started(polled, a="no memory")
    polled.loader.go("a")
    await poll(polled)
    assert polled.loader.begun == ["a", "b"]
    polled.manager.table.records["a"].retry_at = asyncio.get_running_loop().time()
    await poll(polled)
    assert polled.loader.begun == ["a", "b", "a"]


async def test_polling_tries_a_new_version_again_while_the_old_one_serves(polled: Models) -> None:
    await started(polled)
    (polled.path / "a" / "2").mkdir()
    polled.loader.errors["a"] = InvalidArgument("no memory")
    polled.loader.go("a", "a", "a", "e")
    await polled.manager.follow(scan([polled.path]))
    await rest(polled)
    await poll(polled)
    assert polled.manager.table.versions("a") == ("1",)
    del polled.loader.errors["a"]
    await poll(polled)
    assert polled.manager.table.versions("a") == ("2",)
    assert polled.loader.begun == ["a", "b", "e", "a", "a", "a", "e"]


async def test_polling_reads_a_configuration_again_that_could_not_be_read(polled: Models) -> None:
    config = polled.path / "a" / "config.pbtxt"
    text = config.read_text()
    status = config.stat()
    config.write_text("*" * len(text))
    os.utime(config, ns=(status.st_atime_ns, status.st_mtime_ns))
    await started(polled)
    assert polled.ready() == ["b"]
    with pytest.raises(NotFound, match="'a' is not found"):
        polled.manager.table.lookup("a")
    config.write_text(text)
    os.utime(config, ns=(status.st_atime_ns, status.st_mtime_ns))
    await poll(polled)
    assert polled.ready() == ["a", "b", "e"]


async def test_a_failure_is_told_in_full_once_for_each_reason(
    polled: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    polled.log.configure(error=True)
    await started(polled, a="no memory: 10 MB free\n\nAt:\n  model.py(4)")
    for free in range(2, 10):
        polled.loader.errors["a"] = InvalidArgument(f"no memory: {free} MB free\n\nAt:\n  model.py(4)")
        polled.loader.go("a")
        await poll(polled)
    polled.loader.errors["a"] = InvalidArgument("no licence")
    polled.loader.go("a")
    await poll(polled)
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines() if "'a' version 1:" in line]
    failed = "failed to load 'a' version 1: Invalid argument:"
    assert lines == [
        f'"{failed} no memory: 10 MB free\\n\\nAt:\\n  model.py(4)"',
        f'"{failed} no memory: 2 MB free (2 times in a row)"',
        f'"{failed} no memory: 4 MB free (4 times in a row)"',
        f'"{failed} no memory: 8 MB free (8 times in a row)"',
        f'"{failed} no licence"',
    ]


async def test_requests_do_not_keep_a_server_that_stops(models: Models) -> None:
    first = models.load("a")
    await models.loading("a")
    waiting = [models.unload("a"), models.load("a")]
    await asyncio.sleep(0)
    assert await models.manager.close(0)
    with pytest.raises(NaiadError):
        await first
    for each in waiting:
        with pytest.raises(Unavailable, match="Server is stopping"):
            await each
