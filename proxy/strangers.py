"""A log for peers that send garbage: they must not be able to fill the disk with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp.http import HttpProcessingError

from proxy.metrics import Metrics

logger = logging.getLogger(__name__)

QUIET_S: Final = 5.0  # at most one line in so long


class StrangerLog:
    """Counts every dropped peer and logs one line per `QUIET_S`, which says how many it stands for."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._quiet_until_s = float("-inf")
        self._unlogged = 0

    def note(self, remote: str | None, what: str) -> None:
        """A peer was dropped for `what`."""
        self._metrics.strangers.inc()
        self._unlogged += 1
        now_s = self._clock()
        if now_s >= self._quiet_until_s:
            # repr: what a stranger sent must not start a line of its own
            logger.warning("stranger dropped remote=%s count=%d reason=%.200r", remote, self._unlogged, what)
            self._quiet_until_s = now_s + QUIET_S
            self._unlogged = 0


class HttpServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's server log, with malformed requests handed to the `StrangerLog`: aiohttp gives each a traceback."""

    def __init__(self, strangers: StrangerLog) -> None:
        super().__init__(logger)
        self._strangers = strangers

    def exception(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Called by aiohttp for whatever goes wrong with a connection."""
        if not self._note(args, kwargs):
            super().exception(msg, *args, **kwargs)

    def debug(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Called by aiohttp for a connection whose first bytes are no HTTP."""
        if not self._note(args, kwargs):
            super().debug(msg, *args, **kwargs)

    def _note(self, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the record is about a stranger, which is then noted. aiohttp's only argument there is the peer."""
        err = kwargs.get("exc_info")
        if not isinstance(err, HttpProcessingError):
            return False
        self._strangers.note(str(args[0]) if args else None, f"malformed HTTP: {err.message}")
        return True
