"""Reads what models are made of: repositories, configurations, load requests. Disk is touched in threads only."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from naiad.config.read import read_draft
from naiad.errors import Internal, NaiadError
from naiad.models.table import Source
from naiad.repository.overrides import LoadOverride, parse_override, remove_override, write_override
from naiad.repository.snapshot import ModelDirectory, Snapshot, model_names, scan


class RepositorySources:
    """The model repositories of the command line."""

    def __init__(
        self, repositories: Sequence[str], *, config_name: str, auto_complete: bool, gpus: tuple[int, ...]
    ) -> None:
        self.repositories = tuple(repositories)
        self._config_name = config_name
        self._auto_complete = auto_complete
        self._gpus = gpus

    async def scan(self, only: list[str] | None = None) -> Snapshot:
        return await asyncio.to_thread(scan, self.repositories, only)

    async def names(self) -> tuple[Counter[str], frozenset[str]]:
        """The model folders, and in how many repositories each is; and the repositories that cannot be read."""
        return await asyncio.to_thread(model_names, self.repositories)

    async def read(self, directory: ModelDirectory, override: str | None = None) -> Source:
        return await asyncio.to_thread(self._read, directory, override, False)

    async def materialise(self, name: str, parameters: Mapping[str, str | bytes]) -> Source:
        """The source that a load request with parameters describes. Raises InvalidArgument for a wrong parameter;
        what is wrong with their values is the source's `draft`."""
        override = parse_override(parameters)
        making = asyncio.ensure_future(asyncio.to_thread(self._materialise, name, override))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread goes on, and nobody will discard what it makes.
            making.add_done_callback(_remove)
            raise

    async def discard(self, source: Source) -> None:
        if source.made_of_request:
            await asyncio.to_thread(remove_override, source.directory.directory)

    def _materialise(self, name: str, override: LoadOverride) -> Source:
        if not override.files:
            directory = scan(self.repositories, [name]).models.get(name)
            if directory is None:
                raise Internal(f"failed to load '{name}', failed to poll from model repository")
            return self._read(directory, override.config, False)
        try:
            folder = write_override(name, override)
        except NaiadError as error:
            raise Internal(f"failed to load '{name}', failed to poll from model repository") from error
        directory = scan([folder.parent], [name]).models[name]
        return self._read(directory, override.config, True)

    def _read(self, directory: ModelDirectory, override: str | None, made_of_request: bool) -> Source:
        try:
            draft = read_draft(
                Path(directory.directory),
                directory.name,
                config_name=self._config_name,
                override=override,
                auto_complete=self._auto_complete,
                gpus=self._gpus,
            )
        except NaiadError as error:
            return Source(directory, error, override, made_of_request)
        return Source(directory, draft, override, made_of_request)


def _remove(making: "asyncio.Future[Source]") -> None:
    if not making.cancelled() and making.exception() is None and making.result().made_of_request:
        making.get_loop().run_in_executor(None, remove_override, making.result().directory.directory)
