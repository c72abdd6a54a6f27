"""RMS normalisation, with the residual addition that comes before it in every layer fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot_case import AotCase
from kernels.device import check_rows


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    stride_xt,
    stride_rt,
    stride_yt,
    stride_tt,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """x, residual [T, H] -> total = x + residual, y = total / rms(total) * weight. Grid (T,)."""
    t = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    x = tl.load(x_ptr + t * stride_xt + offs_h, mask=mask_h, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + t * stride_rt + offs_h, mask=mask_h, other=0.0)
        tl.store(total_ptr + t * stride_tt + offs_h, x, mask=mask_h)
    x32 = x.to(tl.float32)
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / H + eps)
    tl.store(y_ptr + t * stride_yt + offs_h, (x32 * scale * weight).to(y_ptr.dtype.element_ty), mask=mask_h)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> x / rms(x) * weight [T, H], in x's dtype."""
    y = torch.empty_like(x)
    _launch(x, x, weight, y, y, eps, has_residual=False)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (rms_norm(x + residual), x + residual). The sum is rounded to x's dtype first."""
    y, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, y, total, eps, has_residual=True)
    return y, total


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, total: Tensor, eps: float, *, has_residual: bool
) -> None:
    check_rows(x=x, residual=residual, weight=weight)
    T, H = x.shape
    if T == 0:
        return
    block_h = triton.next_power_of_2(H)
    _rms_norm_kernel[(T,)](
        x,
        residual,
        weight,
        y,
        total,
        x.stride(0),
        residual.stride(0),
        y.stride(0),
        total.stride(0),
        eps,
        H=H,
        BLOCK_H=block_h,
        HAS_RESIDUAL=has_residual,
        num_warps=_num_warps(block_h),
    )


def _num_warps(block_h: int) -> int:
    return min(16, max(1, block_h // 512))  # 16 elements a thread


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain torch."""
    x32 = x.to(torch.float32)
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)  # [T, 1]
    return (x32 * scale * weight.to(torch.float32)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    total = x + residual  # [T, H]
    return rms_norm_reference(total, weight, eps), total


AOT_CASES = [
    AotCase(
        kernel=_rms_norm_kernel,
        max_registers=64,
        name=f"H={H}{' residual' if has_residual else ''}",
        signature={
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr"), "*bf16"),
            **dict.fromkeys(("stride_xt", "stride_rt", "stride_yt", "stride_tt"), "i32"),
            "eps": "fp32",
        },
        constants={"H": H, "BLOCK_H": H, "HAS_RESIDUAL": has_residual},
        num_warps=_num_warps(H),
    )
    for H, has_residual in ((2048, True), (4096, True), (4096, False))
]
