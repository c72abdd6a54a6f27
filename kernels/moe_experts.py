"""The experts of a mixture: two grouped matrix products over ragged experts, SwiGLU between, weighted sum after.

A rank holds `widths[e]` columns of expert e, 0 allowed: the experts' matrices lie one after the other in one array, and
`offsets` says where each begins. An expert of width 0 adds nothing here; other ranks hold all of it.

    moe_routing.py   the assignments (token, expert) sorted by expert and cut into tiles
    moe_gate_up.py   rows of x gathered by expert -> silu(gate) * up, one row an assignment, in sorted order
    moe_down.py      those rows -> weight * (row @ down^T), at the assignment's own place; then each token's K parts
                     are added in its own order

A part is computed from its own row with the same loop over K, whatever else is in its tile, and the sum has one order:
a token's result is bit-identical whatever the batch around it, as long as the batch stays in the bucket of one tile
(configs.py). Other tiles may use other instructions, or another block_k, and so another order of additions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import configs
from kernels.device import arch, check_rows
from kernels.fp8 import FP8_GROUP, dequantize_blocks, dequantize_groups, quantize_fp8_reference
from kernels.moe_down import combine, down
from kernels.moe_gate_up import gate_up
from kernels.moe_routing import assignments_as_tiles, sort_by_expert
from kernels.swiglu import swiglu_reference

_DIRECT_SHARE: Final = 4  # so many experts for each assignment: hardly two meet, and a tile each costs no sort


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer on this rank. F_e is expert e's width here, F_total their sum.

    Expert e owns rows 2 * offsets[e] to 2 * offsets[e + 1] of `gate_up`: F_e gate rows, then F_e up rows. Its
    [H, F_e] down matrix lies row-major in `down`, from H * offsets[e] on. With FP8 weights, one float32 scale belongs
    to each 128 x 128 block; the scales lie as the weights do, with every size divided by 128, so the widths
    must be multiples of 128.
    """

    gate_up: Tensor  # [2 * F_total, H]
    down: Tensor  # [H * F_total]
    offsets: Tensor  # [E + 1] int32: prefix sums of the widths, on the weights' device
    widths: tuple[int, ...]  # [E], the same on the host
    gate_up_scale: Tensor | None = None  # [2 * F_total / 128, ceil(H / 128)] float32
    down_scale: Tensor | None = None  # [ceil(H / 128) * F_total / 128] float32

    @property
    def is_cuda(self) -> bool:
        """Where they lie."""
        return self.gate_up.is_cuda

    def __post_init__(self) -> None:
        """Raises ValueError for FP8 weights that scales of 128 x 128 blocks cannot describe."""
        if self.gate_up_scale is not None:
            odd = [width for width in self.widths if width % FP8_GROUP]
            if odd:
                raise ValueError(f"an FP8 expert has a width of {odd[0]}, which must be a multiple of {FP8_GROUP}")


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The same on a CPU, each expert with its own two matrices, as packed_linear.pack_blocks gives them."""

    gate_up: tuple[Tensor, ...]  # [2 * F_e, H] of each: gate rows, then up rows
    down: tuple[Tensor, ...]  # [H, F_e]
    widths: tuple[int, ...]  # [E]
    is_here: NDArray[np.bool_] | None  # [E] whether the width is above 0; None: all are


@dataclass(frozen=True, slots=True)
class StripExperts:
    """The same on a CPU, as ExpertWeights has them, but each matrix in strips: see bf16_cpu.py."""

    gate_up: Tensor  # [2 * F_total / 16, H / 2, 16, 2]
    down: Tensor  # [H * F_total]
    offsets: Tensor  # [E + 1] int32
    widths: tuple[int, ...]  # [E]


Experts = ExpertWeights | PackedExperts | StripExperts


def pack_nothing(experts: ExpertWeights) -> Experts:
    """The experts as `moe_experts` takes them: as they are."""
    return experts


def moe_experts(x: Tensor, experts: Experts, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """x [T, H], weights [T, K] float32, expert_ids [T, K] int32 -> [T, H], this rank's part of the sum."""
    assert isinstance(experts, ExpertWeights)  # the other forms are for CPUs
    check_rows(x=x, gate_up=experts.gate_up)
    T, hidden = x.shape
    num_experts, top_k, widest = len(experts.widths), expert_ids.shape[1], max(experts.widths)
    if T == 0 or widest == 0:
        return torch.zeros_like(x)
    expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
    kind = "" if experts.gate_up_scale is None else "_fp8"
    shape = (num_experts, hidden, widest, top_k)
    gate_up_tile, down_tile = (
        configs.pick(name + kind, arch(x.device), shape, configs.bucket_of(T)) for name in ("moe_gate_up", "moe_down")
    )
    assert gate_up_tile.block_m == down_tile.block_m, "both products work on one list of tiles"
    if expert_ids.numel() * _DIRECT_SHARE <= num_experts:
        work = assignments_as_tiles(expert_ids)
    else:
        work = sort_by_expert(expert_ids, num_experts, gate_up_tile.block_m)
    inner, inner_scale = gate_up(
        x, experts.gate_up, experts.gate_up_scale, experts.offsets, work, gate_up_tile, top_k, widest
    )
    align = math.gcd(16, *experts.widths)
    parts = down(
        inner,
        inner_scale,
        experts.down,
        experts.down_scale,
        experts.offsets,
        work,
        down_tile,
        weights,
        hidden,
        align,
        x.dtype,
    )
    return combine(parts, top_k)


def moe_experts_reference(x: Tensor, experts: ExpertWeights, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Plain torch: a loop over the experts that have tokens.

    The products run in x's dtype, in float32 for FP8 weights; each token's K parts are summed in float32, in order.
    """
    T, hidden = x.shape
    top_k = expert_ids.shape[1]
    order = torch.argsort(expert_ids.flatten(), stable=True)  # [T * K] assignments, by expert
    counts = torch.bincount(expert_ids.flatten(), minlength=len(experts.widths)).tolist()
    parts = torch.zeros((T * top_k, hidden), dtype=x.dtype)
    first = offset = 0
    for count, width in zip(counts, experts.widths, strict=True):
        if count and width:
            assigned = order[first : first + count]
            parts[assigned] = _expert(x[assigned // top_k], experts, offset, width).to(x.dtype)
        first, offset = first + count, offset + width
    weighted = parts.view(T, top_k, hidden).to(torch.float32) * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(x.dtype)


def _expert(rows: Tensor, experts: ExpertWeights, offset: int, width: int) -> Tensor:
    """rows [n, H] through the expert whose matrices begin at `offset` -> [n, H]."""
    hidden = rows.shape[1]
    gate_up = experts.gate_up[2 * offset : 2 * (offset + width)]  # [2 * F_e, H]
    down = experts.down[hidden * offset : hidden * (offset + width)].view(hidden, width)
    if experts.gate_up_scale is None or experts.down_scale is None:
        return torch.nn.functional.linear(swiglu_reference(torch.nn.functional.linear(rows, gate_up)), down)
    blocks, first, last = -(-hidden // FP8_GROUP), offset // FP8_GROUP, (offset + width) // FP8_GROUP
    gate_up = dequantize_blocks(gate_up, experts.gate_up_scale[2 * first : 2 * last])
    down = dequantize_blocks(down, experts.down_scale[blocks * first : blocks * last].view(blocks, last - first))
    rows = dequantize_groups(*quantize_fp8_reference(rows))
    inner = dequantize_groups(*quantize_fp8_reference(swiglu_reference(rows @ gate_up.T)))
    return inner @ down.T
