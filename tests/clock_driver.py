"""Drives a Clock by hand: one group, whose members say what a test tells them to, at the time that it sets."""

from __future__ import annotations

from typing import Any

from coordinator.clock import Clock, ClockSettings, Commit, Output
from coordinator.messages import Arrive, Beat, Done, Failed, Hello, MemberMessage, Ready, Reconfigure, Release

CONFIG = {"model_hash": "abc", "dtype": "float32", "tp": "4"}


def make_hello(dp_rank: int, **changes: Any) -> Hello:
    """A Hello that the group of `CONFIG` takes."""
    name = f"r{dp_rank}"
    values = {"group": "g", "replica_id": name, "incarnation": name, "dp_rank": dp_rank, "config": CONFIG, "url": ""}
    return Hello(**{**values, **changes})


def make_settings(size: int = 3, **changes: Any) -> ClockSettings:
    """Those of the group of `CONFIG`, but for the changes."""
    limits = {"startup_deadline_s": 60.0, "progress_deadline_s": 10.0, "prefill_delay_s": 0.5}
    return ClockSettings(**{"group": "g", "size": size, "config": CONFIG, **limits, **changes})


class Group:
    """A clock and the hand that moves it. `now_s` is the time of whatever is called next.

    Commits succeed at once, unless `commits_by_hand`: then they gather in `commits`.
    """

    def __init__(
        self,
        clock_class: type[Clock] = Clock,
        *,
        size: int = 3,
        is_started: bool = True,
        commits_by_hand: bool = False,
        epoch: int = 1,
        evicted: tuple[tuple[int, ...], ...] = (),
        is_takeover: bool = False,
        **settings: Any,
    ):
        self.now_s = 100.0
        self.commits: list[Commit] = []
        self.commits_by_hand = False
        members = tuple(rank for rank in range(size) if not any(rank in event for event in evicted))
        start: dict[str, Any] = {"epoch": epoch, "members": members, "evicted": evicted, "is_takeover": is_takeover}
        self.clock = clock_class(make_settings(size, **settings), self.now_s, **start)
        if is_started:
            for dp_rank in members:
                self.join(dp_rank)
            self.form()
        self.commits_by_hand = commits_by_hand

    @classmethod
    def stepped(cls, clock_class: type[Clock] = Clock, **settings: Any) -> Group:
        """One whose first step is committed; from then on it survives losses."""
        group = cls(clock_class, **settings)
        group.run_step(*((1, 0) for _ in group.clock.members))
        return group

    @classmethod
    def taken_over(cls, clock_class: type[Clock] = Clock, **settings: Any) -> Group:
        """One that another master has served before, up to epoch 5; nobody has come yet."""
        return cls(clock_class, is_started=False, epoch=6, is_takeover=True, **settings)

    def told(self, outputs: tuple[Output, ...]) -> list[Any]:
        """The outputs, with what follows from commits in their place."""
        result: list[Any] = []
        for output in outputs:
            if not isinstance(output, Commit):
                result.append(output)
            elif self.commits_by_hand:
                self.commits.append(output)
            else:
                result += self.told(self.clock.committed(output.epoch, self.now_s))
        return result

    def commit(self) -> list[Any]:
        """The oldest commit under way succeeds."""
        return self.told(self.clock.committed(self.commits.pop(0).epoch, self.now_s))

    def join(self, dp_rank: int, **changes: Any) -> list[Any]:
        """A Hello."""
        return self.told(self.clock.hello(make_hello(dp_rank, **changes), self.now_s))

    def form(self) -> Any:
        """All members are ready for the epoch that they were told of. Returns the Go."""
        outputs = [self.send(rank, Ready(epoch=self.clock.epoch, blob=b"%d" % rank)) for rank in self.clock.members]
        return outputs[-1]

    def lose(self, dp_rank: int, why: str = "EOF") -> list[Any]:
        """A connection ends."""
        return self.told(self.clock.lost(dp_rank, why, self.now_s))

    def tell(self, dp_rank: int, message: MemberMessage) -> list[Any]:
        """What a member's message causes."""
        return self.told(self.clock.receive(dp_rank, message, self.now_s))

    def send(self, dp_rank: int, message: MemberMessage) -> Any:
        """The one output that the message causes, or None."""
        outputs = self.tell(dp_rank, message)
        assert len(outputs) <= 1, outputs
        return outputs[0] if outputs else None

    def arrive(
        self,
        dp_rank: int,
        decode: int = 0,
        prefill: int = 0,
        *,
        step: int | None = None,
        wants: tuple[str, ...] = (),
        epoch: int | None = None,
    ) -> Any:
        """One member arrives, for the clock's step and epoch unless told otherwise."""
        arrive = Arrive(
            epoch=self.clock.epoch if epoch is None else epoch,
            step=self.clock.step if step is None else step,
            decode_tokens=decode,
            prefill_tokens=prefill,
            wants=wants,
        )
        return self.send(dp_rank, arrive)

    def arrive_all(self, *counts: tuple[int, int]) -> Any:
        """All members arrive with (decode, prefill) tokens each; returns the last one's output."""
        outputs = [self.arrive(dp_rank, *count) for dp_rank, count in zip(self.clock.members, counts, strict=True)]
        return outputs[-1]

    def done(self, dp_rank: int, step: int) -> Any:
        """One member reports a step."""
        return self.send(dp_rank, Done(epoch=self.clock.epoch, step=step))

    def run_step(self, *counts: tuple[int, int]) -> Release:
        """One whole step of everybody."""
        release = self.arrive_all(*counts)
        assert isinstance(release, Release), release
        for dp_rank in self.clock.members:
            self.done(dp_rank, release.step)
        return release

    def pass_time(self, seconds: float, beating: set[int] | None = None, collectives: tuple[int, ...] = ()) -> Any:
        """Ticks as the master does; those in `beating` (None: all) beat. Returns the first output, if there is one."""
        outputs = self.watch(seconds, dict.fromkeys(self.clock.members if beating is None else beating, collectives))
        return outputs[0] if outputs else None

    def watch(self, seconds: float, collectives: dict[int, tuple[int, ...]]) -> list[Any]:
        """As `pass_time`, with the collectives of each member that beats. Returns the outputs of the first verdict."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.25
            for dp_rank, entered in collectives.items():
                self.send(dp_rank, Beat(epoch=self.clock.epoch, step=0, collectives=entered))
            if outputs := self.told(self.clock.tick(self.now_s)):
                return outputs
        return []


def reason_of(output: Any) -> str:
    """Why the group has failed."""
    assert isinstance(output, Failed), output
    return output.reason


def reconfigure_of(outputs: list[Any]) -> Reconfigure:
    """The one epoch that is told of, after whoever is expelled."""
    reconfigure = outputs[-1]
    assert isinstance(reconfigure, Reconfigure), outputs
    return reconfigure
