"""`replica plan`: memory and communication of each rank, from configurations alone."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from replica.errors import CheckpointError, ConfigError
from replica.layout import Layout, valid_layouts
from replica.model_config import ModelConfig
from replica.plan import PlanSettings, make_plan, sent_bytes, suggest
from replica.plan_command import add_plan_parser
from replica.tensor_specs import tensor_specs
from tests.shapes import PLANS, dense_model_config, model_config

GIB = 2**30
SETTINGS = PlanSettings(dtype="bfloat16", device_bytes=80 * GIB, step_tokens=256)
DEMO = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"


def run(*argv: str | Path) -> int:
    """Runs `replica plan` as the command line does, but for its handling of errors."""
    parser = argparse.ArgumentParser()
    add_plan_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, argv)])
    return int(args.run(args))


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    """What `replica plan --json` prints."""
    assert run(*argv, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3-235b-a22b-fp8-shapes", ("--dp", "2", "--tp", "8")),
        ("qwen3-235b-a22b-shapes", ("--dp", "2", "--tp", "8")),
        ("qwen3-30b-a3b-fp8-shapes", ("--dp", "2", "--tp", "4")),
        ("qwen3-30b-a3b-fp8-shapes", ("--dp", "2", "--tp", "8")),
        ("qwen3-30b-a3b-fp8-shapes", ("--dp", "4", "--tp", "16")),
        ("qwen3-30b-a3b-shapes", ("--dp", "4", "--tp", "16")),
    ],
)
def test_the_fullest_rank_holds_at_most_half_a_percent_more_than_the_mean(
    model: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1.0 <= plan_json(capsys, PLANS / model, *options)["fullest_over_mean"] <= 1.005


@pytest.mark.parametrize(
    ("model", "billions", "num_bytes"),
    [
        ("qwen3-30b-a3b-shapes", 30.53, 61.1e9),
        ("qwen3-30b-a3b-fp8-shapes", 30.53, 31.2e9),
        ("qwen3-235b-a22b-shapes", 235.09, 470.2e9),
        ("qwen3-235b-a22b-fp8-shapes", 235.09, 236.4e9),
    ],
)
def test_the_shapes_of_public_models_have_their_published_size(model: str, billions: float, num_bytes: float) -> None:
    config = ModelConfig.load(PLANS / model)
    specs = tensor_specs(config, config.dtype)
    weights = [spec for name, spec in specs.items() if not name.endswith("_scale_inv")]
    assert sum(spec.num_bytes // spec.item_bytes for spec in weights) / 1e9 == pytest.approx(billions, abs=0.01)
    assert sum(spec.num_bytes for spec in specs.values()) == pytest.approx(num_bytes, rel=0.002)


def test_one_rank_holds_the_whole_model_and_sends_nothing() -> None:
    config = model_config()
    plan = make_plan(config, Layout(), SETTINGS)
    assert plan.ranks[0].weight_bytes == sum(spec.num_bytes for spec in tensor_specs(config, "bfloat16").values())
    assert not any(plan.sent_bytes.values()) and plan.losses == 0 and plan.ranks[0].reserve_bytes == 0


def test_kv_tokens_are_what_is_left_of_the_device() -> None:
    config = model_config()
    for layout in valid_layouts(8, config):
        plan = make_plan(config, layout, PlanSettings(dtype="bfloat16", device_bytes=10**7, step_tokens=8))
        heads = max(1, config.num_kv_heads // layout.attn_tp)
        for rank in plan.ranks:
            assert rank.kv_bytes_per_token == 2 * config.num_layers * heads * config.head_dim * 2
            left = 10**7 - rank.weight_bytes - rank.reserve_bytes
            assert left >= 0 and rank.kv_tokens == left // rank.kv_bytes_per_token
        replicas = [[rank.kv_tokens for rank in plan.ranks if rank.dp_rank == dp] for dp in range(layout.dp)]
        assert plan.kv_tokens == sum(min(tokens) for tokens in replicas)


def test_the_reserve_holds_the_blocks_of_the_replicas_that_may_be_lost() -> None:
    config = ModelConfig.load(PLANS / "qwen3-235b-a22b-shapes")
    layout = Layout.resolve(dp=4, tp=8)
    experts = sum(spec.num_bytes for spec in tensor_specs(config, "bfloat16").values() if spec.kind == "experts")
    block_bytes = 3 * config.hidden_size * 64 * 2
    for losses in range(4):
        plan = make_plan(config, layout, PlanSettings(**{**_fields(SETTINGS), "survive": losses}))
        survivors = (4 - losses) * layout.attn_tp
        for rank in plan.ranks:
            needed = experts / survivors - rank.weights["experts"]
            assert needed <= rank.reserve_bytes <= needed + block_bytes + 1


def test_replicas_that_hold_all_experts_need_no_reserve() -> None:
    config = model_config()
    settings = PlanSettings(**{**_fields(SETTINGS), "survive": 1})
    plan = make_plan(config, Layout.resolve(dp=2, tp=4, mlp_tp=4, moe_tp=2, ep=1), settings)
    mlp_bytes = sum(rank.weights["mlp"] for rank in plan.ranks)
    block_bytes = 3 * config.hidden_size * 64 * 2
    for rank in plan.ranks:  # the dense MLP's blocks alone: the two ranks of the survivor would hold half of it each
        assert 0 <= rank.reserve_bytes - (mlp_bytes / 2 - rank.weights["mlp"]) <= block_bytes + 1


def test_surviving_with_no_replica_left_is_refused() -> None:
    settings = PlanSettings(dtype="bfloat16", device_bytes=GIB, step_tokens=1, survive=2)
    with pytest.raises(ConfigError, match=re.escape("--survive is 2, must be 0 to 1")):
        make_plan(model_config(), Layout.resolve(dp=2, tp=4), settings)


def test_bytes_sent_are_the_chunks_of_every_other_rank() -> None:
    config = dense_model_config(num_layers=1, dense_layers=frozenset({0}), vocab_size=64)
    settings = PlanSettings(dtype="float32", device_bytes=GIB, step_tokens=8)
    token = config.hidden_size * 4
    sent = sent_bytes(config, Layout.resolve(dp=2, tp=4), settings)  # 2 replicas of 2 ranks with 4 tokens each
    assert sent["attention"] == 2 * (1 * 2 * token)  # reduce-scatter and all-gather of 4 tokens over 2 ranks
    assert sent["mlp"] == 2 * (3 * 2 * token)  # the same of 8 tokens over 4 ranks
    assert sent["vocabulary"] == 2 * (1 * 2 * token) + 4 * 32 * 4  # the embedding's sum; each rank's logits
    assert sent["experts"] == 0


def test_a_plan_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLANS / "qwen3-235b-a22b-shapes", "--tp", "4", "--device-memory", "100") == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT: the fullest rank lacks 9.5" in out and "KV tokens of all replicas: 0" in out


def test_the_table_has_a_row_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run(DEMO, "--dp", "2", "--tp", "4")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny-moe, from config.json and the headers of the weights: --dp 2 --tp 4"
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]]


def test_an_index_alone_is_checked_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    names = list(ModelConfig.load(DEMO).tensor_shapes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    assert plan_json(capsys, tmp_path, "--tp", "2")["checked"] == "config.json and the index"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[1:], "model-00001-of-00001.safetensors")}))
    with pytest.raises(CheckpointError, match=re.escape(f"lacks tensor {names[0]}")):
        run(tmp_path, "--tp", "2")
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is damaged"):
        run(tmp_path, "--tp", "2")


def test_suggestions_are_all_valid_layouts_and_the_best_come_first() -> None:
    config = ModelConfig.load(PLANS / "qwen3-30b-a3b-fp8-shapes")
    suggestions = suggest(config, 8, SETTINGS)
    assert {one.plan.layout for one in suggestions} == set(valid_layouts(8, config))
    plans = [one.plan for one in suggestions]
    assert plans[0].kv_tokens >= 0.95 * max(plan.kv_tokens for plan in plans)
    assert plans[0].layout.attn_tp <= config.num_kv_heads  # repeated KV heads are wasted
    assert all(one.reason for one in suggestions)


def test_what_does_not_fit_is_suggested_last() -> None:
    config = ModelConfig.load(PLANS / "qwen3-235b-a22b-shapes")
    missing = [one.plan.missing_bytes > 0 for one in suggest(config, 8, SETTINGS)]
    assert any(missing) and not all(missing) and missing == sorted(missing)


def test_suggestions_name_options_that_give_the_layout_back(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, PLANS / "qwen3-30b-a3b-shapes", "--suggest", "4")["suggestions"]
    for suggestion in found:
        again = plan_json(capsys, PLANS / "qwen3-30b-a3b-shapes", *suggestion["flags"].split())
        assert again["layout"] == suggestion["layout"] and again["kv_tokens"] == suggestion["kv_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp", "3", "--tp", "8"], "nearest valid for 8 ranks: --dp 4 --tp 8"),
        (["--dp", "1", "--tp", "128"], "64 query heads do not divide over attn_tp 128"),
        (["--suggest", "8", "--tp", "8"], "--suggest tries every layout; drop --tp"),
        (["--suggest", "0"], "--suggest is 0"),
        (["--suggest", "4", "--survive", "9"], "no layout of 4 devices allows"),
        (["--tp", "8", "--device-memory", "0"], "--device-memory is 0.0"),
        (["--tp", "8", "--device-memory", "nan"], "--device-memory is nan"),
        (["--tp", "8", "--survive", "-1"], "--survive is -1"),
        (["--tp", "8", "--step-tokens", "0"], "must be above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_remedy(options: list[str], message: str) -> None:
    model = PLANS / "qwen3-235b-a22b-fp8-shapes"
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(model, *options)


def _fields(settings: PlanSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("dtype", "device_bytes", "step_tokens", "survive")}
