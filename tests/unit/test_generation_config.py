"""Sampling defaults and end tokens of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replica.api.generation_config import GenerationDefaults, load_end_token_ids
from replica.api.tokenizer import Tokenizer
from replica.errors import CheckpointError
from tests.commands import DEMO_MODEL

DEMO = Tokenizer.load(DEMO_MODEL)


def write(folder: Path, name: str, **values: Any) -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


def test_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)


def test_defaults_are_openais_where_the_checkpoint_is_silent(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    write(tmp_path, "generation_config.json", temperature=None)
    assert GenerationDefaults.load(tmp_path).temperature == 1.0


def test_checkpoint_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", do_sample=False, temperature=0.6)
    assert GenerationDefaults.load(tmp_path).temperature == 0.0


def test_demo_model_is_greedy() -> None:
    assert GenerationDefaults.load(DEMO_MODEL).temperature == 0.0


def test_repetition_penalty_is_a_default(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", repetition_penalty=1.05)
    assert GenerationDefaults.load(tmp_path).repetition_penalty == 1.05


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 1.5}, {"min_p": True}, {"temperature": float("nan")}],
    ids=str,
)
def test_impossible_default_is_a_checkpoint_error(tmp_path: Path, values: dict[str, Any]) -> None:
    write(tmp_path, "generation_config.json", **values)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(values))} is"):
        GenerationDefaults.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_damaged_generation_config_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.load(tmp_path)


def test_end_tokens_are_united_from_every_source(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", eos_token_id=[1, 2])
    write(tmp_path, "config.json", eos_token_id=3)
    write(tmp_path, "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    assert load_end_token_ids(tmp_path, DEMO) == {1, 2, 3, DEMO.token_id("<|im_end|>")}


def test_end_tokens_may_be_named_nowhere(tmp_path: Path) -> None:
    write(tmp_path, "config.json", eos_token_id=None)
    write(tmp_path, "tokenizer_config.json", eos_token="no such token")
    assert load_end_token_ids(tmp_path, DEMO) == frozenset()


def test_demo_model_ends_with_its_turn_or_its_text() -> None:
    assert load_end_token_ids(DEMO_MODEL, DEMO) == {DEMO.token_id("<|im_end|>"), DEMO.token_id("<|endoftext|>")}


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, True, 1.5])
def test_wrong_end_token_is_a_checkpoint_error(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_end_token_ids(tmp_path, DEMO)


def test_a_file_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match=r"cannot read .*generation_config\.json"):
        GenerationDefaults.load(tmp_path)
