"""First half of the experts: rows of x gathered by expert -> silu(gate) * up of each assignment, in sorted order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import configs
from kernels.aot_case import AotCase
from kernels.device import num_programs
from kernels.fp8 import FP8_GROUP, group_scale, quantize_fp8, to_fp8
from kernels.moe_routing import Sorted, grouped_product_cases, tile_of
from kernels.swiglu import silu


@triton.jit
def _gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    offsets_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    y_ptr,
    y_scale_ptr,
    stride_xt,
    stride_xst,
    stride_wn,
    stride_wsn,
    stride_ym,
    stride_ysm,
    num_tiles,
    num_n,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EXPERTS_ARE_TILES: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """y [A, F_e] = silu(x @ gate^T) * (x @ up^T) for the A sorted rows. Grid (any,). FP8: y is quantised as well."""
    if not EXPERTS_ARE_TILES:
        num_tiles = tl.load(num_tiles_ptr)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), num_tiles * num_n, tl.num_programs(0)):
        expert, rows, assigned, mask_m = tile_of(tile // num_n, order_ptr, tiles_ptr, offs_m, EXPERTS_ARE_TILES)
        offset = tl.load(offsets_ptr + expert).to(tl.int64)
        width = tl.load(offsets_ptr + expert + 1) - offset
        n = (tile % num_n) * BLOCK_N
        if n < width:
            tokens = assigned // TOP_K
            offs_n = n + tl.arange(0, BLOCK_N)
            mask_n = offs_n < width
            x_ptrs = x_ptr + tokens[:, None] * stride_xt + offs_k[None, :]
            gate_ptrs = w_ptr + (2 * offset + offs_n)[:, None] * stride_wn + offs_k[None, :]
            up_ptrs = gate_ptrs + width * stride_wn
            gate_scale_ptr = w_scale_ptr + (2 * offset + n) // 128 * stride_wsn
            up_scale_ptr = gate_scale_ptr + width // 128 * stride_wsn
            if SWAP:
                gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            else:
                gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(0, H, BLOCK_K):
                mask_k = k + offs_k < H
                x = tl.load(x_ptrs + k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
                mask_w = mask_n[:, None] & mask_k[None, :]
                w_gate = tl.load(gate_ptrs + k, mask=mask_w, other=0.0)
                w_up = tl.load(up_ptrs + k, mask=mask_w, other=0.0)
                if IS_FP8:
                    x_scale = tl.load(x_scale_ptr + tokens * stride_xst + k // 128, mask=mask_m, other=0.0)
                    gate_scale = x_scale * tl.load(gate_scale_ptr + k // 128)
                    up_scale = x_scale * tl.load(up_scale_ptr + k // 128)
                    if SWAP:
                        gate += tl.dot(w_gate, x.T) * gate_scale[None, :]
                        up += tl.dot(w_up, x.T) * up_scale[None, :]
                    else:
                        gate += tl.dot(x, w_gate.T) * gate_scale[:, None]
                        up += tl.dot(x, w_up.T) * up_scale[:, None]
                elif SWAP:
                    gate = tl.dot(w_gate, x.T, gate, input_precision="ieee")
                    up = tl.dot(w_up, x.T, up, input_precision="ieee")
                else:
                    gate = tl.dot(x, w_gate.T, gate, input_precision="ieee")
                    up = tl.dot(x, w_up.T, up, input_precision="ieee")
            inner = silu(gate) * up
            if SWAP:
                inner = inner.T
            y_ptrs = y_ptr + rows[:, None] * stride_ym + offs_n[None, :]
            if IS_FP8:  # BLOCK_N is one group
                scale = group_scale(inner, 1)
                tl.store(y_scale_ptr + rows * stride_ysm + n // 128, scale, mask=mask_m)
                inner = to_fp8(inner / scale[:, None])
            tl.store(y_ptrs, inner.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def gate_up(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    offsets: Tensor,
    work: Sorted,
    tile: configs.Tile,
    top_k: int,
    widest: int,
) -> tuple[Tensor, Tensor]:
    """x [T, H] -> silu(gate) * up of the A sorted rows [A, widest] and, if the weights are FP8, its scales."""
    A, hidden = x.shape[0] * top_k, x.shape[1]
    is_fp8 = weight_scale is not None
    x_rows, x_scale = quantize_fp8(x) if is_fp8 else (x, x)
    w_scale = x if weight_scale is None else weight_scale
    inner = torch.empty((A, widest), dtype=x_rows.dtype, device=x.device)
    inner_scale = torch.empty((A, widest // FP8_GROUP), dtype=torch.float32, device=x.device) if is_fp8 else inner
    num_n = triton.cdiv(widest, tile.block_n)
    _gate_up_kernel[(num_programs(work.max_tiles * num_n, tile, x.device),)](
        x_rows,
        x_scale,
        weight,
        w_scale,
        offsets,
        work.order,
        work.tiles,
        work.num_tiles,
        inner,
        inner_scale,
        x_rows.stride(0),
        x_scale.stride(0),
        weight.stride(0),
        w_scale.stride(0),
        inner.stride(0),
        inner_scale.stride(0),
        work.max_tiles,
        num_n,
        H=hidden,
        TOP_K=top_k,
        IS_FP8=is_fp8,
        EXPERTS_ARE_TILES=work.experts_are_tiles,
        **tile.constants(),
    )
    return inner, inner_scale


def _cases(table: str, hidden: int) -> list[AotCase]:
    return grouped_product_cases(
        _gate_up_kernel,
        table,
        hidden,
        signature={
            "y_ptr": "*fp8e4nv" if table.endswith("_fp8") else "*bf16",
            "y_scale_ptr": "*fp32",
            **{f"stride_{name}": "i32" for name in ("xt", "xst", "wn", "wsn", "ym", "ysm")},
            "num_n": "i32",
        },
        constants={"TOP_K": 8},
        unaligned=("stride_xst", "stride_wsn", "stride_ysm", "num_n"),
    )


AOT_CASES = [*_cases("moe_gate_up", 2048), *_cases("moe_gate_up", 4096), *_cases("moe_gate_up_fp8", 4096)]
