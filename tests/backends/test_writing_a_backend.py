"""docs/writing-a-backend.md is true: its package, taken from the page, is found by its entry point and serves."""

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()
MATRIX = np.array([[0, 1, 2], [-1, 0, 2]], np.float32)


def listing(file: str) -> str:
    """The code block that follows the mention of `file`."""
    found = re.search(rf"`{re.escape(file)}`[^\n]*:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, f"the page does not show {file}"
    return found.group(1)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as `pip install --target` would leave it: the module, and the metadata that names the entry point."""
    site = tmp_path / "site"
    project = tomllib.loads(listing("pyproject.toml"))["project"]
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["naiad.backends"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[naiad.backends]", *lines, ""]))
    (site / "matrix_backend.py").write_text(listing("matrix_backend.py"))
    return site


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "rotate"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(listing("models/rotate/config.pbtxt"))
    np.save(model / "1" / "model.npy", MATRIX)
    return model.parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def served(repository: Path, site: Path) -> Iterator[str]:
    """The address of a server whose Python path has `site`, from when its model is loaded."""
    port = free_port()
    arguments = [
        f"--model-repository={repository}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]
    server = subprocess.Popen(
        [sys.executable, "-c", "from naiad.cli import main; main()", "serve", *arguments],
        env=os.environ | {"PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if "| READY" in line:
                break
        else:
            pytest.fail("".join(lines))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.communicate(timeout=60)


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as reply:
        return json.load(reply)


def test_the_backend_is_twenty_lines() -> None:
    lines = [line for line in listing("matrix_backend.py").splitlines() if line]
    assert len(lines) <= 20


def test_the_page_names_nothing_that_is_not_there() -> None:
    from naiad.backends import api

    for name in re.findall(r"`([A-Z][a-z]+(?:Backend|Context|Response))`", PAGE):
        assert hasattr(api, name)
    fields = {*api.ModelContext.__dataclass_fields__, "parameters", "shared"}
    assert {"name", "version", "directory", "version_directory", "path", "config", "settings", "services"} <= fields


def test_a_server_finds_and_serves_it(repository: Path, site: Path) -> None:
    with served(repository, site) as url:
        config = ask(f"{url}/v2/models/rotate/config")
        x = {"name": "X", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
        answer = ask(f"{url}/v2/models/rotate/infer", {"inputs": [x]})
    assert config["max_batch_size"] == 64
    assert config["backend"] == "matrix"
    (y,) = answer["outputs"]
    assert y["shape"] == [2, 3]
    assert y["data"] == (np.array([[1, 2], [3, 4]], np.float32) @ MATRIX).reshape(-1).tolist()
