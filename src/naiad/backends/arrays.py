"""What several backends do to arrays between the contract of `api.py` and a framework. Runs in hosts."""

from typing import Any

import numpy as np
import numpy.typing as npt

from naiad.errors import InvalidArgument


def to_text(array: npt.NDArray[np.object_], tensor: str) -> npt.NDArray[np.object_]:
    """BYTES elements as str, for frameworks that know text only. Raises InvalidArgument where they are not UTF-8."""
    text = np.empty(array.size, dtype=np.object_)
    try:
        text[:] = [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{tensor}' holds {error.object[:20]!r}, which is not UTF-8; the framework of this model takes text only"
        ) from error
    return text.reshape(array.shape)


def from_text(array: npt.NDArray[Any]) -> npt.NDArray[np.object_]:
    """Elements of str (or bytes) as BYTES elements."""
    data = np.empty(array.size, dtype=np.object_)
    data[:] = [element.encode() if isinstance(element, str) else bytes(element) for element in array.reshape(-1)]
    return data.reshape(array.shape)
