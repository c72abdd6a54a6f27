"""A bar for the weights that are loaded, on a terminal only."""

from __future__ import annotations

from typing import Final, TextIO

from replica.frames import Progress

_WIDTH: Final = 40
_MIB: Final = 1 << 20


class ProgressBar:
    """Draws on one line of a terminal; on anything else it draws nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()

    def update(self, progress: Progress) -> None:
        """Shows how far the worker is. The line ends when all is read."""
        if not self._is_shown or progress.total_bytes <= 0:
            return
        share = min(1.0, progress.done_bytes / progress.total_bytes)
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH)
        end = "\n" if share >= 1 else ""
        self._stream.write(
            f"\rloading weights [{bar}] {progress.done_bytes // _MIB} / {progress.total_bytes // _MIB} MiB{end}"
        )
        self._stream.flush()
