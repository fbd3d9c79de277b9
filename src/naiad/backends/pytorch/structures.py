"""Finds the configured outputs in what a model returned: a tensor, or any nesting of the usual containers.

Dictionaries (those of Hugging Face too), NamedTuples, dataclasses, objects with attributes, tuples and lists are
looked into; everything else is a leaf. Lists of strings are leaves, and so are empty lists: whatever they could hold, what
comes behind them keeps its place. Runs in hosts.

The names of a leaf, of which the first that is configured counts:
- its keys or attributes, joined by dots, with `__0`, `__1` for places in an inner tuple: `logits`, `boxes.xy`,
  `hidden_states__0`; the last key alone where no other leaf has it: `xy`
- the path Triton has for AOTInductor packages: `RESULT[boxes][xy]`, `RESULT[hidden_states][0]`
- `<any name>__<index>`, where index counts the leaves from the left.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor as an exported program declares it; -1 for dynamic extents. An unknown one says nothing."""

    datatype: DataType | None = None
    shape: tuple[int, ...] | None = None


UNKNOWN = Declared()


_LEAVES = (Declared, torch.Tensor, torch.nn.Module, str, bytes, bool, int, float, complex, type(None))


def children(value: Any) -> list[tuple[str | int, Any]] | None:
    """The parts of a container with their keys (str) or places (int); None for a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple):
        fields = field_names(value)
        return list(zip(fields, value, strict=True)) if fields else list(enumerate(value))
    if isinstance(value, list):
        return None if is_text(value) else list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    attributes = getattr(value, "__dict__", None)
    if not attributes or callable(value):
        return None
    return [(name, child) for name, child in attributes.items() if not name.startswith("_")] or None


def field_names(value: tuple[Any, ...]) -> Sequence[str]:
    """Of a NamedTuple, or of what functions like `torch.max` return."""
    kind: Any = type(value)
    names: Sequence[str] = getattr(kind, "_fields", ()) or getattr(kind, "__match_args__", ())
    return names if len(names) == len(value) else ()


def is_text(value: Any) -> bool:
    """Whether a list is of strings, at any depth; one that is empty may be."""
    return isinstance(value, list) and all(isinstance(it, str) or is_text(it) for it in value)


def leaves(value: Any) -> list[tuple[Path, Any]]:
    """All leaves from left to right, with the way to each."""
    found: list[tuple[Path, Any]] = []
    _collect(value, (), found)
    return found


def _collect(value: Any, path: Path, found: list[tuple[Path, Any]]) -> None:
    parts = children(value)
    if parts is None:
        found.append((path, value))
        return
    for key, child in parts:
        _collect(child, (*path, key), found)


def leaf_names(paths: Sequence[Path]) -> list[str]:
    """The name each leaf gets in a configuration that is completed."""
    names = [_qualified(path) for path in paths]
    seen = Counter(names)
    return [name if name and seen[name] == 1 else f"OUTPUT__{at}" for at, name in enumerate(names)]


def index_of(name: str) -> int | None:
    """The index of `<name>__<index>`; None for a name that is not like that."""
    head, _, index = name.rpartition("__")
    return int(index) if head and index.isascii() and index.isdigit() else None


def result_path(path: Path) -> str:
    return "RESULT" + "".join(f"[{key}]" for key in path)


def _qualified(path: Path) -> str:
    """The path from its first key on; empty for one of places only."""
    at = next((i for i, key in enumerate(path) if isinstance(key, str)), len(path))
    text = ""
    for key in path[at:]:
        if isinstance(key, int):
            text += f"__{key}"
        else:
            text += f".{key}" if text else key
    return text


def _by_name(paths: Sequence[Path]) -> dict[str, int]:
    """Name -> place of the leaf, without the `__<index>` names. Names that two leaves share are left out."""
    named: dict[str, int] = {}
    kinds = (
        [_qualified(path) for path in paths],
        [next((key for key in reversed(path) if isinstance(key, str)), "") for path in paths],
        [result_path(path) for path in paths],
    )
    for names in kinds:
        seen = Counter(names)
        for at, name in enumerate(names):
            if name and seen[name] == 1:
                named.setdefault(name, at)
    return named


def places(
    model: str, value: Any, paths: Sequence[Path], names: Sequence[str], asked: Collection[str]
) -> dict[str, int]:
    """Which leaf of `value` each of `names` (all outputs of the configuration, in its order) is.

    Names are looked up as keys; if there are none among them, all as `<name>__<index>`; else, and only where
    `value` has an order, they are taken in order, as Triton does. Names that are not there are left out; raises
    Internal, or InvalidArgument for a wrong index, if one of them is `asked` for.
    """
    indices = [index_of(name) for name in names]
    keyed = _by_name(paths)
    wanted: dict[str, int | None]
    if any(name in keyed for name in names) or not has_order(value):
        wanted = {name: keyed.get(name, index) for name, index in zip(names, indices, strict=True)}
    elif None not in indices:
        wanted = dict(zip(names, indices, strict=True))
    else:
        wanted = {name: at for at, name in enumerate(names)}
    found = {}
    for name, at in wanted.items():
        if at is not None and at < len(paths):
            found[name] = at
        elif name in asked:
            raise _unmapped(model, name, value, paths) if at is None else _no_such_index(name, value, paths)
    return found


def has_order(value: Any) -> bool:
    """Whether strict order may name the parts of `value`: those of a dictionary have names of their own."""
    return isinstance(value, (tuple, list)) or children(value) is None


def _no_such_index(name: str, value: Any, paths: Sequence[Path]) -> InvalidArgument:
    return InvalidArgument(
        f"The output {name} in the model configuration refers to an output index which doesn't exist. This model has"
        f" {len(paths)} outputs: it returned {describe(value)}"
    )


def _unmapped(model: str, name: str, value: Any, paths: Sequence[Path]) -> Internal:
    names = ", ".join(repr(it) for it in leaf_names(paths)) or "none"
    return Internal(
        f"output '{name}' of model '{model}' is not in what the model returned: {describe(value)}. Outputs can be named"
        f" {names}, or <name>__0 to <name>__{len(paths) - 1}"
        if paths
        else f"output '{name}' of model '{model}' is not in what the model returned: {describe(value)}, which holds nothing"
    )


def describe(value: Any, depth: int = 0) -> str:
    """The structure of `value` on one line, tensors with type and shape."""
    if isinstance(value, torch.Tensor):
        return f"Tensor({str(value.dtype).removeprefix('torch.')}{list(value.shape)})"
    if isinstance(value, Declared):
        return f"Tensor({value.datatype.name}{list(value.shape or ())})" if value.datatype else "Tensor"
    if value and is_text(value):
        return "List[str]" if isinstance(value[0], str) else "List[List[str]]"
    parts = children(value)
    if parts is None:
        return type(value).__name__
    if depth > 8:
        return "..."
    name = type(value).__name__
    inside = [
        (f"{key!r}: " if isinstance(value, Mapping) else f"{key}=" if isinstance(key, str) else "")
        + describe(child, depth + 1)
        for key, child in parts[:32]
    ]
    if len(parts) > 32:
        inside.append(f"... {len(parts) - 32} more")
    text = ", ".join(inside)
    if isinstance(value, Mapping):
        return f"{{{text}}}" if type(value) is dict else f"{name}({{{text}}})"
    if type(value) is list:
        return f"[{text}]"
    return f"({text})" if type(value) is tuple else f"{name}({text})"
