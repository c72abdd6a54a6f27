"""Causal attention of many new tokens a sequence over its pages of the KV cache, a cached prefix included.

All query heads of one KV head and several consecutive tokens are the rows of one product (GQA packed in M), so keys and
values are read once for all of them. A tile belongs to one sequence: sequence s has at most
cdiv(its tokens, tile) <= its tokens // tile + 1 tiles, so its first tile is query_starts[s] // tile + s, and each
program finds its sequence by bisection. Tiles past a sequence's end stop at once; no host sync is needed.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import configs
from kernels.aot_case import AotCase
from kernels.attention_decode import attend, cache_slots, gather_slots
from kernels.device import arch, check_rows

_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _sequence_of(tile, starts_ptr, S, TILE_T: tl.constexpr):
    """The last sequence whose first tile is not after `tile`."""
    low = 0
    high = S
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TILE_T + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attention_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    y_ptr,
    stride_qt,
    stride_qh,
    stride_cb,
    stride_cs,
    stride_ch,
    stride_bs,
    stride_yt,
    stride_yh,
    scale,
    S,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """y [T, Hq, D]. A tile is BLOCK_M // GROUP tokens of one sequence. Grid (tiles, Hkv)."""
    TILE_T: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s = _sequence_of(tile, starts_ptr, S, TILE_T)
    start = tl.load(starts_ptr + s)
    num_queries = tl.load(starts_ptr + s + 1) - start
    first = (tile - start // TILE_T - s) * TILE_T  # this tile's first query within the sequence
    if first >= num_queries:
        return
    prefix = tl.load(lens_ptr + s) - num_queries  # positions before the first query
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    queries = first + offs_m // GROUP
    heads = head * GROUP + offs_m % GROUP
    mask_d = offs_d < D
    mask_q = ((queries < num_queries) & (offs_m < TILE_T * GROUP))[:, None] & mask_d[None, :]
    rows = (start + queries).to(tl.int64)
    q_ptrs = q_ptr + rows[:, None] * stride_qt + heads[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_q, other=0.0)
    if IS_FP8:
        scale *= tl.load(k_scale_ptr + head)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = prefix + tl.minimum(first + TILE_T, num_queries)  # past the last position that any of these queries sees
    for n in range(0, last, BLOCK_N):
        positions = n + offs_n
        mask_n = positions < last
        table = tables_ptr + s.to(tl.int64) * stride_bs + positions // BLOCK_SIZE
        blocks = tl.load(table, mask=mask_n, other=0).to(tl.int64)
        cached = blocks * stride_cb + (positions % BLOCK_SIZE) * stride_cs + head * stride_ch
        mask_kv = mask_n[:, None] & mask_d[None, :]
        k = tl.load(k_ptr + cached[:, None] + offs_d[None, :], mask=mask_kv, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + cached[:, None] + offs_d[None, :], mask=mask_kv, other=0.0).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        scores = tl.where(positions[None, :] <= prefix + queries[:, None], scores, float("-inf"))
        # Position 0 is seen by every query, so the peak is finite from the first block on.
        peak, total, acc = attend(scores, v, peak, total, acc)
    acc /= total[:, None]
    if IS_FP8:
        acc *= tl.load(v_scale_ptr + head)
    y_ptrs = y_ptr + rows[:, None] * stride_yt + heads[:, None] * stride_yh + offs_d[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_q)


def attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]. The keys and values of the new tokens are in the cache already.

    Sequence s owns the queries query_starts[s] to query_starts[s + 1]; they are its last positions of context_lens[s],
    and each attends to all positions up to its own. k_cache, v_cache [num_blocks, block_size, Hkv, D];
    block_tables [S, B]; query_starts [S + 1]; context_lens [S]; k_scale, v_scale [Hkv] float32 if the cache is
    float8_e4m3fn.
    """
    check_rows(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables)
    T, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    S = context_lens.shape[0]
    y = torch.empty((T, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if T == 0:
        return y
    tile = configs.pick("attention_prefill", arch(q.device), (num_heads, num_kv_heads, head_dim), configs.bucket_of(T))
    group = num_heads // num_kv_heads
    block_m = max(tile.block_m, triton.next_power_of_2(group))
    num_tiles = T // (block_m // group) + S
    _attention_prefill_kernel[(num_tiles, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        context_lens,
        q if k_scale is None else k_scale,
        q if v_scale is None else v_scale,
        y,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        y.stride(0),
        y.stride(1),
        scale * _LOG2_E,
        S,
        GROUP=group,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        IS_FP8=k_scale is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def attention_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Plain torch: a loop over the sequences."""
    out = torch.empty_like(q)
    starts, lens = query_starts.tolist(), context_lens.tolist()  # host sync: on the CPU they are there already
    for s, context_len in enumerate(lens):
        rows = slice(starts[s], starts[s + 1])
        if rows.stop > rows.start:
            slots = cache_slots(block_tables[s : s + 1], torch.arange(context_len).unsqueeze(0), k_cache.shape[1])
            k = gather_slots(k_cache, slots, k_scale, q.dtype)  # [1, Hkv, L, D]
            v = gather_slots(v_cache, slots, v_scale, q.dtype)
            out[rows] = _attend(q[rows], k, v, scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one sequence: q [n, Hq, D] are the last n positions of k and v [1, Hkv, L, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, context_len = k.shape[1:3]
    group = num_heads // num_kv_heads
    positions = torch.arange(context_len)  # [L]
    visible = positions <= positions[context_len - num_queries :].unsqueeze(1)  # [n, L]
    # The heads of one KV head become its queries: n * group of them, so keys and values are never repeated.
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)  # [Hkv, n, group, D]
    grouped = grouped.reshape(1, num_kv_heads, num_queries * group, head_dim)
    mask = visible.repeat_interleave(group, dim=0)  # [n * group, L]
    out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1).reshape(q.shape)


def _cases(cache: str, group: int) -> list[AotCase]:
    fp8 = cache == "*fp8e4nv"
    return [
        AotCase(
            kernel=_attention_prefill_kernel,
            name=f"{group} heads a KV head, {'FP8' if fp8 else 'bf16'} cache",
            signature={
                **dict.fromkeys(("q_ptr", "y_ptr"), "*bf16"),
                **dict.fromkeys(("k_ptr", "v_ptr"), cache),
                **dict.fromkeys(("tables_ptr", "starts_ptr", "lens_ptr"), "*i32"),
                **dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32"),
                **{f"stride_{name}": "i32" for name in ("qt", "qh", "cb", "cs", "ch", "bs", "yt", "yh")},
                "scale": "fp32",
                "S": "i32",
            },
            constants={
                "GROUP": group,
                "D": 128,
                "BLOCK_SIZE": 16,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_D": 128,
                "IS_FP8": fp8,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            ptx="wgmma" if target == "sm_90" else "",
            unaligned=frozenset(("stride_bs", "S")),
        )
        for target in (configs.FP8_ARCHS if fp8 else configs.ARCHS)
        for _, tile in configs.DEFAULTS["attention_prefill"][target]
    ]


AOT_CASES = [*_cases("*bf16", 8), *_cases("*bf16", 16), *_cases("*fp8e4nv", 8)]
