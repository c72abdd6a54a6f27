"""Attention of one new token a sequence over its pages of the KV cache.

The KV length is split so that one long sequence fills the chip: each program attends to one stretch of one sequence for
all query heads of one KV head (they are the rows of its products) and a second kernel joins the stretches. How a
sequence is split depends on its own length alone, so its result does not depend on the batch around it.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import configs
from kernels.aot_case import AotCase
from kernels.device import arch, check_rows

MAX_SPLITS: Final = 64  # of one sequence
MIN_SPLIT: Final = 256  # tokens; shorter sequences are not split
_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _split_len(length, MAX_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens in each split of a sequence: a function of its length alone."""
    even = tl.cdiv(tl.cdiv(length, MAX_SPLITS), BLOCK_N) * BLOCK_N
    return tl.maximum(even, MIN_SPLIT)


@triton.jit
def attend(scores, v, peak, total, acc):
    """Takes one block of scores [M, N] (base 2) and values [N, D] into a running softmax [M] and its sum [M, D].

    The sum is relative to 2^peak: when the peak grows, what was summed so far shrinks. Milakov and Gimelshein,
    "Online normalizer calculation for softmax" (arXiv 1805.02867). Returns the new peak, total and sum.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _attention_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    partial_ptr,
    lse_ptr,
    stride_qs,
    stride_qh,
    stride_cb,
    stride_cs,
    stride_ch,
    stride_bs,
    stride_ps,
    stride_ph,
    stride_pn,
    stride_ls,
    stride_lh,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """partial [S, Hq, splits, D] and lse [S, Hq, splits] (base 2), both float32. Grid (S, Hkv, splits)."""
    s = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lens_ptr + s)
    split_len = _split_len(length, MAX_SPLITS, MIN_SPLIT, BLOCK_N)
    first = split * split_len
    last = tl.minimum(first + split_len, length)
    if first >= length:
        return
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    mask_d = offs_d < D
    mask_q = (offs_g < GROUP)[:, None] & mask_d[None, :]
    heads = head * GROUP + offs_g
    q = tl.load(q_ptr + s * stride_qs + heads[:, None] * stride_qh + offs_d[None, :], mask=mask_q, other=0.0)
    if IS_FP8:
        scale *= tl.load(k_scale_ptr + head)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for n in range(first, last, BLOCK_N):
        positions = n + offs_n
        mask_n = positions < last
        blocks = tl.load(tables_ptr + s * stride_bs + positions // BLOCK_SIZE, mask=mask_n, other=0).to(tl.int64)
        rows = blocks * stride_cb + (positions % BLOCK_SIZE) * stride_cs + head * stride_ch
        mask_kv = mask_n[:, None] & mask_d[None, :]
        k = tl.load(k_ptr + rows[:, None] + offs_d[None, :], mask=mask_kv, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + rows[:, None] + offs_d[None, :], mask=mask_kv, other=0.0).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        scores = tl.where(mask_n[None, :], scores, float("-inf"))
        peak, total, acc = attend(scores, v, peak, total, acc)
    acc /= total[:, None]
    if IS_FP8:
        acc *= tl.load(v_scale_ptr + head)
    out = partial_ptr + s * stride_ps + split * stride_pn + heads[:, None] * stride_ph + offs_d[None, :]
    tl.store(out, acc, mask=mask_q)
    tl.store(lse_ptr + s * stride_ls + heads * stride_lh + split, peak + tl.log2(total), mask=offs_g < GROUP)


@triton.jit
def _join_splits_kernel(
    partial_ptr,
    lse_ptr,
    lens_ptr,
    y_ptr,
    stride_ps,
    stride_ph,
    stride_pn,
    stride_ls,
    stride_lh,
    stride_ys,
    stride_yh,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """y [S, Hq, D] = the partial results weighted by 2^lse; zeros for a length of 0. Grid (S, Hq)."""
    s = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lens_ptr + s)
    num_splits = tl.cdiv(length, _split_len(length, MAX_SPLITS, MIN_SPLIT, BLOCK_N))
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    lse_row = lse_ptr + s * stride_ls + head * stride_lh
    offs_n = tl.arange(0, MAX_SPLITS)
    peak = tl.max(tl.load(lse_row + offs_n, mask=offs_n < num_splits, other=float("-inf")), axis=0)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in range(0, num_splits):
        weight = tl.exp2(tl.load(lse_row + split) - peak)
        row = partial_ptr + s * stride_ps + head * stride_ph + split * stride_pn
        acc += weight * tl.load(row + offs_d, mask=mask_d, other=0.0)
        total += weight
    y = acc / tl.where(num_splits > 0, total, 1.0)
    tl.store(y_ptr + s * stride_ys + head * stride_yh + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """q [S, Hq, D] -> [S, Hq, D]. A sequence of length 0 gives zeros.

    k_cache, v_cache [num_blocks, block_size, Hkv, D]; block_tables [S, B]; context_lens [S], the new token included;
    k_scale, v_scale [Hkv] float32 if the cache is float8_e4m3fn.
    """
    check_rows(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables)
    S, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    y = torch.empty((S, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if S == 0:
        return y
    # The longest sequence is at most as long as its table: bounding by that spares a host sync.
    num_splits = max(1, min(MAX_SPLITS, triton.cdiv(block_tables.shape[1] * block_size, MIN_SPLIT)))
    partial = torch.empty((S, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((S, num_heads, num_splits), dtype=torch.float32, device=q.device)
    tile = configs.pick("attention_decode", arch(q.device), (num_heads, num_kv_heads, head_dim), configs.bucket_of(S))
    splits = {"BLOCK_N": tile.block_n, "MAX_SPLITS": MAX_SPLITS, "MIN_SPLIT": MIN_SPLIT}
    block_d = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // num_kv_heads
    _attention_decode_kernel[(S, num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        q if k_scale is None else k_scale,
        q if v_scale is None else v_scale,
        partial,
        lse,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        partial.stride(0),
        partial.stride(1),
        partial.stride(2),
        lse.stride(0),
        lse.stride(1),
        scale * _LOG2_E,
        GROUP=group,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(tile.block_m, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        IS_FP8=k_scale is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **splits,
    )
    _join_splits_kernel[(S, num_heads)](
        partial,
        lse,
        context_lens,
        y,
        partial.stride(0),
        partial.stride(1),
        partial.stride(2),
        lse.stride(0),
        lse.stride(1),
        y.stride(0),
        y.stride(1),
        D=head_dim,
        BLOCK_D=block_d,
        num_warps=1,
        **splits,
    )
    return y


def attention_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Plain torch: sequences of similar lengths in one batch, padded to the longest of them."""
    out = torch.zeros_like(q)
    S, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    grouped = q.view(S, num_kv_heads, num_heads // num_kv_heads, head_dim)  # the heads of one KV head are its queries
    for rows in _rows_by_length(context_lens):
        lens, tables = context_lens[rows], block_tables[rows]
        positions = torch.arange(int(lens.max()))  # [L]
        valid = positions < lens.unsqueeze(1)  # [S', L]
        # Past its end a sequence reads its own first token again, never an unwritten slot: 0 * NaN would be NaN.
        slots = cache_slots(tables, torch.where(valid, positions, 0), k_cache.shape[1])  # [S', L]
        k = gather_slots(k_cache, slots, k_scale, q.dtype)  # [S', Hkv, L, D]
        v = gather_slots(v_cache, slots, v_scale, q.dtype)
        attended = torch.nn.functional.scaled_dot_product_attention(
            grouped[rows], k, v, attn_mask=valid[:, None, None], scale=scale
        )
        out[rows] = attended.reshape(-1, num_heads, head_dim)
    return out


def _rows_by_length(context_lens: Tensor) -> list[Tensor]:
    """The sequences in groups whose lengths differ by less than a factor of two, so that padding at most doubles."""
    buckets = torch.ceil(torch.log2(context_lens.to(torch.float64)))  # -inf for a length of 0
    return [torch.nonzero(buckets == bucket).squeeze(1) for bucket in sorted(set(buckets.tolist())) if bucket >= 0]


def cache_slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The cache slots [S, L] of positions [S, L] of the sequences of block_tables [S, B]."""
    blocks = torch.gather(block_tables.to(torch.int64), 1, positions // block_size)  # [S, L]
    return blocks * block_size + positions % block_size


def gather_slots(cache: Tensor, slots: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What is in slots [S, L] of a cache [num_blocks, block_size, Hkv, D], as a view of shape [S, Hkv, L, D]."""
    num_kv_heads, head_dim = cache.shape[2:]
    rows = cache.view(-1, num_kv_heads * head_dim).index_select(0, slots.flatten())  # [S * L, Hkv * D]
    heads = rows.view(*slots.shape, num_kv_heads, head_dim)
    if scale is not None:
        heads = heads.to(torch.float32) * scale.unsqueeze(-1)
    return heads.to(dtype).transpose(1, 2)


def _cases(cache: str, group: int) -> list[AotCase]:
    fp8 = cache == "*fp8e4nv"
    constants = {"D": 128, "BLOCK_D": 128, "MAX_SPLITS": MAX_SPLITS, "MIN_SPLIT": MIN_SPLIT}
    strides = ("qs", "qh", "cb", "cs", "ch", "ps", "ph", "pn")
    return [
        AotCase(
            kernel=_attention_decode_kernel,
            max_registers=168,
            name=f"{group} heads a KV head, {'FP8' if fp8 else 'bf16'} cache",
            signature={
                "q_ptr": "*bf16",
                **dict.fromkeys(("k_ptr", "v_ptr"), cache),
                **dict.fromkeys(("tables_ptr", "lens_ptr"), "*i32"),
                **dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "partial_ptr", "lse_ptr"), "*fp32"),
                **{f"stride_{name}": "i32" for name in (*strides, "bs", "ls", "lh")},
                "scale": "fp32",
            },
            constants={
                **constants,
                "GROUP": group,
                "BLOCK_SIZE": 16,
                "BLOCK_G": tile.block_m,
                "BLOCK_N": tile.block_n,
                "IS_FP8": fp8,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            unaligned=frozenset(("stride_bs", "stride_ls", "stride_lh")),
        )
        for target in (configs.FP8_ARCHS if fp8 else configs.ARCHS)
        for _, tile in configs.DEFAULTS["attention_decode"][target]
    ]


AOT_CASES = [
    *_cases("*bf16", 8),
    *_cases("*bf16", 16),
    *_cases("*fp8e4nv", 8),
    AotCase(
        kernel=_join_splits_kernel,
        max_registers=64,
        name="D=128",
        signature={
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            "lens_ptr": "*i32",
            "y_ptr": "*bf16",
            **{f"stride_{name}": "i32" for name in ("ps", "ph", "pn", "ls", "lh", "ys", "yh")},
        },
        constants={"D": 128, "BLOCK_D": 128, "BLOCK_N": 64, "MAX_SPLITS": MAX_SPLITS, "MIN_SPLIT": MIN_SPLIT},
        num_warps=1,
        unaligned=frozenset(("stride_ls", "stride_lh")),
    ),
]
