"""The clock of this command's group, as its supervisor serves it: coordinator/master.py in the replica's own terms.

Loaded only where a group has several replicas.
"""

from __future__ import annotations

from coordinator.clock import ClockSettings
from coordinator.errors import GroupFailed
from coordinator.master import Master
from replica.config import ReplicaConfig
from replica.errors import ConfigError


class GroupMaster:
    """`start`, then `run` until the group has ended, then `close`."""

    def __init__(self, config: ReplicaConfig, shared: dict[str, str]) -> None:
        """`shared` is what all members must have in common (group_config.py)."""
        self.failure = ""  # why the group failed, if it did
        self._address = (config.master_addr, config.master_port)
        settings = ClockSettings(
            group=config.group,
            size=config.layout.dp,
            config=shared,
            startup_deadline_s=config.startup_timeout_s,
            progress_deadline_s=config.progress_deadline_s,
            prefill_delay_s=config.prefill_delay_s,
        )
        self._master = Master(settings, config.group_secret.encode())

    async def start(self) -> int:
        """Listens. Returns the port. Raises ConfigError when it cannot be had."""
        host, port = self._address
        try:
            return await self._master.start(host, port)
        except OSError as err:
            raise ConfigError(
                f"cannot serve the group's clock at {host}:{port}: {err.strerror} (--master-addr, --master-port)"
            ) from err

    async def run(self) -> None:
        """Returns when the group has ended, however. Its members learn why, and end by themselves."""
        try:
            await self._master.run()
        except GroupFailed as err:
            self.failure = str(err)

    async def close(self) -> None:
        """Drops every connection and frees the port."""
        await self._master.close()
