"""Logits to token ids, with the parameters that a frame brings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import kernels
from replica.frames import I32, StepInput


def sample(logits: Tensor, frame: StepInput) -> I32:
    """logits [N, V] float32 -> the sampled ids [N]. Each depends on its own row's parameters and logits alone."""
    device = logits.device
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
    ids: I32 = token_ids.cpu().numpy()  # host sync: the engine needs the ids
    return ids
