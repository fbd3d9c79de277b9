"""What the distribution and its pages say, held against what is there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from naiad.cli.convert import command as convert
from naiad.cli.init import command as init
from naiad.instances.hosts import HOST_PARAMETER, TIMEOUT_PARAMETER
from naiad.instances.interpreter import ENVIRONMENT_PARAMETER
from naiad.options import OPTIONS, REFUSED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLAGS = {
    *(flag for option in OPTIONS.values() for flag in (option.flag, *option.aliases)),
    *REFUSED,
    *(flag for command in (convert, init) for parameter in command.params for flag in parameter.opts),
    "--version",
    "--help",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_naiad_are_there(page: Path) -> None:
    # A command may go on in the next line. What other programs are given is not checked.
    commands = re.findall(r"\bnaiad (?:serve|init|convert|--model)(?:.*\\\n)*[^`\n]*", page.read_text())
    flags = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(commands))
    assert [flag for flag in flags if flag not in FLAGS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_to_install_are_there(page: Path) -> None:
    extras = re.findall(r"(?:naiad|\.)\[([\w,-]+)\]'", page.read_text())
    named = {name for extra in extras for name in extra.split(",")}
    assert named <= PROJECT["optional-dependencies"].keys()


def test_parameters_of_models_are_explained() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for parameter in (HOST_PARAMETER, TIMEOUT_PARAMETER, ENVIRONMENT_PARAMETER):
        assert f"| `{parameter}` |" in text


def test_dependencies_say_how_old_they_may_be() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for dependency in PROJECT["dependencies"]:
        found = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", dependency)
        assert found, dependency
        tested, least = ([int(part) for part in text.split(".")] for text in (pinned[found[1]], found[2]))
        assert least <= tested


def hot_path() -> list[Path]:
    """The modules that setup.py compiles."""
    [names] = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOT_PATH"
    ]
    return [ROOT / "src" / "naiad" / f"{name}.py" for name in names]


@pytest.mark.parametrize("module", hot_path(), ids=lambda module: module.stem)
def test_constants_of_compiled_modules_are_final(module: Path) -> None:
    """Any other one is looked up in a dictionary at each use."""
    names = [
        node.targets[0].id
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    assert [name for name in names if re.fullmatch("_?[A-Z][A-Z0-9_]+", name)] == []
