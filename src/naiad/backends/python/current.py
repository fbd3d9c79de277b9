"""The instance whose code runs in this process.

`pb_utils` has functions without an argument that tells whom they serve (`Logger.log`, `load_model`), because
Triton runs one instance per process. So do we, except without isolation, where the instance entered last counts;
all have the same services then.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from naiad.backends.api import Services
from naiad.backends.python.failures import TritonModelException

if TYPE_CHECKING:
    from naiad.backends.python.metrics import Notes


class Instance:
    """`is_serving` is false while the model is constructed and while it is finalized."""

    __slots__ = ("directory", "is_serving", "notes", "services")

    def __init__(self, services: Services, directory: Path) -> None:
        self.services = services
        self.directory = directory
        self.is_serving = False
        self.notes: Notes | None = None


_instance: Instance | None = None


def enter(instance: Instance) -> None:
    global _instance
    _instance = instance


def instance() -> Instance:
    """Raises TritonModelException where no model is loaded in this process."""
    if _instance is None:
        raise TritonModelException("triton_python_backend_utils works only inside of a model that a server has loaded.")
    return _instance
