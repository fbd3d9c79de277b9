"""The event loop on which the coroutines of a model run, in a thread of its own."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from naiad.backends.python.failures import end_fork

#: How long coroutines may take to end when their instance does.
_CLOSE_S = 5.0


class EventLoop:
    """Where coroutines of a model run: a loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._host = os.getpid()
        self._thread = threading.Thread(target=self._work, name="coroutines", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels what still runs. Code that blocks the loop is not waited for long: the process ends anyway."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_S)

    def _work(self) -> None:
        is_stopped = False
        while not is_stopped:
            try:
                self._loop.run_forever()
                is_stopped = True
            except (SystemExit, KeyboardInterrupt) as error:
                end_fork(self._host, error)
                # Of a coroutine, whose result it is too: whoever waits for that has yet to hear of it.
                continue
        self._loop.run_until_complete(_cancel(asyncio.all_tasks(self._loop)))
        self._loop.close()


async def _cancel(tasks: "set[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
