"""What the members of a group say of it, taken together: the unit of health is the group. Pure functions.

Members step together, so while the group changes its members none of them can serve a new request. Each member reports
its epoch; epochs only grow, so the newest one is the truth, and whoever still reports an older one either catches up in
a moment or was evicted, which the newest epoch's list of members tells. Members that are silent are not asked: one that
froze in the middle of a change must not hold up those that went on without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from proxy.protocol import LoadReport


class GroupState(StrEnum):
    """Whether a group serves new requests."""

    LIVE = "live"  # some member does
    RECONFIGURING = "reconfiguring"  # none for the moment that a change of its members takes
    DEAD = "dead"  # none: all are silent, leaving, unreachable or evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group, as far as its members have told."""

    epoch: int = 0
    is_reconfiguring: bool = False
    members: frozenset[int] = frozenset()  # the dp ranks that live in `epoch`; empty: not told

    def has_evicted(self, dp_rank: int | None, report: LoadReport | None) -> bool:
        """Whether the group goes on without the member whose newest report this is."""
        return self._is_ahead_of(report) and bool(self.members) and dp_rank not in self.members

    def holds_up(self, report: LoadReport | None) -> bool:
        """Whether the member whose newest report this is serves no new request until a change is over."""
        return self.is_reconfiguring or self._is_ahead_of(report)

    def _is_ahead_of(self, report: LoadReport | None) -> bool:
        return report is not None and report.epoch < self.epoch


def taken_together(reports: Iterable[LoadReport]) -> Group:
    """The group whose members, but for the silent ones, last reported this."""
    told = list(reports)
    if not told:
        return Group()
    epoch = max(report.epoch for report in told)
    newest = [report for report in told if report.epoch == epoch]
    return Group(
        epoch=epoch,
        is_reconfiguring=any(report.is_reconfiguring for report in newest),
        members=next((frozenset(report.members) for report in newest if report.members), frozenset()),
    )
