"""`python -m kernels.aot`: compiles every kernel for every target without a GPU, and says what the compiler says.

One row a kernel, shape bucket and target: registers a thread, bytes spilled a thread, shared memory of a program. A row
over its budget (AotCase), over its target's shared memory, or without an instruction it is meant to have fails the run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.aot_case import AotCase
from kernels.configs import ARCHS, SHARED_LIMIT_BYTES

MODULES: Final = (
    "rms_norm",
    "rope_cache",
    "swiglu",
    "attention_decode",
    "attention_prefill",
    "moe_routing",
    "moe_gate_up",
    "moe_down",
    "fp8",
    "sampling",
)
TARGETS: Final = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_INTEGER_SPECIALISATION: Final = 16  # what Triton sees at a launch of most pointers, strides and sizes


@dataclass(frozen=True, slots=True)
class Row:
    """What one compilation came to. `problem` is "" if all is within budget."""

    kernel: str
    case: str
    target: str
    registers: int
    max_registers: int
    spill_bytes: int
    shared_bytes: int
    compile_s: float
    problem: str


def cases() -> list[AotCase]:
    """Every case of every kernel file."""
    modules = [importlib.import_module(f"kernels.{name}") for name in MODULES]
    return [case for module in modules for case in module.AOT_CASES]


def compile_case(case: AotCase, target: str) -> Row:
    """Compiles one case for one target, which must be among the case's."""
    started_s = time.monotonic()
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):  # where Triton prints the log of ptxas
            compiled = triton.compile(_source(case), target=TARGETS[target], options=_options(case))
    except Exception as err:  # whatever the compiler raises is this row's result, and the run goes on
        reason = str(err).strip().splitlines()
        return _row(case, target, -1, -1, -1, started_s, f"{type(err).__name__}: {reason[-1] if reason else ''}")
    registers, spill_bytes = (_hip_usage if target == "gfx942" else _cuda_usage)(compiled.asm, log.getvalue())
    shared_bytes = compiled.metadata.shared
    problems = []
    if spill_bytes > case.max_spill_bytes:
        problems.append(f"spills {spill_bytes} bytes, budget is {case.max_spill_bytes}")
    max_registers = _max_registers(case, target)
    if registers > max_registers:
        problems.append(f"uses {registers} registers, budget is {max_registers}")
    if shared_bytes > SHARED_LIMIT_BYTES[target]:
        problems.append(f"uses {shared_bytes} bytes of shared memory, {target} has {SHARED_LIMIT_BYTES[target]}")
    if case.ptx and case.ptx not in compiled.asm["ptx"]:
        problems.append(f"has no {case.ptx} in its PTX")
    return _row(case, target, registers, spill_bytes, shared_bytes, started_s, "; ".join(problems))


def _row(
    case: AotCase, target: str, registers: int, spill_bytes: int, shared_bytes: int, started_s: float, problem: str
) -> Row:
    name = case.kernel.__name__.strip("_").removesuffix("_kernel")
    seconds = round(time.monotonic() - started_s, 2)
    budget = _max_registers(case, target)
    return Row(name, case.name, target, registers, budget, spill_bytes, shared_bytes, seconds, problem)


def _max_registers(case: AotCase, target: str) -> int:
    return case.max_registers * (2 if target == "gfx942" else 1)


def _source(case: AotCase) -> ASTSource:
    names = case.kernel.arg_names
    missing = set(names) ^ {*case.signature, *case.constants}
    assert not missing, f"{case.kernel.__name__}, case {case.name}: {missing} missing or unknown"
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in case.signature.items() if kind != "fp32" and name not in case.unaligned]
    attrs = {(names.index(name),): [["tt.divisibility", _INTEGER_SPECIALISATION]] for name in aligned}
    return ASTSource(case.kernel, signature, case.constants, attrs)


def _options(case: AotCase) -> dict[str, Any]:
    return {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}


def _cuda_usage(asm: dict[str, Any], log: str) -> tuple[int, int]:
    """Registers and bytes spilled, of a thread, in the log of `ptxas -v`."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers:
        raise RuntimeError(f"ptxas said nothing of registers: {log[:200]!r}; is TRITON_ALWAYS_COMPILE honoured?")
    return max(map(int, registers)), max((int(store) + int(load) for store, load in spills), default=0)


def _hip_usage(asm: dict[str, Any], log: str) -> tuple[int, int]:
    """Vector registers and bytes spilled, of a lane, in the metadata of the assembly."""
    text = asm["amdgcn"]
    registers = max(map(int, re.findall(r"\.vgpr_count:\s*(\d+)", text)))
    return registers, 4 * max(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)))


def main(argv: list[str] | None = None) -> int:
    """Prints the table, then one line of JSON. Returns 1 if any row has a problem."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=ARCHS, help="only this target (repeatable)")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    args = parser.parse_args(argv)
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a cached kernel has no log
    rows = []
    print(f"{'kernel':<22}{'case':<34}{'target':<8}{'regs':>5}{'of':>5}{'spill':>7}{'shared':>8}{'s':>6}  problem")
    for target in args.target or ARCHS:
        for case in cases():
            if args.kernel in case.kernel.__name__ and target in (case.targets or ARCHS):
                row = compile_case(case, target)
                rows.append(row)
                registers = f"{row.registers:>5}{row.max_registers:>5}"
                numbers = f"{registers}{row.spill_bytes:>7}{row.shared_bytes:>8}{row.compile_s:>6.1f}"
                print(f"{row.kernel:<22}{row.case:<34}{row.target:<8}{numbers}  {row.problem}", flush=True)
    failed = [row for row in rows if row.problem]
    summary = {"triton": triton.__version__, "rows": len(rows), "failed": [asdict(row) for row in failed]}
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
