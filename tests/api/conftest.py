"""Servers to ask, and names for models that no other test uses."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Client, Repository, Server


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "models")


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that loads what it is told to; its `repository` is empty at first."""
    repository = Repository(tmp_path_factory.mktemp("models"))
    with Server(repository, flags=("--model-control-mode=explicit",)) as server:
        server.repository = repository  # type: ignore[attr-defined]
        yield server.started()


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries of fake_cuda.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcudart.so", source], check=True)
    (folder / "libcuda.so.1").symlink_to("libcudart.so")
    return folder


@pytest.fixture(params=["http", "grpc"])
def client(explicit: Server, request: pytest.FixtureRequest) -> Client:
    return explicit.client(request.param)


@pytest.fixture
def name() -> str:
    """Short enough for ps to show it whole."""
    return f"m{uuid.uuid4().hex[:7]}"
