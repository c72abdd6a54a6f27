"""Which members an epoch has, and how the next one comes about: decided, committed, told. Pure state.

- **Commit, then tell.** An epoch is proposed for committing, and only when that has succeeded is it in force and are
  members told of it. One proposal is under way at a time; who is evicted meanwhile is left out of the next one, which
  follows at once. The one between is in force without anybody being told of it.
- **Epochs grow.** Each is above every epoch that was ever committed or that a member has been told of.
- **Evictions are events.** All that are left out by one epoch are one event, in ascending order, appended to those
  before: which rank takes over what is a function of that list.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.messages import ClockMessage, Evicted, Reconfigure
from coordinator.verdicts import Kind, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """An output that is no message: this membership is to be committed, and then `Clock.committed` to be called."""

    epoch: int
    members: tuple[int, ...]
    evicted: tuple[tuple[int, ...], ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expel:
    """An output for one member alone: if it is connected, it is sent `message`, and then its connection is closed."""

    dp_rank: int
    message: Evicted


Output = ClockMessage | Commit | Expel


class Epochs:
    """The memberships of one master's life. Times are those of the clock."""

    def __init__(self, first_epoch: int, members: tuple[int, ...], evicted: tuple[tuple[int, ...], ...]) -> None:
        """The first epoch starts from `members` and `evicted`: the whole group, or what was in force last."""
        self.epoch = first_epoch - 1  # in force; before the first one, the number below it
        self.members = members
        self.evicted = evicted
        self.departed = {rank: "it was evicted under an earlier master" for event in evicted for rank in event}
        self.proposed_s = 0.0  # when the proposal under way was made
        self._proposal: Commit | None = None
        self._kinds: dict[int, Kind] = {}  # what spoke against each that was evicted by this master
        self._undone: list[int] = []  # evicted, and in no proposal yet
        self._untold: dict[int, str] = {}  # evicted and not yet told, with the reason
        self._reasons: list[str] = []  # of the verdicts that the members have not been told of
        self._decided_s = 0.0  # when the first of them was given
        self._detect_s = 0.0  # the longest that one of them took

    @property
    def reason(self) -> str:
        """Why there is to be a new epoch."""
        return "; ".join(self._reasons)

    @property
    def last_epoch(self) -> int:
        """The highest that is in force or proposed: a store may carry a proposal out after all."""
        return self._proposal.epoch if self._proposal else self.epoch

    @property
    def remaining(self) -> tuple[int, ...]:
        """Who is left when all verdicts are carried out."""
        members = self._proposal.members if self._proposal else self.members
        return tuple(rank for rank in members if rank not in self._undone)

    def rise_above(self, epoch: int) -> None:
        """The next epoch is above this one, too."""
        self.epoch = max(self.epoch, epoch)

    def judge(self, verdict: Verdict, now_s: float) -> None:
        """Leaves the blamed out of the next epoch; with nobody blamed, that one has the same members."""
        if not self._reasons:
            self._decided_s, self._detect_s = now_s, 0.0
        self._reasons.append(verdict.reason)
        self._detect_s = max(self._detect_s, now_s - verdict.evidence_s)
        self._undone += verdict.blamed
        for rank in verdict.blamed:
            self.departed[rank] = self._untold[rank] = verdict.reason
            self._kinds[rank] = verdict.kind

    def propose(self, now_s: float) -> Commit | None:
        """The next epoch; None while one is under way, which this one then follows."""
        if self._proposal is not None:
            return None
        event = (tuple(sorted(self._undone)),) if self._undone else ()
        self._proposal = Commit(
            epoch=self.epoch + 1, members=self.remaining, evicted=self.evicted + event, reason=self.reason
        )
        self._undone.clear()
        self.proposed_s = now_s
        return self._proposal

    def commit(self, epoch: int, now_s: float) -> tuple[Output, ...]:
        """The proposal is committed: what is to be told, or the proposal that follows. Nothing for any other epoch."""
        if self._proposal is None or self._proposal.epoch != epoch:
            return ()
        self.epoch, self.members, self.evicted = epoch, self._proposal.members, self._proposal.evicted
        self._proposal = None
        gone = [rank for rank in self._untold if rank not in self.members]
        expels = [Expel(dp_rank=rank, message=Evicted(epoch=epoch, reason=self._untold.pop(rank))) for rank in gone]
        if self._undone:
            following = self.propose(now_s)
            assert following is not None
            return (*expels, following)
        reconfigure = Reconfigure(
            epoch=epoch,
            members=self.members,
            evicted=self.evicted,
            kinds=tuple(self._kinds.get(rank, Kind.UNKNOWN) for event in self.evicted for rank in event),
            reason=self.reason,
            detect_ms=_ms(self._detect_s),
            agree_ms=_ms(now_s - self._decided_s),
        )
        self._reasons.clear()
        return (*expels, reconfigure)


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
