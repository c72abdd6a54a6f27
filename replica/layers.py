"""What the layers of a model are made of: weights of this rank and what is done with them.

Sizes: T tokens, H hidden, E experts, K experts per token, F width on this rank, D head size, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from replica.model_config import RopeConfig, YarnConfig
from replica.step_tensors import StepTensors
from replica.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    @classmethod
    def load(cls, weights: WeightReader, *names: str, has_bias: bool = False) -> Linear:
        """The linears `names`, fused into one whose output is theirs side by side."""
        bias = weights.stacked([f"{name}.bias" for name in names]) if has_bias else None
        return cls(weights.stacked([f"{name}.weight" for name in names]), bias)

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        return torch.nn.functional.linear(x, self.weight, self.bias)


class DenseMlp:
    """SwiGLU between two linears."""

    def __init__(self, weights: WeightReader, prefix: str) -> None:
        self.gate_up = Linear.load(weights, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.down = Linear.load(weights, f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self.down(kernels.swiglu(self.gate_up(x)))


class ExpertMlp:
    """A mixture of experts: each token goes through the K experts that its router chooses."""

    def __init__(
        self, weights: WeightReader, prefix: str, *, widths: Sequence[int], top_k: int, renormalize: bool
    ) -> None:
        self.top_k = top_k
        self.renormalize = renormalize
        self.router = Linear.load(weights, f"{prefix}.gate")
        self.experts = weights.experts(f"{prefix}.experts", [[(0, width)] for width in widths])

    def __call__(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        weights, experts = kernels.route(self.router(x), self.top_k, self.renormalize)  # [T, K] float32, [T, K] int32
        return kernels.moe_experts(x, self.experts, weights, experts)


def paged_attention(q: Tensor, step: StepTensors, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]: attention of every sequence of the step over its pages.

    k_cache, v_cache [num_blocks, block_size, Hkv, D] hold the step's own keys and values already.
    """
    n = step.num_decodes
    parts = []
    if n:
        parts.append(kernels.attention_decode(q[:n], k_cache, v_cache, step.decode_tables, step.decode_lens, scale))
    if len(q) > n or not n:  # a step of no tokens goes this way too
        chunk = (step.prefill_tables, step.prefill_starts, step.prefill_lens)
        parts.append(kernels.attention_prefill(q[n:], k_cache, v_cache, *chunk, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """[P, D] float32: each position's D/2 cosines, then its D/2 sines, all times the attention factor."""
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)  # [D/2]
    wavelengths = rope.theta ** (dims / head_dim)
    frequencies = 1.0 / wavelengths
    if rope.yarn is not None:
        kept = _yarn_kept(rope.theta, rope.yarn, head_dim, device)
        frequencies = 1.0 / (rope.yarn.factor * wavelengths) * (1 - kept) + frequencies * kept
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)  # [P, D/2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _yarn_kept(theta: float, yarn: YarnConfig, head_dim: int, device: torch.device) -> Tensor:
    """[D/2] how far each dimension keeps its pace: 1 for the fast ones, 0 for the slow ones, a ramp between."""

    def dimension(rotations: float) -> float:
        """The dimension that turns so often over the trained context."""
        turns = yarn.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    index = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((index - low) / (high - low)).clamp(0, 1)
