"""Who takes part in a step: what is known of a batch before the step in front of it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from replica.batch import Batch
from replica.request import Sequence


@dataclass(slots=True)
class Outline:
    """Who takes part in a step and with how many tokens."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the sequences that decode."""
        return len(self.decodes)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts."""
        return sum(num_new for _, num_new in self.prefills)

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [*self.decodes, *(sequence for sequence, _ in self.prefills)]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    def batch(self) -> Batch:
        """The batch, now that the step before it is committed."""
        num_decodes = len(self.decodes)
        prompt_rows = [_num_prompt_rows(sequence, num_new) for sequence, num_new in self.prefills]
        return Batch(
            sequences=tuple(self.sequences),
            num_new=(1,) * num_decodes + tuple(num_new for _, num_new in self.prefills),
            is_sampled=(True,) * num_decodes + tuple(s.num_computed + n == s.num_tokens for s, n in self.prefills),
            num_decodes=num_decodes,
            num_prompt_rows=(*(0,) * num_decodes, *prompt_rows) if any(prompt_rows) else (),
        )


def _num_prompt_rows(sequence: Sequence, num_new: int) -> int:
    """Tokens of the step after which a prompt token comes whose log probability is wanted and not known yet.

    A prompt that is computed anew after a preemption tells nothing new.
    """
    if sequence.params.prompt_logprobs is None:
        return 0
    start = max(sequence.num_computed, len(sequence.prompt_logprobs))
    return max(0, min(sequence.num_computed + num_new, len(sequence.prompt_ids) - 1) - start)
