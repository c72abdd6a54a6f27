"""Matrix products with this rank's part of a weight, in the model's dtype or in block-scaled FP8.

A weight that is cut by rows (q, k, v, gate, up) gives some columns of the output; one that is cut by columns (o_proj,
down_proj) takes some columns of the input and gives this rank's part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from replica.errors import CheckpointError
from replica.groups import Group
from replica.layout import Range
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX
from replica.shards import Ranges
from replica.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Tensor  # [out, in], as kernels.pack_linear gives it, or plain
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        return kernels.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """The same with FP8 weights, and activations that are quantised in groups of 128 columns of a token.

    A kernel finds an element's scale by its row / 128, counted from the first row that it is given. A part that is cut
    by heads may begin within a block of 128; so it is given to the kernel in pieces, each of which begins with a block
    or lies within one. Heads of 128 give a single piece.
    """

    pieces: tuple[tuple[Tensor, Tensor], ...]  # weights [rows, in] and their scales; the outputs lie side by side
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        outputs = [kernels.linear_fp8(x, weight, scale) for weight, scale in self.pieces]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y if self.bias is None else y + self.bias


class OutputLinear:
    """o_proj without its bias: its input is cut by heads, so the results of the replica's ranks are parts of a sum.

    In FP8, heads that do not fill groups of 128 on each rank leave groups that span ranks. Then the ranks first agree
    on the groups' scales, so that each value is rounded as on one rank. Published FP8 checkpoints have heads of 128.
    """

    def __init__(self, weights: WeightReader, name: str) -> None:
        matrix = f"{name}.weight"
        part = weights.shard(matrix)
        self._linear = load_linear(weights, name)
        self._first, stop = _only(part.columns)
        self._num_groups = -(-weights.shards.config.num_heads * weights.shards.config.head_dim // FP8_BLOCK)
        self._spans_ranks = (
            isinstance(self._linear, Fp8Linear)
            and weights.shards.layout.attn_tp > 1
            and (stop - self._first) % FP8_BLOCK != 0
        )

    def __call__(self, x: Tensor, group: Group) -> Tensor:  # [T, heads of this rank * D] -> [T, H], a part
        if not self._spans_ranks:
            return self._linear(x)
        assert isinstance(self._linear, Fp8Linear)
        ((weight, weight_scale),) = self._linear.pieces
        start = self._first // FP8_BLOCK
        own = kernels.group_maxima(x, self._first)  # [T, groups that this rank touches]
        maxima = torch.zeros((x.shape[0], self._num_groups), dtype=torch.float32, device=x.device)
        maxima[:, start : start + own.shape[1]] = own
        maxima = group.all_gather(maxima, [x.shape[0]] * group.size).view(group.size, *maxima.shape).amax(dim=0)
        x_scale = kernels.scale_of(maxima[:, start : start + own.shape[1]])
        return kernels.linear_fp8_scaled(x, x_scale, weight, weight_scale, self._first)


def load_linear(weights: WeightReader, *names: str, has_bias: bool = False) -> Linear | Fp8Linear:
    """The rank's parts of the linears `names`, fused into one whose output is theirs side by side.

    Raises CheckpointError if some of them are FP8 and some are not.
    """
    bias = weights.stacked([f"{name}.bias" for name in names]) if has_bias else None
    matrices = [f"{name}.weight" for name in names]
    kinds = {weights.shards.config.is_fp8(name) for name in matrices}
    if len(kinds) > 1:
        raise CheckpointError(f"modules_to_not_convert names some of {', '.join(names)}: all or none must be FP8")
    weight = weights.stacked(matrices)
    if kinds == {False}:
        return Linear(kernels.pack_linear(weight), bias)
    scale = weights.stacked([name + SCALE_SUFFIX for name in matrices])
    pieces = _pieces(weights.shard(name).rows for name in matrices)
    return Fp8Linear(tuple((weight[rows], scale[blocks]) for rows, blocks in pieces), bias)


def _pieces(parts: Iterable[Ranges]) -> list[tuple[slice, slice]]:
    """Cuts the rows of stacked parts into pieces whose scales can be found by row / 128.

    A part is the rows that were taken of one tensor; its scales are those of the blocks that it touches. Returns the
    slices of the rows in memory, and of their scales.
    """
    pieces: list[tuple[slice, slice]] = []
    row = block = 0  # in memory
    for start, stop in (run for part in parts for span in part for run in _block_runs(span)):
        num_blocks = -(-stop // FP8_BLOCK) - start // FP8_BLOCK
        first_row, first_block = row, block
        if pieces and (row - pieces[-1][0].start) % FP8_BLOCK == 0:
            rows, blocks = pieces.pop()
            first_row, first_block = rows.start, blocks.start
        row, block = row + stop - start, block + num_blocks
        pieces.append((slice(first_row, row), slice(first_block, block)))
    return pieces or [(slice(0, 0), slice(0, 0))]


def _block_runs(span: Range) -> list[Range]:
    """The range in parts that begin with a block, or lie within one."""
    start, stop = span
    boundary = -(-start // FP8_BLOCK) * FP8_BLOCK
    return [span] if start == boundary or stop <= boundary else [(start, boundary), (boundary, stop)]


def _only(ranges: Ranges | None) -> Range:
    assert ranges is not None and len(ranges) == 1  # heads are consecutive
    return ranges[0]
