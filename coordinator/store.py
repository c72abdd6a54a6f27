"""What a master needs of the place where a group's membership outlives a process.

`membership.py` keeps it in Redis, `simulation.py` in simulated memory. Nothing on the step path asks it anything.

Two numbers order everything, and neither ever falls: a **token** per mastership and an **epoch** per membership. A
store may lose what it was told last, or all of it; whoever writes brings along the highest that it has seen, and the
highest wins.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, cast

LEASE_S: Final = 2.0  # a master that has not renewed for so long may be replaced


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of `join_address`. Raises ValueError for what is none."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The membership that was committed last."""

    epoch: int
    members: tuple[int, ...]  # dp ranks that live, ascending
    evicted: tuple[tuple[int, ...], ...]  # dp ranks of each eviction, in order
    config_hash: str  # of what all members have in common

    def to_json(self) -> str:
        """Text that from_json reads; equal for equal records."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises ValueError where `text` is not what to_json wrote."""
        try:
            fields = cast(dict[str, Any], json.loads(text))
            return cls(
                epoch=int(fields["epoch"]),
                members=tuple(map(int, fields["members"])),
                evicted=tuple(tuple(map(int, event)) for event in fields["evicted"]),
                config_hash=str(fields["config_hash"]),
            )
        except (KeyError, TypeError, OverflowError, RecursionError) as err:
            raise ValueError(f"not a membership record: {text!r:.200}") from err


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to be the master, as long as it is renewed."""

    token: int  # grows with each master
    epoch: int  # the first that this master may begin: one more than any that was stored or seen
    record: Record | None  # the last master's membership, if there was one


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterAddress:
    """Where the holder of the lease listens."""

    token: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the store says of the mastership at one moment."""

    token: int  # the highest ever; 0 where there never was a master, or the store has lost its data
    epoch: int  # the highest ever, committed or only handed out with a lease
    record: Record | None  # the membership that was committed last, if any was
    address: str  # host:port of the token's holder
    is_leased: bool  # the lease has not run out
    is_over: bool = False  # the holder gave it up: its group has ended, and there is nothing to take over

    @property
    def committed_epoch(self) -> int:
        """That of the record; 0 for none."""
        return self.record.epoch if self.record else 0


class Store(Protocol):
    """Each call returns, or raises StoreUnavailable, within a second.

    A call that raises StoreUnavailable may have happened, or may still happen, late. Repeating one is harmless.
    """

    async def take_lease(
        self, *, holder: str, address: str, seen_token: int, seen_epoch: int, replaces: int | None = None
    ) -> Lease:
        """The lease, if nobody holds it, or if `replaces` is the holder's token. Raises LeaseHeld, StoreUnavailable.

        `holder` is a name that no other life of a process has, `address` (host:port) is where its clock is.
        """

    async def renew(self, token: int, epoch: int) -> int:
        """Keeps the lease for another LEASE_S, and restores what a store that lost its data lacks.

        Returns how many commands the store has: where there are none, `commands` need not be asked for.
        Raises Fenced where the token was replaced, StoreUnavailable.
        """

    async def commit(self, token: int, record: Record) -> None:
        """Replaces the record by one of a newer epoch: no two different records may have the same one.

        Raises Fenced where the token was replaced or the epoch is not newer, StoreUnavailable.
        """

    async def release(self, token: int) -> None:
        """Gives the lease up, if it is still held, since the group has ended. Raises StoreUnavailable."""

    async def master(self) -> MasterAddress | None:
        """Who holds the lease; None where it has run out. Raises StoreUnavailable."""

    async def view(self) -> View:
        """What a standby looks at. Raises StoreUnavailable."""

    async def commands(self, pending: Collection[str]) -> list[str]:
        """What operators have asked for since the last call. Raises Fenced, StoreUnavailable.

        `pending`: of what was given out before, what not all members have acted on. The rest is forgotten; a master
        that follows is given what is not, so that it is carried at least once.
        """

    async def command(self, name: str) -> None:
        """Asks the master to put a command into a release. Raises StoreUnavailable, ValueError for a bad name."""

    async def close(self) -> None:
        """Ends the connections."""
