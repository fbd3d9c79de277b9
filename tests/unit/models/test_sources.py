import asyncio
import os
import tempfile
import threading
from pathlib import Path

import pytest

from naiad.models import sources
from naiad.models.sources import RepositorySources

FILES: dict[str, str | bytes] = {"config": '{"backend": "python"}', "file:1/model.py": b"pass"}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of load requests go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def repository_sources(tmp_path_factory: pytest.TempPathFactory) -> RepositorySources:
    repository = tmp_path_factory.mktemp("models")
    return RepositorySources([str(repository)], config_name="", auto_complete=True, gpus=())


async def test_files_of_a_load_request_are_there_until_they_are_discarded(
    repository_sources: RepositorySources, temporary: Path
) -> None:
    source = await repository_sources.materialise("m", FILES)
    assert (Path(source.directory.directory) / "1" / "model.py").read_bytes() == b"pass"
    await repository_sources.discard(source)
    assert os.listdir(temporary) == []


async def test_files_of_a_load_request_that_is_given_up_meanwhile_are_removed(
    repository_sources: RepositorySources, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go_on, removed = threading.Event(), threading.Event(), threading.Event()
    write, remove = sources.write_override, sources.remove_override

    def write_and_wait(*arguments: object) -> Path:
        folder = write(*arguments)  # type: ignore[arg-type]
        written.set()
        go_on.wait()
        return folder

    def remove_and_tell(directory: Path) -> None:
        remove(directory)
        removed.set()

    monkeypatch.setattr(sources, "write_override", write_and_wait)
    monkeypatch.setattr(sources, "remove_override", remove_and_tell)
    load = asyncio.ensure_future(repository_sources.materialise("m", FILES))
    await asyncio.to_thread(written.wait)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert os.listdir(temporary) != []
    go_on.set()
    assert await asyncio.to_thread(removed.wait, 60)
    assert os.listdir(temporary) == []
