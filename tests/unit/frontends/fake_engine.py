"""What the engines that the tests of both front ends talk to have in common: models in memory, and no schedulers."""

import asyncio
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from naiad.config.model_config import ModelConfig
from naiad.errors import NotFound, Unavailable
from naiad.messages import InferRequest
from naiad.metadata import ServerMetadata


class Model(Protocol):
    name: str
    config: ModelConfig


ModelType = TypeVar("ModelType", bound=Model)


class ModelsInMemory(Generic[ModelType]):
    """All of an engine but inference, statistics, index and loading. `calls` are those that a test is to answer."""

    def __init__(self, models: Iterable[ModelType]) -> None:
        self.calls: asyncio.Queue[Any] = asyncio.Queue()
        self.requests: list[InferRequest] = []
        self.loaded: list[tuple[str, Any]] = []
        self.ready = True
        self.exiting = False
        self.models = {model.name: model for model in models}

    def is_live(self) -> bool:
        if self.exiting:
            raise Unavailable("Server exiting")
        return True

    async def is_ready(self) -> bool:
        return self.ready

    def model(self, name: str, version: int = -1) -> ModelType:
        model = self.models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version not in (-1, 1):
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return model

    async def model_ready(self, name: str, version: int = -1) -> bool:
        self.model(name, version)
        return True

    def metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "2.51.0", ("classification", "sequence"))

    def model_config(self, name: str, version: int = -1) -> ModelConfig:
        return self.model(name, version).config

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self.loaded.append((name, unload_dependents))
