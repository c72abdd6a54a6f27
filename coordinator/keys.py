"""Every key in Redis. The braces put a group's keys on one node of a cluster, as its scripts need."""

from __future__ import annotations

import re
from typing import Final

MAX_GROUP_CHARS: Final = 200
_GROUP: Final = re.compile(r"[^\s{}]+")


def checked_group(group: str) -> str:
    """`group` itself. Raises ValueError where it cannot be part of a key."""
    if len(group) > MAX_GROUP_CHARS or not _GROUP.fullmatch(group):
        raise ValueError(
            f"group is {group!r:.220}, needs 1 to {MAX_GROUP_CHARS} characters, no braces and no spaces (--group)"
        )
    return group


def mastership(group: str) -> str:
    """Hash, never expires: token and epoch (the highest ever), holder and address, record (the last committed)."""
    return f"lockstep:{{{group}}}:mastership"


def lease(group: str) -> str:
    """String: the token whose master lives. Expires unless it is renewed."""
    return f"lockstep:{{{group}}}:lease"


def commands(group: str) -> str:
    """List of commands that not all members have acted on, oldest first: a random id, a space, a name."""
    return f"lockstep:{{{group}}}:commands"
