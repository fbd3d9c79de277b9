import os
import subprocess
import sys
import tempfile
import time

import pytest

from naiad import server
from naiad.errors import Unavailable
from naiad.options import ServerOptions


@pytest.fixture
def started(tmp_path, monkeypatch):
    """TMPDIR as it was when a server started that finds no folder for temporary files but that one."""
    seen = []

    def run(main):
        main.close()
        seen.append(os.environ.get("TMPDIR"))
        return 0

    monkeypatch.setattr(server.uvloop, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [os.environ.get("TMPDIR", "/nowhere")])
    monkeypatch.setenv("TMPDIR", "/nowhere")
    return seen


def test_temporary_files_of_a_read_only_system_are_in_shared_memory(started):
    assert server.serve(ServerOptions(model_repository=("/a",))) == 0
    assert started == ["/dev/shm"]


def test_without_any_folder_for_temporary_files(started, monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(Unavailable, match="set TMPDIR, or mount one at /tmp"):
        server.serve(ServerOptions(model_repository=("/a",)))
    assert started == []


def test_a_folder_that_there_is_stays(started, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert server.serve(ServerOptions(model_repository=("/a",))) == 0
    assert started == [str(tmp_path)]


def test_without_standard_streams(tmp_path):
    begun = tmp_path / "begun"
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    code = f"open({str(begun)!r}, 'w')\n\n\nclass TritonPythonModel:\n    def execute(self, requests): ...\n"
    (tmp_path / "models" / "m" / "1" / "model.py").write_text(code)
    ports = " ".join(f"--{service}-port=0" for service in ("http", "grpc", "metrics"))
    command = f'exec "$0" -m naiad --model-repository={tmp_path}/models {ports} <&- >&- 2>&-'
    with subprocess.Popen(["sh", "-c", command, sys.executable]) as process:
        while not begun.exists() and process.poll() is None:
            time.sleep(0.01)  # nobody tells when a file is there
        process.terminate()
        assert process.wait(60) == 0


ADOPTING = """
import ctypes, os, subprocess, sys
from naiad import server
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come here, as to process 1
orphan = int(subprocess.check_output(["sh", "-c", "sleep 60 >/dev/null & echo $!"]))
assert server._reap(0) == 0, "it runs"
os.kill(orphan, 9)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
assert server._reap(0) == orphan
assert os.path.exists(f"/proc/{orphan}"), "it may be somebody's"
assert server._reap(orphan) == 0
assert not os.path.exists(f"/proc/{orphan}")
"""


def test_process_1_asks_for_the_end_of_orphans():
    subprocess.run([sys.executable, "-c", ADOPTING], check=True, timeout=60)
