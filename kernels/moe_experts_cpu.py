"""The experts of a mixture on the CPU: two products for each expert that has tokens.

In bfloat16, code of our own does all of it where it can be had (bf16_cpu.py). Elsewhere the assignments (token,
expert) are sorted by expert, each expert's padded to a number of rows that there is code for (packed_linear.py), and
cut into runs of whole experts whose rows fit a core's cache. A run goes through everything before the next one begins:
its experts' first products, SwiGLU and the routing weights over all of its rows at once, the second products. A decode
step is one run. Last, each token's K parts are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import bf16_cpu
from kernels.moe_experts import Experts, ExpertWeights, PackedExperts, StripExperts, moe_experts_reference
from kernels.packed_linear import linear_padded, pack_blocks, padded_rows

_RUN_ROWS: Final = 256  # their 2 * F columns in bfloat16 and F in float32 fit a second-level cache

I64 = NDArray[np.int64]


def pack_experts(experts: ExpertWeights) -> Experts:
    """What `moe_experts_cpu` takes: packed unless it is FP8. Nothing of `experts` is kept then."""
    if experts.gate_up_scale is not None:
        return experts
    strips = bf16_cpu.pack_experts(experts)
    if strips is not None:
        return strips
    hidden, widths = experts.gate_up.shape[1], experts.widths
    gate_up = experts.gate_up.split([2 * width for width in widths])
    flat = experts.down.split([hidden * width for width in widths])
    down = tuple(part.view(hidden, width) for part, width in zip(flat, widths, strict=True))
    return PackedExperts(
        gate_up=tuple(map(_packed, gate_up)),
        down=tuple(map(_packed, down)),
        widths=widths,
        is_here=None if all(widths) else np.array(widths) > 0,
    )


def _packed(part: Tensor) -> Tensor:
    """A copy, packed where that is of use: a view would keep the array of all experts."""
    packed = pack_blocks(part)
    return part.clone() if packed is part else packed


def moe_experts_cpu(x: Tensor, experts: Experts, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """See moe_experts.moe_experts. The routing weights are applied between the two products, in float32."""
    if isinstance(experts, ExpertWeights):
        return moe_experts_reference(x, experts, weights, expert_ids)
    if isinstance(experts, StripExperts):
        return bf16_cpu.experts(x, experts, weights, expert_ids)
    work = _Work.sort(expert_ids, weights, experts)
    parts = x.new_empty((len(work.tokens), x.shape[1]))
    if experts.is_here is not None:
        parts[-1].zero_()
    for run in work.runs(experts.widths):
        rows = slice(run.first, run.first + sum(run.rows))
        inner = torch.cat(
            [
                linear_padded(part, experts.gate_up[expert])
                for part, expert in zip(x.index_select(0, work.tokens[rows]).split(run.rows), run.experts, strict=True)
            ]
        )  # [rows, 2 * F]
        inner = _weighted_swiglu(inner, work.weights[rows])  # [rows, F]
        outputs = [
            linear_padded(part, experts.down[expert])
            for part, expert in zip(inner.split(run.rows), run.experts, strict=True)
        ]
        torch.cat(outputs, out=parts[rows])
    return torch.embedding_bag(parts, work.places, work.bags, mode=0)[0]  # 0: sums, in float32


def _weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """x [n, 2F], weights [n, 1] float32 -> weights * silu(gate) * up [n, F]."""
    gate, up = x.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate.to(torch.float32))
    return y.mul_(up).mul_(weights).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive experts of one width."""

    first: int  # row
    experts: list[int]
    rows: list[int]  # of each


@dataclass(frozen=True, slots=True)
class _Work:
    """Who computes what: P rows in the order of the experts, and one of zeros after them, for what is not here."""

    tokens: Tensor  # [P + 1] int64: the row of x; any, where a row is padding
    weights: Tensor  # [P + 1, 1] float32: the routing weight
    places: Tensor  # [T * K] int64: the row of each assignment
    bags: Tensor  # [T] int64: a token's first assignment
    rows: I64  # [E] of each expert, padding included

    @classmethod
    def sort(cls, expert_ids: Tensor, weights: Tensor, experts: PackedExperts) -> _Work:
        """expert_ids, weights [T, K]. In numpy, which takes a fifth of torch's time for arrays so small."""
        ids = expert_ids.numpy().ravel()
        top_k = expert_ids.shape[1]
        order = ids.argsort(kind="stable")  # assignments, by expert
        counts = np.bincount(ids, minlength=len(experts.widths))
        rows = padded_rows(counts)
        if experts.is_here is not None:
            rows = rows * experts.is_here
        num_rows = int(rows.sum())
        shifts = rows - counts
        shifts = shifts.cumsum() - shifts  # what experts before add by padding, or leave out
        sorted_places = np.arange(len(ids)) + shifts.repeat(counts)
        if experts.is_here is not None:
            sorted_places[~experts.is_here.repeat(counts)] = num_rows
        places = np.empty_like(sorted_places)
        places[order] = sorted_places
        tokens = np.zeros(num_rows + 1, np.int64)
        tokens[sorted_places] = order // top_k
        row_weights = np.zeros((num_rows + 1, 1), np.float32)
        row_weights[sorted_places, 0] = weights.numpy().ravel()[order]
        return cls(
            tokens=torch.from_numpy(tokens),
            weights=torch.from_numpy(row_weights),
            places=torch.from_numpy(places),
            bags=torch.from_numpy(np.arange(0, len(ids), top_k)),
            rows=rows,
        )

    def runs(self, widths: Sequence[int]) -> Iterator[_Run]:
        """All rows, cut before an expert of another width and where a run would be longer than _RUN_ROWS."""
        run = _Run(0, [], [])
        num_rows = 0
        for expert in np.flatnonzero(self.rows).tolist():
            rows = int(self.rows[expert])
            if run.experts and (num_rows + rows > _RUN_ROWS or widths[run.experts[0]] != widths[expert]):
                yield run
                run, num_rows = _Run(run.first + num_rows, [], []), 0
            run.experts.append(expert)
            run.rows.append(rows)
            num_rows += rows
        if run.experts:
            yield run
