"""RMS normalisation on the CPU: by code of our own where it can be had (bf16_cpu.py), else in few passes of torch: each
costs microseconds for few rows and memory traffic for many."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels import bf16_cpu


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See rms_norm.rms_norm."""
    if bf16_cpu.serves(x):
        return bf16_cpu.rms_norm(x, weight, eps)
    return normed(x, eps).mul_(weight).to(x.dtype)


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See rms_norm.add_rms_norm."""
    if bf16_cpu.serves(x):
        return bf16_cpu.add_rms_norm(x, residual, weight, eps)
    total = x + residual  # [T, H]
    return rms_norm_cpu(total, weight, eps), total


def normed(x: Tensor, eps: float) -> Tensor:
    """x [..., H] -> x / rms(x) float32, a new tensor."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # one pass, also over bfloat16
    scale = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return x * scale


@cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
