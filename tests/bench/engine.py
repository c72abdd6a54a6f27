"""One replica on this machine's cores beside transformers' `generate` and, where it is installed, vLLM's CPU build.

    python -m tests.bench.engine [--models random demo] [--contenders lockstep transformers vllm] [--rounds 3]

All of them are started once and then measured in turn, point by point and round by round, with the same prompts, so
that a noisy machine disturbs all alike; those that are not measured are stopped. Ours is measured over HTTP, with one
request for each prompt of a batch; the peers generate in their own process. Greedy, no prompt comes twice, and the
time of the prompts is part of every figure. A first round, which is not counted, warms up.

Prints tables of medians and, as the last line, JSON. A ratio is the median over the rounds of our throughput over a
peer's in that round. `make bench-engine-peers` installs vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.engine_contenders import VLLM_PYTHON, Contender, contenders
from tests.bench.engine_model import DEMO_MODEL, ROOT, SIZES, random_model, weight_bytes

KV_CACHE_GB: Final = {"random": 1.0, "demo": 0.25}
MAX_STARTUP_S: Final = 10.0
MAX_OVERHEAD_MB: Final = 600.0  # beyond weights and cache
MB: Final = 1e6
TABLE: Final = "{:<8} {:<14} {:>10} {:>14} {:>16} {:>14}"


@dataclass(frozen=True, slots=True)
class Point:
    """One load: so many prompts at once."""

    name: str
    batch: int
    num_prompt: int
    num_output: int
    counts_prompt: bool = False  # whether its tokens are those of the prompts

    @property
    def tokens(self) -> int:
        """What its throughput counts."""
        return self.batch * (self.num_prompt if self.counts_prompt else self.num_output)


POINTS: Final = (
    Point("1", 1, 128, 64),
    Point("8", 8, 128, 64),
    Point("32", 32, 128, 64),
    Point("prompt", 8, 1024, 1, counts_prompt=True),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of one contender in one round."""

    tokens_per_s: float
    cpu_s_per_1k: float


def measure(contender: Contender, point: Point, draw: random.Random) -> Sample:
    """Runs one point once."""
    prompts = [[draw.randrange(SIZES["vocab_size"]) for _ in range(point.num_prompt)] for _ in range(point.batch)]
    before_s = contender.session.cpu_s
    seconds = contender.generate(prompts, point.num_output)
    cpu_s = contender.session.cpu_s - before_s
    return Sample(point.tokens / seconds, 1000 * cpu_s / point.tokens)


def run(started: list[Contender], rounds: int) -> dict[str, dict[str, list[Sample]]]:
    """By point and contender, one sample a round."""
    samples: dict[str, dict[str, list[Sample]]] = {p.name: {c.name: [] for c in started} for p in POINTS}
    for number in range(rounds + 1):
        for point in POINTS:
            for contender in started:
                contender.session.resume()
                sample = measure(contender, point, random.Random(f"{number} {point.name}"))
                contender.session.pause()
                if number:
                    samples[point.name][contender.name].append(sample)
    return samples


def report(model: Path, kv_cache_gb: float, names: list[str], rounds: int) -> dict[str, Any]:
    """Measures one model and prints its tables. Returns its part of the JSON."""
    with tempfile.TemporaryDirectory() as folder:
        started = contenders(model, Path(folder), names, kv_cache_gb=kv_cache_gb)
        try:
            samples = run(started, rounds)
            peaks_mb = {contender.name: contender.session.peak_bytes / MB for contender in started}
        finally:
            for contender in started:
                contender.session.close()
    print(TABLE.format("batch", "engine", "tokens/s", "CPU s/1k tok", "x transformers", "x vllm"))
    for point, by_contender in samples.items():
        for name, found in by_contender.items():
            cells = [f"{median(found, 'tokens_per_s'):.1f}", f"{median(found, 'cpu_s_per_1k'):.2f}"]
            for peer in ("transformers", "vllm"):
                cells.append(f"{ratio(by_contender, name, peer):.2f}" if peer in by_contender else "-")
            print(TABLE.format(point, name, *cells))
    print(f"\n{'engine':<14} {'start-up s':>10} {'peak memory MB':>15}")
    for contender in started:
        print(f"{contender.name:<14} {contender.startup_s:>10.1f} {peaks_mb[contender.name]:>15.0f}")
    allowed_mb = weight_bytes(model) / MB + kv_cache_gb * 2**30 / MB + MAX_OVERHEAD_MB
    print(
        f"allowed for ours: {MAX_STARTUP_S:g} s, {allowed_mb:.0f} MB (weights, cache, {MAX_OVERHEAD_MB:g} MB)\n",
        flush=True,
    )
    return {
        "points": {
            point: {name: [asdict(sample) for sample in found] for name, found in by_contender.items()}
            for point, by_contender in samples.items()
        },
        "startup_s": {contender.name: round(contender.startup_s, 2) for contender in started},
        "peak_mb": {name: round(peak) for name, peak in peaks_mb.items()},
        "allowed_mb": round(allowed_mb),
        **{f"ratio_to_{peer}": ratios(samples, peer) for peer in names if peer != "lockstep" and "lockstep" in names},
    }


def median(samples: list[Sample], field: str) -> float:
    """Over the rounds."""
    return statistics.median(getattr(sample, field) for sample in samples)


def ratio(by_contender: dict[str, list[Sample]], name: str, peer: str) -> float:
    """The median over the rounds of one's throughput over another's."""
    pairs = zip(by_contender[name], by_contender[peer], strict=True)
    return statistics.median(own.tokens_per_s / other.tokens_per_s for own, other in pairs)


def ratios(samples: dict[str, dict[str, list[Sample]]], peer: str) -> dict[str, float]:
    """By point: ours over the peer's."""
    return {point: round(ratio(by_contender, "lockstep", peer), 3) for point, by_contender in samples.items()}


def main(argv: list[str] | None = None) -> int:
    """Prints the tables and the JSON line."""
    parser = argparse.ArgumentParser(description="One replica beside transformers and vLLM on this machine's cores.")
    parser.add_argument("--models", nargs="+", choices=("random", "demo"), default=["random", "demo"])
    installed = ["lockstep", "transformers", *(["vllm"] if VLLM_PYTHON.exists() else [])]
    parser.add_argument("--contenders", nargs="+", choices=installed, default=installed)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted, after one of warm-up")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench-engine", help="where its model is kept")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nobody outlives this

    results: dict[str, Any] = {}
    for name in options.models:
        model = DEMO_MODEL if name == "demo" else random_model(options.folder)
        print(f"{name} model, {len(os.sched_getaffinity(0))} cores", flush=True)
        results[name] = report(model, KV_CACHE_GB[name], options.contenders, options.rounds)
    # The bar is set for the random model, whose figures are repeated where a reader looks first.
    first = results[options.models[0]]
    bar = {key: value for key, value in first.items() if key.startswith("ratio_to_")}
    print(json.dumps({"benchmark": "engine", "cores": len(os.sched_getaffinity(0)), "models": results, **bar}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
