"""What the layers of a model are made of: weights of this rank and what is done with them.

Sizes: T tokens, n of them owned by this rank, H hidden, K experts per token, F width on this rank, D head size,
P positions, V vocabulary. A result that is called a part is this rank's part of a sum over the layer's group; see
groups.py for how it becomes whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import kernels
from replica.groups import Groups
from replica.linears import Fp8Linear, Linear, load_linear
from replica.model_config import RopeConfig, YarnConfig
from replica.step_tensors import StepTensors
from replica.weights import WeightReader


class Embedding:
    """The rank's rows of the vocabulary."""

    def __init__(self, weights: WeightReader, name: str, *, is_head: bool) -> None:
        """`is_head`: its weight is that of the model's last linear too."""
        weight = weights.tensor(name)  # [V of this rank, H]
        self.weight = kernels.pack_embedding(weight) if is_head else weight
        self.first, self.last = weights.shards.vocab_rows
        self.is_whole = self.last - self.first == weights.shards.config.vocab_size

    def __call__(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, H], a part: zeros where another rank has the row
        if self.is_whole:
            return kernels.embedding(self.weight, token_ids)
        is_here = (token_ids >= self.first) & (token_ids < self.last)
        rows = torch.where(is_here, token_ids - self.first, 0)
        return kernels.embedding(self.weight, rows) * is_here.unsqueeze(1)


class DenseMlp:
    """SwiGLU between two linears; in parts, as ExpertMlp."""

    def __init__(self, weights: WeightReader, prefix: str) -> None:
        self._prefix = prefix
        self.parts: list[tuple[Linear | Fp8Linear, Linear | Fp8Linear]] = []  # gate and up fused, and down, of each
        self.take_over(weights)

    def take_over(self, weights: WeightReader) -> None:
        """Adds the blocks of the layer that `weights` has."""
        gate_up = load_linear(weights, f"{self._prefix}.gate_proj", f"{self._prefix}.up_proj")
        self.parts.append((gate_up, load_linear(weights, f"{self._prefix}.down_proj")))

    def __call__(self, x: Tensor, step: StepTensors, groups: Groups) -> Tensor:  # [n, H] -> [n, H]
        x = groups.mlp.all_gather(x, step.mlp_rows)  # [T of the group, H]
        x = _sum([down(kernels.swiglu(gate_up(x))) for gate_up, down in self.parts])  # [T of the group, H], a part
        return groups.mlp.reduce_scatter(x, step.mlp_rows)


class ExpertMlp:
    """A mixture of experts: each token goes through the K experts that its router chooses.

    `parts` has the rank's own blocks first, then those that it took over at each eviction of replicas.
    """

    def __init__(self, weights: WeightReader, prefix: str, layer: int) -> None:
        self._prefix = prefix
        self._layer = layer
        self.top_k = weights.shards.config.num_experts_per_tok
        self.renormalize = weights.shards.config.norm_topk_prob
        self.router = load_linear(weights, f"{prefix}.gate")
        self.parts: list[kernels.Experts] = []
        self.take_over(weights)

    def take_over(self, weights: WeightReader) -> None:
        """Adds the blocks of the layer's experts that `weights` has."""
        self.parts.append(kernels.pack_experts(weights.experts(f"{self._prefix}.experts", self._layer)))

    def __call__(self, x: Tensor, step: StepTensors, groups: Groups) -> Tensor:  # [n, H] -> [n, H]
        # Its owner routes a token: if each rank did, one that rounds otherwise could add parts of other experts.
        weights, experts = kernels.route(self.router(x), self.top_k, self.renormalize)  # [n, K] float32, [n, K] int32
        x, weights, experts = groups.moe.all_gather_packed(
            (x, weights, experts), step.moe_rows
        )  # [T of the group, ...]
        x = _sum([kernels.moe_experts(x, part, weights, experts) for part in self.parts])  # [T of the group, H], a part
        return groups.moe.reduce_scatter(x, step.moe_rows)


def _sum(parts: list[Tensor]) -> Tensor:
    """Added in float32, as the group adds what its ranks have."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


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
