"""The steps of an epoch: arrivals and Dones in, releases out. Pure state; time is passed in.

- **One path.** A step is released to all when all have arrived for it, and every member runs exactly one forward for
  it, with exactly the counts that the release names: its own last arrival's, or the decodes alone.
- **Level, not edge.** An arrival stands until its step is released and may be replaced until then. Each release uses
  arrivals up. One for a step already released is ignored, one for a later step breaks the protocol.
- **Parked.** With no tokens anywhere and no command, nothing is released: the release of the next step is the wake.
- **Commit.** Done(s) says that all ranks of the member have reported s: its batch is committed. Dones come in order,
  one a step. What all have Done, the group has committed.
- **Bounded lead.** At most MAX_LEAD released steps are not yet committed: arrivals overlap the forward before,
  and nobody runs away from a member that is stuck.
- **Prefills together.** A step as long as its longest member is cheap only if the long parts coincide. Prefill parts
  are held back for `prefill_delay_s` (plus the step then running) while somebody decodes, unless all have one. Once one
  runs, all run; a prompt that goes on in the next step is not held again.
- **Commands travel on the clock.** A command, from the master's process or wanted by a member, is in one release of an
  epoch, so all members act on it at the same step. If the epoch ends before all have done that step, the next epoch
  carries it again: acting on it twice does no harm, not acting would. After the one that carries `stop` nothing is
  released.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final

from coordinator.errors import ProtocolError
from coordinator.messages import STOP, Arrive, Done, Release
from coordinator.standing import Standing

MAX_LEAD: Final = 2  # released steps that are not committed: one that runs and one that waits for it


class Steps:
    """The steps of one epoch after the other. `arrive` and `done` raise ProtocolError for what a member may not say."""

    def __init__(self, prefill_delay_s: float) -> None:
        self.step = 0  # the next to be released
        self.committed = -1  # the last that all have done
        self.progress_s = 0.0  # when a step was last committed, or released with none before it under way
        self.work_s = math.inf  # when the first work for the next step came
        self._prefill_delay_s = prefill_delay_s
        self._epoch = 0
        self._members: list[Standing] = []  # in the order of the epoch's members
        self._is_open = False  # steps may be arrived for
        self._commands: dict[str, None] = {}  # for the next release
        self._carried: deque[tuple[int, tuple[str, ...]]] = deque()  # steps that are not committed, and their commands
        self._num_arrived = 0
        self._num_done: Counter[int] = Counter()  # how many have done each step that not all have

    @property
    def is_running(self) -> bool:
        """Whether a released step is not committed."""
        return self.committed < self.step - 1

    @property
    def has_work(self) -> bool:
        """Whether there is a reason for the next step."""
        arrivals = (member.arrival for member in self._members)
        return bool(self._commands) or any(arrival is not None and arrival.has_work for arrival in arrivals)

    @property
    def pending_commands(self) -> frozenset[str]:
        """Those that no release has carried, or whose step is not committed."""
        return frozenset(self._commands).union(*(names for _, names in self._carried))

    @property
    def is_parked(self) -> bool:
        """Whether all stand arrived and idle, and every released step is committed."""
        all_arrived = self._num_arrived == len(self._members)
        return self._is_open and all_arrived and not self.is_running and not self.has_work

    def begin(self, epoch: int, members: list[Standing]) -> None:
        """A new epoch, in which nothing may be arrived for until `open`."""
        self._epoch, self._members = epoch, members
        self.close()
        self.step, self.committed = 0, -1
        self._num_arrived = 0
        self._num_done.clear()
        self._commands = dict.fromkeys([*(name for _, names in self._carried for name in names), *self._commands])
        self._carried.clear()

    def open(self, now_s: float) -> None:
        """All members are ready."""
        self._is_open = True
        self.progress_s = now_s
        self.work_s = now_s if self._commands else math.inf

    def close(self) -> None:
        """Nothing is released any more in this epoch."""
        self._is_open = False

    def arrive(self, member: Standing, arrive: Arrive, now_s: float) -> tuple[Release, ...]:
        """The member stands ready for a step. Returns the release that this was the last condition of."""
        if arrive.step < self.step:
            return ()
        if arrive.step > self.step or not self._is_open:
            what = f"while step {self.step} is the next" if self._is_open else "while no step is to come"
            raise ProtocolError(f"arrived for step {arrive.step} {what}")
        if arrive.has_work:
            self.work_s = min(self.work_s, now_s)
        if member.arrival is None:
            self._num_arrived += 1
        member.arrival = arrive
        if not arrive.prefill_tokens:
            member.prefill_since_s = None
        elif member.prefill_since_s is None:
            member.prefill_since_s = now_s
        return self._release(now_s)

    def done(self, member: Standing, done: Done, now_s: float) -> tuple[Release, ...]:
        """All ranks of the member have reported a step. Returns as `arrive` does."""
        if done.step != member.done + 1 or done.step >= self.step:
            raise ProtocolError(f"reported step {done.step}, its next is {member.done + 1}")
        member.done = done.step
        self._num_done[done.step] += 1
        if self._num_done[done.step] < len(self._members):
            return ()
        del self._num_done[done.step]
        self.committed = done.step
        self.progress_s = now_s
        while self._carried and self._carried[0][0] <= done.step:
            self._carried.popleft()
        return self._release(now_s)

    def command(self, name: str, now_s: float) -> tuple[Release, ...]:
        """Puts a command into the next release. Returns as `arrive` does."""
        self._commands[name] = None
        self.work_s = min(self.work_s, now_s)
        return self._release(now_s)

    def forget_withdrawn_work(self) -> None:
        """To be called now and then: work that came and went was not waited for."""
        if not self.has_work:
            self.work_s = math.inf

    def forgive(self, pause_s: float, now_s: float) -> None:
        """Does not count a pause of the master."""
        self.progress_s = min(now_s, self.progress_s + pause_s)
        if self.work_s < now_s:
            self.work_s = min(now_s, self.work_s + pause_s)

    def _release(self, now_s: float) -> tuple[Release, ...]:
        """Releases the next step if every rule allows it."""
        if not self._is_open or self._num_arrived < len(self._members):
            return ()
        if self.step - 1 - self.committed >= MAX_LEAD or not self.has_work:
            return ()
        arrivals = [member.arrival for member in self._members if member.arrival is not None]
        runs_prefill = self._may_prefill(arrivals, now_s)
        commands = dict.fromkeys([*self._commands, *(want for arrival in arrivals for want in arrival.wants)])
        release = Release(
            epoch=self._epoch,
            step=self.step,
            decode_tokens=tuple(arrival.decode_tokens for arrival in arrivals),
            prefill_tokens=tuple(arrival.prefill_tokens if runs_prefill else 0 for arrival in arrivals),
            commands=tuple(commands),
        )
        if not self.is_running:
            self.progress_s = now_s
        for member, prefill_tokens in zip(self._members, release.prefill_tokens, strict=True):
            member.arrival = None
            member.prefilled = prefill_tokens > 0
            if member.prefilled:
                member.prefill_since_s = None
        self._num_arrived = 0
        self.work_s = math.inf
        if commands:
            self._carried.append((self.step, release.commands))
            self._commands.clear()
            self._is_open = STOP not in commands
        self.step += 1
        return (release,)

    def _may_prefill(self, arrivals: list[Arrive], now_s: float) -> bool:
        """Whether prefill parts run in the step that is about to be released."""
        since_s = [m.prefill_since_s for m in self._members if m.prefill_since_s is not None]
        return (
            len(since_s) == len(arrivals)
            or not any(arrival.decode_tokens for arrival in arrivals)
            or any(now_s - began_s >= self._prefill_delay_s for began_s in since_s)
            or any(m.prefilled and m.prefill_since_s is not None for m in self._members)
        )
