"""The reference server: NVIDIA's tritonserver, as the PyPI package nvidia-pytriton carries it.

Owns its environment (`benchmarks/.env-triton`, or the one named by NAIAD_TRITON_ENV) and the command that starts the
server outside of pytriton. Run as a program it becomes the server:

    python benchmarks/triton.py --model-repository=DIR [any flag of tritonserver]
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.7.0"
REQUIREMENTS = (f"nvidia-pytriton=={VERSION}", "numpy<2")


def environment() -> Path:
    return Path(os.environ.get("NAIAD_TRITON_ENV", Path(__file__).parent / ".env-triton")).absolute()


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _packages(environment: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([_python(environment), "-c", code], text=True).strip())


def install() -> Path:
    """Makes the environment where it is missing; its `tritonserver` directory. Needs the package index the first time."""
    where = environment()
    if not _python(where).exists():
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
    try:
        server = _packages(where) / "pytriton" / "tritonserver"
        if not server.is_dir():
            raise FileNotFoundError(server)
    except FileNotFoundError:
        subprocess.run([_python(where), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        server = _packages(where) / "pytriton" / "tritonserver"
    # The backend looks for its stub beside itself; the package keeps one per version of Python.
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy2(server / "python_backend_stubs" / version / stub.name, stub)
    return server


def command(flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment variables that start the server with `flags`."""
    server = install()
    where = environment()
    code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    library = subprocess.check_output([_python(where), "-c", code], text=True).strip()
    variables = dict(os.environ)
    # The stub embeds libpython and finds the environment's numpy through the first python3 on the path.
    variables["PATH"] = f"{where / 'bin'}{os.pathsep}{variables['PATH']}"
    libraries = [str(server.parent.parent / "nvidia_pytriton.libs"), library, variables.get("LD_LIBRARY_PATH", "")]
    variables["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in libraries if path)
    variables.pop("PYTHONHOME", None)
    directories = [f"--backend-directory={server / 'backends'}", f"--cache-directory={server / 'caches'}"]
    return [str(server / "bin" / "tritonserver"), *directories, *flags], variables


def main() -> None:
    arguments, variables = command(sys.argv[1:])
    os.execve(arguments[0], arguments, variables)


if __name__ == "__main__":
    main()
