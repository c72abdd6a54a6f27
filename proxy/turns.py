"""What is new goes first: events of streams that flow already wait until all that has come is read.

A replica steps all its streams at once, so their events come in bursts of hundreds, and writing one takes twice as long
as reading it. A request, or the first bytes of an answer, would wait for all that came before it to be written. So a
client with an event to write takes its turn instead: the event loop reads everything that is ready, and what is new in
it is sent as it is read; then some clients are written to, and the loop looks again.

No client waits long for that. They take turns in the order in which they came, each is there once, and the more come,
the more are written to in one turn. What is read for one that waits already is written at once, with what waits, and so
is the end of an answer (`ClientConnection.write_in_turn`).
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.client import ClientConnection

FEWEST: Final = 32  # clients written to in one turn: some 0.3 ms, for which one more look at the sockets is cheap
PART: Final = 4  # for so many clients that came since the last turn, at least one is written to


class Turns:
    """The clients that wait, and what for. A client that is written to before its turn is taken out by who does so."""

    def __init__(self) -> None:
        self.waiting: dict[ClientConnection, bytes] = {}  # the first to come is the first
        self._joined = 0  # since the last turn
        self._is_due = False  # a turn comes

    def join(self, client: ClientConnection, data: bytes) -> None:
        """The client, which does not wait yet, is written to in its turn."""
        self.waiting[client] = data
        self._joined += 1
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._write_some)

    def _write_some(self) -> None:
        count = max(FEWEST, self._joined // PART)
        self._joined = 0
        try:
            for client in list(islice(self.waiting, count)):
                client.write_held()
        finally:
            self._is_due = bool(self.waiting)
            if self._is_due:
                asyncio.get_running_loop().call_soon(self._write_some)
