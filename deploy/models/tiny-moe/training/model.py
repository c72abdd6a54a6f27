"""The demo model for training: Qwen3-MoE in plain torch, with Hugging Face's parameter names.

B batch, T tokens of a sequence, H hidden, E experts, K experts per token, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG: dict[str, Any] = dict(  # the checkpoint's config.json, in its order
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=640,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    hidden_act="silu",
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    attention_bias=False,
    attention_dropout=0.0,
    tie_word_embeddings=False,
    decoder_sparse_step=1,
    mlp_only_layers=[0],
    moe_intermediate_size=384,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
    use_cache=True,
    use_sliding_window=False,
    sliding_window=None,
    max_window_layers=4,
    initializer_range=0.02,
    torch_dtype="bfloat16",
)


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A projection without bias."""
    return nn.Linear(num_inputs, num_outputs, bias=False)


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, CONFIG["rms_norm_eps"]).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU; also one expert."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden_size, width), linear(hidden_size, width)
        self.down_proj = linear(width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> the same."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class MoE(nn.Module):
    """K of E experts a token. `balance_loss` is that of the last forward; 1 when all experts get equal shares."""

    balance_loss: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.num_experts, self.top_k = config["num_experts"], config["num_experts_per_tok"]
        hidden_size, width = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = linear(hidden_size, self.num_experts)
        self.experts = nn.ModuleList(MLP(hidden_size, width) for _ in range(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> the same."""
        shape = x.shape
        x = x.reshape(-1, shape[-1])  # [B*T, H]
        probabilities = self.gate(x).float().softmax(-1)  # [B*T, E]
        weights, experts = probabilities.topk(self.top_k, -1)  # [B*T, K] each
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        share = F.one_hot(experts, self.num_experts).float().mean((0, 1))  # [E]
        self.balance_loss = self.num_experts * (share * probabilities.mean(0)).sum()
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)  # [B*T*K] pairs by expert
        tokens = order // self.top_k
        # Sizes of Python ints for split: one host sync a layer, free on the CPU where this trains.
        parts = torch.split(x[tokens], flat.bincount(minlength=self.num_experts).tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        y = (y * weights.reshape(-1)[order, None]).to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, y).reshape(shape)


class Attention(nn.Module):
    """Causal grouped-query attention with normed queries and keys."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden_size, self.head_dim = config["hidden_size"], config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = linear(hidden_size, self.num_heads * self.head_dim)
        self.k_proj = linear(hidden_size, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(hidden_size, self.num_kv_heads * self.head_dim)
        self.o_proj = linear(self.num_heads * self.head_dim, hidden_size)
        self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H], cos and sin [T, D] -> [B, T, H]."""
        B, T, _ = x.shape
        q, k, v = (project(x).view(B, T, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(v.dtype)  # [B, heads, T, D]
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)  # [B, KV heads, T, D]
        v = v.transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        # The queries of one KV head stand below each other: one product a KV head, no copies of keys.
        q = q.reshape(B, self.num_kv_heads, group * T, self.head_dim)
        scores = (q @ k.transpose(-1, -2)).float().view(B, self.num_kv_heads, group, T, T) * self.head_dim**-0.5
        scores = scores + torch.full((T, T), -1e30).triu(1)
        attended = scores.softmax(-1).to(v.dtype).view(B, self.num_kv_heads, group * T, T) @ v
        attended = attended.view(B, self.num_heads, T, self.head_dim)
        y: Tensor = self.o_proj(attended.transpose(1, 2).reshape(B, T, -1))
        return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split form: x [B, heads, T, D], cos and sin [T, D] -> as x."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Layer(nn.Module):
    """Attention, then a dense MLP or a MoE."""

    def __init__(self, config: dict[str, Any], layer: int) -> None:
        super().__init__()
        hidden_size = config["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden_size), Norm(hidden_size)
        self.self_attn = Attention(config)
        is_dense = layer in config["mlp_only_layers"]
        self.mlp = MLP(hidden_size, config["intermediate_size"]) if is_dense else MoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Qwen3Moe(nn.Module):
    """The whole model. `state_dict()` has the names of a Hugging Face checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config["head_dim"], config["rope_theta"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.model.norm = Norm(config["hidden_size"])
        self.lm_head = linear(config["hidden_size"], config["vocab_size"])
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, initial_std(name, parameter))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V]."""
        frequencies = 1 / self.rope_theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)  # [D/2]
        angles = torch.arange(ids.shape[1]).float()[:, None] * frequencies  # [T, D/2]
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids)  # type: ignore[operator]  # nn.Module's attributes are untyped
        for layer in self.model.layers:  # type: ignore[union-attr]
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.model.norm(x))  # type: ignore[operator]
        return logits

    def balance_loss(self) -> Tensor:
        """The mean over the MoE layers of the last forward."""
        losses = [module.balance_loss for module in self.modules() if isinstance(module, MoE)]
        return torch.stack(losses).mean()


def initial_std(name: str, parameter: Tensor) -> float:
    """1/sqrt(fan in), half of that for what is added to the residual stream, 0.02 for the vocabulary's two ends."""
    if "embed" in name or "lm_head" in name:
        return 0.02
    scale = 0.5 if "down_proj" in name or "o_proj" in name else 1.0
    return float(parameter.shape[1] ** -0.5 * scale)
