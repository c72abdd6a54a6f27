"""Computes the masks of constrained sequences for the step that comes, off the event loop and by a deadline.

A mask needs the token before it, so it is made between two steps, while the replica's group may wait. What takes too
long or fails ends its own sequence; the step goes on without it. A grammar that fails does so wherever it runs. Its
work is bounded (grammar.py), so one that is only late tells of this machine, and another replica can go on with it.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from replica.logit_edits import banned_ids
from replica.request import ConstraintFailed, FinishReason, Sequence

logger = logging.getLogger(__name__)

MASK_DEADLINE_S: Final = 1.0  # a mask takes well below a millisecond; a grammar that needs this is made to hurt
NUM_THREADS: Final = 4


class MaskFiller:
    """Threads that compute masks, of their own so that a slow one delays nothing but masks."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="mask")  # starts them on demand

    async def fill(self, sequences: list[Sequence]) -> list[tuple[Sequence, FinishReason, str]]:
        """Gives each constrained sequence its `mask`. Returns those that have none, how they end, and why."""
        constrained = [s for s in sequences if s.constraint is not None and s.finish_reason is None]
        if not constrained:
            return []
        loop = asyncio.get_running_loop()
        masks = [loop.run_in_executor(self._threads, _mask, sequence) for sequence in constrained]
        try:
            await asyncio.wait(masks, timeout=MASK_DEADLINE_S)
        except asyncio.CancelledError:  # the step is cut off; the next one must not find a thread in a constraint
            await asyncio.wait(masks, timeout=MASK_DEADLINE_S)
            raise
        failed: list[tuple[Sequence, FinishReason, str]] = []
        for sequence, mask in zip(constrained, masks, strict=True):
            if not mask.done():
                mask.cancel()
                late = f"the grammar's next tokens were not known after {MASK_DEADLINE_S:g} s"
                failed.append((sequence, FinishReason.LOST, late))
            elif (err := mask.exception()) is None:
                sequence.mask = mask.result()
            else:
                if not isinstance(err, ConstraintFailed):
                    logger.error("constraint failed request_id=%s", sequence.request_id, exc_info=err)
                why = f"the answer cannot follow its grammar any further, ask for a simpler one: {err}"
                failed.append((sequence, FinishReason.ERROR, why))
        return failed


def _mask(sequence: Sequence) -> bytes | None:
    assert sequence.constraint is not None
    return sequence.constraint.mask(sequence.output_ids, banned_ids(sequence))
