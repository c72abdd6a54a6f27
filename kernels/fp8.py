"""FP8 (e4m3) with scales in blocks, as in DeepSeek-V3 and Qwen's FP8 checkpoints.

An activation has one scale for each token and 128 columns, computed as it is used; a weight [N, K] has one for each
128 x 128 block, from the checkpoint. value = float8 * scale.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import configs
from kernels.aot_case import AotCase
from kernels.device import arch, check_rows, num_programs

FP8_GROUP: Final = 128  # columns that share one scale, and rows too in a weight
FP8_MAX: Final = 448.0
_LEAST_SCALE: Final = 1e-12  # of a group of zeros
_GROUP_TILE: Final = 8  # groups quantised by one program


@triton.jit
def to_fp8(x):
    """float32 -> float8_e4m3fn, saturated."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def group_scale(x, axis: tl.constexpr):
    """The scale that makes the largest of a group (along `axis` of float32 x) fill float8_e4m3fn."""
    return tl.maximum(tl.max(tl.abs(x), axis=axis) / 448.0, 1e-12)


@triton.jit
def _quantize_kernel(
    x_ptr, y_ptr, scale_ptr, stride_xt, stride_yt, stride_st, H, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """x [T, H] -> y [T, H] float8, scale [T, cdiv(H, GROUP)]. Grid (T, cdiv(H, GROUP * TILE))."""
    t = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * TILE + tl.arange(0, TILE)
    offs_h = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + t * stride_xt + offs_h, mask=offs_h < H, other=0.0).to(tl.float32)
    scale = group_scale(x, 1)
    tl.store(y_ptr + t * stride_yt + offs_h, to_fp8(x / scale[:, None]), mask=offs_h < H)
    tl.store(scale_ptr + t * stride_st + offs_g, scale, mask=offs_g * GROUP < H)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] -> (float8_e4m3fn [T, H], scales [T, ceil(H / 128)] float32), one scale for 128 columns of a token."""
    check_rows(x=x)
    T, H = x.shape
    num_groups = triton.cdiv(H, FP8_GROUP)
    y = torch.empty((T, H), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((T, num_groups), dtype=torch.float32, device=x.device)
    if y.numel():
        _quantize_kernel[(T, triton.cdiv(num_groups, _GROUP_TILE))](
            x, y, scale, x.stride(0), y.stride(0), scale.stride(0), H, GROUP=FP8_GROUP, TILE=_GROUP_TILE
        )
    return y, scale


def quantize_fp8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    H = x.shape[1]
    groups = _as_groups(x, 0)  # [T, groups, 128]
    scale = scale_of(groups.abs().amax(dim=-1))  # [T, groups]
    y = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return y.flatten(1)[:, :H].contiguous(), scale


@triton.jit
def _linear_fp8_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    y_ptr,
    stride_xt,
    stride_xst,
    stride_wn,
    stride_wsn,
    stride_yt,
    T,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    """y [T, N] = x [T, K] @ w [N, K]^T, both float8 with scales. Grid (any,): programs stride over the tiles."""
    num_n = tl.cdiv(N, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK_M) * num_n, tl.num_programs(0)):
        offs_m = (tile // num_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (tile % num_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m = offs_m < T
        mask_n = offs_n < N
        w_scale_row = w_scale_ptr + ((tile % num_n) * BLOCK_N // GROUP) * stride_wsn
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            mask_k = k + offs_k < K
            x_ptrs = x_ptr + offs_m[:, None] * stride_xt + (k + offs_k)[None, :]
            w_ptrs = w_ptr + offs_n[:, None] * stride_wn + (k + offs_k)[None, :]
            x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
            x_scale = tl.load(x_scale_ptr + offs_m * stride_xst + k // GROUP, mask=mask_m, other=0.0)
            scale = x_scale * tl.load(w_scale_row + k // GROUP)
            if SWAP:
                acc += tl.dot(w, x.T) * scale[None, :]
            else:
                acc += tl.dot(x, w.T) * scale[:, None]
        if SWAP:
            acc = acc.T
        y_ptrs = y_ptr + offs_m[:, None] * stride_yt + offs_n[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight [N, K] float8_e4m3fn, weight_scale [ceil(N / 128), ceil(K / 128)] float32 -> [T, N].

    x is quantised here; the result has x's dtype. Any size may be 0.
    """
    check_rows(x=x, weight=weight, weight_scale=weight_scale)
    T, K = x.shape
    N = weight.shape[0]
    y = torch.empty((T, N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    quantized, x_scale = quantize_fp8(x)
    tile = configs.pick("linear_fp8", arch(x.device), (N, K), configs.bucket_of(T))
    num_tiles = triton.cdiv(T, tile.block_m) * triton.cdiv(N, tile.block_n)
    _linear_fp8_kernel[(num_programs(num_tiles, tile, x.device),)](
        quantized,
        x_scale,
        weight,
        weight_scale,
        y,
        quantized.stride(0),
        x_scale.stride(0),
        weight.stride(0),
        weight_scale.stride(0),
        y.stride(0),
        T,
        N,
        K,
        GROUP=FP8_GROUP,
        **tile.constants(),
    )
    return y


def linear_fp8_reference(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Plain torch: both sides back in float32."""
    activations = dequantize_groups(*quantize_fp8_reference(x))
    return (activations @ dequantize_blocks(weight, weight_scale).T).to(x.dtype)


def scale_of(largest: Tensor) -> Tensor:
    """The scales that make the largest magnitudes of groups fill float8_e4m3fn."""
    return (largest / FP8_MAX).clamp(min=_LEAST_SCALE)


def group_maxima(x: Tensor, first: int) -> Tensor:
    """x [T, K], columns `first` and on of a wider matrix -> [T, groups of 128 that they touch] float32, largest |x|."""
    return _as_groups(x, first).abs().amax(dim=-1)


def linear_fp8_scaled(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: int) -> Tensor:
    """As linear_fp8, for columns `first` and on of wider matrices, with the activations' scales given.

    x [T, K]; x_scale [T, G] and weight_scale [ceil(N / 128), G] have one column for each group of 128 that these
    columns touch -> [T, N]. For activations whose groups span ranks; plain torch on every device.
    """
    groups = _as_groups(x, first)
    quantized = (groups / x_scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    activations = quantized.to(torch.float32) * x_scale.unsqueeze(-1)
    before = first % FP8_GROUP
    weights = torch.nn.functional.pad(weight.to(torch.float32), (before, 0))
    weights = dequantize_blocks(weights, weight_scale)[:, before:]  # [N, K]
    return (activations.flatten(1)[:, before : before + x.shape[1]] @ weights.T).to(x.dtype)


def _as_groups(x: Tensor, first: int) -> Tensor:
    """x [T, K] -> [T, G, 128] float32, with zeros before and after."""
    before = first % FP8_GROUP
    num_groups = -(-(before + x.shape[1]) // FP8_GROUP)
    padded = torch.nn.functional.pad(x.to(torch.float32), (before, num_groups * FP8_GROUP - before - x.shape[1]))
    return padded.view(x.shape[0], num_groups, FP8_GROUP)


def dequantize_groups(x: Tensor, scale: Tensor) -> Tensor:
    """x [T, H] of any type, scale [T, ceil(H / 128)] -> [T, H] float32."""
    return x.to(torch.float32) * scale.repeat_interleave(FP8_GROUP, dim=1)[:, : x.shape[1]]


def dequantize_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [N, K] of any type, scale [ceil(N / 128), ceil(K / 128)] -> [N, K] float32."""
    rows = scale.repeat_interleave(FP8_GROUP, dim=0)[: weight.shape[0]]
    return dequantize_groups(weight, rows)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (float8_e4m3fn [N, K], scales [ceil(N / 128), ceil(K / 128)]): what an FP8 checkpoint holds."""
    N, K = weight.shape
    rows, columns = -(-N // FP8_GROUP), -(-K // FP8_GROUP)
    padding = (0, columns * FP8_GROUP - K, 0, rows * FP8_GROUP - N)
    blocks = torch.nn.functional.pad(weight.to(torch.float32), padding).view(rows, FP8_GROUP, columns, FP8_GROUP)
    scale = (blocks.abs().amax(dim=(1, 3)) / FP8_MAX).clamp(min=_LEAST_SCALE)  # [rows, columns]
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(rows * FP8_GROUP, columns * FP8_GROUP)[:N, :K].contiguous(), scale


AOT_CASES = [
    AotCase(
        kernel=_quantize_kernel,
        max_registers=64,
        name="any H",
        signature={
            "x_ptr": "*bf16",
            "y_ptr": "*fp8e4nv",
            "scale_ptr": "*fp32",
            **dict.fromkeys(("stride_xt", "stride_yt", "stride_st", "H"), "i32"),
        },
        constants={"GROUP": FP8_GROUP, "TILE": _GROUP_TILE},
        targets=configs.FP8_ARCHS,
    ),
    *(
        AotCase(
            kernel=_linear_fp8_kernel,
            name=f"M={tile.block_m}",
            signature={
                **dict.fromkeys(("x_ptr", "w_ptr"), "*fp8e4nv"),
                **dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32"),
                "y_ptr": "*bf16",
                **{f"stride_{name}": "i32" for name in ("xt", "xst", "wn", "wsn", "yt")},
                **dict.fromkeys(("T", "N", "K"), "i32"),
            },
            constants={
                "GROUP": FP8_GROUP,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
                "SWAP": tile.is_swapped,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            ptx="wgmma" if target == "sm_90" else "",
            unaligned=frozenset(("stride_xst", "stride_wsn", "T")),
        )
        for target in configs.FP8_ARCHS
        for _, tile in configs.DEFAULTS["linear_fp8"][target]
    ),
]
