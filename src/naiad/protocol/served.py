"""A model version as codecs and front ends see it, in whichever process they run."""

from naiad.config.model_config import ModelConfig


class ServedModel:
    """A model version that serves, as front ends see it. Of `config` nothing but the instance groups ever changes."""

    def __init__(self, config: ModelConfig, version: int, labels: dict[str, list[str]]) -> None:
        self.name = config.name
        self.version = version
        self.config = config
        #: Class names, by output.
        self.labels = labels
        self.batching = config.batching
        self.decoupled = config.decoupled
