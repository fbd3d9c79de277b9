"""Which connections of a listener are open. On the event loop."""

import asyncio
from typing import Any


class OpenConnections:
    """The open ones. Each has `finish()`, which closes it when what it owes is done, `abort()` and `waiting_since`, the
    loop time of the last progress of something incomplete that its client owes; 0 where it owes nothing."""

    def __init__(self) -> None:
        self.open: set[Any] = set()
        self._changed = asyncio.Event()

    def lost(self, connection: Any) -> None:
        self.open.discard(connection)
        self._changed.set()

    async def gone(self) -> None:
        """Returns when there are none."""
        while self.open:
            self._changed.clear()
            await self._changed.wait()
