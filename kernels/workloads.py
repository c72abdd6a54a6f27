"""Each kernel at the shapes of a real model: what to run, and the bytes and FLOPs that it cannot do without.

For `tune.py`, for the check on a GPU, and for the floors in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

import kernels
from kernels.fp8 import quantize_blocks

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one layer on one rank, and of the vocabulary."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    width: int  # of an expert
    vocab: int

    def on_rank(self, attn_tp: int, moe_tp: int) -> Shape:
        """One rank's share, where the sizes divide."""
        kv_heads = max(1, self.num_kv_heads // attn_tp)
        heads = self.num_heads // attn_tp
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, width=self.width // moe_tp)


QWEN3_30B: Final = Shape(
    name="Qwen3-30B-A3B",
    hidden=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    top_k=8,
    width=768,
    vocab=151_936,
)
QWEN3_235B: Final = replace(QWEN3_30B, name="Qwen3-235B-A22B", hidden=4096, num_heads=64, width=1536)


@dataclass(frozen=True, slots=True)
class Workload:
    """One call of one kernel."""

    kernel: str
    run: Callable[[], Any]
    num_bytes: int  # read and written at least once, from and to memory
    flops: int  # of matrix products


class Workloads:
    """Makes the calls for one shape and dtype, with random inputs, on one device."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._generator = torch.Generator(device=device).manual_seed(0)

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        """Normal numbers times `scale`."""
        return (torch.randn(size, generator=self._generator, device=self.device) * scale).to(self.dtype)

    def add_rms_norm(self, T: int) -> Workload:
        """The norm before attention or experts."""
        H = self.shape.hidden
        x, residual, weight = self.random(T, H), self.random(T, H), self.random(H)
        num_bytes = (4 * T * H + H) * x.itemsize
        return Workload("add_rms_norm", lambda: kernels.add_rms_norm(x, residual, weight, 1e-6), num_bytes, 0)

    def rope_cache(self, T: int) -> Workload:
        """Norm and rotation of heads, and the cache write."""
        s = self.shape
        q, k, v = (self.random(T, heads, s.head_dim) for heads in (s.num_heads, s.num_kv_heads, s.num_kv_heads))
        weight, cos_sin = self.random(s.head_dim), torch.rand((T, s.head_dim), device=self.device)
        positions = torch.arange(T, dtype=torch.int32, device=self.device)
        k_cache, v_cache, _ = self._cache(1, T)
        args = (q, k, v, weight, weight, 1e-6, cos_sin, positions, positions, k_cache, v_cache)
        num_bytes = 2 * (q.nbytes + k.nbytes + v.nbytes) + cos_sin.nbytes
        return Workload("qk_norm_rope_cache", lambda: kernels.qk_norm_rope_cache(*args), num_bytes, 0)

    def _cache(self, S: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """k_cache, v_cache and block_tables [S, B] of S sequences of `context` tokens in shuffled blocks."""
        s, blocks = self.shape, -(-context // BLOCK_SIZE)
        size = (S * blocks, BLOCK_SIZE, s.num_kv_heads, s.head_dim)
        order = torch.randperm(S * blocks, generator=self._generator, device=self.device)
        return self.random(*size), self.random(*size), order.to(torch.int32).view(S, blocks)

    def attention_decode(self, S: int, context: int) -> Workload:
        """One token for each of S sequences of `context` tokens."""
        s = self.shape
        q = self.random(S, s.num_heads, s.head_dim)
        k_cache, v_cache, tables = self._cache(S, context)
        lens = torch.full((S,), context, dtype=torch.int32, device=self.device)
        args = (q, k_cache, v_cache, tables, lens, s.head_dim**-0.5)
        num_bytes = 2 * S * context * s.num_kv_heads * s.head_dim * q.itemsize + 2 * q.nbytes
        flops = 4 * S * context * s.num_heads * s.head_dim
        return Workload("attention_decode", lambda: kernels.attention_decode(*args), num_bytes, flops)

    def attention_prefill(self, T: int) -> Workload:
        """One prompt of T tokens, nothing cached."""
        s = self.shape
        q = self.random(T, s.num_heads, s.head_dim)
        k_cache, v_cache, tables = self._cache(1, T)
        starts = torch.tensor([0, T], dtype=torch.int32, device=self.device)
        args = (q, k_cache, v_cache, tables, starts, starts[1:], s.head_dim**-0.5)
        num_bytes = 2 * T * s.num_kv_heads * s.head_dim * q.itemsize + 2 * q.nbytes
        flops = 2 * T * (T + 1) * s.num_heads * s.head_dim  # half of the square
        return Workload("attention_prefill", lambda: kernels.attention_prefill(*args), num_bytes, flops)

    def route(self, T: int) -> Workload:
        """The choice of experts."""
        s, logits = self.shape, self.random(T, self.shape.num_experts)
        num_bytes = logits.nbytes + 8 * T * s.top_k
        return Workload("route", lambda: kernels.route(logits, s.top_k, True), num_bytes, 0)

    def experts(self, is_fp8: bool) -> kernels.ExpertWeights:
        """Experts of one width. Made one matrix at a time: the float32 of all of them would be twice their size."""
        s, E = self.shape, self.shape.num_experts
        offsets = torch.arange(E + 1, dtype=torch.int32, device=self.device) * s.width
        sizes = [(2 * s.width, s.hidden)] * E + [(s.hidden, s.width)] * E
        matrices = [self.random(*size, scale=size[1] ** -0.5) for size in sizes]
        widths = (s.width,) * E
        if not is_fp8:
            down = torch.cat([matrix.flatten() for matrix in matrices[E:]])
            return kernels.ExpertWeights(torch.cat(matrices[:E]), down, offsets, widths)
        quantized, scales = zip(*map(quantize_blocks, matrices), strict=True)
        down = torch.cat([matrix.flatten() for matrix in quantized[E:]])
        down_scale = torch.cat([scale.flatten() for scale in scales[E:]])
        return kernels.ExpertWeights(torch.cat(quantized[:E]), down, offsets, widths, torch.cat(scales[:E]), down_scale)

    def moe(self, T: int, experts: kernels.ExpertWeights) -> Workload:
        """The experts of T tokens, routed evenly at random."""
        s, x = self.shape, self.random(T, self.shape.hidden)
        weights, ids = kernels.route(self.random(T, s.num_experts), s.top_k, True)
        used = int(ids.unique().numel())  # host sync: a workload is made once
        per_expert = 3 * s.hidden * s.width * experts.gate_up.itemsize
        flops = 6 * T * s.top_k * s.hidden * s.width
        name = "moe_experts" if experts.gate_up_scale is None else "moe_experts FP8"
        return Workload(
            name, lambda: kernels.moe_experts(x, experts, weights, ids), used * per_expert + 2 * x.nbytes, flops
        )

    def linear_fp8(self, T: int) -> Workload:
        """The projection of q, k and v."""
        s = self.shape
        N, K = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden
        x, (weight, scale) = self.random(T, K), quantize_blocks(self.random(N, K, scale=K**-0.5))
        num_bytes = weight.nbytes + x.nbytes + T * N * x.itemsize
        return Workload("linear_fp8", lambda: kernels.linear_fp8(x, weight, scale), num_bytes, 2 * T * N * K)

    def sample(self, N: int) -> Workload:
        """top_k 20 and top_p 0.95 at temperature 0.6, as Qwen3 recommends."""
        logits = self.random(N, self.shape.vocab).to(torch.float32)

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((N,), value, dtype=dtype, device=self.device)

        zero, seeds = row(0, torch.int32), torch.arange(N, device=self.device)
        limits = (row(0.6, torch.float32), row(20, torch.int32), row(0.95, torch.float32), row(0, torch.float32))
        return Workload("sample", lambda: kernels.sample(logits, *limits, seeds, zero, zero), logits.nbytes, 0)
