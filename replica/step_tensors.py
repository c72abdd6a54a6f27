"""The tensors of one forward: what the engine's frame says, on the rank's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replica.frames import I32, StepInput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """T tokens; decodes come first, one token each, then the tokens of the prefill chunks. All int32."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] block_id * block_size + offset
    sample_rows: Tensor  # [N] which tokens' logits are wanted
    num_decodes: int
    decode_tables: Tensor  # [decodes, B]
    decode_lens: Tensor  # [decodes] context with the step's own token
    prefill_tables: Tensor  # [chunks, B]
    prefill_starts: Tensor  # [chunks + 1] first row of each chunk, counted from the first chunk's
    prefill_lens: Tensor  # [chunks]

    @classmethod
    def from_frame(cls, frame: StepInput, device: torch.device) -> StepTensors:
        """Copies the arrays of a frame, which are read-only, to the device."""

        def tensor(array: I32) -> Tensor:
            return torch.tensor(array, dtype=torch.int32, device=device)

        n = frame.num_decodes
        return cls(
            token_ids=tensor(frame.token_ids),
            positions=tensor(frame.positions),
            slots=tensor(frame.slots),
            sample_rows=tensor(frame.sample_rows),
            num_decodes=n,
            decode_tables=tensor(frame.block_tables[:n]),
            decode_lens=tensor(frame.context_lens[:n]),
            prefill_tables=tensor(frame.block_tables[n:]),
            prefill_starts=tensor(frame.query_starts[n:] - n),
            prefill_lens=tensor(frame.context_lens[n:]),
        )
