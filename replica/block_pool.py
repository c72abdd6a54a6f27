"""KV blocks (pure state). Every block is either free or owned by exactly one sequence."""

from __future__ import annotations

from replica.request import Sequence


class BlockPool:
    """Hands out block ids 0 to `num_blocks` - 1 of a cache whose blocks hold `block_size` tokens each."""

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size
        self._free: list[int] = []  # the last freed is the next used: its memory is still warm
        self._owners: list[Sequence | None] = []

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, free or not."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def add_blocks(self, num_blocks: int) -> None:
        """The cache exists now: it is made by the worker, long after the pool."""
        first = self.num_blocks
        self._free.extend(range(first + num_blocks - 1, first - 1, -1))
        self._owners.extend([None] * num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Gives free blocks to the sequence and appends them to its own. The caller has checked `num_free`."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks wanted, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            assert self._owners[block] is None, f"block {block} is free and owned"
            self._owners[block] = sequence
        sequence.block_ids.extend(blocks)
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Takes back all blocks of the sequence."""
        for block in reversed(sequence.block_ids):
            assert self._owners[block] is sequence, f"block {block} is not owned by the sequence that frees it"
            self._owners[block] = None
            self._free.append(block)
        sequence.block_ids.clear()
