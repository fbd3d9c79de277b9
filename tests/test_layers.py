"""Imports point one way: a part imports only from those before it in LAYERS. And hosts stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import naiad

ROOT = Path(naiad.__file__).parent

#: Files and folders of src/naiad, from the innermost out. Those of one row may import one another.
LAYERS: list[set[str]] = [
    {"errors", "datatypes", "messages", "metadata", "packed", "statistics"},
    {"options"},
    {"telemetry"},
    {"config"},
    {"protocol"},
    {"backends"},
    {"instances"},
    {"scheduling"},
    {"repository"},
    {"models"},
    {"engine"},
    {"model_calls"},
    {"frontends"},
    {"server"},
    {"convert"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
#: Carry no rank: the package itself (its version), what `python -m naiad` runs, and what `init --example` writes out.
UNRANKED = {"__init__", "__main__", "examples"}
#: Never in a host: half a second of imports, and threads before the fork.
TOO_HEAVY_FOR_HOSTS = ("google.protobuf", "tritonclient", "grpc", "naiad.engine", "naiad.frontends")


def part_of(module: str) -> str:
    """`naiad.config.parse` -> `config`."""
    return module.split(".")[1] if "." in module else "__init__"


def modules() -> Iterator[tuple[str, Path]]:
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of everything of naiad that `source` imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the module's full name"
            # `from naiad import errors` names a part in the list of names.
            names = [f"naiad.{alias.name}" for alias in node.names] if node.module == "naiad" else [str(node.module)]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "naiad":
                yield node.lineno, name


def test_every_part_has_a_place() -> None:
    assert {part_of(module) for module, _ in modules()} <= LEVEL.keys() | UNRANKED


@pytest.mark.parametrize(("module", "file"), [pytest.param(*found, id=found[0]) for found in modules()])
def test_imports_point_one_way(module: str, file: Path) -> None:
    part = part_of(module)
    if part in UNRANKED:
        return
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {part} imports {imported}"
        for line, imported in imports(file.read_text())
        if LEVEL.get(part_of(imported), 0) > LEVEL[part]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import naiad.engine", ["naiad.engine"]),
        ("from naiad import engine, errors", ["naiad.engine", "naiad.errors"]),
        ("def f():\n    from naiad.engine import Engine", ["naiad.engine"]),
        ("import json\nfrom os import path", []),
    ],
)
def test_imports_are_found_in_every_spelling(source: str, found: list[str]) -> None:
    assert [name for _, name in imports(source)] == found


@pytest.mark.parametrize(
    "modules_of_hosts",
    [["naiad.backends.api"], ["naiad.instances.host"], ["naiad.instances.zygote"], ["naiad.backends.python"]],
    ids=lambda names: names[0],
)
def test_hosts_stay_light(modules_of_hosts: list[str]) -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {modules_of_hosts!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {TOO_HEAVY_FOR_HOSTS!r} if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []
