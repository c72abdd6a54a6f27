"""What a member knows of its group: the epoch, the step, and why it ends. Pure state; time is passed in.

`member.py` puts it on a connection, `simulation.py` on a simulated one. The rules:

- **Newest wins.** Of all Reconfigures that came, the newest counts. Frames of any other epoch than that are ignored.
- **Evictions add up.** Which rank holds which weights follows from the evictions in their order. A new master that
  does not know those that this member was told of, because the store lost them with the last one, cannot be followed.
- **Told, then taken up.** An epoch is taken up when the member says that it is ready for it. From the Reconfigure until
  then everything that is waited for raises Superseded, and what is sent bears the old epoch: nothing that the old
  epoch still causes here can be taken for the new one's.
- **From step 0.** An epoch taken up has no arrival, no release and no Done. Commands that were wanted and that no
  release which was taken has carried are still wanted.
- **In order, once.** Releases are taken in order, each after an arrival for it; Dones are in order, each step once.
- **No step without a master.** With the connection go the releases that were not taken: others may not have had them.
- **Silence.** A master that has not been heard for `silence_s` counts as lost, like one whose connection ended. Time in
  which this member itself did not run does not count.
- **Another master.** One whose master is lost looks for one for `redial_s`, and says which epoch it was told of last;
  then it is at its end. One that was told of none yet is at its end at once: it has nothing that is worth keeping.
- **The end is final.** An eviction, the group's failure and the loss of the master each end the membership for good;
  the first that comes is what everybody who waits is given.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from coordinator.errors import CoordinatorError, GroupFailed, JoinRefused, MasterLost, ProtocolError, Superseded
from coordinator.errors import Evicted as EvictedError
from coordinator.messages import (
    BEAT_INTERVAL_S,
    MAX_TICK_S,
    PARKED_BEAT_S,
    Arrive,
    Beat,
    Done,
    Evicted,
    Failed,
    Fault,
    Go,
    Message,
    Ready,
    Reconfigure,
    Release,
)
from coordinator.verdicts import SILENT_S

MAX_FAULT_CHARS: Final = 1000


class MemberState:
    """One member's side of the protocol. What the step loop says comes back as the message to send."""

    def __init__(self, *, silence_s: float, redial_s: float) -> None:
        self.epoch = 0  # the one that was taken up; 0 before the first
        self.step = 0  # the next to be taken
        self.newest: Reconfigure | None = None  # of those that came
        self.offered_epoch = 0  # that of the Reconfigure which the loop was given last
        self.go: Go | None = None  # of the epoch that was taken up
        self.error: CoordinatorError | None = None  # why the membership has ended
        self.is_connected = False
        self._silence_s = max(silence_s, SILENT_S)  # less says nothing: masters beat more seldom than that
        self._redial_s = redial_s
        self._releases: deque[Release] = deque()  # received and not yet taken; the clock's lead bounds them
        self._arrival: tuple[int, int] | None = None  # decode and prefill tokens that stand for `step`
        self._wants: dict[str, None] = {}  # commands asked for and not yet seen in a release
        self._done = -1
        self._heard_s = 0.0
        self._lost_s = 0.0  # when the master was lost
        self._lost_why = ""
        self._ticked_s = 0.0

    @property
    def told_epoch(self) -> int:
        """The newest epoch that a master has told of; 0 for none. A Hello carries it."""
        return self.newest.epoch if self.newest else 0

    @property
    def is_superseded(self) -> bool:
        """Whether there is an epoch that the loop has not been given yet."""
        return self.told_epoch > self.offered_epoch

    @property
    def is_looking(self) -> bool:
        """Whether a master is to be looked for."""
        return self.error is None and not self.is_connected and self.told_epoch > 0

    @property
    def is_parked(self) -> bool:
        """Whether this member stands arrived and idle, and has done every step that it took."""
        return self._arrival == (0, 0) and self._done == self.step - 1 and not self._releases

    @property
    def beat_interval_s(self) -> float:
        """How often this member is to beat, and to call `tick`. From any thread."""
        return PARKED_BEAT_S if self.is_parked else BEAT_INTERVAL_S

    # The connection

    def accepted(self, now_s: float) -> None:
        """A master has accepted this member's Hello."""
        self.is_connected = True
        self._heard_s = self._ticked_s = now_s

    def refused(self, reason: str) -> None:
        """A master has refused this member's Hello: one that was a member before is one no more."""
        self.end(EvictedError(reason) if self.told_epoch else JoinRefused(reason))

    def lose_master(self, why: str, now_s: float) -> None:
        """The connection has ended, or was given up."""
        if not self.is_connected:
            return
        self.is_connected = False
        self._releases.clear()
        self._lost_s, self._lost_why = now_s, why
        if not self.told_epoch:
            self.end(MasterLost(why))

    def heard(self, now_s: float) -> None:
        """Something has come from the master."""
        self._heard_s = now_s

    def tick(self, now_s: float) -> None:
        """Looks at the deadlines. To be called every `beat_interval_s`, after what has come was taken."""
        pause_s = max(0.0, now_s - self._ticked_s - MAX_TICK_S)
        self._ticked_s = now_s
        self._heard_s = min(now_s, self._heard_s + pause_s)
        self._lost_s = min(now_s, self._lost_s + pause_s)
        silent_s = now_s - self._heard_s
        if self.is_connected and silent_s > self._silence_s:
            self.lose_master(f"the master was silent for {silent_s:.1f} s", now_s)
        elif self.is_looking and now_s - self._lost_s > self._redial_s:
            self.end(MasterLost(f"{self._lost_why}, and no master was found within {self._redial_s:g} s"))

    def end(self, error: CoordinatorError) -> None:
        """The first error is the one that everybody who waits gets."""
        self.error = self.error or error
        self.is_connected = False

    def take(self, message: Message) -> None:
        """Takes what the master says. Raises ProtocolError for what no master says to a member."""
        match message:
            case Release():
                if message.epoch == self.epoch == self.told_epoch:
                    self._releases.append(message)
            case Go():
                if message.epoch == self.epoch == self.told_epoch:
                    self.go = message
            case Reconfigure():
                if message.epoch > self.told_epoch:
                    self._be_told(message)
            case Evicted():
                self.end(EvictedError(message.reason))
            case Failed():
                self.end(GroupFailed(message.reason))
            case Beat():
                return
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a member that was accepted")

    def _be_told(self, reconfigure: Reconfigure) -> None:
        told = self.newest.evicted if self.newest else ()
        if reconfigure.evicted[: len(told)] == told:
            self.newest = reconfigure
            return
        known = f"epoch {reconfigure.epoch} has the evictions {reconfigure.evicted}, this member was told of {told}"
        self.end(GroupFailed(f"the membership store has lost what was committed: {known}"))

    # The step loop

    def offer(self, after_epoch: int) -> Reconfigure | None:
        """The newest epoch, if it comes after `after_epoch`: what `ready` is to be about."""
        if self.newest is None or self.newest.epoch <= after_epoch:
            return None
        self.offered_epoch = self.newest.epoch
        return self.newest

    def ready(self, blob: bytes) -> Ready:
        """Takes up the epoch that was offered last: this member could step in it. Raises as `check` does.

        What the loop had under way in the old epoch must be cut off before.
        """
        if self.offered_epoch == self.told_epoch:
            self.epoch = self.offered_epoch
            self.step, self._done = 0, -1
            self.go = self._arrival = None
            self._releases.clear()
        self.check()
        return Ready(epoch=self.epoch, blob=blob)

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> Arrive:
        """Stands ready for `step` with these tokens; replaces what was said for it."""
        self._arrival = (decode_tokens, prefill_tokens)
        return self._arrive(self._arrival)

    def want(self, command: str) -> Arrive | None:
        """Asks for a command; there is nothing to send as long as nothing was said for `step`."""
        self._wants[command] = None
        return self._arrive(self._arrival) if self._arrival is not None else None

    def check(self) -> None:
        """Raises the error that ended the membership, or Superseded."""
        if self.error is not None:
            raise self.error
        if self.told_epoch > self.epoch:
            raise Superseded(f"epoch {self.told_epoch} follows epoch {self.epoch}")

    def next_release(self) -> Release | None:
        """The release of `step`, if it has come. Raises as `check` does."""
        assert self._arrival is not None, "arrive first"
        self.check()
        if not self._releases:
            return None
        release = self._releases.popleft()
        assert release.step == self.step
        self.step += 1
        self._arrival = None
        for command in release.commands:
            self._wants.pop(command, None)
        return release

    def done(self, step: int) -> Done:
        """All ranks have reported `step`. In order, each step that was taken once."""
        assert self._done + 1 == step < self.step
        self._done = step
        return Done(epoch=self.epoch, step=step)

    def fault(self, step: int, what: str) -> Fault:
        """A collective of `step` raised."""
        return Fault(epoch=self.epoch, step=step, what=what[:MAX_FAULT_CHARS])

    def beat(self, collectives: tuple[int, ...]) -> Beat:
        """This member's ranks live. From any thread."""
        return Beat(epoch=self.epoch, step=self.step, collectives=collectives)

    def _arrive(self, arrival: tuple[int, int]) -> Arrive:
        decode_tokens, prefill_tokens = arrival
        return Arrive(
            epoch=self.epoch,
            step=self.step,
            decode_tokens=decode_tokens,
            prefill_tokens=prefill_tokens,
            wants=tuple(self._wants),
        )
