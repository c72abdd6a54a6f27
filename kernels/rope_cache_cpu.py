"""Norm, rotation and cache write on the CPU: by code of our own where it can be had (bf16_cpu.py), else by torch, for
queries and keys together and a few hundred tokens at a time."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels import bf16_cpu
from kernels.rms_norm_cpu import normed
from kernels.rope_cache import HeadNorms
from kernels.step_plan import StepPlan

_TOKENS: Final = 256  # of float32 heads, which a second-level cache is to hold from one pass to the next


def cache_heads_cpu(
    qkv: Tensor, norms: HeadNorms, eps: float, plan: StepPlan, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """See rope_cache.cache_heads."""
    cpu = plan.cpu
    if cpu is None:
        return bf16_cpu.cache_heads(qkv, norms.heads, eps, plan.tables, k_cache, v_cache)
    num_heads = qkv.shape[1] - 2 * k_cache.shape[2]
    qk, v = qkv[:, : -k_cache.shape[2]], qkv[:, -k_cache.shape[2] :]
    if len(qk) <= _TOKENS:
        rotated = _rotated(qk, norms.heads, eps, cpu.cosines, cpu.sines)
    else:
        rotated = torch.empty_like(qk)
        for start in range(0, len(qk), _TOKENS):
            rows = slice(start, start + _TOKENS)
            rotated[rows] = _rotated(qk[rows], norms.heads, eps, cpu.cosines[rows], cpu.sines[rows])
    for cache, x in ((k_cache, rotated[:, num_heads:]), (v_cache, v)):
        written = x if cpu.written is None else x.index_select(0, cpu.written)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, cpu.places, written)
    return rotated[:, :num_heads]


def _rotated(x: Tensor, weights: Tensor, eps: float, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [t, heads, D], weights [heads, D], cosines and sines [t, 1, D] -> x normed and rotated."""
    heads = normed(x, eps).mul_(weights)
    swapped = heads.roll(x.shape[-1] // 2, dims=-1)
    return heads.mul_(cosines).addcmul_(swapped, sines).to(x.dtype)
