"""The instance whose code runs in this process.

`pb_utils` has functions without an argument that tells whom they serve (`Logger.log`, `load_model`), because
Triton runs one instance per process. So do we, except without isolation, where the instance entered last counts;
all have the same services then.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from naiad.backends.api import Services
from naiad.backends.python.failures import TritonModelException
from naiad.errors import NaiadError

if TYPE_CHECKING:
    from naiad.backends.python.metrics import Notes

A = TypeVar("A")


class Instance:
    """`is_serving` is false while the model is constructed and while it is finalized."""

    __slots__ = ("directory", "is_serving", "name", "notes", "services")

    def __init__(self, name: str, services: Services, directory: Path) -> None:
        self.name = name
        self.services = services
        self.directory = directory
        self.is_serving = False
        self.notes: Notes | None = None

    def ask(self, method: str, argument: Any, kind: type[A], failed: str) -> A:
        """An answer of the server. Raises TritonModelException, with Triton's words after `failed`."""
        try:
            return self.services.call(method, argument, kind)
        except NaiadError as error:
            raise self.refused(failed, error.message) from error

    def refused(self, failed: str, reason: str) -> TritonModelException:
        """`Failed to load model: Failed to process the request for model 'add_0_0', message: <reason>`."""
        return TritonModelException(
            f"{failed}: Failed to process the request for model '{self.name}', message: {reason}"
        )


_instance: Instance | None = None


def enter(instance: Instance) -> None:
    global _instance
    _instance = instance


def instance() -> Instance:
    """Raises TritonModelException where no model is loaded in this process."""
    if _instance is None:
        raise TritonModelException("triton_python_backend_utils works only inside of a model that a server has loaded.")
    return _instance
