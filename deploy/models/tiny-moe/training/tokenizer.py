"""Trains the demo model's byte-level BPE tokenizer on its own corpus; digits stay single tokens.

python tokenizer.py OUT     writes tokenizer.json, tokenizer_config.json and chat_template.jinja into the folder OUT
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator

from corpus import draw
from template import chat_template
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
NUM_SAMPLES = 20_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Qwen's split: words with the sign before them, single digits, runs of signs, line ends, spaces.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What the template writes around messages, often enough that its words become tokens.
TEMPLATE_TEXTS = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}',
    'system\nuser\nassistant\nTools:\n{"name": "get_weather", "arguments": {"city": "',
) * 50


def training_texts() -> Iterator[str]:
    """The texts that merges are counted in."""
    rng = random.Random(1)
    for _ in range(NUM_SAMPLES):
        for message in draw(rng).messages:
            yield message["content"] + " " + message.get("reasoning_content", "")
    yield from TEMPLATE_TEXTS


def train() -> Tokenizer:
    """A tokenizer of VOCAB_SIZE tokens; the special and added ones come last."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        min_frequency=100,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_TOKENS])
    return tokenizer


def main(argv: list[str]) -> int:
    """Trains and saves; prints the size of the vocabulary."""
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer.")
    parser.add_argument("out", help="folder to write to; made when missing")
    args = parser.parse_args(argv)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=train(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template()
    fast.save_pretrained(args.out)
    print("vocab", len(fast))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
