"""What listens for clients, as far as the options alone decide it."""

import pytest

from naiad.frontends import listening
from naiad.options import ServerOptions


@pytest.mark.parametrize(
    ("cores", "asked", "frontends", "processes"),
    [
        (1, -1, 1, 0),
        (2, -1, 1, 2),
        (64, -1, 1, 4),
        (64, -1, 2, 0),
        (64, 0, 1, 0),
        (1, 3, 1, 3),
        (64, 8, 2, 8),
    ],
)
def test_how_many_processes_read_large_json(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: int, frontends: int, processes: int
) -> None:
    monkeypatch.setattr(listening, "available_cores", lambda: cores)
    options = ServerOptions(model_repository=("models",), json_processes=asked, frontends=frontends)
    assert listening._text_processes(options) == processes
