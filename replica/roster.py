"""Who runs and who waits, and what each that runs holds: a row of the step's arrays, and blocks (pure state).

Both lists stand in one order, by priority and within one by arrival: the first that waits runs next, the last that runs
gives way. Who gives way loses its blocks and is computed anew, as far as the cache does not have them any more.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from replica.batch import RowTable
from replica.block_pool import BlockPool
from replica.request import Sequence


@dataclass(slots=True)
class SchedulerCounts:
    """What has happened since the start."""

    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts that the cache was asked for
    prefix_hits: int = 0  # of these, those that it had
    step_tokens: Counter[int] = field(default_factory=Counter)  # tokens of a step -> steps with so many; none without


class Roster:
    """Moves sequences between waiting and running. Which of them a step computes is the Scheduler's."""

    def __init__(self, *, max_running: int, max_model_len: int, block_size: int, has_prefix_cache: bool) -> None:
        self._max_running = max_running
        self.pool = BlockPool(block_size=block_size, has_prefix_cache=has_prefix_cache)
        self.rows = RowTable(
            num_rows=max_running, max_blocks=self.pool.blocks_for(max_model_len), block_size=block_size
        )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts = SchedulerCounts()
        self._numbers = count()

    def add(self, sequence: Sequence) -> None:
        """A new one waits, behind all others of its priority."""
        sequence.place = (sequence.priority, next(self._numbers))
        insort(self.waiting, sequence, key=_place)

    def remove(self, sequence: Sequence) -> bool:
        """Takes it off its list; False if it is on neither. What it holds it keeps until `release`."""
        for sequences in (self.running, self.waiting):
            if sequence in sequences:
                sequences.remove(sequence)
                return True
        return False

    def admit_next(self) -> Sequence | None:
        """Lets the first waiting sequence run if there is room for all of its tokens; None if not.

        Each running sequence keeps one free block in reserve, lest the newcomer be preempted at once.
        """
        if not self.waiting or len(self.running) >= self._max_running or not self.rows.has_free:
            return None
        sequence = self.waiting[0]
        found = self._find(sequence)
        if not self._fits(sequence, found, len(self.running)) or self._is_coming(sequence, len(found)):
            return None
        del self.waiting[0]
        insort(self.running, sequence, key=_place)
        self.rows.take(sequence)
        self.pool.share(sequence, found)
        self.rows.append_blocks(sequence, found)
        self.allocate(sequence, self.pool.blocks_for(sequence.num_tokens))
        sequence.num_computed = len(found) * self.pool.block_size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            if self.pool.has_prefix_cache:
                self.counts.prefix_queries += len(sequence.prompt_ids)
                self.counts.prefix_hits += sequence.num_cached
        return sequence

    def allocate(self, sequence: Sequence, num_blocks: int) -> None:
        """Gives a running sequence what it lacks of so many blocks, which must be free."""
        num_missing = num_blocks - len(sequence.block_ids)
        if num_missing > 0:
            self.rows.append_blocks(sequence, self.pool.allocate(sequence, num_missing))

    def make_room_for_decodes(self) -> None:
        """Gives each running sequence, in order, the block that its next token needs."""
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            num_missing = self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_ids)
            if num_missing > 0:
                if num_missing > self.pool.num_free:
                    self.preempt(self.running[-1])  # perhaps the sequence itself
                    continue
                self.rows.append_blocks(sequence, self.pool.allocate(sequence, num_missing))
            position += 1

    def in_the_way(self) -> list[Sequence]:
        """The running sequences of lower priority, from the last on, without which the first waiting one would have
        room. Nobody if it has room, or would not have any all the same."""
        if not self.waiting or not self.running or self.running[-1].priority <= self.waiting[0].priority:
            return []
        first = self.waiting[0]
        found = self._find(first)
        leaving: list[Sequence] = []
        num_freed = 0
        num_running = len(self.running)
        while num_running >= self._max_running or not self._fits(first, found, num_running - num_freed):
            if not num_running or (last := self.running[num_running - 1]).priority <= first.priority:
                return []
            leaving.append(last)
            num_running -= 1
            num_freed += len(last.block_ids)  # at most: it may share some
        return leaving

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence waits again, in its old place, and nothing of it is computed."""
        self.running.remove(sequence)
        self.release((sequence,))
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=_place)
        self.counts.num_preemptions += 1

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Takes back what these hold."""
        for sequence in sequences:
            self.rows.give_back(sequence)
            self.pool.free(sequence)

    def _find(self, sequence: Sequence) -> list[int]:
        """The blocks that the cache has of its beginning."""
        last = self.running[-1] if self.running else sequence
        if last.prompt_ids is sequence.prompt_ids and not sequence.block_keys:  # another choice of one request
            sequence.block_keys = last.block_keys[: len(sequence.prompt_ids) // self.pool.block_size]
        return self.pool.find(sequence, num_skippable(sequence))

    def _fits(self, sequence: Sequence, found: list[int], num_reserved: int) -> bool:
        """Whether the blocks are free that it needs beside those that were found, and so many more. Of those that were
        found some may be free as well."""
        num_used = sum(self.pool.num_users(block) > 0 for block in found)
        return self.pool.blocks_for(sequence.num_tokens) - num_used + num_reserved <= self.pool.num_free

    def _is_coming(self, sequence: Sequence, num_found: int) -> bool:
        """Whether a running sequence in front of this one computes just the block that it needs next, that of number
        `num_found`."""
        start = num_found * self.pool.block_size
        stop = start + self.pool.block_size
        if not self.pool.has_prefix_cache or stop > num_skippable(sequence):
            return False
        return any(
            start <= other.num_computed < stop <= other.num_tokens
            and other.place < sequence.place
            and (not start or self.pool.key(other, num_found - 1) == self.pool.key(sequence, num_found - 1))
            and other.tokens(start, stop) == sequence.tokens(start, stop)
            for other in self.running
        )


def num_skippable(sequence: Sequence) -> int:
    """How many of its first tokens need not be computed if their keys and values are there: no logits of theirs are
    wanted, neither for a next token nor for the log probabilities of the prompt."""
    if sequence.params.prompt_logprobs is not None:
        num_known = len(sequence.prompt_logprobs)
        if num_known < len(sequence.prompt_ids) - 1:
            return num_known
    return sequence.num_tokens - 1


def _place(sequence: Sequence) -> tuple[int, int]:
    return sequence.place
