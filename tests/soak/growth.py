"""What a process holds, and whether that grows: its memory, its open files, and the objects of Python by their type."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np

MIB: Final = 2**20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def rss_mib(pid: int | str = "self") -> float:
    """The memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / MIB


def num_open_files(pid: int | str = "self") -> int:
    """Its open files and sockets."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line with the least squares through points (x, y)."""
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


def num_objects() -> Counter[str]:
    """How many objects there are of each type, of those that the collector knows: all that can hold others."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
