"""One replica's way to the clock that its group shares: coordinator/member.py in the replica's own terms.

Loaded only where a group has several replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import msgpack

from coordinator.errors import CoordinatorError, JoinFailed, JoinRefused
from coordinator.member import Member
from coordinator.messages import Hello as MemberHello
from coordinator.messages import Release
from proxy.protocol import Hello
from replica.config import ReplicaConfig
from replica.errors import ConfigError, GroupLost, ReplicaError, WorkerFailed

# A rank that is killed takes its peers along: their collectives raise. So a member whose rank merely raised waits a
# little, in which the one whose rank was killed, or raised first, can say so and be named in the verdict.
FAULT_GRACE_S: Final = 0.5
VERDICT_S: Final = 2.0  # the master answers a Fault at once


class GroupClock:
    """A StepClock (step_clock.py) that is shared. `join`, `exchange`, then steps; `close` it in any case."""

    def __init__(
        self,
        config: ReplicaConfig,
        hello: Hello,
        shared: dict[str, str],
        *,
        collectives: Callable[[], tuple[int, ...]],
    ) -> None:
        """`hello` is what proxies are told of this replica, `shared` what the group must have in common
        (group_config.py). `collectives`, called from a thread: how many each rank of this replica has entered."""
        self.is_shared = True
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
            silence_s=config.progress_deadline_s,
            collectives=collectives,
        )

    @property
    def epoch(self) -> int:
        """See StepClock."""
        return self._member.epoch

    async def join(self) -> None:
        """Waits until all replicas are there. Raises ConfigError if this one is refused, GroupLost."""
        with _translated():
            await self._member.join()

    async def exchange(self, blobs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The blobs of this replica's ranks -> those of all ranks, when all replicas have come so far."""
        with _translated():
            go = await self._member.ready(msgpack.packb(blobs))
        return tuple(blob for packed in go.blobs for blob in msgpack.unpackb(packed))

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """See StepClock."""
        self._member.arrive(decode_tokens=decode_tokens, prefill_tokens=prefill_tokens)

    def want(self, command: str) -> None:
        """See StepClock."""
        self._member.want(command)

    async def released(self) -> Release:
        """See StepClock."""
        with _translated():
            return await self._member.released()

    def done(self, step: int) -> None:
        """See StepClock."""
        self._member.done(step)

    async def failed(self) -> NoReturn:
        """See StepClock."""
        with _translated():
            await self._member.failed()
        raise AssertionError("it returns with an error only")

    async def verdict(self, step: int, error: WorkerFailed) -> ReplicaError:
        """See StepClock."""
        if not error.was_killed and (lost := await self._lost_within(FAULT_GRACE_S)):
            return lost
        self._member.fault(step, str(error))
        return await self._lost_within(VERDICT_S) or error

    def close(self) -> None:
        """Leaves the group."""
        self._member.close()

    async def _lost_within(self, limit_s: float) -> GroupLost | None:
        try:
            async with asyncio.timeout(limit_s):
                await self.failed()
        except TimeoutError:
            return None
        except GroupLost as lost:
            return lost


@contextmanager
def _translated() -> Iterator[None]:
    """The coordinator's errors as the replica's."""
    try:
        yield
    except JoinRefused as err:
        raise ConfigError(f"the group does not take this replica: {err}") from err
    except JoinFailed as err:
        raise GroupLost(f"{err} (--master-addr, --master-port)") from err
    except CoordinatorError as err:
        raise GroupLost(str(err)) from err
