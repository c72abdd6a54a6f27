"""The tensors of one forward: what the engine's frame says, on the rank's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replica.errors import PeerError
from replica.frames import I32, StepInput
from replica.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """T tokens of the replica; decodes come first, one token each, then the tokens of the prefill chunks. All int32.

    Each token has one owner among the replica's ranks; the `..._rows` are the numbers of tokens that each rank of a
    group owns, in the order of the group's ranks.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] block_id * block_size + offset
    attention_rows: tuple[int, ...]  # their sum is T
    mlp_rows: tuple[int, ...]
    moe_rows: tuple[int, ...]
    sampled_rows: tuple[int, ...]  # of the attention group, counting only tokens whose logits are wanted
    sample_rows: Tensor  # [sampled_rows of this rank] where those are among the tokens that this rank owns
    num_decodes: int
    decode_tables: Tensor  # [decodes, B]
    decode_lens: Tensor  # [decodes] context with the step's own token
    prefill_tables: Tensor  # [chunks, B]
    prefill_starts: Tensor  # [chunks + 1] first row of each chunk, counted from the first chunk's
    prefill_lens: Tensor  # [chunks]

    @classmethod
    def from_frame(cls, frame: StepInput, device: torch.device, groups: Groups) -> StepTensors:
        """Copies the arrays of a frame, which are read-only, to the device.

        Raises PeerError if the frame has other tokens than the group has agreed on: before any collective.
        """

        def tensor(array: I32) -> Tensor:
            return torch.tensor(array, dtype=torch.int32, device=device)

        tokens = _group_tokens(frame, groups)
        attention_rows = groups.attention.owned_rows(groups.layout, tokens)
        bounds = np.cumsum((0, *attention_rows))  # of the tokens that each rank of the replica owns
        sampled = np.searchsorted(frame.sample_rows, bounds)  # the same of the sampled ones, which are ascending
        position = groups.attention.position
        own_sampled = frame.sample_rows[sampled[position] : sampled[position + 1]]
        n = frame.num_decodes
        return cls(
            token_ids=tensor(frame.token_ids),
            positions=tensor(frame.positions),
            slots=tensor(frame.slots),
            attention_rows=attention_rows,
            mlp_rows=groups.mlp.owned_rows(groups.layout, tokens),
            moe_rows=groups.moe.owned_rows(groups.layout, tokens),
            sampled_rows=tuple(np.diff(sampled).tolist()),
            sample_rows=tensor(own_sampled - bounds[position].astype(np.int32)),
            num_decodes=n,
            decode_tables=tensor(frame.block_tables[:n]),
            decode_lens=tensor(frame.context_lens[:n]),
            prefill_tables=tensor(frame.block_tables[n:]),
            prefill_starts=tensor(frame.query_starts[n:] - n),
            prefill_lens=tensor(frame.context_lens[n:]),
        )


def _group_tokens(frame: StepInput, groups: Groups) -> list[int]:
    """The tokens of each replica of the group in this step."""
    layout, num_tokens = groups.layout, len(frame.token_ids)
    tokens: list[int] = frame.group_tokens.tolist() if layout.dp > 1 else [num_tokens]
    own = layout.dp_rank(groups.attention.ranks[0])
    if len(tokens) != layout.dp or tokens[own] != num_tokens:
        raise PeerError(f"step {frame.step} of replica {own} has {num_tokens} tokens, its group agreed on {tokens}")
    return tokens
