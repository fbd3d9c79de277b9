"""Requests that come again around other data: what was read of one is kept and filled anew. Pure."""

from collections.abc import Iterable
from typing import Final

from naiad.datatypes import DataType
from naiad.messages import InferRequest, Tensor

#: What stands before the data of a request is kept up to this size, and of so many requests.
LARGEST: Final = 1024
MOST: Final = 1024
#: Little is copied faster than a view of it is made.
_SMALL: Final = 4096


class RequestTemplate:
    """A request whose data stand at the end of its message, in the order of its inputs, each behind a head of its own,
    which says how long it is and may be empty."""

    __slots__ = ("_inputs", "_known")

    def __init__(self, request: InferRequest, heads: Iterable[bytes]) -> None:
        #: Without the data, which would keep its message.
        self._known = request.of(())
        self._inputs: list[tuple[str, DataType, tuple[int, ...], bytes, int]] = [
            (tensor.name, tensor.datatype, tensor.shape, head, len(tensor.contents))
            for tensor, head in zip(request.inputs, heads, strict=True)
        ]

    def fill(self, message: bytes | memoryview, at: int) -> InferRequest | None:
        """The request in a message as long as the first one, whose data begin at `at`; None where they are cut
        otherwise."""
        rest = message if len(message) <= _SMALL else memoryview(message)
        inputs: list[Tensor] = []
        for name, datatype, shape, head, size in self._inputs:
            if head:
                start = at
                at += len(head)
                if message[start:at] != head:
                    return None
            inputs.append(Tensor(name, datatype, shape, rest[at : at + size]))
            at += size
        return self._known.of(tuple(inputs))
