"""The inference requests that are being served: what a stopping proxy waits for, and stops when it must."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.exchange import Exchange


class OpenRequests:
    """All open inference requests of one proxy."""

    def __init__(self) -> None:
        self.is_draining = False  # an answer that begins from now on closes its client's connection
        self._open: set[Exchange] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Exchange]:
        """Those that are open now, whatever becomes of them meanwhile."""
        return iter(list(self._open))

    def add(self, request: Exchange) -> None:
        """A request began."""
        self._open.add(request)
        if len(self._open) == 1:
            self._none_open.clear()

    def discard(self, request: Exchange) -> None:
        """It ended."""
        self._open.discard(request)
        if not self._open:
            self._none_open.set()

    async def drained(self) -> None:
        """Returns when no request is open. From the call on, an answer that begins closes its client's connection."""
        self.is_draining = True
        await self._none_open.wait()

    def stop_all(self) -> None:
        """Ends what is open."""
        for request in self:
            request.stop()
