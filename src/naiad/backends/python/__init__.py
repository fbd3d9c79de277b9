"""The Python backend: models written as `model.py` files for Triton."""

from naiad.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
