"""Asks the demo model fresh questions through transformers' greedy decoding and prints the share right, per task.

python evaluate.py MODEL NUM_QUESTIONS SEED [--dtype float32]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import torch
from corpus import Sample, draw, is_right
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_SIZE = 25
MAX_NEW_TOKENS = 220
END_OF_TURN = "<|im_end|>"


@torch.no_grad()
def answers(model: Any, tokenizer: Any, samples: list[Sample]) -> list[str]:
    """The model's greedy answers, with their reasoning, to one batch of questions."""
    prompts = [
        tokenizer.apply_chat_template(
            sample.messages[:-1], tools=sample.tools, tokenize=False, add_generation_prompt=True
        )
        for sample in samples
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)  # [batch, prompt + new]
    new_ids = output[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(ids, skip_special_tokens=False).split(END_OF_TURN)[0] for ids in new_ids]


def main(argv: list[str]) -> int:
    """Prints the wrong answers, then right/asked per task, then the share right."""
    parser = argparse.ArgumentParser(description="Score the demo model on fresh questions.")
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("num_questions", type=int)
    parser.add_argument("seed", type=int, help="draws the questions")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    rng = random.Random(args.seed)
    samples = [draw(rng) for _ in range(args.num_questions)]
    samples.sort(key=lambda sample: len(str(sample.messages)))  # batches of similar length need little padding
    right: Counter[str] = Counter()
    for start in range(0, len(samples), BATCH_SIZE):
        batch = samples[start : start + BATCH_SIZE]
        for sample, answer in zip(batch, answers(model, tokenizer, batch), strict=True):
            if is_right(sample, answer):
                right[sample.task] += 1
            else:
                print(f"wrong {sample.task} {sample.messages[-2]['content'][-120:]!r} -> {answer[-160:]!r}")
    asked = Counter(sample.task for sample in samples)
    for task in sorted(asked):
        print(f"{task:10} {right[task]}/{asked[task]}")
    print("all", right.total() / len(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
