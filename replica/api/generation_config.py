"""What a checkpoint says about generation: the sampling defaults and the tokens that end an answer. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replica.api.tokenizer import Tokenizer
from replica.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters of a request that names none. OpenAI's defaults where the checkpoint is silent."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Reads `folder`/generation_config.json, which may be missing. Raises CheckpointError."""
        path = folder / "generation_config.json"
        raw = read_json_object(path)
        sampled = raw.get("do_sample") is not False
        return cls(
            temperature=_number(path, raw, "temperature", 1.0, low=0.0) if sampled else 0.0,
            top_k=int(_number(path, raw, "top_k", 0, low=0)),
            top_p=_number(path, raw, "top_p", 1.0, low=0.0, high=1.0),
            min_p=_number(path, raw, "min_p", 0.0, low=0.0, high=1.0),
            repetition_penalty=_number(path, raw, "repetition_penalty", 1.0, low=0.01, high=100.0),
        )


def load_end_token_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: of generation_config.json (one or a list), config.json and the tokenizer.

    They are united because checkpoints disagree with themselves: a chat model's config.json often names only the
    base model's end of text, and an answer that runs past its end of turn is never wanted.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                raise CheckpointError(
                    f"{folder / name}: eos_token_id is {value!r}, must be a token id or a list of them"
                )
            ids.add(token_id)
    token = special_tokens(folder).get("eos_token")
    token_id = tokenizer.token_id(token) if token is not None else None
    return frozenset(ids if token_id is None else ids | {token_id})


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) of tokenizer_config.json, by name."""
    legacy = read_json_object(folder / "special_tokens_map.json")
    found: dict[str, str] = {}
    for key, value in (legacy | read_json_object(folder / "tokenizer_config.json")).items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises CheckpointError."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(f"cannot read {path}: {err}") from err
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, must hold an object")
    return raw


def _number(path: Path, raw: dict[str, Any], name: str, default: float, *, low: float, high: float = math.inf) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value == math.inf:
        limit = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
        raise CheckpointError(f"{path}: {name} is {value!r}, must be a number, {limit}")
    return value
