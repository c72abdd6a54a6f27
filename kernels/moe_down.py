"""Second half of the experts: the inner rows -> weighted parts at their assignments' places -> each token's sum."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import configs
from kernels.aot_case import AotCase
from kernels.device import num_programs
from kernels.moe_routing import Sorted, grouped_product_cases, tile_of

_COMBINE_BLOCK: Final = 1024


@triton.jit
def _down_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    offsets_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    weights_ptr,
    y_ptr,
    stride_xm,
    stride_xsm,
    stride_ya,
    num_tiles,
    H: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EXPERTS_ARE_TILES: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """y [A, H] = weight * (x @ down^T), at the assignments' own places. Grid (any,). A width of 0 writes zeros."""
    if not EXPERTS_ARE_TILES:
        num_tiles = tl.load(num_tiles_ptr)
    num_n: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), num_tiles * num_n, tl.num_programs(0)):
        expert, rows, assigned, mask_m = tile_of(tile // num_n, order_ptr, tiles_ptr, offs_m, EXPERTS_ARE_TILES)
        # All widths are multiples of ALIGN; saying so lets the compiler load whole vectors of a row.
        offset = tl.load(offsets_ptr + expert).to(tl.int64) // ALIGN * ALIGN
        width = tl.load(offsets_ptr + expert + 1) // ALIGN * ALIGN - offset
        n = (tile % num_n) * BLOCK_N
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < H
        x_ptrs = x_ptr + rows[:, None] * stride_xm + offs_k[None, :]
        w_ptrs = w_ptr + offset * H + offs_n[:, None] * width + offs_k[None, :]
        w_scale_row = w_scale_ptr + offset // 128 * ((H + 127) // 128) + n // 128 * (width // 128)
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, width.to(tl.int32), BLOCK_K):
            mask_k = k + offs_k < width
            x = tl.load(x_ptrs + k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs + k, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
            if IS_FP8:
                scale = tl.load(x_scale_ptr + rows * stride_xsm + k // 128, mask=mask_m, other=0.0)
                scale *= tl.load(w_scale_row + k // 128)
                if SWAP:
                    acc += tl.dot(w, x.T) * scale[None, :]
                else:
                    acc += tl.dot(x, w.T) * scale[:, None]
            elif SWAP:
                acc = tl.dot(w, x.T, acc, input_precision="ieee")
            else:
                acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if SWAP:
            acc = acc.T
        acc *= tl.load(weights_ptr + assigned, mask=mask_m, other=0.0)[:, None]
        y_ptrs = y_ptr + assigned[:, None] * stride_ya + offs_n[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _combine_kernel(parts_ptr, y_ptr, stride_pa, stride_yt, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr):
    """parts [T * K, H] -> y [T, H], summed over K in order, in float32. Grid (T, cdiv(H, BLOCK_H))."""
    t = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    acc = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(TOP_K):
        acc += tl.load(parts_ptr + (t * TOP_K + k) * stride_pa + offs_h, mask=mask_h, other=0.0)
    tl.store(y_ptr + t * stride_yt + offs_h, acc.to(y_ptr.dtype.element_ty), mask=mask_h)


def down(
    inner: Tensor,
    inner_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    offsets: Tensor,
    work: Sorted,
    tile: configs.Tile,
    routing: Tensor,
    hidden: int,
    align: int,
    dtype: torch.dtype,
) -> Tensor:
    """inner [A, widest] -> the parts [A, H] times routing [T, K], each at its assignment's place.

    All widths are multiples of `align`.
    """
    parts = torch.empty((routing.numel(), hidden), dtype=dtype, device=inner.device)
    num_n = triton.cdiv(hidden, tile.block_n)
    _down_kernel[(num_programs(work.max_tiles * num_n, tile, inner.device),)](
        inner,
        inner_scale,
        weight,
        inner_scale if weight_scale is None else weight_scale,
        offsets,
        work.order,
        work.tiles,
        work.num_tiles,
        routing,
        parts,
        inner.stride(0),
        inner_scale.stride(0),
        parts.stride(0),
        work.max_tiles,
        H=hidden,
        ALIGN=align,
        IS_FP8=weight_scale is not None,
        EXPERTS_ARE_TILES=work.experts_are_tiles,
        **tile.constants(),
    )
    return parts


def combine(parts: Tensor, top_k: int) -> Tensor:
    """parts [T * K, H], T > 0 -> [T, H]."""
    T, hidden = parts.shape[0] // top_k, parts.shape[1]
    y = torch.empty((T, hidden), dtype=parts.dtype, device=parts.device)
    _combine_kernel[(T, triton.cdiv(hidden, _COMBINE_BLOCK))](
        parts, y, parts.stride(0), y.stride(0), hidden, TOP_K=top_k, BLOCK_H=_COMBINE_BLOCK
    )
    return y


def _cases(table: str, hidden: int) -> list[AotCase]:
    return grouped_product_cases(
        _down_kernel,
        table,
        hidden,
        signature={
            "y_ptr": "*bf16",
            "weights_ptr": "*fp32",
            **{f"stride_{name}": "i32" for name in ("xm", "xsm", "ya")},
        },
        constants={"ALIGN": 16},
        unaligned=("stride_xsm",),
    )


AOT_CASES = [
    *_cases("moe_down", 2048),
    *_cases("moe_down", 4096),
    *_cases("moe_down_fp8", 4096),
    AotCase(
        kernel=_combine_kernel,
        max_registers=64,
        name="K=8",
        signature={
            **dict.fromkeys(("parts_ptr", "y_ptr"), "*bf16"),
            **dict.fromkeys(("stride_pa", "stride_yt", "H"), "i32"),
        },
        constants={"TOP_K": 8, "BLOCK_H": _COMBINE_BLOCK},
    ),
]
