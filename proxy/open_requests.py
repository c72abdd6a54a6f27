"""The inference requests that are being served: what a stopping proxy waits for, and cancels when it must."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


class OpenRequests:
    """The tasks of all open inference requests of one proxy."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def track(self) -> Iterator[None]:
        """Counts the current task as an open request while the block runs."""
        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        self._tasks.add(task)
        self._none_open.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._none_open.set()

    async def drained(self) -> None:
        """Returns when no request is open. From the call on, an answer that begins closes its client's connection."""
        self._is_draining = True
        await self._none_open.wait()

    def cancel_all(self) -> None:
        """Ends what is open, as if the clients had left."""
        for task in self._tasks:
            task.cancel()

    async def close_connections(self, request: web.Request, answer: web.StreamResponse) -> None:
        """For `app.on_response_prepare`: during a drain, the client's next request goes to another proxy."""
        if self._is_draining:
            answer.force_close()
            answer.headers["Connection"] = "close"
