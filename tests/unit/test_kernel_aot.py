"""Ahead-of-time compilation reports what is over budget. One small kernel stands for all."""

from __future__ import annotations

import dataclasses
import json

import pytest
import triton

from kernels import aot
from kernels.aot_case import AotCase


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[AotCase]:
    """What `main` will compile: at first the one case of SwiGLU."""
    for knobs, name in ((triton.knobs.nvidia, "dump_ptxas_log"), (triton.knobs.compilation, "always_compile")):
        monkeypatch.setattr(knobs, name, True)
    chosen = [case for case in aot.cases() if case.kernel.__name__ == "_swiglu_kernel"]
    monkeypatch.setattr(aot, "cases", lambda: chosen)
    return chosen


def test_a_kernel_within_its_budget_passes(cases: list[AotCase], capsys: pytest.CaptureFixture[str]) -> None:
    assert aot.main(["--target", "sm_90", "--target", "gfx942"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["swiglu", "swiglu"]
    assert json.loads(lines[-1]) == {"triton": triton.__version__, "rows": 2, "failed": []}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_registers": 1}, "registers, budget is 1"),
        ({"max_spill_bytes": -1}, "spills 0 bytes, budget is -1"),
        ({"ptx": "wgmma"}, "has no wgmma in its PTX"),
        ({"constants": {"BLOCK_F": 1000}}, "power of 2"),
    ],
)
def test_a_kernel_over_its_budget_fails_the_run_and_says_why(
    change: dict[str, object], problem: str, cases: list[AotCase], capsys: pytest.CaptureFixture[str]
) -> None:
    cases[:] = [dataclasses.replace(cases[0], **change)]  # type: ignore[arg-type]
    assert aot.main(["--target", "sm_90"]) == 1
    table, _, summary = capsys.readouterr().out.rstrip().rpartition("\n")
    assert problem in table and problem in json.loads(summary)["failed"][0]["problem"]


def test_every_kernel_of_every_file_has_a_case() -> None:
    compiled = {case.kernel.__name__ for case in aot.cases()}
    files = {name: __import__(f"kernels.{name}", fromlist=["x"]) for name in aot.MODULES}
    defined = {name for module in files.values() for name in vars(module) if name.endswith("_kernel")}
    assert compiled == defined


def test_shared_memory_over_the_targets_limit_is_a_problem(
    cases: list[AotCase], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(aot.SHARED_LIMIT_BYTES, "sm_90", -1)
    assert aot.main(["--target", "sm_90"]) == 1
    assert "bytes of shared memory, sm_90 has -1" in capsys.readouterr().out
