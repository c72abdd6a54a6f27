"""How far each kernel, and the real model code through them, is from float64 and from the CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import kernels
from kernels.attention_decode import attention_decode_reference
from kernels.attention_prefill import attention_prefill_reference
from kernels.fp8 import linear_fp8_reference, quantize_blocks
from kernels.moe_experts import moe_experts_reference
from kernels.moe_routing import route_reference
from kernels.rms_norm import add_rms_norm_reference
from kernels.rope_cache import qk_norm_rope_cache_reference
from kernels.sampling import sample_reference
from kernels.swiglu import swiglu_reference
from kernels.workloads import QWEN3_30B, Workloads
from replica.checkpoint import SINGLE_FILE, Checkpoint
from replica.frames import StepInput
from replica.groups import Groups
from replica.kv_cache import KVCache
from replica.layout import Layout
from replica.model_config import ModelConfig
from replica.models.qwen3_moe import Qwen3Moe
from replica.shards import Shards
from replica.step_tensors import StepTensors
from replica.weights import WeightReader

DEMO: Final = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
CPU: Final = torch.device("cpu")
# Largest error allowed, as a share of the largest value: some roundings of each type.
BOUND: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
FP8_BOUND: Final = 4e-2
TOKENS: Final = (1, 19, 300, 3000)  # a bucket each, and every sort

LARGE: Final[dict[str, Any]] = {  # a layer of Qwen3-30B-A3B, four times
    "num_hidden_layers": 4,
    "mlp_only_layers": [],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 32_000,
}


@dataclass(frozen=True, slots=True)
class Parity:
    """How far one kernel is from float64."""

    kernel: str
    error: float
    bound: float

    @property
    def is_close(self) -> bool:
        """NaN is not."""
        return self.error <= self.bound


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    expected = expected.to(CPU, torch.float64)
    return float((actual.to(CPU, torch.float64) - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The same numbers in float64 on the CPU; integers and positions stay what they are."""
    return [t.to(CPU, torch.float64) if t.is_floating_point() else t.to(CPU) for t in tensors]


def parity(device: torch.device, dtype: torch.dtype, tokens: Sequence[int] = TOKENS) -> list[Parity]:
    """Every kernel with `dtype`, and with FP8 where it has it, on small shapes of odd sizes."""
    make, bound = Workloads(QWEN3_30B, device, dtype), BOUND[dtype]
    rows = [*_dense_parity(make, bound), *_attention_parity(make, bound), *_moe_parity(make, bound, tokens)]
    return [*rows, *_sampling_parity(make)]


def _dense_parity(make: Workloads, bound: float) -> list[Parity]:
    x, residual, weight = make.random(33, 512), make.random(33, 512), make.random(512)
    normed, _ = kernels.add_rms_norm(x, residual, weight, 1e-6)
    expected, _ = add_rms_norm_reference(*_wide(x), *_wide(residual), *_wide(weight), 1e-6)
    rows = [Parity("add_rms_norm", relative_error(normed, expected), bound)]
    rows.append(Parity("swiglu", relative_error(kernels.swiglu(x), swiglu_reference(*_wide(x))), bound))
    matrix, scale = quantize_blocks(make.random(384, 512))
    actual = kernels.linear_fp8(x, matrix, scale)
    exact = linear_fp8_reference(x.to(CPU, torch.float32), matrix.to(CPU), scale.to(CPU))
    rows.append(Parity("linear_fp8", relative_error(actual, exact), bound))
    return rows


def _attention_parity(make: Workloads, bound: float) -> list[Parity]:
    device, rows = make.device, []
    for name, is_fp8 in (("", False), (" FP8 cache", True)):
        q, k, v = make.random(37, 8, 128), make.random(37, 2, 128), make.random(37, 2, 128)
        weight, cos_sin = make.random(128), torch.rand((64, 128), device=device)
        scales = (
            (torch.tensor([0.02, 0.03], device=device), torch.tensor([0.01, 0.02], device=device)) if is_fp8 else ()
        )
        positions = torch.arange(37, dtype=torch.int32, device=device)
        caches = [torch.zeros((4, 16, 2, 128), dtype=make.dtype, device=device) for _ in range(2)]
        if is_fp8:
            caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
        wide = _wide(q, k, v, weight, weight)
        copies = [cache.to(CPU) if is_fp8 else cache.to(CPU, torch.float64) for cache in caches]
        expected = qk_norm_rope_cache_reference(
            *wide, 1e-6, cos_sin.to(CPU), *_wide(positions, positions), *copies, *[s.to(CPU) for s in scales]
        )
        q = kernels.qk_norm_rope_cache(q, k, v, weight, weight, 1e-6, cos_sin, positions, positions, *caches, *scales)
        rows.append(Parity(f"qk_norm_rope_cache{name}", relative_error(q, expected), bound))
        stored = [relative_error(cache.to(torch.float32), copy) for cache, copy in zip(caches, copies, strict=True)]
        rows.append(Parity(f"cache write{name}", max(stored), 0.13 if is_fp8 else bound))
        tables = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
        lens = torch.tensor([37], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 37], dtype=torch.int32, device=device)
        host = [cache.to(CPU) if is_fp8 else cache.to(CPU, torch.float64) for cache in caches]
        tail = [s.to(CPU) for s in scales]
        actual = kernels.attention_decode(q[-1:], *caches, tables, lens, 0.09, *scales)
        exact = attention_decode_reference(*_wide(q[-1:]), *host, *_wide(tables, lens), 0.09, *tail)
        rows.append(Parity(f"attention_decode{name}", relative_error(actual, exact), bound))
        actual = kernels.attention_prefill(q, *caches, tables, starts, lens, 0.09, *scales)
        exact = attention_prefill_reference(*_wide(q), *host, *_wide(tables, starts, lens), 0.09, *tail)
        rows.append(Parity(f"attention_prefill{name}", relative_error(actual, exact), bound))
    return rows


def _moe_parity(make: Workloads, bound: float, tokens: Sequence[int]) -> list[Parity]:
    widths, hidden, rows = (128, 0, 256, 128, 384), 256, []
    offsets = torch.tensor([0, *widths], device=make.device).cumsum(0).to(torch.int32)
    total = sum(widths)
    matrices = [make.random(hidden, width, scale=16**-0.5) for width in widths]
    gate_up = make.random(2 * total, hidden, scale=hidden**-0.5)
    down = torch.cat([matrix.flatten() for matrix in matrices])
    plain = kernels.ExpertWeights(gate_up, down, offsets, widths)
    gate_up8, gate_up_scale = quantize_blocks(gate_up)
    parts = [quantize_blocks(matrix) for matrix in matrices if matrix.numel()]
    down8, down_scale = (torch.cat([part[i].flatten() for part in parts]) for i in (0, 1))
    fp8 = kernels.ExpertWeights(gate_up8, down8, offsets, widths, gate_up_scale, down_scale)
    for T in tokens:
        x, logits = make.random(T, hidden), make.random(T, len(widths))
        weights, ids = kernels.route(logits, 2, True)
        expected_weights, expected_ids = route_reference(logits.to(CPU), 2, True)
        wrong = float((ids.to(CPU) != expected_ids).any())
        rows.append(Parity(f"route T={T}", wrong + relative_error(weights, expected_weights), 1e-5))
        host = [t.to(CPU) for t in (weights, ids)]
        exact = kernels.ExpertWeights(*_wide(gate_up, down, offsets), widths)
        expected = moe_experts_reference(*_wide(x), exact, *host)
        rows.append(
            Parity(f"moe_experts T={T}", relative_error(kernels.moe_experts(x, plain, weights, ids), expected), bound)
        )
        exact = kernels.ExpertWeights(
            *[t.to(CPU) for t in (gate_up8, down8, offsets)],
            widths,
            *[scale.to(CPU) for scale in (gate_up_scale, down_scale)],
        )
        expected = moe_experts_reference(x.to(CPU, torch.float32), exact, *host)
        error = relative_error(kernels.moe_experts(x, fp8, weights, ids), expected)
        rows.append(Parity(f"moe_experts FP8 T={T}", error, FP8_BOUND))
    return rows


def _sampling_parity(make: Workloads) -> list[Parity]:
    """The share of rows whose token differs from the CPU's: only sums in another order may make one."""
    n = 32
    logits = torch.randn((n, 2000), device=make.device) * 3
    limits = (
        torch.linspace(0, 1.5, n),
        (torch.arange(n) % 4 * 10).to(torch.int32),
        1 - torch.arange(n) % 3 * 0.1,
        torch.arange(n) % 5 * 0.02,
        torch.arange(n) << 31,
        torch.zeros(n, dtype=torch.int32),
        torch.arange(n, dtype=torch.int32),
    )
    ids = kernels.sample(logits, *(limit.to(make.device) for limit in limits))
    differing = ids.to(CPU) != sample_reference(logits.to(CPU), *limits)
    return [Parity("sample", float(differing.float().mean()), 0.0)]


def write_random_checkpoint(folder: Path, fields: dict[str, Any]) -> None:
    """A checkpoint of random bfloat16 weights: the demo model's config with other fields."""
    (folder / "config.json").write_text(json.dumps(json.loads((DEMO / "config.json").read_text()) | fields))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in ModelConfig.load(folder).tensor_shapes().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:  # uniform: several times cheaper to make than normal, and there may be two billion
            values = torch.rand(shape, generator=generator, dtype=torch.float32).sub_(0.5)
            tensors[name] = values.mul_(3.4 * shape[1] ** -0.5).to(torch.bfloat16)
    save_file(tensors, folder / SINGLE_FILE)


def prompt(T: int) -> StepInput:
    """One prompt of T tokens of which the last four are sampled."""
    tokens, N = np.arange(T, dtype=np.int32), 4
    return StepInput(
        step=0,
        num_decodes=0,
        token_ids=tokens * 37 % 600,
        positions=tokens,
        slots=tokens,
        query_starts=np.array([0, T], np.int32),
        context_lens=np.array([T], np.int32),
        block_tables=np.arange(-(-T // 16), dtype=np.int32)[np.newaxis],
        sample_rows=tokens[-N:],
        temperature=np.zeros(N, np.float32),
        top_k=np.zeros(N, np.int32),
        top_p=np.ones(N, np.float32),
        min_p=np.zeros(N, np.float32),
        seeds=np.zeros(N, np.uint64),
        choices=np.zeros(N, np.int32),
        output_indices=np.zeros(N, np.int32),
    )


@torch.inference_mode()
def model_logits(folder: Path, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Logits [4, V] after a prompt of 60 tokens, on the CPU."""
    config, groups = ModelConfig.load(folder), Groups.alone()
    shards = Shards(config, Layout(), 0)
    reader = WeightReader(
        Checkpoint.open(folder), shards, dtype=dtype, device=device, on_progress=lambda done, total: None
    )
    with reader as weights:
        model = Qwen3Moe(config, weights, num_positions=64, device=device)
    cache = KVCache(shards, num_blocks=4, block_size=16, dtype=dtype, device=device)
    return model.forward(StepTensors.from_frame(prompt(60), device, groups), cache, groups).to(CPU)


def demo_parity(device: torch.device) -> Parity:
    """The demo model in float32."""
    error = relative_error(*(model_logits(DEMO, where, torch.float32) for where in (device, CPU)))
    return Parity("demo model's logits", error, 1e-4)


def large_parity(device: torch.device, fields: dict[str, Any]) -> Parity:
    """A random model in bfloat16, whose two paths round alike but not in one order."""
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), fields)
        error = relative_error(*(model_logits(Path(folder), where, torch.bfloat16) for where in (device, CPU)))
    return Parity("random 4-layer model's logits", error, 6e-2)
