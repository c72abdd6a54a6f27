"""KV blocks and what is in them (pure state).

A block is used by the sequences that have it in their tables, or it is free. A block that is full of committed tokens
can be *entered* under a key, the hash of its tokens and of all that come before them: keys and values depend on nothing
else, so whoever begins with the same tokens takes the block instead of computing them. Nobody writes into a block that
is entered.

An entered block that nobody uses is free as any other, and keeps its key until it is handed out to hold something else:
the least recently used goes first, and of one sequence's blocks the last, since nothing finds a block whose
predecessors are gone.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import sha256

from replica.request import Sequence


class BlockPool:
    """Hands out block ids 0 to `num_blocks` - 1 of a cache whose blocks hold `block_size` tokens each."""

    def __init__(self, *, block_size: int, has_prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.has_prefix_cache = has_prefix_cache
        self._num_users: list[int] = []  # of each block
        self._keys: list[bytes | None] = []  # of each block, if it is entered
        self._entered: dict[bytes, int] = {}  # key -> block
        self._empty: list[int] = []  # free and not entered; the last freed is the next used: its memory is still warm
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and entered; the least recently used first

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, free or not."""
        return len(self._num_users)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._empty) + len(self._idle)

    def add_blocks(self, num_blocks: int) -> None:
        """The cache exists now: it is made by the worker, long after the pool."""
        first = self.num_blocks
        self._empty.extend(range(first + num_blocks - 1, first - 1, -1))
        self._num_users.extend([0] * num_blocks)
        self._keys.extend([None] * num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_users(self, block: int) -> int:
        """How many sequences have the block in their tables."""
        return self._num_users[block]

    def allocate(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Gives free blocks to the sequence and appends them to its own. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            assert not self._num_users[block], f"block {block} is free and used"
            self._num_users[block] = 1
        sequence.block_ids.extend(blocks)
        return blocks

    def share(self, sequence: Sequence, blocks: list[int]) -> None:
        """Lets the sequence, which has no blocks yet, begin with these, which `find` has found for it."""
        assert not sequence.block_ids
        for block in blocks:
            if not self._num_users[block]:
                del self._idle[block]
            self._num_users[block] += 1
        sequence.block_ids.extend(blocks)

    def free(self, sequence: Sequence) -> None:
        """The sequence uses its blocks no more."""
        for block in reversed(sequence.block_ids):
            assert self._num_users[block], f"block {block} is freed and nobody uses it"
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None
        sequence.block_ids.clear()

    def find(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The blocks that hold the beginning of the sequence: full ones, and within its first `num_tokens`."""
        found: list[int] = []
        if self.has_prefix_cache:
            for index in range(num_tokens // self.block_size):
                block = self._entered.get(self.key(sequence, index))
                if block is None:
                    break
                found.append(block)
        return found

    def enter(self, sequence: Sequence, start: int, stop: int) -> None:
        """Its blocks from number `start` to `stop` are full, and the steps that filled them are committed.

        Where another block holds the same already, that one stays and this one is nobody's but the sequence's.
        """
        if not self.has_prefix_cache:
            return
        for index in range(start, stop):
            key, block = self.key(sequence, index), sequence.block_ids[index]
            if key not in self._entered:
                self._entered[key] = block
                self._keys[block] = key

    def key(self, sequence: Sequence, index: int) -> bytes:
        """What names the content of the sequence's block of this number, which its tokens fill.

        A cryptographic hash: somebody who found two texts with one key could read, or spoil, another's answers.
        """
        keys = sequence.block_keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            tokens = array("i", sequence.tokens(start, start + self.block_size))
            assert len(tokens) == self.block_size, "the block is not full"
            keys.append(sha256((keys[-1] if keys else b"") + tokens.tobytes()).digest())
        return keys[index]

    def _evict(self) -> int:
        """Takes its key from the entered block that has been of no use for longest."""
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._entered[key]
        self._keys[block] = None
        return block
