"""CPU time and memory of process groups, and how busy the rest of the machine is.

Everything is read from `/proc`: Linux only, no dependency.  `utime + stime` of
`/proc/PID/stat` has a resolution of one tick (10 ms), but their sum follows the
scheduler's exact run time, so a window of some seconds is measured to about 1 %.
"""

from __future__ import annotations

import os

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/PID/stat` after the command name, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def session_pids(session: int) -> list[int]:
    """The processes of one session (a router and all that it started)."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields and int(fields[3]) == session and fields[0] != "Z":
                pids.append(int(name))
    return pids


def cpu_seconds(session: int) -> float:
    """CPU seconds used so far by the session, its ended children included."""
    total = 0
    for pid in session_pids(session):
        fields = _stat(pid)
        if fields:
            total += sum(int(fields[i]) for i in (11, 12, 13, 14))
    return total / TICK


def rss_bytes(session: int) -> int:
    """Resident memory of the session's processes (shared pages count in each)."""
    total = 0
    for pid in session_pids(session):
        fields = _stat(pid)
        if fields:
            total += int(fields[21]) * PAGE
    return total


def threads(session: int) -> int:
    """Threads of the session's processes."""
    return sum(int(fields[17]) for pid in session_pids(session) if (fields := _stat(pid)))


def machine_seconds() -> tuple[float, float]:
    """(CPU seconds that all processes used, CPU seconds that the hypervisor took)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft) / TICK, steal / TICK
