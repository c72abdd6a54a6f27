"""What may be said, committed and run: each event is reported here, and what may not be raises Violation."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from coordinator.clock import Clock, Phase
from coordinator.messages import ClockMessage, Go, Reconfigure, Release
from coordinator.simulation.world import Inconclusive, Violation
from coordinator.store import Record

if TYPE_CHECKING:
    from coordinator.simulation.group import Group


class Account:
    """What has happened in one group."""

    def __init__(self, group: Group) -> None:
        self.began_s = math.inf  # when the first step was committed by all
        self.num_epochs = 0
        self.num_masters = 0
        self.num_batches = 0  # committed, each member's counted
        self.evicted: set[int] = set()
        self._evictions: dict[int, tuple[tuple[int, ...], ...]] = {}  # that each member was told of
        self._forgotten: set[int] = set()  # epochs that members were told of, and that the store has lost
        self._group = group
        self._records: dict[int, Record] = {}  # by epoch, as committed
        self._releases: dict[tuple[int, int], Release] = {}  # as first run, by epoch and step
        self._spoke: dict[int, int] = {}  # epoch -> the token of the master that told of it
        self._deposed: set[int] = set()  # tokens of masters that know that they are replaced
        self._commands: dict[str, int] = {}  # to the token of the master that was given it
        self._acted: dict[str, set[int]] = {}  # members that have done a step which carried the command
        self._done: Counter[tuple[int, int]] = Counter()

    def members(self, epoch: int) -> tuple[int, ...]:
        """Of a committed epoch."""
        return self._records[epoch].members

    # Masters and the store

    def committed(self, token: int, record: Record) -> None:
        """The store has done a commit. One that nobody was told of may be lost with the store's data, and followed."""
        told_epoch = max(self._spoke, default=0)
        if record.epoch <= told_epoch and self._records[record.epoch] != record:
            if record.epoch in self._forgotten:
                raise Inconclusive  # the store lost it with the only master that knew it
            raise Violation(f"{record} is committed with token {token}, after epoch {told_epoch}")
        if len(record.members) < self._group.min_members:
            raise Violation(f"{record} has no room for the weights")
        gone = {rank for event in record.evicted for rank in event}
        everybody = range(self._group.settings.size)
        if record.members != tuple(rank for rank in everybody if rank not in gone):
            raise Violation(f"{record} does not add up to the group")
        self.evicted |= gone
        self._records[record.epoch] = record
        self.num_epochs += 1

    def lost(self, record: Record | None) -> None:
        """The store has lost its data, but for this."""
        kept_epoch = record.epoch if record else 0
        self._forgotten |= {epoch for epoch in self._spoke if epoch > kept_epoch}

    def leased(self, token: int, holder: str) -> None:
        """A master has taken the lease. A token may come again when its holder is gone and the store has lost it."""
        self.num_masters += 1
        for other in self._group.supervisors:
            master = other.master
            if master is None or master.is_over or not other.is_alive or other.is_frozen:
                continue
            if other.holder != holder and master.token >= token:
                raise Violation(f"{holder} is master with token {token}, {other.holder} with {master.token}")

    def deposed(self, token: int) -> None:
        """A master has learnt that it is replaced."""
        self._deposed.add(token)

    def said(self, token: int, message: ClockMessage) -> None:
        """A master says something to its members."""
        if token in self._deposed:
            raise Violation(f"the master {token}, which is replaced, says {message}")
        if isinstance(message, Reconfigure):
            self._check_told(message)
            if self._spoke.setdefault(message.epoch, token) != token:
                raise Violation(
                    f"epoch {message.epoch} is told of by the masters {self._spoke[message.epoch]}, {token}"
                )
        elif isinstance(message, Go | Release) and self._spoke.get(message.epoch) != token:
            raise Violation(f"the master {token} says {message}, whose epoch another has told of")

    # Members

    def told(self, dp_rank: int, reconfigure: Reconfigure) -> None:
        """A member takes an epoch up."""
        self._check_told(reconfigure)
        if dp_rank not in reconfigure.members:
            raise Violation(f"member {dp_rank} takes up {reconfigure}, which it is not of")
        before = self._evictions.get(dp_rank, ())
        if reconfigure.evicted[: len(before)] != before:
            # Who holds which weights follows from the evictions in their order.
            raise Violation(f"member {dp_rank} takes up {reconfigure}, which does not go on from {before}")
        self._evictions[dp_rank] = reconfigure.evicted

    def going(self, dp_rank: int, go: Go) -> None:
        """A member begins to step in an epoch."""
        wanted = tuple(f"{rank}@{go.epoch}".encode() for rank in self.members(go.epoch))
        if go.blobs != wanted:
            raise Violation(f"member {dp_rank} builds its groups from {go.blobs}, not from {wanted}")

    def released(self, release: Release) -> None:
        """A member runs a step."""
        first = self._releases.setdefault((release.epoch, release.step), release)
        if first != release:
            raise Violation(f"one runs {first}, another {release}")
        if len(release.tokens) != len(self.members(release.epoch)):
            raise Violation(f"{release} is not of the members of its epoch")
        if not sum(release.tokens) and not release.commands:
            raise Violation(f"{release} has nothing to run")

    def done(self, dp_rank: int, release: Release) -> None:
        """A member has committed a step."""
        self.num_batches += 1
        for name in release.commands:
            self._acted.setdefault(name, set()).add(dp_rank)
        key = (release.epoch, release.step)
        self._done[key] += 1
        if self._done[key] == len(self.members(release.epoch)):
            self.began_s = min(self.began_s, self._group.world.now_s)

    def commanded(self, name: str, token: int) -> None:
        """A master has been given a command."""
        self._commands[name] = token

    def clock_ended(self, clock: Clock) -> None:
        """A master's clock has come to its end."""
        if clock.phase is Phase.FAILED and not clock.failure:
            raise Violation("the group fails without a reason")

    def look_at_commands(self) -> None:
        """Once all is at rest: every member has acted on what a master that is still there was told to do."""
        if any(engine.is_alive and (engine.is_frozen or engine.ranks.is_frozen) for engine in self._group.engines):
            return  # a group of one that is frozen has nobody who would miss it
        for supervisor in self._group.supervisors:
            if not supervisor.is_alive or supervisor.is_frozen or supervisor.master is None:
                continue
            token, phase = supervisor.master.token, supervisor.master.clock.phase
            for name in (name for name, told in self._commands.items() if told == token):
                acted = self._acted.get(name, set())
                if phase is Phase.RUNNING and (late := set(supervisor.master.clock.members) - acted):
                    raise Violation(f"members {late} have not acted on {name}")

    def _check_told(self, reconfigure: Reconfigure) -> None:
        record = self._records.get(reconfigure.epoch)
        if record is None:
            raise Violation(f"{reconfigure} is told and was never committed")
        if (record.members, record.evicted) != (reconfigure.members, reconfigure.evicted):
            raise Violation(f"{reconfigure} is told, but {record} was committed")
