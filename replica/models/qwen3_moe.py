"""Qwen3-MoE and dense Qwen3: decoder layers of grouped-query attention with normed heads, then experts or a dense MLP.

Sizes: T tokens of the step, N of them sampled, H hidden, Hq and Hkv query and KV heads, D head size, V vocabulary.
The device is nobody's business here: `kernels` picks what runs on it. A step of no tokens takes the same path.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kernels
from replica.kv_cache import KVCache
from replica.layers import DenseMlp, ExpertMlp, Linear, paged_attention, rope_table
from replica.model_config import ModelConfig
from replica.step_tensors import StepTensors
from replica.weights import WeightReader


class Qwen3Moe:
    """The whole model on one rank."""

    def __init__(self, config: ModelConfig, weights: WeightReader, *, num_positions: int, device: torch.device) -> None:
        """Reads all weights. Positions up to `num_positions` can be served."""
        self.eps = config.rms_norm_eps
        self.embedding = weights.tensor("model.embed_tokens.weight")  # [V, H]
        cos_sin = rope_table(config.rope, config.head_dim, num_positions, device)
        self.layers = [DecoderLayer(config, weights, layer, cos_sin) for layer in range(config.num_layers)]
        self.norm = weights.tensor("model.norm.weight")  # [H]
        self.head = Linear(self.embedding) if config.tie_word_embeddings else Linear.load(weights, "lm_head")

    def forward(self, step: StepTensors, cache: KVCache) -> Tensor:
        """Logits after the step's sampled tokens [N, V] float32; the step's keys and values go to the cache."""
        x = torch.nn.functional.embedding(step.token_ids, self.embedding)  # [T, H]
        residual: Tensor | None = None
        for layer, k_cache, v_cache in zip(self.layers, cache.keys, cache.values, strict=True):
            x, residual = layer(x, residual, step, k_cache, v_cache)
        assert residual is not None  # there is at least one layer
        # Before the last norm, because the head is the largest matrix and few tokens need it.
        x, residual = x.index_select(0, step.sample_rows), residual.index_select(0, step.sample_rows)  # [N, H] both
        x, _ = kernels.add_rms_norm(x, residual, self.norm, self.eps)
        return self.head(x).to(torch.float32)


class DecoderLayer:
    """Attention, then experts or a dense MLP, each after a norm and added to the residual."""

    def __init__(self, config: ModelConfig, weights: WeightReader, layer: int, cos_sin: Tensor) -> None:
        prefix = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = weights.tensor(f"{prefix}.input_layernorm.weight")  # [H]
        self.attention = Attention(config, weights, f"{prefix}.self_attn", cos_sin)
        self.post_attention_norm = weights.tensor(f"{prefix}.post_attention_layernorm.weight")  # [H]
        self.mlp: ExpertMlp | DenseMlp
        if config.is_moe(layer):
            self.mlp = ExpertMlp(
                weights,
                f"{prefix}.mlp",
                widths=[config.moe_intermediate_size] * config.num_experts,
                top_k=config.num_experts_per_tok,
                renormalize=config.norm_topk_prob,
            )
        else:
            self.mlp = DenseMlp(weights, f"{prefix}.mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepTensors, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], not yet added to the residual [T, H] (None in the first layer) -> the same two after this layer."""
        if residual is None:
            residual = x
            x = kernels.rms_norm(x, self.input_norm, self.eps)
        else:
            x, residual = kernels.add_rms_norm(x, residual, self.input_norm, self.eps)
        x = self.attention(x, step, k_cache, v_cache)
        x, residual = kernels.add_rms_norm(x, residual, self.post_attention_norm, self.eps)
        return self.mlp(x), residual


class Attention:
    """Grouped-query attention over the paged cache; each head of q and k is normed, then rotated."""

    def __init__(self, config: ModelConfig, weights: WeightReader, prefix: str, cos_sin: Tensor) -> None:
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]  # of q, k and v
        self.scale = config.head_dim**-0.5
        self.cos_sin = cos_sin  # [P, D] float32
        names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self.qkv = Linear.load(weights, *names, has_bias=config.attention_bias)
        self.q_norm = weights.tensor(f"{prefix}.q_norm.weight")  # [D]
        self.k_norm = weights.tensor(f"{prefix}.k_norm.weight")  # [D]
        self.out = Linear.load(weights, f"{prefix}.o_proj", has_bias=config.attention_bias)

    def __call__(self, x: Tensor, step: StepTensors, k_cache: Tensor, v_cache: Tensor) -> Tensor:  # [T, H] -> [T, H]
        T = x.shape[0]
        qkv = self.qkv(x).view(T, sum(self.heads), self.head_dim)
        q, k, v = torch.split(qkv, self.heads, dim=1)  # [T, Hq, D], [T, Hkv, D] twice
        q = kernels.qk_norm_rope_cache(
            q, k, v, self.q_norm, self.k_norm, self.eps, self.cos_sin, step.positions, step.slots, k_cache, v_cache
        )
        y = paged_attention(q, step, k_cache, v_cache, self.scale)  # [T, Hq, D]
        return self.out(y.flatten(1))
