"""What has been sent of a stream, so that another replica could continue it.

The relay records the raw bytes of every event stream that it passes on, in whole HTTP chunks, and reads them never:
only a stream that lost its replica looks at its journal. Recording must cost next to nothing, so it keeps the very
objects that were read. A journal is bounded; one that is full forgets all, since half a journal continues nothing.
"""

from __future__ import annotations


class Journal:
    """One stream's."""

    __slots__ = ("_parts", "_room")

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._parts: list[bytes] | None = []

    def record(self, data: bytes) -> None:
        """These bytes were passed on."""
        if self._parts is None:
            return
        self._room -= len(data)
        if self._room < 0:
            self._parts = None
        else:
            self._parts.append(data)

    def sent(self) -> bytes | None:
        """All that was passed on, as it was framed; None if it was too much to keep."""
        return None if self._parts is None else b"".join(self._parts)
