"""Functions on tensors that a model is made of: Triton kernels, or the plain torch of each on the CPU.

T tokens, H hidden, E experts, K experts per token, F expert width on this rank, D head size, V vocabulary,
S sequences, B blocks of a sequence. A layer's KV cache is two tensors, k_cache and v_cache
[num_blocks, block_size, num_kv_heads, D].
"""

from __future__ import annotations

from kernels import attention_cpu as _attention_cpu
from kernels import attention_decode as _attention_decode
from kernels import attention_prefill as _attention_prefill
from kernels import fp8 as _fp8
from kernels import moe_experts as _moe_experts
from kernels import moe_experts_cpu as _moe_experts_cpu
from kernels import moe_routing as _moe_routing
from kernels import moe_routing_cpu as _moe_routing_cpu
from kernels import packed_linear as _packed_linear
from kernels import paged_attention as _paged_attention
from kernels import rms_norm as _rms_norm
from kernels import rms_norm_cpu as _rms_norm_cpu
from kernels import rope_cache as _rope_cache
from kernels import rope_cache_cpu as _rope_cache_cpu
from kernels import sampling as _sampling
from kernels import step_plan as _step_plan
from kernels import step_plan_cpu as _step_plan_cpu
from kernels import swiglu as _swiglu
from kernels import swiglu_cpu as _swiglu_cpu
from kernels.device import dispatched
from kernels.fp8 import group_maxima, linear_fp8_scaled, scale_of
from kernels.moe_experts import Experts, ExpertWeights
from kernels.rope_cache import HeadNorms
from kernels.step_plan import StepPlan, StepTables

add_rms_norm = dispatched(_rms_norm.add_rms_norm, _rms_norm_cpu.add_rms_norm_cpu)
attention_decode = dispatched(_attention_decode.attention_decode, _attention_decode.attention_decode_reference)
attention_prefill = dispatched(_attention_prefill.attention_prefill, _attention_prefill.attention_prefill_reference)
cache_heads = dispatched(_rope_cache.cache_heads, _rope_cache_cpu.cache_heads_cpu)
embedding = dispatched(_packed_linear.embedding_plain, _packed_linear.embedding)
linear = dispatched(_packed_linear.linear_plain, _packed_linear.linear)
linear_fp8 = dispatched(_fp8.linear_fp8, _fp8.linear_fp8_reference)
moe_experts = dispatched(_moe_experts.moe_experts, _moe_experts_cpu.moe_experts_cpu)
pack_embedding = dispatched(_packed_linear.pack_nothing, _packed_linear.pack_embedding)
pack_experts = dispatched(_moe_experts.pack_nothing, _moe_experts_cpu.pack_experts)
pack_linear = dispatched(_packed_linear.pack_nothing, _packed_linear.pack)
paged_attention = dispatched(_paged_attention.paged_attention, _attention_cpu.paged_attention_cpu)
penalize = dispatched(_sampling.penalize, _sampling.penalize_reference)
plan_step = dispatched(_step_plan.plan_step, _step_plan_cpu.plan_step_cpu)
qk_norm_rope_cache = dispatched(_rope_cache.qk_norm_rope_cache, _rope_cache.qk_norm_rope_cache_reference)
rms_norm = dispatched(_rms_norm.rms_norm, _rms_norm_cpu.rms_norm_cpu)
route = dispatched(_moe_routing.route, _moe_routing_cpu.route_cpu)
sample = dispatched(_sampling.sample, _sampling.sample_reference)
swiglu = dispatched(_swiglu.swiglu, _swiglu_cpu.swiglu_cpu)

__all__ = [
    "ExpertWeights",
    "Experts",
    "HeadNorms",
    "StepPlan",
    "StepTables",
    "add_rms_norm",
    "attention_decode",
    "attention_prefill",
    "cache_heads",
    "embedding",
    "group_maxima",
    "linear",
    "linear_fp8",
    "linear_fp8_scaled",
    "moe_experts",
    "pack_embedding",
    "pack_experts",
    "pack_linear",
    "paged_attention",
    "penalize",
    "plan_step",
    "qk_norm_rope_cache",
    "rms_norm",
    "route",
    "sample",
    "scale_of",
    "swiglu",
]
