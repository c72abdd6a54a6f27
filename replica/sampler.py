"""Logits to token ids, with the parameters that a frame brings.

Order: log probabilities are taken of the logits as the model gave them; then biases, penalties, masks; then
temperature, top-k, top-p and min-p choose.
"""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from torch import Tensor

import kernels
from replica.frames import I32, LogitEdits, Logprobs, LogprobsWanted, StepInput


def sample(logits: Tensor, frame: StepInput) -> tuple[I32, Logprobs | None]:
    """logits [N, V] float32 -> the sampled ids [N]. Each depends on its own row's parameters and logits alone.

    May change the logits. With them come the log probabilities that the frame asks for.
    """
    device = logits.device
    wanted = frame.logprobs
    distributions = None if wanted is None else log_probabilities(logits, wanted)
    if frame.edits is not None:
        edit_logits(logits, frame.edits)
    token_ids = kernels.sample(
        logits,
        torch.tensor(frame.temperature, device=device),
        torch.tensor(frame.top_k, device=device),
        torch.tensor(frame.top_p, device=device),
        torch.tensor(frame.min_p, device=device),
        torch.tensor(frame.seeds.view(np.int64), device=device),  # the same 64 bits
        torch.tensor(frame.choices, device=device),
        torch.tensor(frame.output_indices, device=device),
    )
    found = None
    if wanted is not None and distributions is not None:
        found = report_logprobs(distributions, wanted, token_ids)
    ids: I32 = token_ids.cpu().numpy()  # host sync: the engine needs the ids
    return ids, found


def log_probabilities(logits: Tensor, wanted: LogprobsWanted) -> Tensor:
    """logits [N, V] -> [L, V] float32, of the rows of interest."""
    rows = torch.tensor(wanted.rows, dtype=torch.int64, device=logits.device)
    return torch.log_softmax(logits[rows].to(torch.float32), dim=-1)


def report_logprobs(distributions: Tensor, wanted: LogprobsWanted, token_ids: Tensor) -> Logprobs:
    """distributions [L, V], token_ids [N] -> the token of interest of each row and the most likely ones."""
    device = distributions.device
    rows = torch.tensor(wanted.rows, dtype=torch.int64, device=device)
    targets = torch.tensor(wanted.targets, dtype=torch.int64, device=device)
    targets = torch.where(targets < 0, token_ids[rows].to(torch.int64), targets).unsqueeze(1)  # [L, 1]
    top = distributions.topk(min(wanted.num_top, distributions.shape[1]), dim=-1)
    ids = torch.cat([targets, top.indices], dim=1).to(torch.int32)
    values = torch.cat([distributions.gather(1, targets), top.values], dim=1)
    return Logprobs(token_ids=ids.cpu().numpy(), values=values.cpu().numpy())  # host sync: the engine needs them


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Changes logits [N, V] in place."""
    device = logits.device

    def index(array: I32) -> Tensor:
        return torch.tensor(array, dtype=torch.int64, device=device)

    if len(edits.bias_rows):
        biases = torch.tensor(edits.biases, dtype=logits.dtype, device=device)
        logits.index_put_((index(edits.bias_rows), index(edits.bias_ids)), biases, accumulate=True)
    if len(edits.penalty_rows):
        rows = index(edits.penalty_rows)
        counts = torch.zeros((len(rows), logits.shape[1]), dtype=torch.int32, device=device)  # [P, V]
        places = (index(edits.seen_rows), index(edits.seen_ids))
        counts[places] = torch.tensor(edits.seen_counts, dtype=torch.int32, device=device)
        is_seen = torch.zeros(counts.shape, dtype=torch.bool, device=device)
        is_seen[places] = True
        factors = (edits.repetition, edits.presence, edits.frequency)
        repetition, presence, frequency = (torch.tensor(f, dtype=torch.float32, device=device) for f in factors)
        logits[rows] = kernels.penalize(logits[rows], counts, is_seen, repetition, presence, frequency)
    if len(edits.mask_rows):
        rows = index(edits.mask_rows)
        logits[rows] = logits[rows].masked_fill_(~_allowed(edits.masks, logits.shape[1], device), -inf)


def _allowed(masks: I32, vocab_size: int, device: torch.device) -> Tensor:
    """masks [M, W] -> [M, V] bool. Tokens past the masks' end are forbidden."""
    words = torch.tensor(masks, dtype=torch.int32, device=device).unsqueeze(-1)  # [M, W, 1]
    bits = (words >> torch.arange(32, dtype=torch.int32, device=device)) & 1  # [M, W, 32]
    allowed = torch.zeros((len(masks), vocab_size), dtype=torch.bool, device=device)
    known = bits.reshape(len(masks), -1)[:, :vocab_size]
    allowed[:, : known.shape[1]] = known.bool()
    return allowed
