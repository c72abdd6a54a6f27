"""What is new goes first: events of streams that flow already wait until all that has come is read.

A replica steps all its streams at once, so their events come in bursts of hundreds, and writing one takes twice as long
as reading it. A request, or the first bytes of an answer, would wait for all that came before it to be written. So a
client with an event to write takes its turn instead: the event loop reads everything that is ready, and what is new in
it is sent as it is read; then some clients are written to, and the loop looks again.

No client waits long for that. They take turns in the order in which they came, each is there once, and of many, many
are written to in one turn. What is read for one that waits already is written at once, with what waits, and so is the
end of an answer (`ClientConnection.write_in_turn`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.client import ClientConnection

FEWEST: Final = 16  # clients written to in one turn: less than 0.2 ms, for which one more look at the sockets is cheap
PART: Final = 8  # of very many clients, one in so many is written to in one turn


class Turns:
    """The clients with an event to write. Used on one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[ClientConnection] = deque()

    def join(self, client: ClientConnection) -> None:
        """The client is written to in its turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write_some)
        self._waiting.append(client)

    def _write_some(self) -> None:
        waiting = self._waiting
        try:
            for _ in range(min(max(FEWEST, len(waiting) // PART), len(waiting))):
                waiting.popleft().take_turn()
        finally:
            if waiting:
                asyncio.get_running_loop().call_soon(self._write_some)
