"""Ends what model code has let go of: response senders without a final response, iterators not read to their end.

`__del__` runs wherever the garbage collector does, possibly inside of the host's own sending. So it only leaves
a note here, and a thread does what is to be done.
"""

import functools
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

Ending = Callable[[], None]


@functools.cache
def endings() -> "SimpleQueue[Ending]":
    """The queue of what is to be done; the thread starts with the first call, which must not be in `__del__`."""
    # `SimpleQueue.put` may be called while the same thread is inside of it, which `__del__` needs.
    queue: SimpleQueue[Ending] = SimpleQueue()
    threading.Thread(target=_work, args=(queue,), name="dropped", daemon=True).start()
    return queue


def _work(queue: "SimpleQueue[Ending]") -> None:
    while True:
        try:
            queue.get()()
        except Exception:
            # One that fails must not keep others from their end.
            sys.excepthook(*sys.exc_info())
