"""Qwen3-MoE and dense Qwen3: decoder layers of grouped-query attention with normed heads, then experts or a dense MLP.

Sizes: T tokens of the replica's step, n of them owned by this rank, N of them sampled, H hidden, Hq and Hkv query and
KV heads of this rank, D head size, V vocabulary. Where ranks share a layer, groups.py tells what they exchange.
The device is nobody's business here: `kernels` picks what runs on it. A step of no tokens takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import kernels
from replica.groups import Group, Groups
from replica.kv_cache import KVCache
from replica.layers import DenseMlp, Embedding, ExpertMlp, rope_table
from replica.linears import Linear, OutputLinear, load_linear
from replica.model_config import ModelConfig
from replica.step_tensors import StepTensors
from replica.weights import WeightReader


class Qwen3Moe:
    """One rank's part of the whole model."""

    def __init__(self, config: ModelConfig, weights: WeightReader, *, num_positions: int, device: torch.device) -> None:
        """Reads the rank's weights. Positions up to `num_positions` can be served."""
        self.eps = config.rms_norm_eps
        self.vocab_size = config.vocab_size
        tied = config.tie_word_embeddings
        self.embedding = Embedding(weights, "model.embed_tokens.weight", is_head=tied)
        self.cos_sin = rope_table(config.rope, config.head_dim, num_positions, device)  # [P, D] float32
        self.layers = [DecoderLayer(config, weights, layer) for layer in range(config.num_layers)]
        self.norm = weights.tensor("model.norm.weight")  # [H]
        # [V of this rank, H]. One that is tied is not held twice: it is the largest matrix.
        self.head = Linear(self.embedding.weight) if tied else load_linear(weights, "lm_head")

    def take_over(self, weights: WeightReader, layers: Iterable[int]) -> None:
        """Adds the blocks of MLPs and experts that `weights` has, in these layers, to what the rank holds."""
        for layer in layers:
            self.layers[layer].mlp.take_over(weights)

    def forward(self, step: StepTensors, cache: KVCache, groups: Groups) -> Tensor:
        """Logits after the step's sampled tokens [N, V] float32, on the replica's first rank; [0, V] on the others.

        The step's keys and values go to the cache.
        """
        tables = kernels.StepTables(
            cos_sin=self.cos_sin,
            positions=step.positions,
            slots=step.slots,
            decode_tables=step.decode_tables,
            decode_lens=step.decode_lens,
            prefill_tables=step.prefill_tables,
            prefill_starts=step.prefill_starts,
            prefill_lens=step.prefill_lens,
        )
        plan = kernels.plan_step(cache.keys[0], tables)
        x = self.embedding(step.token_ids)  # [T, H], a part
        x = groups.attention.reduce_scatter(x, step.attention_rows)  # [n, H]
        residual: Tensor | None = None
        for layer, k_cache, v_cache in zip(self.layers, cache.keys, cache.values, strict=True):
            x, residual = layer(x, residual, step, plan, k_cache, v_cache, groups)
        assert residual is not None  # there is at least one layer
        # Before the last norm, because the head is the largest matrix and few tokens need it.
        x, residual = x.index_select(0, step.sample_rows), residual.index_select(0, step.sample_rows)  # [owned, H] both
        x, _ = kernels.add_rms_norm(x, residual, self.norm, self.eps)
        x = groups.attention.all_gather(x, step.sampled_rows)  # [N, H]
        logits = groups.attention.gather_columns(self.head(x))  # [N, padded V]
        return logits[:, : self.vocab_size].to(torch.float32)


class DecoderLayer:
    """Attention, then experts or a dense MLP, each after a norm and added to the residual."""

    def __init__(self, config: ModelConfig, weights: WeightReader, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = weights.tensor(f"{prefix}.input_layernorm.weight")  # [H]
        self.attention = Attention(config, weights, f"{prefix}.self_attn")
        self.post_attention_norm = weights.tensor(f"{prefix}.post_attention_layernorm.weight")  # [H]
        self.mlp: ExpertMlp | DenseMlp
        if config.is_moe(layer):
            self.mlp = ExpertMlp(weights, f"{prefix}.mlp", layer)
        else:
            self.mlp = DenseMlp(weights, f"{prefix}.mlp")

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepTensors,
        plan: kernels.StepPlan,
        k_cache: Tensor,
        v_cache: Tensor,
        groups: Groups,
    ) -> tuple[Tensor, Tensor]:
        """x [n, H], not yet added to the residual [n, H] (None in the first layer) -> the same two after this layer."""
        if residual is None:
            residual = x
            x = kernels.rms_norm(x, self.input_norm, self.eps)
        else:
            x, residual = kernels.add_rms_norm(x, residual, self.input_norm, self.eps)
        x = self.attention(x, step, plan, k_cache, v_cache, groups.attention)
        x, residual = kernels.add_rms_norm(x, residual, self.post_attention_norm, self.eps)
        return self.mlp(x, step, groups), residual


class Attention:
    """Grouped-query attention over the paged cache; each head of q and k is normed, then rotated."""

    def __init__(self, config: ModelConfig, weights: WeightReader, prefix: str) -> None:
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.heads = weights.shards.num_heads  # of q, k and v
        self.scale = config.head_dim**-0.5
        names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self.qkv = load_linear(weights, *names, has_bias=config.attention_bias)
        q_norm, k_norm = (weights.tensor(f"{prefix}.{name}_norm.weight") for name in "qk")  # [D] both
        self.norms = kernels.HeadNorms.of(q_norm, k_norm, *self.heads[:2])
        self.out = OutputLinear(weights, f"{prefix}.o_proj")
        self.out_bias = weights.tensor(f"{prefix}.o_proj.bias") if config.attention_bias else None  # [H]

    def __call__(
        self,
        x: Tensor,
        step: StepTensors,
        plan: kernels.StepPlan,
        k_cache: Tensor,
        v_cache: Tensor,
        group: Group,
    ) -> Tensor:
        """x [n, H] -> [n, H]."""
        x = group.all_gather(x, step.attention_rows)  # [T, H]
        T = x.shape[0]
        qkv = self.qkv(x).view(T, sum(self.heads), self.head_dim)
        q = kernels.cache_heads(qkv, self.norms, self.eps, plan, k_cache, v_cache)  # [T, Hq, D]
        y = kernels.paged_attention(q, plan, k_cache, v_cache, self.scale)  # [T, Hq, D]
        y = group.reduce_scatter(self.out(y.flatten(1), group), step.attention_rows)  # [n, H]
        return y if self.out_bias is None else y + self.out_bias  # once, after the sum
