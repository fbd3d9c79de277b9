"""What the server says of itself and of its models, without any protocol."""

import msgspec


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output as metadata shows it; -1 first where the model batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ServerMetadata(msgspec.Struct, frozen=True):
    name: str
    version: str
    extensions: tuple[str, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """`versions` are those that are ready, or the one asked for; `platform` is the backend where there is none."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class IndexEntry(msgspec.Struct, frozen=True):
    """A model version in the repository index; all but the name are None for a model never loaded."""

    name: str
    version: str | None = None
    state: str | None = None
    reason: str | None = None
