"""Errors of the coordinator, and what they mean for the process that meets them.

CoordinatorError
├── ProtocolError     a peer's bytes are no message of this version: its connection is dropped
├── JoinRefused       the master will not have this member (wrong secret, version, setting, rank): exit code 2, one line
├── JoinFailed        no master could be reached by the start-up deadline: exit code 1
├── Superseded        a newer Reconfigure has come: what was waited for is void; take it up with `Member.reconfigured`
├── Evicted           the group goes on without this member: hand its requests back (resumable error), exit code 1
├── GroupFailed       the master's verdict: this group steps no more; the reason names who is at fault: as Evicted
├── MasterLost        the master is gone or silent, and no other was found in time: as Evicted
├── Deposed           a master's own: another has taken its lease; its members look for that one
├── StoreUnavailable  the membership store did not answer in time: try again, serving goes on meanwhile
│   └── StoreGarbled  it holds what no group has written, or another one has: at the start exit code 2, one line
├── Fenced            the store knows a newer token or epoch: who holds this one must not act any more
├── LeaseHeld         another master holds the lease; names its token and address
└── PrivateRedisFailed  no Redis could be started for this group: exit code 1
"""

from __future__ import annotations


class CoordinatorError(Exception):
    """Root of everything that this package raises on purpose."""


class ProtocolError(CoordinatorError):
    """The peer's bytes are not a message of this version. The connection is closed."""


class JoinRefused(CoordinatorError):
    """The master refused the Hello, or is not one that this member can follow."""


class JoinFailed(CoordinatorError):
    """No master could be reached in time."""


class Superseded(CoordinatorError):
    """A newer epoch than the one that was waited in has begun."""


class Evicted(CoordinatorError):
    """The group goes on without this member."""


class GroupFailed(CoordinatorError):
    """The group steps no more."""


class MasterLost(CoordinatorError):
    """The master is gone or silent."""


class Deposed(CoordinatorError):
    """Another master has taken this one's lease."""


class StoreUnavailable(CoordinatorError):
    """The membership store could not be reached, or did not answer in time. What was asked may still happen."""


class StoreGarbled(StoreUnavailable):
    """What the membership store holds under the group's keys is not this group's. Names the key and the remedy."""


class Fenced(CoordinatorError):
    """The membership store has seen a newer token or epoch than the caller's."""


class LeaseHeld(CoordinatorError):
    """Another master holds the lease."""

    def __init__(self, token: int, address: str) -> None:
        super().__init__(f"the lease is held by the master at {address} (token {token})")
        self.token = token
        self.address = address


class PrivateRedisFailed(CoordinatorError):
    """No Redis server was found, or the one that was started did not answer."""
