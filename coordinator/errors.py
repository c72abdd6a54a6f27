"""Errors of the coordinator, and what they mean for the process that meets them.

CoordinatorError
├── ProtocolError   a peer's bytes are no message of this version: its connection is dropped
├── JoinRefused     the master will not have this member (wrong secret, version, setting, rank): exit code 2, one line
├── JoinFailed      no master could be reached by the start-up deadline: exit code 1
├── GroupFailed     the master's verdict: this group steps no more; the reason names the member at fault
└── MasterLost      the master's connection ended, or the master fell silent: as GroupFailed
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


class GroupFailed(CoordinatorError):
    """The group steps no more."""


class MasterLost(CoordinatorError):
    """The master is gone or silent."""
