"""What has been sent of a stream, so that another replica could continue it.

The relay records the raw bytes of every event stream that it passes on, in whole HTTP chunks, and reads them never:
only a stream that lost its replica looks at its journal. Recording must cost next to nothing, so it copies into one
growing buffer: keeping the pieces themselves would spread each stream over hundreds of small objects, whose end, when
many streams end together, makes the next requests wait. A journal is bounded; one that is full forgets all, since half
a journal continues nothing.
"""

from __future__ import annotations


class Journal:
    """One stream's."""

    __slots__ = ("_max_bytes", "_sent")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sent: bytearray | None = bytearray()

    def record(self, data: bytes) -> None:
        """These bytes were passed on."""
        if self._sent is None:
            return
        self._sent += data
        if len(self._sent) > self._max_bytes:
            self._sent = None

    def sent(self) -> bytes | None:
        """All that was passed on, as it was framed; None if it was too much to keep."""
        return None if self._sent is None else bytes(self._sent)
