"""A Ray cluster of two nodes on this machine, each with an address of its own, for tests. In the end all is killed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.commands import BIN, Command, free_port, wait_until

STARTED: Final = "Ray runtime started."
STARTED_S: Final = 90.0  # on a busy machine; 10 on an idle one
SECOND_NODE: Final = "127.0.0.2"
OPTIONS: Final = ("--block", "--num-gpus", "0", "--object-store-memory", str(80 << 20), "--disable-usage-stats")


@dataclass(frozen=True)
class RayCluster:
    """Its nodes, each with all of its processes."""

    address: str
    head: Command
    second: Command

    def kill_second(self) -> None:
        """The second node is lost: all of its processes at once."""
        for pid in self.second.pids():
            os.kill(pid, signal.SIGKILL)
        self.second.process.wait()


@contextmanager
def ray_cluster(folder: Path, *, head_cpus: int, second_cpus: int) -> Iterator[RayCluster]:
    """A running cluster. Nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as sockets:  # paths must be short
        address = f"127.0.0.1:{free_port()}"
        own = ("--head", "--port", address.partition(":")[2], "--temp-dir", sockets, "--include-dashboard", "false")
        nodes = [_node(folder / "head.log", *own, "--num-cpus", str(head_cpus))]
        try:
            joins = ("--address", address, "--node-ip-address", SECOND_NODE)
            nodes.append(_node(folder / "second.log", *joins, "--num-cpus", str(second_cpus)))
            yield RayCluster(address, *nodes)
        finally:
            for node in nodes:
                node.close()
            for pid in _users(sockets):  # agents, which would go on for a while
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not _users(sockets), "the end of Ray's processes")


def _node(log_file: Path, *options: str) -> Command:
    """A node that has started."""
    node = Command([str(BIN / "ray"), "start", *OPTIONS, *options], log_file)
    try:
        wait_until(lambda: STARTED in node.log() or node.process.poll() is not None, "a Ray node", STARTED_S)
        assert STARTED in node.log(), node.log()
    except BaseException:
        node.close()
        raise
    return node


def _users(folder: str) -> list[int]:
    """The processes with files open in the folder, such as their logs. Ray overwrites what else would mark them."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_open(pid, folder)]


def _has_open(pid: int, folder: str) -> bool:
    links = Path(f"/proc/{pid}/fd")
    with suppress(OSError):  # it has ended
        return any(os.readlink(links / name).startswith(folder) for name in os.listdir(links))
    return False
