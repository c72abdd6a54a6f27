"""What a replica knows of its group, for GET /group, the metrics and the log. The step loop writes it.

A reconfiguration stops every member's steps for a while, which is told in parts that follow each other:

    detect       from the last that was heard of who is evicted to the verdict
    agree        until the new membership is committed
    rebuild      until the ranks of all members are connected anew, but for
    reload       reading the weights that the lost ranks held
    first_step   until a step of the new epoch is done
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from replica.step_clock import Reconfiguration

logger = logging.getLogger(__name__)

PARTS: Final = ("detect", "agree", "rebuild", "reload", "first_step")


class GroupPhase(StrEnum):
    """Whether a replica steps with its group."""

    FORMING = "forming"  # the members are not all there, or not connected yet
    RUNNING = "running"
    RECONFIGURING = "reconfiguring"  # its last step was cut off, and a new epoch begins
    LOST = "lost"  # it steps no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Members that the group goes on without."""

    dp_ranks: tuple[int, ...]
    kinds: tuple[str, ...]  # what spoke against each, in a word
    epoch: int  # the first without them
    reason: str
    at_s: float  # Unix time


@dataclass(slots=True, kw_only=True)
class GroupState:
    """One replica's view of its group. The default is that of a replica alone, which runs."""

    members: tuple[int, ...] = (0,)  # dp ranks that live; none before the first epoch is agreed on
    epoch: int = 0
    phase: GroupPhase = GroupPhase.RUNNING
    evictions: list[Eviction] = field(default_factory=list)
    num_reconfigurations: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # of all of them, by part
    last: dict[str, float] = field(default_factory=dict)  # the parts of the last one, as far as it has come
    is_looking: Callable[[], bool] = lambda: False  # for a new master (StepClock)
    unix_s: Callable[[], float] = time.time

    @property
    def state(self) -> GroupPhase:
        """The phase as others are told of it: while a new master is looked for, a new epoch is to come."""
        return GroupPhase.RECONFIGURING if self.phase is GroupPhase.RUNNING and self.is_looking() else self.phase

    @property
    def evicted_by_kind(self) -> Counter[str]:
        """How many replicas were evicted, by what spoke against them."""
        return Counter(kind for eviction in self.evictions for kind in eviction.kinds)

    def forming(self, first: Reconfiguration) -> None:
        """The first epoch is agreed on."""
        self.epoch, self.members, self.phase = first.epoch, first.members, GroupPhase.FORMING

    def suspended(self) -> None:
        """Nothing runs until a new epoch has begun."""
        self.phase = GroupPhase.RECONFIGURING

    def changed(self, change: Reconfiguration) -> None:
        """A new epoch is agreed on."""
        known = sum(len(eviction.dp_ranks) for eviction in self.evictions)
        gone = tuple(dp_rank for event in change.evicted for dp_rank in event)[known:]
        if gone:
            self.evictions.append(
                Eviction(
                    dp_ranks=gone,
                    kinds=change.kinds[known:],
                    epoch=change.epoch,
                    reason=change.reason,
                    at_s=self.unix_s(),
                )
            )
        self.epoch, self.members, self.phase = change.epoch, change.members, GroupPhase.RECONFIGURING
        self.num_reconfigurations += 1
        self.last = {}
        self._took(detect=change.detect_s, agree=change.agree_s)
        logger.info(
            "group reconfigures epoch=%d members=%s evicted=%s reason=%r",
            change.epoch,
            list(change.members),
            list(gone),
            change.reason,
        )

    def connected(self, *, rebuild_s: float, reload_s: float) -> None:
        """The ranks of all members are connected for the new epoch."""
        self.phase = GroupPhase.RUNNING
        if self.num_reconfigurations:  # the first time is no pause
            self._took(rebuild=rebuild_s, reload=reload_s)

    @property
    def awaits_first_step(self) -> bool:
        """Whether no step of an epoch that began with a reconfiguration is done yet."""
        return self.phase is GroupPhase.RUNNING and "rebuild" in self.last and "first_step" not in self.last

    def stepped(self, first_step_s: float) -> None:
        """The first step of the epoch is done."""
        self._took(first_step=first_step_s)
        parts = " ".join(f"{part}_s={seconds:.3f}" for part, seconds in self.last.items())
        logger.info("group goes on epoch=%d members=%s %s", self.epoch, list(self.members), parts)

    def to_json(self) -> dict[str, Any]:
        """The body of GET /group."""
        return {
            "state": str(self.state),
            "epoch": self.epoch,
            "members": list(self.members),
            "evicted": [
                {
                    "dp_ranks": list(e.dp_ranks),
                    "kinds": list(e.kinds),
                    "epoch": e.epoch,
                    "reason": e.reason,
                    "at": round(e.at_s, 3),
                }
                for e in self.evictions
            ],
            "reconfigurations": self.num_reconfigurations,
            "last_reconfiguration": {f"{part}_s": round(seconds, 4) for part, seconds in self.last.items()} or None,
        }

    def _took(self, **parts: float) -> None:
        for part, seconds in parts.items():
            self.last[part] = seconds
            self.seconds[part] += seconds
