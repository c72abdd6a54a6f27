"""What a clock knows of one member that is connected."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.messages import Arrive, Hello


@dataclass(slots=True, kw_only=True)
class Standing:
    """One member. Times are the clock's."""

    hello: Hello
    heard_s: float  # its last frame
    beat_s: float  # its last beat
    blob: bytes | None = None  # that it said it is ready with, in this epoch
    arrival: Arrive | None = None  # for the clock's step
    done: int = -1  # the last step of this epoch that it has done
    collectives: tuple[int, ...] = ()  # entered by each rank in this epoch, as of its last beat
    moved_s: float = 0.0  # when a beat last told of more of them than the one before
    prefill_since_s: float | None = None  # it has had prefill tokens to run since then
    prefilled: bool = False  # its prefill part ran in the last released step

    @property
    def dp_rank(self) -> int:
        """The member's place in the group's layout."""
        return self.hello.dp_rank

    @property
    def name(self) -> str:
        """For reasons."""
        return f"member {self.hello.dp_rank} ({self.hello.replica_id})"

    def enter(self, collectives: tuple[int, ...], now_s: float) -> None:
        """A beat tells how many collectives each rank has entered in this epoch."""
        if collectives != self.collectives:
            self.collectives, self.moved_s = collectives, now_s

    def begin_epoch(self) -> None:
        """Forgets the epoch before."""
        self.blob = self.arrival = self.prefill_since_s = None
        self.done, self.collectives, self.prefilled = -1, (), False
