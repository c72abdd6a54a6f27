"""What happens to queries, keys and values between their projection and attention, in one pass.

Each head of q and k is RMS-normalised over D (where the model has such weights) and rotated by its token's position;
keys and values are then written to their slots of the paged cache. The rotation is the half-split form:
(a, b) -> (a cos - b sin, b cos + a sin), with a the first half of the head and b the second. A cache of
float8_e4m3fn holds values divided by their head's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot_case import AotCase
from kernels.configs import FP8_ARCHS
from kernels.device import check_rows
from kernels.fp8 import FP8_MAX, to_fp8
from kernels.rms_norm import rms_norm_reference
from kernels.step_plan import StepPlan


@triton.jit
def _qk_norm_rope_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ct,
    stride_ot,
    stride_oh,
    stride_cb,
    stride_cs,
    stride_ch,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Grid (T, 3): one token's queries, keys or values. A head is two tiles of [heads, HALF]."""
    t = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    offs_d = tl.arange(0, BLOCK_HALF)
    offs_h = tl.arange(0, BLOCK_HEADS)
    mask_d = offs_d < HALF
    slot = tl.load(slots_ptr + t).to(tl.int64)
    cached = (slot // BLOCK_SIZE) * stride_cb + (slot % BLOCK_SIZE) * stride_cs
    cached += offs_h[:, None] * stride_ch + offs_d[None, :]
    num_written = tl.where(slot >= 0, NUM_KV_HEADS, 0)
    if role == 2:
        mask = (offs_h < num_written)[:, None] & mask_d[None, :]
        v_ptrs = v_ptr + t * stride_vt + offs_h[:, None] * stride_vh + offs_d[None, :]
        low = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(v_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        _store_halves(v_cache_ptr + cached, low, high, v_scale_ptr, offs_h, NUM_KV_HEADS, mask, HALF, IS_FP8)
    else:
        position = tl.load(positions_ptr + t).to(tl.int64)
        cos = tl.load(cos_sin_ptr + position * stride_ct + offs_d, mask=mask_d, other=0.0)
        sin = tl.load(cos_sin_ptr + position * stride_ct + HALF + offs_d, mask=mask_d, other=0.0)
        if role == 0:
            mask = (offs_h < NUM_HEADS)[:, None] & mask_d[None, :]
            q_ptrs = q_ptr + t * stride_qt + offs_h[:, None] * stride_qh + offs_d[None, :]
            low, high = _norm_rotate(q_ptrs, q_weight_ptr, cos, sin, mask, offs_d, mask_d, eps, HALF, HAS_NORM)
            out_ptrs = q_out_ptr + t * stride_ot + offs_h[:, None] * stride_oh + offs_d[None, :]
            tl.store(out_ptrs, low.to(q_out_ptr.dtype.element_ty), mask=mask)
            tl.store(out_ptrs + HALF, high.to(q_out_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (offs_h < num_written)[:, None] & mask_d[None, :]
            k_ptrs = k_ptr + t * stride_kt + offs_h[:, None] * stride_kh + offs_d[None, :]
            low, high = _norm_rotate(k_ptrs, k_weight_ptr, cos, sin, mask, offs_d, mask_d, eps, HALF, HAS_NORM)
            _store_halves(k_cache_ptr + cached, low, high, k_scale_ptr, offs_h, NUM_KV_HEADS, mask, HALF, IS_FP8)


@triton.jit
def _norm_rotate(x_ptrs, weight_ptr, cos, sin, mask, offs_d, mask_d, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """The halves of heads at x_ptrs [heads, HALF], normed and rotated, in float32."""
    low = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean_square = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean_square + eps)[:, None]
        low *= scale * tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        high *= scale * tl.load(weight_ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    return low * cos[None, :] - high * sin[None, :], high * cos[None, :] + low * sin[None, :]


@triton.jit
def _store_halves(
    ptrs, low, high, scale_ptr, offs_h, NUM_KV_HEADS: tl.constexpr, mask, HALF: tl.constexpr, IS_FP8: tl.constexpr
):
    """Writes two float32 halves [heads, HALF] of keys or values to the cache, divided by their scales if it is FP8."""
    if IS_FP8:
        scale = tl.load(scale_ptr + offs_h, mask=offs_h < NUM_KV_HEADS, other=1.0)[:, None]
        low = to_fp8(low / scale)
        high = to_fp8(high / scale)
    tl.store(ptrs, low.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, high.to(ptrs.dtype.element_ty), mask=mask)


def qk_norm_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Returns q normed and rotated [T, Hq, D]; writes k (normed and rotated) and v to the cache.

    q [T, Hq, D], k, v [T, Hkv, D]; q_weight, k_weight [D], or both None for a model without these norms;
    cos_sin [P, D] float32, each position's D/2 cosines, then its D/2 sines; positions, slots [T];
    k_cache, v_cache [num_blocks, block_size, Hkv, D]. slot = block_id * block_size + offset; -1 is not written.
    k_scale, v_scale [Hkv] float32 if the cache is float8_e4m3fn.
    """
    check_rows(q=q, k=k, v=v, cos_sin=cos_sin, k_cache=k_cache, v_cache=v_cache)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache has strides {k_cache.stride()}, v_cache {v_cache.stride()}; they must be equal")
    T, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty((T, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if T == 0:
        return q_out
    _qk_norm_rope_cache_kernel[(T, 3)](
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        cos_sin,
        positions,
        slots,
        q_out,
        k_cache,
        v_cache,
        k if k_scale is None else k_scale,
        v if v_scale is None else v_scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin.stride(0),
        q_out.stride(0),
        q_out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=k_cache.shape[1],
        HALF=head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(max(num_heads, num_kv_heads)),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=q_weight is not None,
        IS_FP8=k_scale is not None,
    )
    return q_out


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of a layer's heads."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    heads: Tensor  # [Hq + Hkv, D] float32: those of each head

    @classmethod
    def of(cls, q: Tensor, k: Tensor, num_heads: int, num_kv_heads: int) -> HeadNorms:
        """From the weights of the query heads and of the key heads."""
        heads = torch.cat((q.expand(num_heads, -1), k.expand(num_kv_heads, -1)))
        return cls(q, k, heads.to(torch.float32))


def cache_heads(qkv: Tensor, norms: HeadNorms, eps: float, plan: StepPlan, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """qkv [T, Hq + 2 * Hkv, D] -> q normed and rotated [T, Hq, D]; keys and values go to the cache."""
    num_kv_heads = k_cache.shape[2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    tables = plan.tables
    return qk_norm_rope_cache(
        *(q, k, v, norms.q, norms.k, eps),
        *(tables.cos_sin, tables.positions, tables.slots, k_cache, v_cache),
    )


def qk_norm_rope_cache_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Plain torch."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    q_out, k_out = _rotated(q, q_weight, eps, cos, sin), _rotated(k, k_weight, eps, cos, sin)
    written = slots >= 0
    if not bool(written.all()):
        slots, k_out, v = slots[written], k_out[written], v[written]
    _write(k_cache, slots, k_out, k_scale)
    _write(v_cache, slots, v, v_scale)
    return q_out


def _rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    x32 = x.to(torch.float32)
    if weight is not None:
        x32 = rms_norm_reference(x32, weight, eps)
    a, b = x32.chunk(2, dim=-1)  # [T, heads, D/2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _write(cache: Tensor, slots: Tensor, x: Tensor, scale: Tensor | None) -> None:
    if scale is not None:
        x = (x.to(torch.float32) / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    cache.view(-1, *cache.shape[2:])[slots] = x.to(cache.dtype)


def _case(name: str, num_heads: int, num_kv_heads: int, cache: str) -> AotCase:
    bf16 = ("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr", "q_out_ptr")
    float32 = ("cos_sin_ptr", "k_scale_ptr", "v_scale_ptr")
    strides = ("qt", "qh", "kt", "kh", "vt", "vh", "ct", "ot", "oh", "cb", "cs", "ch")
    return AotCase(
        kernel=_qk_norm_rope_cache_kernel,
        max_registers=128,
        name=name,
        signature={
            **dict.fromkeys(bf16, "*bf16"),
            **dict.fromkeys(float32, "*fp32"),
            **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i32"),
            **dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache),
            **{f"stride_{name}": "i32" for name in strides},
            "eps": "fp32",
        },
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": 16,
            "HALF": 64,
            "BLOCK_HEADS": num_heads,
            "BLOCK_HALF": 64,
            "HAS_NORM": True,
            "IS_FP8": cache == "*fp8e4nv",
        },
        targets=FP8_ARCHS if cache == "*fp8e4nv" else (),
    )


AOT_CASES = [
    _case("30B, bf16 cache", 32, 4, "*bf16"),
    _case("235B, bf16 cache", 64, 4, "*bf16"),
    _case("30B, FP8 cache", 32, 4, "*fp8e4nv"),
]
