"""`python -m tests.kernels.gpu_check`: what only a GPU can show. One line where there is none; at most 4 minutes.

Parity of every kernel with float64, logits of the real model code on the GPU against the CPU, and the speed of each
kernel as a share of what the same GPU copies or multiplies, beside torch's own operators. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import triton

from kernels.workloads import QWEN3_30B, Workload, Workloads
from tests.kernels.gpu_parity import LARGE, demo_parity, large_parity, parity

DECODE_BATCHES: Final = (1, 8, 64, 256)
CONTEXT: Final = 4096  # tokens in the cache of each decoding sequence
PREFILL: Final = 8192
MAX_SECONDS: Final = 230.0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one kernel is. Shares are of the copy bandwidth and matrix rate measured in the same run."""

    kernel: str
    tokens: int
    microseconds: float
    bandwidth_share: float
    rate_share: float
    torch_microseconds: float | None  # the same by torch's own operator, where it has one


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call, with a cold L2."""
    return float(triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median"))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written in a millisecond by a copy of 1 GiB."""
    source, target = (torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * 2**30 / milliseconds(lambda: target.copy_(source))


def matrix_rate(device: torch.device) -> float:
    """FLOPs in a millisecond of a large product in bfloat16."""
    a, b = (torch.randn((8192, 8192), device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b)


def torch_equal(work: Workload, make: Workloads, tokens: int) -> float | None:
    """Milliseconds of torch's own operator on the same sizes, where it has one."""
    s = make.shape
    if work.kernel.startswith("attention"):
        is_decode = work.kernel == "attention_decode"
        sizes = (tokens, CONTEXT, 1) if is_decode else (1, tokens, tokens)
        k, v = (make.random(sizes[0], s.num_kv_heads, sizes[1], s.head_dim) for _ in range(2))
        q = make.random(sizes[0], s.num_heads, sizes[2], s.head_dim)
        attend = torch.nn.functional.scaled_dot_product_attention
        return milliseconds(lambda: attend(q, k, v, is_causal=not is_decode, enable_gqa=True))
    if work.kernel == "moe_experts" and hasattr(torch, "_grouped_mm"):
        rows = make.random(tokens * s.top_k, s.hidden)
        weight = make.random(s.num_experts, 2 * s.width, s.hidden).transpose(1, 2)
        ends = torch.linspace(0, len(rows), s.num_experts + 1, device=make.device)[1:].to(torch.int32)
        inner, down = make.random(len(rows), s.width), make.random(s.num_experts, s.hidden, s.width).transpose(1, 2)
        return milliseconds(
            lambda: (torch._grouped_mm(rows, weight, offs=ends), torch._grouped_mm(inner, down, offs=ends))
        )
    return None


def speeds(device: torch.device, deadline_s: float) -> list[Speed]:
    """Every kernel at decode batches and at one prefill, until the deadline."""
    bandwidth, rate = copy_bandwidth(device), matrix_rate(device)
    print(f"copy {bandwidth / 1e9:.2f} TB/s, bf16 matrix product {rate / 1e9:.0f} TFLOP/s")
    make = Workloads(QWEN3_30B, device)
    experts = {is_fp8: make.experts(is_fp8) for is_fp8 in (False, True)}
    results: list[Speed] = []
    for tokens in (*DECODE_BATCHES, PREFILL):
        attention = make.attention_prefill if tokens == PREFILL else lambda S: make.attention_decode(S, CONTEXT)
        makers: list[Callable[[], Workload]] = [
            lambda T=tokens: make.add_rms_norm(T),
            lambda T=tokens: make.rope_cache(T),
            lambda T=tokens: make.route(T),
            lambda T=tokens, attention=attention: attention(T),
            lambda T=tokens: make.moe(T, experts[False]),
            lambda T=tokens: make.moe(T, experts[True]),
            lambda T=tokens: make.linear_fp8(T),
            *([] if tokens == PREFILL else [lambda T=tokens: make.sample(T)]),
        ]
        for maker in makers:
            if time.monotonic() > deadline_s:
                print("stopped at the time limit")
                return results
            work = maker()
            ms = milliseconds(work.run)
            beside = torch_equal(work, make, tokens)
            speed = Speed(
                work.kernel,
                tokens,
                1e3 * ms,
                work.num_bytes / ms / bandwidth,
                work.flops / ms / rate,
                None if beside is None else 1e3 * beside,
            )
            results.append(speed)
            other = "" if beside is None else f"{speed.torch_microseconds:>10.1f}"
            print(
                f"{speed.kernel:<22}{tokens:>6}{speed.microseconds:>10.1f} us{speed.bandwidth_share:>8.0%}"
                f"{speed.rate_share:>8.0%}{other}",
                flush=True,
            )
    return results


def main() -> int:
    """Returns 1 if any kernel is not close. Without a GPU nothing is checked, which is no failure."""
    if not torch.cuda.is_available():
        print("gpu_check: no GPU here, nothing was checked")
        return 0
    deadline_s = time.monotonic() + MAX_SECONDS
    device = torch.device("cuda")
    rows = [*parity(device, torch.bfloat16), *parity(device, torch.float32)]
    rows += [demo_parity(device), large_parity(device, LARGE)]
    for row in rows:
        print(f"{row.kernel:<34}error {row.error:.2e}  bound {row.bound:.0e}  {'ok' if row.is_close else 'WRONG'}")
    print(f"{'kernel':<22}{'tokens':>6}{'time':>13}{'copy':>8}{'matrix':>8}{'torch us':>10}")
    fast = speeds(device, deadline_s)
    name = torch.cuda.get_device_name(device)
    print(json.dumps({"gpu": name, "parity": [asdict(r) for r in rows], "speed": [asdict(r) for r in fast]}))
    return 0 if all(row.is_close for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
