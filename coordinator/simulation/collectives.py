"""What the ranks of an epoch do together: collectives, in which each waits for all others.

This is where a protocol without agreement hangs or mixes things up, so the first invariant is checked here: all
members of an epoch enter the same collectives, of the same step with the same sizes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.simulation.world import Violation, World

RAISE_S: Final = (
    0.01  # a neighbour of a rank that is gone notices within so long; others wait for as long as nobody tells them
)


@dataclass(frozen=True, slots=True)
class Collective:
    """What a member enters. Two members in different ones of an epoch would wait for ever, or mix up data."""

    step: int
    number: int  # within the step
    tokens: tuple[int, ...]  # of every member, as released


@dataclass(slots=True)
class _Waiting:
    then: Callable[[], None]
    fail: Callable[[str], None]


class ProcessGroup:
    """The process groups of one epoch, from the blobs of its Go on."""

    def __init__(self, world: World, epoch: int, members: tuple[int, ...]) -> None:
        self.members = members
        self.is_wedged = False  # a collective never ends, for anybody: a lost packet, a stuck fabric
        self.is_flapping = False  # the next collective raises for who enters it first
        self._world = world
        self._epoch = epoch
        self._entered = dict.fromkeys(members, 0)
        self._order: list[Collective] = []  # as entered first, by anybody
        self._waiting: dict[int, _Waiting] = {}
        self._gone: set[int] = set()  # members that are dead, or have released their collectives of this epoch

    def entered(self, member: int) -> int:
        """Collectives that this member has entered."""
        return self._entered[member]

    def enter(self, member: int, collective: Collective, then: Callable[[], None], fail: Callable[[str], None]) -> None:
        """`then` happens when all members have entered, `fail` where one that is gone is next to this one."""
        place = self._entered[member]
        self._entered[member] += 1
        if place == len(self._order):
            self._order.append(collective)
        elif self._order[place] != collective:
            raise Violation(
                f"epoch {self._epoch}: member {member} enters {collective} where others enter {self._order[place]}"
            )
        self._waiting[member] = _Waiting(then, fail)
        if self._is_beside_a_gap(member) or self.is_flapping:
            self.is_flapping = False
            self._world.after(RAISE_S, None, self._raise, member, place)
        elif not self._gone and not self.is_wedged and min(self._entered.values()) > place:
            waiting, self._waiting = self._waiting, {}
            for each in waiting.values():
                each.then()

    def leave(self, member: int) -> None:
        """The member's ranks are dead, or have shut their connections down: what they waited for does not happen."""
        self._waiting.pop(member, None)
        self._gone.add(member)
        for other in list(self._waiting):
            if self._is_beside_a_gap(other):
                self._world.after(RAISE_S, None, self._raise, other, self._entered[other] - 1)

    def _is_beside_a_gap(self, member: int) -> bool:
        place, size = self.members.index(member), len(self.members)
        return bool({self.members[(place + 1) % size], self.members[place - 1]} & self._gone)

    def _raise(self, member: int, place: int) -> None:
        if member in self._waiting and self._entered[member] == place + 1:
            self._waiting.pop(member).fail("Connection closed by peer")
