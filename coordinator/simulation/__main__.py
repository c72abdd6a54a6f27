"""python -m coordinator.simulation --seeds N --first K: prints a summary, then JSON as the last line.

A seed that fails prints its trace and how to run it again; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence

from coordinator.simulation import Result, simulate

MAX_TRACES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    options = parser.parse_args(argv)
    began_s = time.monotonic()
    results: list[Result] = []
    failed: list[Result] = []
    for seed in range(options.first, options.first + options.seeds):
        results.append(simulate(seed))
        if results[-1].violation:
            failed.append(results[-1])
            if len(failed) <= MAX_TRACES:
                _explain(failed[-1])
    summary = {
        "seeds": len(results),
        "failed": [result.seed for result in failed],
        "events": sum(result.num_events for result in results),
        "simulated_s": round(sum(result.simulated_s for result in results)),
        "masters": sum(result.num_masters for result in results),
        "epochs": sum(result.num_epochs for result in results),
        "committed_batches": sum(result.num_batches for result in results),
        "largest_group": max((result.size for result in results), default=0),
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    counts = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in summary.items() if name != "failed")
    print(f"{counts}; {len(failed)} failed")
    print(json.dumps(summary))
    return 1 if failed else 0


def _explain(result: Result) -> None:
    print(*result.trace, sep="\n")
    print(f"seed {result.seed}, {result.size} members: {result.violation}")
    print(f"again: python -m coordinator.simulation --seeds 1 --first {result.seed}\n")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # a seed's trace says it better
    sys.exit(main())
