"""Who is to blame when a group does not get on. Pure functions of what the clock knows of its members.

- **Silent.** A member sends beats while all of its ranks live: one without a beat for long is dead, frozen or cut off.
- **Behind.** Ranks meet in collectives. Where one is stuck the others wait for it in the collective that it has not
  entered: whoever has entered the fewest is the one that holds the others up, once nobody enters any more.
- **Nobody.** Where no member is silent and none is behind the others, nobody is to blame: the ranks, or what connects
  them, are stuck together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coordinator.messages import BEAT_INTERVAL_S
from coordinator.standing import Standing

SILENT_S: Final = 4 * BEAT_INTERVAL_S  # where the group does not get on, who has sent no beat for so long is to blame
SETTLED_S: Final = 3 * BEAT_INTERVAL_S  # beats that differ for no longer than this may be of different moments


class Kind(StrEnum):
    """What speaks against a member, in a word: for metrics."""

    LOST = "lost"  # its connection has ended
    SILENT = "silent"  # no beat comes
    STALLED = "stalled"  # it holds a step up
    ABSENT = "absent"  # it does not arrive for a step
    UNREADY = "unready"  # it does not begin the epoch
    UNSEEN = "unseen"  # it has not come to a new master
    PROTOCOL = "protocol"  # it has broken the protocol
    UNKNOWN = "unknown"  # a master before this one evicted it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who must go, which may be nobody, and why."""

    blamed: tuple[int, ...] = ()  # dp ranks
    kind: Kind = Kind.UNKNOWN  # what speaks against them, if there are any
    reason: str
    evidence_s: float  # the last sign of life, or of progress, before it


def silent(members: Iterable[Standing], limit_s: float, now_s: float) -> Verdict | None:
    """Blames all that have sent no beat for `limit_s`; None where there is none."""
    if late := [member for member in members if now_s - member.beat_s > limit_s]:
        reason = f"{_names(late)} was silent for {limit_s:g} s"
        evidence_s = min(member.beat_s for member in late)
        return Verdict(blamed=_ranks(late), kind=Kind.SILENT, reason=reason, evidence_s=evidence_s)
    return None


def stalled(members: Sequence[Standing], step: int, since_s: float, limit_s: float, now_s: float) -> Verdict | None:
    """`step`, which runs since `since_s`, was not done by all within `limit_s`; None while it is not clear whose fault.

    Counts in beats are of different moments: while they move, a member may seem to be behind that only beat earlier.
    So they are compared once they have stood still, and nobody is blamed where they still move at twice the limit.
    """
    what = f"step {step} was not done within {limit_s:g} s"
    late = [member for member in members if member.done < step]
    if mute := _mute(late, members, now_s):
        reason = f"{what}: {_names(mute)} is silent"
        return Verdict(blamed=_ranks(mute), kind=Kind.SILENT, reason=reason, evidence_s=since_s)
    entered = {member.dp_rank: min(member.collectives, default=0) for member in members}
    fewest, most = min(entered.values()), max(entered.values())
    is_moving = now_s - max(member.moved_s for member in members) < SETTLED_S
    if is_moving and now_s - since_s <= 2 * limit_s:
        return None
    if is_moving:
        return Verdict(reason=f"{what}: its collectives go on, slowly", evidence_s=since_s)
    if fewest == most:
        reason = f"{what}: waiting for {_names(late)}, no rank is behind another in collectives"
        return Verdict(reason=reason, evidence_s=since_s)
    behind = [member for member in members if entered[member.dp_rank] == fewest]
    reason = f"{what}: {_names(behind)} is furthest behind in collectives ({fewest} of {most})"
    return Verdict(blamed=_ranks(behind), kind=Kind.STALLED, reason=reason, evidence_s=since_s)


def faulty(members: Sequence[Standing], what: str, since_s: float, now_s: float) -> Verdict:
    """A collective raised at `since_s`, and no connection has ended since."""
    if mute := _mute(members, members, now_s):
        evidence_s = min(member.beat_s for member in mute)
        reason = f"{what}; {_names(mute)} is silent"
        return Verdict(blamed=_ranks(mute), kind=Kind.SILENT, reason=reason, evidence_s=evidence_s)
    return Verdict(reason=f"{what}; no member is lost or silent", evidence_s=since_s)


def absent(members: Sequence[Standing], step: int, since_s: float, limit_s: float) -> Verdict:
    """There is work for `step` since `since_s`, and not all have arrived within `limit_s`."""
    late = [member for member in members if member.arrival is None]
    reason = f"{_names(late)} did not arrive for step {step} within {limit_s:g} s"
    blamed = _ranks(late) if len(late) < len(members) else ()
    return Verdict(blamed=blamed, kind=Kind.ABSENT, reason=reason, evidence_s=since_s)


def missing(refusals: Mapping[int, str], since_s: float, limit_s: float) -> Verdict:
    """Not all have joined since `since_s`. `refusals`: their dp ranks, each with why it was refused last, if it was."""
    waited_for = ", ".join(
        f"dp_rank {rank} " + (f"was refused: {reason}" if reason else "has not joined")
        for rank, reason in refusals.items()
    )
    return Verdict(reason=f"the group did not start within {limit_s:g} s: {waited_for}", evidence_s=since_s)


def unready(members: Sequence[Standing], epoch: int, since_s: float, limit_s: float) -> Verdict:
    """`epoch` was told of at `since_s`, and not all were ready within `limit_s`."""
    late = [member for member in members if member.blob is None]
    reason = f"epoch {epoch} did not begin within {limit_s:g} s: {_names(late)} is not ready"
    return Verdict(blamed=_ranks(late), kind=Kind.UNREADY, reason=reason, evidence_s=since_s)


def _mute(suspects: Iterable[Standing], members: Sequence[Standing], now_s: float) -> list[Standing]:
    """Those that have been silent; nobody where all have, since then it is more likely that they were not heard."""
    if all(now_s - member.beat_s > SILENT_S for member in members):
        return []
    return [member for member in suspects if now_s - member.beat_s > SILENT_S]


def _ranks(members: Iterable[Standing]) -> tuple[int, ...]:
    return tuple(member.dp_rank for member in members)


def _names(members: Iterable[Standing]) -> str:
    return " and ".join(member.name for member in members)
