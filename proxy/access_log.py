"""One line of JSON per inference request, without prompts, answers or keys.

Lines are gathered and written a few times a second: a write to a file takes microseconds once the kernel has the
page, but not when it is done for every request. The file is opened anew when it was moved away, so that log rotation
needs no signal.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Final

from proxy.errors import ConfigError
from proxy.outcomes import End

if TYPE_CHECKING:
    from proxy.exchange import Exchange

logger = logging.getLogger(__name__)

MAX_UNWRITTEN: Final = 1000  # lines gathered before they are written anyway
_escape: Final = json.encoder.encode_basestring_ascii


class AccessLog:
    """The log of one proxy; without a file it does nothing."""

    def __init__(self, file: str) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._file = file
        self._lines: list[str] = []
        self._fd = -1
        if file:
            try:
                self._fd = _open(file)
            except OSError as err:
                raise ConfigError(f"--access-log {file}: {err.strerror}") from err

    @property
    def is_on(self) -> bool:
        """Whether lines are wanted."""
        return self._fd >= 0

    def note(self, request: Exchange, status: int, end: End, duration_s: float) -> None:
        """A request has ended now. Times that it never reached are 0."""
        # Formatted by hand: json.dumps of the same costs as much as all routing of a request.
        model, replica = request.model, request.replica
        self._lines.append(
            f'{{"time": {time.time():.3f}, "request_id": {_escape(request.request_id.decode())}, '
            f'"key": {_escape(request.ticket.caller.name)}, "route": "{request.route}", '
            f'"model": {"null" if model is None else _escape(model)}, '
            f'"replica": {_escape(replica.replica_id if replica else "")}, '
            f'"status": {status}, "outcome": "{end}", "attempts": {len(request.tried)}, '
            f'"request_bytes": {request.size}, "answer_bytes": {request.answer_bytes}, '
            f'"queue_s": {request.queue_s:.6f}, "first_byte_s": {request.first_byte_s:.6f}, '
            f'"duration_s": {duration_s:.6f}}}\n'
        )
        if len(self._lines) >= MAX_UNWRITTEN:
            self.flush()

    def flush(self) -> None:
        """Writes what was gathered. A disk that is full costs lines, never requests."""
        if not self._lines:
            return
        text, self._lines = "".join(self._lines).encode(), []
        try:
            os.write(self._fd, text)
        except OSError as err:
            logger.error("access log not written file=%s err=%s", self._file, err.strerror)

    def reopen(self) -> None:
        """Opens the file anew if another, or none, is at its path now."""
        if not self.is_on:
            return
        try:
            if os.path.exists(self._file) and os.path.samestat(os.stat(self._file), os.fstat(self._fd)):
                return
            self.flush()
            fd = _open(self._file)
        except OSError as err:
            logger.error("access log not opened again file=%s err=%s", self._file, err.strerror)
            return
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Writes what is left."""
        if self.is_on:
            self.flush()
            os.close(self._fd)
            self._fd = -1


def _open(file: str) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
