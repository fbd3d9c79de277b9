import errno
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from naiad.errors import Unavailable
from naiad.frontends.processes import pool

#: Ends when its connection does, which is the first of the three descriptors.
PROGRAM = "import socket, sys; socket.socket(fileno=int(sys.argv[-3])).recv(1)"


async def test_a_process_that_cannot_be_watched_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", PROGRAM, *command[-3:]], **more))
        return started[0]

    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(pool.subprocess, "Popen", start)
    monkeypatch.setattr(os, "pidfd_open", fail)
    processes: Any = SimpleNamespace(behind=None)
    with pytest.raises(Unavailable, match="cannot start front-end process 3: Too many open files"):
        pool._Process(processes, 3).launch()
    assert started[0].wait(60) == 0
