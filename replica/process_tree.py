"""What the processes of one `replica serve` know of each other: supervisor -> engine -> workers.

A parent holds one end of a pipe or socket of which each child holds the other. Only the parent has its end, so the
kernel closes it however the parent ends, SIGKILL included, and the child sees EOF and exits. No process outlives the
one that answers for it, and none holds a port or a device that the next life needs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Final

# What a supervisor and its engines say to each other (engine.py).
STOP_BYTE: Final = b"s"
READY: Final = b"ready"
EPOCH: Final = b"epoch"
GROUP_FAILED: Final = b"failed"


def follow_parent(fd: int, on_byte: Callable[[], None] = lambda: None) -> None:
    """Ends this process when the parent's end of `fd` closes; calls `on_byte` for each byte that comes before.

    A thread does it, since the main thread may be inside a long computation; hence no clean-up runs at the end either.
    """

    def follow() -> None:
        try:
            while os.read(fd, 1):
                on_byte()
        except OSError:
            pass  # a reset connection: the parent is as gone as after EOF
        os._exit(1)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()


def ignoring_signals(command: Sequence[str]) -> tuple[str, ...]:
    """The command, begun with SIGINT and SIGTERM ignored: they come to every process of a terminal or a service.

    A Python that ignored them itself would do so only after its imports. The shell becomes the command; it is there
    because libuv, under uvloop, resets what a child would inherit.
    """
    return ("/bin/sh", "-c", 'trap "" INT TERM; exec "$@"', "sh", *command)


def describe_status(status: int) -> str:
    """A child's exit status, as `subprocess` reports it, in words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, or asyncio's where uvloop is not made for the platform."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
