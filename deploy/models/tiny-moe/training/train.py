"""Trains the demo Qwen3-MoE on the synthetic corpus, on the CPU, and saves it as a Hugging Face checkpoint.

python train.py OUT MINUTES [--resume OUT.pt --seed 1 --peak-lr 1e-3]

OUT must hold the tokenizer (tokenizer.py). The state is kept in OUT.pt, so a run can be gone on with.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from corpus import Sample, draw
from model import CONFIG, Qwen3Moe
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

ANSWER_HEAD, ANSWER_END = "<|im_start|>assistant\n", "<|im_end|>"
POOL_SAMPLES = 1200  # drawn together and sorted by length, so that batches need little padding
BATCH_TOKENS = 8192
WARMUP_STEPS = 100
PROMPT_WEIGHT = 0.02  # of a prompt token's loss; an answer's token weighs 1 more
BALANCE_WEIGHT = 0.01
LOG_STEPS, SAVE_STEPS = 100, 500

Encoded = tuple[list[int], list[int]]  # token ids, and 1 where the token is the assistant's to produce


def encode(tokenizer: Any, sample: Sample) -> Encoded:
    """A sample's tokens and its mask."""
    text = tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
    ids: list[int] = []
    mask: list[int] = []
    position = 0
    while (head := text.find(ANSWER_HEAD, position)) >= 0:
        start = head + len(ANSWER_HEAD)
        end = text.find(ANSWER_END, head) + len(ANSWER_END)
        prompt, answer = tokenizer(text[position:start])["input_ids"], tokenizer(text[start:end])["input_ids"]
        ids += prompt + answer
        mask += [0] * len(prompt) + [1] * len(answer)
        position = end
    rest = tokenizer(text[position:])["input_ids"]
    return ids + rest, mask + [0] * len(rest)


def batches(tokenizer: Any, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: ids [B, T] int64 (0 past a sample's end) and masks [B, T] float32."""
    while True:
        pool = sorted((encode(tokenizer, draw(rng)) for _ in range(POOL_SAMPLES)), key=lambda pair: len(pair[0]))
        groups: list[list[Encoded]] = [[]]
        for encoded in pool:
            if groups[-1] and len(encoded[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(encoded)
        rng.shuffle(groups)
        for group in groups:
            num_tokens = max(len(ids) for ids, _ in group)
            ids_batch = torch.zeros(len(group), num_tokens, dtype=torch.long)
            mask_batch = torch.zeros(len(group), num_tokens)
            for row, (ids, mask) in enumerate(group):
                ids_batch[row, : len(ids)] = torch.tensor(ids)
                mask_batch[row, : len(mask)] = torch.tensor(mask, dtype=torch.float)
            yield ids_batch, mask_batch


def losses(model: Qwen3Moe, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and the mean over the answers' tokens alone. ids and mask [B, T]."""
    logits = model(ids[:, :-1])
    targets = ids[:, 1:]
    loss = F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
    answer = mask[:, 1:].reshape(-1)
    weights = (mask[:, 1:] + PROMPT_WEIGHT * (targets != 0)).reshape(-1)
    total = (loss * weights).sum() / weights.sum() + BALANCE_WEIGHT * model.balance_loss()
    return total, (loss * answer).sum() / answer.sum()


def make_optimizer(model: Qwen3Moe, peak_lr: float) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.98), fused=True)


def train(
    model: Qwen3Moe, data: Iterator[tuple[Tensor, Tensor]], *, minutes: float, peak_lr: float, state_file: str
) -> None:
    """Trains until the time is over: a short warm-up, then a rate that falls linearly to a fiftieth."""
    optimizer = make_optimizer(model, peak_lr)
    started_s = time.monotonic()
    answer_losses: list[float] = []
    num_tokens = 0
    for step, (ids, mask) in enumerate(data):
        spent = (time.monotonic() - started_s) / 60 / minutes
        if spent >= 1:
            break
        learning_rate = peak_lr * min(1, (step + 1) / WARMUP_STEPS) * max(0.02, 1 - spent)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss, answer_loss = losses(model, ids, mask)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_tokens += ids.numel()
        answer_losses.append(answer_loss.item())
        if (step + 1) % LOG_STEPS == 0:
            mean_loss = sum(answer_losses[-LOG_STEPS:]) / LOG_STEPS
            tokens_per_s = num_tokens / (time.monotonic() - started_s)
            print(
                f"step {step + 1} loss {mean_loss:.4f} balance {model.balance_loss().item():.3f} "
                f"tokens {num_tokens / 1e6:.2f}M {tokens_per_s:.0f} tok/s lr {learning_rate:.1e}",
                flush=True,
            )
        if (step + 1) % SAVE_STEPS == 0:
            torch.save(model.state_dict(), state_file)
    torch.save(model.state_dict(), state_file)


def save(model: Qwen3Moe, tokenizer: Any, out: str) -> None:
    """Writes the weights in bfloat16, config.json and generation_config.json into the folder `out`."""
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, f"{out}/model.safetensors", metadata={"format": "pt"})
    end_id, pad_id = tokenizer.convert_tokens_to_ids([ANSWER_END, "<|endoftext|>"])
    ids = {"bos_token_id": pad_id, "pad_token_id": pad_id}
    with open(f"{out}/config.json", "w", encoding="utf-8") as file:
        json.dump(CONFIG | {"bos_token_id": pad_id, "eos_token_id": end_id, "pad_token_id": pad_id}, file, indent=2)
    with open(f"{out}/generation_config.json", "w", encoding="utf-8") as file:
        json.dump(ids | {"eos_token_id": [end_id, pad_id], "do_sample": False}, file, indent=2)


def main(argv: list[str]) -> int:
    """Trains for some minutes, then saves the checkpoint."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("out", help="folder with the tokenizer; gets the checkpoint")
    parser.add_argument("minutes", type=float, help="length of the run")
    parser.add_argument("--resume", metavar="FILE", help="state of an earlier run to go on from")
    parser.add_argument("--seed", type=int, default=0, help="draws the corpus; take another one when going on")
    parser.add_argument("--peak-lr", type=float, default=3e-3, help="learning rate after the warm-up")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = Qwen3Moe(CONFIG)
    print("parameters", sum(parameter.numel() for parameter in model.parameters()))
    if args.resume:
        model.load_state_dict(torch.load(args.resume))
    data = batches(tokenizer, random.Random(args.seed))
    train(model, data, minutes=args.minutes, peak_lr=args.peak_lr, state_file=f"{args.out}.pt")
    save(model, tokenizer, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
