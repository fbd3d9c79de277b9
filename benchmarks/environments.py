"""An environment of its own for each server that is not Naiad, with pinned versions, made where it is missing.

They lie beside this file as `.env-NAME`, or in the folder that NAIAD_BENCH_ENVIRONMENTS names.
"""

import os
import subprocess
import sys
from pathlib import Path


def folder(name: str) -> Path:
    return Path(os.environ.get("NAIAD_BENCH_ENVIRONMENTS", Path(__file__).parent)).absolute() / f".env-{name}"


def install(name: str, requirements: tuple[str, ...]) -> Path:
    """The environment's `bin`. Needs the package index the first time; raises CalledProcessError where pip fails."""
    where = folder(name)
    done = where / ".installed"
    wanted = "\n".join(requirements)
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
        pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements], check=True)
        done.write_text(wanted)
    return where / "bin"
