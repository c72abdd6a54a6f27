"""Which experts a token goes to, with which weights, and the work list of the grouped products that follow.

An *assignment* is one (token, expert) pair; assignment a is token a // K's choice a % K. `sort_by_expert` puts the
assignments of one expert next to each other, in their own order, and cuts each expert's into tiles of block_m rows.
Every program computes what it needs from the counts of all experts, so there is no atomic, no host sync and one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import configs
from kernels.aot_case import AotCase
from kernels.device import check_rows

Scoring = Literal["softmax", "sigmoid"]

_ONE_LAUNCH: Final = 4096  # assignments; each of E programs reads all of them
_CHUNK: Final = 1024  # assignments that one program of the two-launch sort places
_STEP: Final = 32  # of them at a time


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    stride_lt,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
):
    """logits [T, E] -> weights, experts [T, K]: K times the largest, lowest id on ties. Grid (cdiv(T, BLOCK_T),)."""
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < T
    mask = mask_t[:, None] & (offs_e < E)[None, :]
    logits = tl.load(logits_ptr + offs_t[:, None] * stride_lt + offs_e[None, :], mask=mask, other=float("-inf"))
    logits = tl.where(mask_t[:, None], logits.to(tl.float32), 0.0)  # rows past T must not give NaN
    logits = tl.where((offs_e < E)[None, :], logits, float("-inf"))
    peak = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - peak[:, None]), axis=1)
    left = logits
    weights = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    experts = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for k in tl.static_range(K):
        best = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == best[:, None], offs_e[None, :], BLOCK_E), axis=1)
        expert = tl.minimum(expert, E - 1)  # a row of NaN must not name an expert that does not exist
        score = tl.exp(best - peak) / total if IS_SOFTMAX else 1.0 / (1.0 + tl.exp(-best))
        weights = tl.where(offs_k[None, :] == k, score[:, None], weights)
        experts = tl.where(offs_k[None, :] == k, expert[:, None], experts)
        left = tl.where(offs_e[None, :] == expert[:, None], float("-inf"), left)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=1)[:, None]
    out = offs_t[:, None] * K + offs_k[None, :]
    mask_out = mask_t[:, None] & (offs_k < K)[None, :]
    tl.store(weights_ptr + out, weights, mask=mask_out)
    tl.store(experts_ptr + out, experts, mask=mask_out)


def route(logits: Tensor, top_k: int, renormalize: bool, scoring: Scoring = "softmax") -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (weights [T, K] float32, experts [T, K] int32), heaviest first, the lower id first on ties.

    `renormalize` makes a token's weights sum to 1.
    """
    check_rows(logits=logits)
    T, E = logits.shape
    weights = torch.empty((T, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((T, top_k), dtype=torch.int32, device=logits.device)
    block_t = 4
    if T:
        _route_kernel[(triton.cdiv(T, block_t),)](
            logits,
            weights,
            experts,
            logits.stride(0),
            T,
            E=E,
            K=top_k,
            BLOCK_T=block_t,
            BLOCK_E=triton.next_power_of_2(E),
            BLOCK_K=triton.next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            IS_SOFTMAX=scoring == "softmax",
        )
    return weights, experts


def route_reference(
    logits: Tensor, top_k: int, renormalize: bool, scoring: Scoring = "softmax"
) -> tuple[Tensor, Tensor]:
    """Plain torch. The order is that of the logits: two scores may round to one number."""
    logits32 = logits.to(torch.float32)
    scores = torch.softmax(logits32, dim=-1) if scoring == "softmax" else torch.sigmoid(logits32)  # [T, E]
    experts = torch.sort(logits32, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)  # [T, K]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)


@triton.jit
def _store_tiles(tiles_ptr, expert, start, count, first_tile, BLOCK_M: tl.constexpr):
    """Writes an expert's tiles: (expert, first row, row past the last)."""
    for j in range(0, tl.cdiv(count, BLOCK_M)):
        tile_ptr = tiles_ptr + (first_tile + j) * 3
        tl.store(tile_ptr, expert)
        tl.store(tile_ptr + 1, start + j * BLOCK_M)
        tl.store(tile_ptr + 2, tl.minimum(start + (j + 1) * BLOCK_M, start + count))


@triton.jit
def _sort_kernel(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    A,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One launch: program e counts all A assignments, then places those of expert e. Grid (E,). BLOCK_E > E."""
    e = tl.program_id(0)
    offs_a = tl.arange(0, BLOCK_A)
    offs_e = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for a in range(0, A, BLOCK_A):
        counts += tl.histogram(tl.load(ids_ptr + a + offs_a, mask=a + offs_a < A, other=E), BLOCK_E)
    start = tl.sum(tl.where(offs_e < e, counts, 0), axis=0)
    count = tl.sum(tl.where(offs_e == e, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(offs_e < e, tl.cdiv(counts, BLOCK_M), 0), axis=0)
    _store_tiles(tiles_ptr, e, start, count, first_tile, BLOCK_M)
    if e == E - 1:
        tl.store(num_tiles_ptr, first_tile + tl.cdiv(count, BLOCK_M))
    for a in range(0, A, BLOCK_A):
        ids = tl.load(ids_ptr + a + offs_a, mask=a + offs_a < A, other=E)
        mine = (ids == e).to(tl.int32)
        place = start + tl.cumsum(mine, axis=0) - mine
        tl.store(order_ptr + place, a + offs_a, mask=ids == e)
        start += tl.sum(mine, axis=0)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, A, E: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """First of two launches: counts [chunks, BLOCK_E] of each chunk's assignments by expert. Grid (chunks,)."""
    chunk = tl.program_id(0)
    offs_a = chunk * CHUNK + tl.arange(0, CHUNK)
    counts = tl.histogram(tl.load(ids_ptr + offs_a, mask=offs_a < A, other=E), BLOCK_E)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _place_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    A,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Second of two launches: each program places one chunk and writes the tiles of some experts. Grid (chunks,)."""
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    offs_e = tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_E], tl.int32)  # of each expert, in earlier chunks
    counts = tl.zeros([BLOCK_E], tl.int32)
    for c in range(0, num_chunks):
        row = tl.load(counts_ptr + c * BLOCK_E + offs_e)
        counts += row
        before += tl.where(c < chunk, row, 0)
    counts = tl.where(offs_e < E, counts, 0)  # column E counts the padding of the last chunk
    starts = tl.cumsum(counts, axis=0) - counts
    tile_counts = tl.cdiv(counts, BLOCK_M)
    first_tiles = tl.cumsum(tile_counts, axis=0) - tile_counts
    if chunk == 0:
        tl.store(num_tiles_ptr, tl.sum(tile_counts, axis=0))
    for e in range(chunk, E, num_chunks):
        is_e = offs_e == e
        start = tl.sum(tl.where(is_e, starts, 0), axis=0)
        count = tl.sum(tl.where(is_e, counts, 0), axis=0)
        _store_tiles(tiles_ptr, e, start, count, tl.sum(tl.where(is_e, first_tiles, 0), axis=0), BLOCK_M)
    place = starts + before  # where the next assignment of each expert goes
    for a in range(0, CHUNK, STEP):
        offs_a = chunk * CHUNK + a + tl.arange(0, STEP)
        ids = tl.load(ids_ptr + offs_a, mask=offs_a < A, other=E)
        chosen = (ids[:, None] == offs_e[None, :]).to(tl.int32)  # [STEP, BLOCK_E]
        row = tl.sum(chosen * (place[None, :] + tl.cumsum(chosen, axis=0) - 1), axis=1)
        tl.store(order_ptr + row, offs_a, mask=offs_a < A)
        place += tl.sum(chosen, axis=0)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The assignments of a step by expert, and the tiles of block_m rows that the grouped products work on.

    With `experts_are_tiles` nothing is sorted: each assignment is a tile of its own and `tiles` is expert_ids.
    """

    order: Tensor  # [T * K] int32: the assignment in each row
    tiles: Tensor  # [max_tiles, 3] int32: expert, first row, row past the last
    num_tiles: Tensor  # [1] int32; at most max_tiles, known on the device only
    max_tiles: int
    experts_are_tiles: bool = False


def assignments_as_tiles(expert_ids: Tensor) -> Sorted:
    """The work list of a step so small that hardly two assignments share an expert: no launch at all."""
    return Sorted(expert_ids, expert_ids, expert_ids, expert_ids.numel(), experts_are_tiles=True)


def sort_by_expert(expert_ids: Tensor, num_experts: int, block_m: int) -> Sorted:
    """expert_ids [T, K] int32, not empty. Equal to a stable sort."""
    A, device = expert_ids.numel(), expert_ids.device
    max_tiles = min(A, triton.cdiv(A, block_m) + num_experts)
    order = torch.empty(A, dtype=torch.int32, device=device)
    tiles = torch.empty((max_tiles, 3), dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    block_e = triton.next_power_of_2(num_experts + 1)
    sizes = {"E": num_experts, "BLOCK_E": block_e}
    if A <= _ONE_LAUNCH:
        block_a = min(1024, max(32, triton.next_power_of_2(A)))
        _sort_kernel[(num_experts,)](expert_ids, order, tiles, num_tiles, A, BLOCK_A=block_a, BLOCK_M=block_m, **sizes)
    else:
        num_chunks = triton.cdiv(A, _CHUNK)
        counts = torch.empty((num_chunks, block_e), dtype=torch.int32, device=device)
        _count_kernel[(num_chunks,)](expert_ids, counts, A, CHUNK=_CHUNK, **sizes)
        _place_kernel[(num_chunks,)](
            expert_ids, counts, order, tiles, num_tiles, A, BLOCK_M=block_m, CHUNK=_CHUNK, STEP=_STEP, **sizes
        )
    return Sorted(order, tiles, num_tiles, max_tiles)


def sort_by_expert_reference(expert_ids: Tensor, num_experts: int, block_m: int) -> Sorted:
    """Plain torch."""
    flat = expert_ids.flatten()
    tiles, start = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        end = start + count
        tiles += [(expert, row, min(row + block_m, end)) for row in range(start, end, block_m)]
        start = end
    order = torch.argsort(flat, stable=True).to(torch.int32)
    table, num_tiles = torch.tensor(tiles, dtype=torch.int32), torch.tensor([len(tiles)], dtype=torch.int32)
    return Sorted(order, table, num_tiles, len(tiles))


@triton.jit
def tile_of(tile_m, order_ptr, tiles_ptr, offs_m, EXPERTS_ARE_TILES: tl.constexpr):
    """Tile tile_m's expert, its sorted rows, their assignments (where the mask holds) and the mask."""
    if EXPERTS_ARE_TILES:  # tiles_ptr is expert_ids
        expert = tl.load(tiles_ptr + tile_m)
        rows = tile_m + offs_m
        mask_m = offs_m < 1
        assigned = rows
    else:
        expert = tl.load(tiles_ptr + tile_m * 3)
        rows = tl.load(tiles_ptr + tile_m * 3 + 1) + offs_m
        mask_m = rows < tl.load(tiles_ptr + tile_m * 3 + 2)
        assigned = tl.load(order_ptr + rows, mask=mask_m, other=0)
    return expert, rows.to(tl.int64), assigned.to(tl.int64), mask_m


def grouped_product_cases(
    kernel: Any,
    table: str,
    hidden: int,
    *,
    signature: dict[str, str],
    constants: dict[str, Any],
    unaligned: tuple[str, ...],
) -> list[AotCase]:
    """The cases of a grouped product: every target's tiles in a table of configs.DEFAULTS, at a hidden size.

    The arguments are those that the two products do not share.
    """
    is_fp8 = table.endswith("_fp8")
    return [
        AotCase(
            kernel=kernel,
            name=f"H={hidden} M={tile.block_m}{' direct' if direct else ''}{' FP8' if is_fp8 else ''}",
            signature={
                **dict.fromkeys(("x_ptr", "w_ptr"), "*fp8e4nv" if is_fp8 else "*bf16"),
                **dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32"),
                **dict.fromkeys(("offsets_ptr", "order_ptr", "tiles_ptr", "num_tiles_ptr"), "*i32"),
                "num_tiles": "i32",
                **signature,
            },
            constants={
                "H": hidden,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
                "SWAP": tile.is_swapped,
                "EXPERTS_ARE_TILES": direct,
                "IS_FP8": is_fp8,
                **constants,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            ptx="wgmma" if target == "sm_90" else "",
            unaligned=frozenset(("num_tiles", *unaligned)),
        )
        for target in (configs.FP8_ARCHS if is_fp8 else configs.ARCHS)
        for _, tile in configs.DEFAULTS[table][target]
        for direct in ((True, False) if tile.block_m == 16 else (False,))
    ]


_SORTED_SIGNATURE: Final = {"order_ptr": "*i32", "tiles_ptr": "*i32", "num_tiles_ptr": "*i32", "A": "i32"}
_SIZES: Final = {"E": 128, "BLOCK_E": 256}
AOT_CASES = [
    *(
        AotCase(
            kernel=_route_kernel,
            max_registers=64,
            name=f"E=128 {scoring}",
            signature={
                "logits_ptr": "*bf16",
                "weights_ptr": "*fp32",
                "experts_ptr": "*i32",
                "stride_lt": "i32",
                "T": "i32",
            },
            constants={
                "E": 128,
                "K": 8,
                "BLOCK_T": 4,
                "BLOCK_E": 128,
                "BLOCK_K": 8,
                "RENORMALIZE": True,
                "IS_SOFTMAX": scoring == "softmax",
            },
            unaligned=frozenset(("T",)),
        )
        for scoring in ("softmax", "sigmoid")
    ),
    AotCase(
        kernel=_sort_kernel,
        max_registers=64,
        name="E=128",
        signature={"ids_ptr": "*i32", **_SORTED_SIGNATURE},
        constants={**_SIZES, "BLOCK_A": 1024, "BLOCK_M": 16},
        unaligned=frozenset(("A",)),
    ),
    AotCase(
        kernel=_count_kernel,
        max_registers=64,
        name="E=128",
        signature={"ids_ptr": "*i32", "counts_ptr": "*i32", "A": "i32"},
        constants={**_SIZES, "CHUNK": _CHUNK},
        unaligned=frozenset(("A",)),
    ),
    AotCase(
        kernel=_place_kernel,
        max_registers=168,
        name="E=128",
        signature={"ids_ptr": "*i32", "counts_ptr": "*i32", **_SORTED_SIGNATURE},
        constants={**_SIZES, "BLOCK_M": 128, "CHUNK": _CHUNK, "STEP": _STEP},
        unaligned=frozenset(("A",)),
    ),
]
