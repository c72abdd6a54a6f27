"""The clock of this command's group, as its supervisor serves it, or stands by to: coordinator/ in the replica's terms.

The first machine's supervisor begins as the master. It takes the lease in the group's store, which is the Redis that
was named, or one of its own. Where the store is shared, the supervisors of other machines stand by, and one of them
takes over when the master is lost, also one whose own replicas are lost. A master whose group has failed serves the
next life of the group at once.

Loaded only where a group has several replicas.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from coordinator import keys
from coordinator.clock import ClockSettings
from coordinator.errors import (
    CoordinatorError,
    Deposed,
    GroupFailed,
    LeaseHeld,
    PrivateRedisFailed,
    StoreUnavailable,
)
from coordinator.master import Master, Mastership, bind
from coordinator.member import LOOK_S, MAX_SILENCE_S
from coordinator.membership import Membership
from coordinator.private_redis import PrivateRedis
from coordinator.standby import POLL_S, begin, take_over
from coordinator.store import join_address, split_address
from replica.address import own_address
from replica.config import ReplicaConfig
from replica.errors import ConfigError

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0  # after an address could not be had
MISSED_S: Final = MAX_SILENCE_S + LOOK_S  # members that have lost their master have found another by then, or ended
SHOWN_HASH_CHARS: Final = 12


class GroupMaster:
    """`start`, then `run` for as long as there are replicas here, then `close`."""

    def __init__(
        self,
        config: ReplicaConfig,
        shared: Mapping[str, str],
        *,
        why_not: Callable[[tuple[int, ...]], str],
        told_epoch: Callable[[], int],
        has_members: Callable[[], bool],
        on_failed: Callable[[], None],
    ) -> None:
        """`shared` is what all members must have in common (group_config.py), `why_not` why so few could not go on.

        `told_epoch`: the last epoch of this life of the group that the replicas of this machine, dead ones among them,
        were told of, 0 before the first. `has_members`: whether one of them lives and was told of any. `on_failed` is
        called when the group that was served here has failed; `failure` says why.
        """
        self.failure = ""
        self.is_left_behind = False  # another machine's group, which no replica of this one can be a member of
        self.is_serving = False
        self._config = config
        self._told_epoch = told_epoch
        self._has_members = has_members
        self._on_failed = on_failed
        self._settings = ClockSettings(
            group=config.group,
            size=config.layout.dp,
            config=shared,
            startup_deadline_s=config.startup_timeout_s,
            progress_deadline_s=config.progress_deadline_s,
            prefill_delay_s=config.prefill_delay_s,
            why_not=why_not,
        )
        self._holder = secrets.token_hex(16)
        self._redis: PrivateRedis | None = None
        self._store: Membership | None = None
        self._listener: socket.socket | None = None  # bound, and not a Master's yet
        self._mastership: Mastership | None = None

    async def start(self) -> ReplicaConfig:
        """Becomes the master, on the first machine, unless there is one. Returns the settings with its address.

        Raises ConfigError when the port or the store cannot be had, or the store has another group of this name.
        """
        config = self._config
        if config.node_rank == 0:
            port = await self._bind(config.master_addr, config.master_port)
            config = replace(config, master_port=port)
        elif not config.redis_url:
            return config
        try:
            self._store = await self._open_store()
            await self._check(self._store)
            if config.node_rank == 0:
                address = join_address(config.master_addr, config.master_port)
                lease = await begin(self._store, holder=self._holder, address=address)
                self._mastership = Mastership(store=self._store, lease=lease, is_takeover=False)
            elif (master := await self._store.master()) is not None:
                config = replace(config, master_addr=master.host, master_port=master.port)
        except LeaseHeld as held:
            logger.warning("another supervisor is the master of this group, this one stands by reason=%s", held)
            self._drop_listener()
            host, port = split_address(held.address)
            config = replace(config, master_addr=host, master_port=port)
        except (PrivateRedisFailed, StoreUnavailable, ValueError) as err:
            raise ConfigError(f"cannot keep the group's membership: {err} (--redis-url)") from err
        return config

    async def run(self) -> None:
        """Serves the group's lives, one after the other, while this process is the master; else stands by.

        Returns when the group has stopped as asked, or when it is not for this process to serve it.
        """
        if self._store is None:
            return
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(self._redis.run())] if self._redis is not None else []
            is_stopped = False
            while not is_stopped:
                try:
                    mastership = self._mastership or await self._stand_by(self._store)
                    is_stopped = await self._serve(mastership)
                except ConfigError as err:  # what worked at the start may do so again; replicas serve meanwhile
                    logger.error("%s; trying again", err)
                    await asyncio.sleep(RETRY_S)
            for task in keeping:
                task.cancel()

    async def not_needed(self) -> None:
        """Waits until the replicas of other machines can do without this one, which has lost its own.

        They cannot while it is the master, and may not while it could become that: until they have a membership without
        its replicas, somebody else's master may be lost as well.
        """
        deadline_s = time.monotonic() + MISSED_S
        while True:
            if not self.is_serving and (time.monotonic() > deadline_s or await self._have_others_gone_on()):
                return
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Gives the lease up, drops every connection and frees the port."""
        self._drop_listener()
        if self._store is not None:
            if self._mastership is not None:
                with suppress(CoordinatorError):  # it runs out by itself, and is not ours if it is fenced
                    await self._store.release(self._mastership.lease.token)
            await self._store.close()
        if self._redis is not None:
            await self._redis.close()

    async def _open_store(self) -> Membership:
        url = self._config.redis_url
        if not url:
            self._redis = PrivateRedis()
            await self._redis.start()
            url = self._redis.url
            if self._config.layout.nnodes > 1:
                logger.warning("no --redis-url: the group ends with this machine, which alone can serve its clock")
        return Membership.at(url, self._config.group)

    async def _check(self, store: Membership) -> None:
        """Raises ConfigError where another group lives, or was lost, under this one's name; StoreUnavailable."""
        await store.check()
        view = await store.view()
        record, own_hash = view.record, self._settings.config_hash
        if record is None or view.is_over or record.config_hash == own_hash:
            return
        raise ConfigError(
            f"--group is {self._config.group!r}, by which the store knows another group: its configuration has the hash"
            f" {record.config_hash[:SHOWN_HASH_CHARS]}, this one's {own_hash[:SHOWN_HASH_CHARS]}; it was last in epoch"
            f" {record.epoch} with {len(record.members)} replicas, its master at {view.address}; take another --group,"
            f" or delete the key {keys.mastership(self._config.group)} if that group is no more"
        )

    async def _have_others_gone_on(self) -> bool:
        if self._store is None:  # nor can this machine be of use to them
            return True
        try:
            view = await self._store.view()
        except StoreUnavailable:
            return False
        own = set(self._config.local_dp_ranks)
        return view.is_over or (view.record is not None and own.isdisjoint(view.record.members))

    async def _serve(self, mastership: Mastership) -> bool:
        """One life of the group, as far as it is served here. Returns whether it has stopped as asked."""
        listener = self._listener
        if listener is None:
            await self._bind(self._config.master_addr, self._config.master_port)
            listener = self._listener
        assert listener is not None
        self._config = replace(self._config, master_port=listener.getsockname()[1])
        self._listener = None
        master = Master(self._settings, self._config.group_secret.encode(), mastership)
        self.is_serving = True
        try:
            await master.start(listener)
            await master.run()
        except GroupFailed as err:
            self.failure = str(err)
            # The lease is kept, lest a standby take over a group that is just being started again.
            lease = replace(mastership.lease, epoch=master.clock.last_epoch + 1)
            self._mastership = replace(mastership, lease=lease, is_takeover=False)
            self._on_failed()
        except Deposed:
            self._mastership = None
            if not self._has_members():
                # The group goes on elsewhere, without the replicas of this machine, and takes no new members.
                self.is_left_behind = True
                self._on_failed()
        else:
            return True
        finally:
            self.is_serving = False
            await master.close()
        return False

    async def _stand_by(self, store: Membership) -> Mastership:
        """Waits until the master is lost and this process is to be the next one."""
        host = own_address(self._config.master_addr)
        port = await self._bind(host, 0)
        self._config = replace(self._config, master_addr=host, master_port=port)
        lease = await take_over(
            store, holder=self._holder, address=join_address(host, port), told_epoch=self._told_epoch
        )
        self._mastership = Mastership(store=store, lease=lease, is_takeover=lease.record is not None)
        return self._mastership

    async def _bind(self, host: str, port: int) -> int:
        """Gets a listener, and returns its port. Raises ConfigError."""
        self._drop_listener()
        try:
            self._listener = await bind(host, port)
        except OSError as err:
            raise ConfigError(
                f"cannot serve the group's clock at {host}:{port}: {err.strerror} (--master-addr, --master-port)"
            ) from err
        bound: int = self._listener.getsockname()[1]
        return bound

    def _drop_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
