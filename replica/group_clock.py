"""One replica's way to the clock that its group shares: coordinator/member.py in the replica's own terms.

Members are told of in the order in which they live; here everything is by the dp ranks of the layout, which never
change: a replica that is lost has no tokens.

Loaded only where a group has several replicas.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NoReturn

import msgpack

from coordinator.errors import CoordinatorError, GroupFailed, JoinFailed, JoinRefused, Superseded
from coordinator.member import LOOK_S, MAX_SILENCE_S, Member
from coordinator.membership import Membership
from coordinator.messages import Hello as MemberHello
from coordinator.messages import Reconfigure, Release
from proxy.protocol import Hello
from replica.config import ReplicaConfig
from replica.errors import ConfigError, CutOff, GroupLost
from replica.step_clock import Reconfiguration

CUT_OFF_S: Final = 10.0  # a wait that an epoch has ended is cut off by who watches `superseded`, at once


class GroupClock:
    """A StepClock (step_clock.py) that is shared. `join`, `exchange`, then steps; `close` it in any case."""

    def __init__(
        self,
        config: ReplicaConfig,
        hello: Hello,
        shared: dict[str, str],
        *,
        collectives: Callable[[], tuple[int, ...]],
        is_alive: Callable[[], bool],
    ) -> None:
        """`hello` is what proxies are told of this replica, `shared` what the group must have in common
        (group_config.py). Called from a thread: `collectives`, how many each rank of this replica has entered in the
        epoch, and `is_alive`, whether all of its ranks live."""
        self.is_shared = True
        self.takeover_s = LOOK_S + config.progress_deadline_s  # the master may have been silent before it is missed
        self._dp = config.layout.dp
        self._members = tuple(range(self._dp))
        self._store = Membership.at(config.redis_url, config.group) if _master_may_move(config) else None
        self._member = Member(
            hello=MemberHello(
                group=hello.group,
                replica_id=hello.replica_id,
                incarnation=hello.incarnation,
                dp_rank=hello.dp_rank,
                config=shared,
                url=hello.url,
            ),
            host=config.master_addr,
            port=config.master_port,
            secret=config.group_secret.encode(),
            startup_deadline_s=config.startup_timeout_s,
            silence_s=min(config.progress_deadline_s, MAX_SILENCE_S if _master_may_move(config) else math.inf),
            collectives=collectives,
            is_alive=is_alive,
            find_master=self._find_master,
        )

    async def join(self) -> Reconfiguration:
        """Waits until all replicas are there; how the first epoch begins. Raises ConfigError if this one is refused,
        GroupLost."""
        try:
            with _translated():
                return reconfiguration(await self._member.join())
        except JoinRefused as err:
            raise ConfigError(f"the group does not take this replica: {err}") from err

    async def exchange(self, blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """See StepClock."""
        try:
            with _translated():
                go = await self._member.ready(msgpack.packb(blobs))
        except Superseded as err:
            return await _cut_off(err)
        return tuple(blob for packed in go.blobs for blob in msgpack.unpackb(packed))

    @property
    def is_looking(self) -> bool:
        """See StepClock."""
        return self._member.is_looking

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """See StepClock."""
        self._member.arrive(decode_tokens=decode_tokens, prefill_tokens=prefill_tokens)

    def want(self, command: str) -> None:
        """See StepClock."""
        self._member.want(command)

    async def released(self) -> Release:
        """See StepClock."""
        try:
            with _translated():
                release = await self._member.released()
        except Superseded as err:
            return await _cut_off(err)
        return for_all_replicas(release, self._members, self._dp)

    def done(self, step: int) -> None:
        """See StepClock."""
        self._member.done(step)

    def fault(self, step: int, what: str) -> None:
        """See StepClock."""
        self._member.fault(step, what)

    async def superseded(self) -> None:
        """See StepClock."""
        with _translated():
            await self._member.superseded()

    async def reconfigured(self) -> Reconfiguration:
        """See StepClock."""
        with _translated():
            change = reconfiguration(await self._member.reconfigured(self._member.epoch))
        self._members = change.members
        return change

    async def failed(self) -> NoReturn:
        """See StepClock."""
        with _translated():
            await self._member.failed()
        raise AssertionError("it returns with an error only")

    def leave(self) -> None:
        """See StepClock."""
        self._member.close()

    async def close(self) -> None:
        """Leaves the group, if that has not happened yet, and drops what else is open."""
        self._member.close()
        if self._store is not None:
            await self._store.close()

    async def _find_master(self) -> tuple[str, int] | None:
        master = await self._store.master() if self._store is not None else None
        return (master.host, master.port) if master is not None else None


def for_all_replicas(release: Release, members: tuple[int, ...], dp: int) -> Release:
    """The release with an entry for each replica of the layout; those that are not among the members have no tokens."""
    if len(members) == dp:
        return release
    decode_tokens, prefill_tokens = [0] * dp, [0] * dp
    for position, dp_rank in enumerate(members):
        decode_tokens[dp_rank] = release.decode_tokens[position]
        prefill_tokens[dp_rank] = release.prefill_tokens[position]
    return replace(release, decode_tokens=tuple(decode_tokens), prefill_tokens=tuple(prefill_tokens))


def reconfiguration(message: Reconfigure) -> Reconfiguration:
    """A master's message in this package's terms."""
    return Reconfiguration(
        epoch=message.epoch,
        members=message.members,
        evicted=message.evicted,
        kinds=message.kinds,
        reason=message.reason,
        detect_s=message.detect_ms / 1000,
        agree_s=message.agree_ms / 1000,
    )


def _master_may_move(config: ReplicaConfig) -> bool:
    """Whether the supervisor of another machine can become the master. The store then says where it is."""
    return config.layout.nnodes > 1 and bool(config.redis_url)


async def _cut_off(superseded: Superseded) -> NoReturn:
    await asyncio.sleep(CUT_OFF_S)
    raise GroupLost(f"nobody has taken up the new epoch within {CUT_OFF_S:g} s: {superseded}")


@contextmanager
def _translated() -> Iterator[None]:
    """The coordinator's errors as the replica's, but for those that only one call can have."""
    try:
        yield
    except (JoinRefused, Superseded):
        raise
    except JoinFailed as err:
        raise GroupLost(f"{err} (--master-addr, --master-port)") from err
    except GroupFailed as err:
        raise GroupLost(str(err)) from err
    except CoordinatorError as err:
        raise CutOff(str(err)) from err
