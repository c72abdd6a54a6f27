"""SwiGLU: silu of the gate half times the up half."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot_case import AotCase
from kernels.device import check_rows

_BLOCK_F: Final = 1024


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, stride_xt, stride_yt, F, BLOCK_F: tl.constexpr):
    """x [T, 2F] (gate half, then up half) -> y [T, F]. Grid (T, cdiv(F, BLOCK_F))."""
    t = tl.program_id(0).to(tl.int64)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    gate = tl.load(x_ptr + t * stride_xt + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + t * stride_xt + F + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * stride_yt + offs_f, (silu(gate) * up).to(y_ptr.dtype.element_ty), mask=mask_f)


def swiglu(x: Tensor) -> Tensor:
    """x [T, 2F] (gate half, then up half) -> silu(gate) * up [T, F], in x's dtype."""
    check_rows(x=x)
    T, F = x.shape[0], x.shape[1] // 2
    y = torch.empty((T, F), dtype=x.dtype, device=x.device)
    if y.numel():
        _swiglu_kernel[(T, triton.cdiv(F, _BLOCK_F))](x, y, x.stride(0), y.stride(0), F, BLOCK_F=_BLOCK_F)
    return y


def swiglu_reference(x: Tensor) -> Tensor:
    """Plain torch."""
    gate, up = x.to(torch.float32).chunk(2, dim=-1)  # [T, F] each
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


AOT_CASES = [
    AotCase(
        kernel=_swiglu_kernel,
        max_registers=64,
        name="any F",
        signature={"x_ptr": "*bf16", "y_ptr": "*bf16", "stride_xt": "i32", "stride_yt": "i32", "F": "i32"},
        constants={"BLOCK_F": _BLOCK_F},
    )
]
