"""Machines as network namespaces of Linux, on one bridge; each can be cut off from all others."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType
from typing import Final

import pytest

_SUBNET: Final = "10.213.7"  # of tests that are on no real network


class Network:
    """So many machines, and this process at `host_address`. Skips the test where namespaces may not be made."""

    def __init__(self, num_machines: int) -> None:
        self.host_address = f"{_SUBNET}.1"
        self.addresses = [f"{_SUBNET}.{10 + i}" for i in range(num_machines)]
        self._name = f"lk{os.getpid() % 100_000}"

    def command_prefix(self, machine: int) -> list[str]:
        """What runs a command on a machine, put before it."""
        return ["ip", "netns", "exec", self._namespace(machine)]

    def cut(self, machine: int) -> None:
        """Nothing comes from the machine any more, and nothing reaches it. Connections stay open."""
        _ip("link", "set", self._link(machine), "down")

    def heal(self, machine: int) -> None:
        """The machine is back."""
        _ip("link", "set", self._link(machine), "up")

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._name, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as err:
            pytest.skip(f"network namespaces cannot be made here: {err}")
        _ip("addr", "add", f"{self.host_address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for machine, address in enumerate(self.addresses):
            namespace, link = self._namespace(machine), self._link(machine)
            _ip("netns", "add", namespace)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", link, "master", self._name)
            _ip("link", "set", link, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in range(len(self.addresses)):
            subprocess.run(["ip", "netns", "del", self._namespace(machine)], check=False)
            subprocess.run(["ip", "link", "del", self._link(machine)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], check=False)

    def _namespace(self, machine: int) -> str:
        return f"{self._name}-{machine}"

    def _link(self, machine: int) -> str:
        return f"{self._name}v{machine}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
