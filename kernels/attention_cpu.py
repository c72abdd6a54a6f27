"""Attention over pages on the CPU: by code of our own where it can be had (bf16_cpu.py), else by torch's own fused
attention over few sequences at a time.

A sequence's blocks are copied one after the other, whole blocks at once, into a buffer of a few hundred kilobytes that
a core's cache holds until attention has read it: so the cache's memory is read once, in long stretches, and nothing
else is. Which blocks, and where sequences end, is in the step's plan.

Queries of a prompt go in tiles, each with the keys that its last query sees, so little more than the visible half of
the products is computed. One mask serves all tiles (step_plan_cpu.causal_mask): the tile of t queries that sees v keys
takes its v columns that end at width + t.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import bf16_cpu
from kernels.step_plan import CpuPlan, DecodeChunk, PromptChunk, StepPlan
from kernels.step_plan_cpu import TILE


def paged_attention_cpu(q: Tensor, plan: StepPlan, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """See paged_attention.paged_attention."""
    cpu = plan.cpu
    if cpu is None:
        return bf16_cpu.attention(q, plan.tables, k_cache, v_cache, scale)
    n = cpu.num_decodes
    decoded = _decodes(q[:n], cpu, k_cache, v_cache, scale)
    if n == len(q):
        return decoded
    out = q.new_empty(q.shape)
    out[:n] = decoded
    for prompt in cpu.prompts:
        assert cpu.causal is not None  # where there are prompts there is a mask
        _prefill(q[prompt.rows], out[prompt.rows], prompt, cpu.causal, k_cache, v_cache, scale)
    return out


def _decodes(q: Tensor, cpu: CpuPlan, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """q [decodes, Hq, D] -> the same."""
    if len(cpu.decodes) == 1 and cpu.order is None and len(q) == cpu.decodes[0].sequences.stop:
        return _decode(q, cpu.decodes[0], k_cache, v_cache, scale)  # nothing to put together
    if cpu.order is not None:
        q = q.index_select(0, cpu.order)
    attended = q.new_zeros(q.shape)  # a sequence without tokens attends to nothing
    for chunk in cpu.decodes:
        attended[chunk.sequences] = _decode(q[chunk.sequences], chunk, k_cache, v_cache, scale)
    return attended if cpu.ranks is None else attended.index_select(0, cpu.ranks)


def _decode(q: Tensor, chunk: DecodeChunk, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """q [n, Hq, D] -> [n, Hq, D]."""
    n, _, head_dim = q.shape
    grouped = q.view(n, k_cache.shape[2], -1, head_dim)  # the heads of one KV head are its queries
    k, v = _sequences(k_cache, chunk, n), _sequences(v_cache, chunk, n)
    return scaled_dot_product_attention(grouped, k, v, attn_mask=chunk.mask, scale=scale).view(q.shape)


def _sequences(cache: Tensor, chunk: DecodeChunk, n: int) -> Tensor:
    """What the n sequences of a chunk have in a cache: [n, Hkv, L, D]."""
    num_kv_heads, head_dim = cache.shape[2:]
    blocks = _blocks(cache, chunk.blocks)  # [n * B * block_size, Hkv * D]
    # Not only masked: what another sequence has left there may be NaN, and 0 * NaN is.
    blocks.index_fill_(0, chunk.padding, 0.0)
    return blocks.view(n, -1, num_kv_heads, head_dim)[:, : chunk.max_len].transpose(1, 2)


def _prefill(
    q: Tensor, out: Tensor, prompt: PromptChunk, causal: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
) -> None:
    """q, out [n, Hq, D]: the last n positions of the context."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    k, v = (
        _blocks(cache, prompt.blocks).view(1, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [1, Hkv, B * block_size, D]
    num_queries = q.shape[0]
    for start in range(0, num_queries, TILE):
        tile = slice(start, min(start + TILE, num_queries))
        visible = prompt.context_len - num_queries + tile.stop
        last = causal.shape[1] - TILE + tile.stop - tile.start
        attended = scaled_dot_product_attention(
            q[tile].transpose(0, 1).unsqueeze(0),
            k[:, :, :visible],
            v[:, :, :visible],
            attn_mask=causal[: tile.stop - tile.start, last - visible : last],
            scale=scale,
            enable_gqa=True,
        )  # [1, Hq, tile, D]
        out[tile] = attended[0].transpose(0, 1)


def _blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of a cache [num_blocks, block_size, Hkv, D], copied: [len(blocks) * block_size, Hkv * D]."""
    num_blocks, block_size = cache.shape[:2]
    return cache.view(num_blocks, -1).index_select(0, blocks).view(len(blocks) * block_size, -1)
