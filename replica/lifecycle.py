"""What an engine process is doing now. Written by engine.py, read by the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """The states of an engine, in the order in which it passes them."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class Lifecycle:
    """The one holder of an engine's state. `reason` says why it drains or failed."""

    state: EngineState = EngineState.LOADING
    reason: str = ""
