"""`python -m kernels.tune`: searches tiles on a GPU and writes what it measured into configs.py.

Offline only: a replica that stopped to tune would make every replica of its group wait. A call stops at its deadline
and keeps the buckets that it has finished, so a large search is several calls with `--kernel` and `--tokens`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import triton

from kernels import configs
from kernels.configs import ANY, Entry, Rows, Tile
from kernels.device import arch
from kernels.workloads import QWEN3_30B, QWEN3_235B, Shape, Workload, Workloads

KERNELS: Final = ("moe", "moe_fp8", "attention_decode", "attention_prefill", "linear_fp8")
TOKENS: Final = (1, 8, 64, 256, 2048, 8192)
MAX_SECONDS: Final = 240.0
DECODE_CONTEXT: Final = 4096  # tokens in the cache of each decoding sequence
PREFILL_TOKENS: Final = 512  # below this a step holds decodes: prefill attention is not tuned for it
_BEGIN, _END = "# tuned: begin\n", "# tuned: end\n"


def candidates(kernel: str) -> Iterator[Tile]:
    """The tiles worth trying for one kernel. Those that do not fit the device are skipped when they fail to launch."""
    if kernel == "attention_decode":
        for n, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
            yield Tile(16, n, 0, warps, stages)
    elif kernel == "attention_prefill":
        for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
            yield Tile(m, n, 0, warps, stages)
    else:
        is_fp8 = kernel.endswith("fp8")
        columns = (128,) if kernel == "moe_gate_up_fp8" else (64, 128)
        depths = (128,) if is_fp8 else (64, 128)
        for m, n, k, warps, stages in itertools.product((16, 64, 128), columns, depths, (4, 8), (3, 4)):
            yield Tile(m, n, k, warps, stages, is_swapped=m == 16, is_persistent=m > 16)
            if m == 16:
                yield Tile(m, n, k, warps, stages)


def time_tile(entry: Entry, tile: Tile, run: Callable[[], Any]) -> float:
    """Milliseconds of `run` with this tile for this entry of the table; infinite if it does not fit the device."""
    configs.TUNED[entry] = ((ANY, tile),)
    configs.pick.cache_clear()
    try:
        return float(triton.testing.do_bench(run, warmup=10, rep=50))
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
        return float("inf")


def search(
    entry: Entry, run: Callable[[], Any], deadline_s: float, block_m: int | None = None
) -> tuple[float, Tile] | None:
    """The fastest tile (of this block_m, if given) and its milliseconds; None if the deadline came before the end."""
    best: tuple[float, Tile] | None = None
    for tile in candidates(entry[0]):
        if time.monotonic() > deadline_s:
            return None
        if block_m in (None, tile.block_m):
            ms = time_tile(entry, tile, run)
            if best is None or ms < best[0]:
                best = ms, tile
    return best


def search_moe(
    suffix: str, gpu: str, shape: tuple[int, ...], run: Callable[[], Any], deadline_s: float
) -> dict[Entry, tuple[float, Tile]] | None:
    """Both products together: for each block_m the best down, then the best gate-up beside it."""
    gate_up, down = (f"moe_gate_up{suffix}", gpu, shape), (f"moe_down{suffix}", gpu, shape)
    results = []
    for block_m in (16, 64, 128):
        first = next((tile for tile in candidates(gate_up[0]) if tile.block_m == block_m), None)
        if first is None:
            continue
        configs.TUNED[gate_up] = ((ANY, first),)
        best_down = search(down, run, deadline_s, block_m)
        if best_down is None:
            return None
        configs.TUNED[down] = ((ANY, best_down[1]),)
        best_gate_up = search(gate_up, run, deadline_s, block_m)
        if best_gate_up is None:
            return None
        results.append((best_gate_up[0], best_gate_up[1], best_down[1]))
    ms, gate_up_tile, down_tile = min(results, key=lambda result: result[0])
    return {gate_up: (ms, gate_up_tile), down: (ms, down_tile)}


def problem(kernel: str, works: Workloads, tokens: int) -> tuple[Workload, tuple[int, ...]]:
    """The workload of one search, and the shape under which the launcher looks its tile up."""
    s = works.shape
    if kernel == "attention_decode":
        return works.attention_decode(tokens, DECODE_CONTEXT), (s.num_heads, s.num_kv_heads, s.head_dim)
    if kernel == "attention_prefill":
        return works.attention_prefill(tokens), (s.num_heads, s.num_kv_heads, s.head_dim)
    if kernel == "linear_fp8":
        return works.linear_fp8(tokens), ((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden)
    experts = works.experts(is_fp8=kernel == "moe_fp8")
    return works.moe(tokens, experts), (s.num_experts, s.hidden, s.width, s.top_k)


def render(table: dict[Entry, Rows]) -> str:
    """TUNED as source text, in the layout that the formatter keeps."""
    lines = []
    for key, rows in sorted(table.items()):
        name, gpu, shape = key
        lines.append(f'    ("{name}", "{gpu}", {shape}): (\n')
        for most, tile in rows:
            flags = "".join(f", {flag}=True" for flag in ("is_swapped", "is_persistent") if getattr(tile, flag))
            sizes = (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages)
            lines.append(f"        ({most}, Tile({', '.join(map(str, sizes))}{flags})),\n")
        lines.append("    ),\n")
    body = "{\n" + "".join(lines) + "}" if lines else "{}"
    return f"TUNED: Final[dict[Entry, Rows]] = {body}\n"


def write(path: Path, table: dict[Entry, Rows]) -> None:
    """Replaces the text between the marks of configs.py."""
    before, rest = path.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    path.write_text(before + _BEGIN + render(table) + _END + after)


def merged(rows: Rows, most: int, tile: Tile) -> Rows:
    """`rows` with one bucket more, or with another tile for it."""
    return tuple(sorted({**dict(rows), most: tile}.items()))


def main(argv: list[str] | None = None) -> int:
    """Returns 0 also where there is no GPU, with a line that says so."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this one (repeatable)")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="only this bucket (repeatable)")
    parser.add_argument("--model", choices=("30b", "235b"), default="30b", help="whose shapes")
    parser.add_argument("--attn-tp", type=int, default=1, help="width of attention")
    parser.add_argument("--moe-tp", type=int, default=1, help="width of the experts")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels.tune: no GPU here, nothing was measured")
        return 0
    deadline_s = time.monotonic() + MAX_SECONDS - 10.0  # the last candidate may take as long to compile
    whole: Shape = {"30b": QWEN3_30B, "235b": QWEN3_235B}[args.model]
    works = Workloads(whole.on_rank(args.attn_tp, args.moe_tp), torch.device("cuda"))
    gpu = arch(works.device)
    table = dict(configs.TUNED)
    report = []
    for kernel, tokens in itertools.product(args.kernel or KERNELS, args.tokens or TOKENS):
        if kernel == "attention_prefill" and tokens < PREFILL_TOKENS:
            continue
        work, shape = problem(kernel, works, tokens)
        if kernel.startswith("moe"):
            found = search_moe(kernel.removeprefix("moe"), gpu, shape, work.run, deadline_s)
        else:
            best = search((kernel, gpu, shape), work.run, deadline_s)
            found = None if best is None else {(kernel, gpu, shape): best}
        if found is None:
            print(f"stopped at the deadline before {kernel} at {tokens} tokens was searched")
            break
        for entry, (ms, tile) in found.items():
            table[entry] = merged(table.get(entry, ()), tokens, tile)
            report.append({"kernel": entry[0], "shape": shape, "tokens": tokens, "ms": ms})
            print(f"{entry[0]:<20}{shape!s:<26}{tokens:>6} tokens  {ms:8.4f} ms  {tile}", flush=True)
    write(Path(configs.__file__), table)
    print(json.dumps({"arch": gpu, "measured": report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
