"""transformers or vLLM as a child of the benchmark: `PYTHON engine_peer.py transformers|vllm MODEL`.

Says {"ready": true} when the model is loaded. Then it answers each line {"prompts": [[ids], ...], "num_output": n} of
its standard input with {"seconds": s}: the time to generate n greedy tokens for each of the prompts, which are all of
one length. Runs in the peer's own environment, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 32

Generate = Callable[[list[list[int]], int], list[list[int]]]


def load_transformers(model: str) -> Generate:
    """`generate` of transformers, as it comes: static shapes, no compilation."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.generation_config.eos_token_id = None  # all of the tokens, whatever they mean

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_output, do_sample=False, pad_token_id=0
        )
        return out[:, ids.shape[1] :].tolist()

    return generate


def load_vllm(model: str) -> Generate:
    """vLLM's offline engine with its defaults, but for a prefix cache: every prompt is to be computed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # By default it keeps a core for its own processes and computes on the others: on half of two.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_output: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(inputs, params, use_tqdm=False)]

    return generate


LOADERS = {"transformers": load_transformers, "vllm": load_vllm}


def main(kind: str, model: str) -> None:
    """Loads, then answers until its standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is not an answer
    generate = LOADERS[kind](model)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        started_s = time.perf_counter()
        outputs = generate(order["prompts"], order["num_output"])
        seconds = time.perf_counter() - started_s
        if any(len(output) != order["num_output"] for output in outputs):
            raise RuntimeError(f"{kind} gave answers of {[len(output) for output in outputs]} tokens")
        print(json.dumps({"seconds": seconds}), file=answers)


if __name__ == "__main__":  # vLLM starts children that import this file again
    main(*sys.argv[1:])
