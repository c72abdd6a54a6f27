"""The check for a GPU, as far as the interpreter can run it, so that it works when a GPU is at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import tune
from kernels.workloads import QWEN3_30B, Workloads
from tests.kernels import gpu_check
from tests.kernels.gpu_parity import CPU, LARGE, large_parity, parity

TINY = replace(
    QWEN3_30B, hidden=128, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=4, top_k=2, width=128, vocab=300
)


def test_every_kernel_is_close_to_float64() -> None:
    rows = parity(CPU, torch.float32, tokens=(1, 19))
    assert len({row.kernel for row in rows}) == len(rows) > 15
    assert [row for row in rows if not row.is_close] == []


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.swiglu", lambda x: x[:, : x.shape[1] // 2] * torch.nan)
    assert [row.kernel for row in parity(CPU, torch.float32, tokens=()) if not row.is_close] == ["swiglu"]


@pytest.mark.long
def test_the_random_model_of_the_check_runs() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    small |= {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 640}
    assert large_parity(CPU, LARGE | small).error == 0


def test_every_workload_runs_and_knows_its_floor() -> None:
    make = Workloads(TINY, CPU, torch.float32)
    works = [make.add_rms_norm(3), make.rope_cache(3), make.route(3), make.attention_decode(2, 20), make.sample(2)]
    works += [make.attention_prefill(20), make.linear_fp8(3), make.moe(3, make.experts(False))]
    works += [make.moe(3, make.experts(True))]
    for work in works:
        work.run()
        assert work.num_bytes > 0 and work.flops >= 0


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_the_search_looks_tiles_up_as_the_launchers_do(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import configs

    asked = []

    def pick(name: str, arch: str, shape: tuple[int, ...], bucket: int) -> configs.Tile:
        asked.append((name, shape))
        return configs.DEFAULTS[name][arch][0][1]

    work, shape = tune.problem(kernel, Workloads(TINY, CPU, torch.float32), 2)
    monkeypatch.setattr(configs, "pick", pick)
    work.run()
    names = {"moe": ["moe_gate_up", "moe_down"], "moe_fp8": ["moe_gate_up_fp8", "moe_down_fp8"]}.get(kernel, [kernel])
    assert asked == [(name, shape) for name in names]


def test_without_a_gpu_the_check_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == "gpu_check: no GPU here, nothing was checked\n"
