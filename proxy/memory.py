"""How the process handles memory, set once at its start."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

# glibc's malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 * 2**20
MMAP_BYTES: Final = 4 * 2**20

YOUNG_OBJECTS: Final = 10_000  # new ones that make the garbage collector look; going through them takes 1 ms


def keep_freed_memory() -> None:
    """Lets malloc keep what large bodies freed, rather than give it back and ask for zeroed pages again.

    Halves the cost of a 256 KiB body: page faults are most of it. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)


def spare_the_collector() -> None:
    """Takes what exists by now, which stays for ever, out of the garbage collector's rounds, and makes these rarer.

    What a request leaves behind is freed without the collector. With Python's own threshold it would look through all
    that is new a dozen times while a burst of requests comes in.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
