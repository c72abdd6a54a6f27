"""`replica plan MODEL`: what a layout needs, or which layouts so many devices allow, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from replica.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, check_names
from replica.config import flag
from replica.errors import CheckpointError, ConfigError
from replica.layout import Layout
from replica.model_config import DTYPE_BYTES, ModelConfig
from replica.plan import GIB, Plan, PlanSettings, Suggestion, make_plan, suggest
from replica.tensor_specs import KINDS

_LAYOUT_OPTIONS: Final = {
    "dp": "replicas of the group; they share the ranks of --tp between them",
    "tp": "ranks that share the MLP and the experts, and so the size of the group (default 1)",
    "attn_tp": "ranks of one replica; may be given instead of --dp",
    "mlp_tp": "ranks that share a dense MLP (default --tp)",
    "moe_tp": "ranks that share each expert (default --tp / --ep)",
    "ep": "parts into which the experts are divided (default 1)",
}


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Adds the degrees of a layout; one that is not given is None."""
    for name, text in _LAYOUT_OPTIONS.items():
        parser.add_argument(flag(name), type=int, metavar="N", help=text)


def layout_from(args: argparse.Namespace, nnodes: int = 1) -> Layout:
    """The layout that the options ask for. Raises ConfigError, with the nearest valid choice."""
    given = {name: getattr(args, name) for name in _LAYOUT_OPTIONS if getattr(args, name) is not None}
    return Layout.resolve(**given, nnodes=nnodes)


def add_plan_parser(commands: Any) -> None:
    """Adds the verb to argparse's subparsers; its namespace has `run`, a function of the namespace: `run_plan`."""
    parser = commands.add_parser(
        "plan",
        help="show what a layout needs, before anything starts",
        description="Shows each rank's weights, KV cache and communication. Needs config.json alone; the names and "
        "shapes of an index or of safetensors headers are checked where there are some.",
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a Hugging Face checkpoint")
    add_layout_options(parser)
    nnodes_help = "machines, with as many replicas each (default 1)"
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=nnodes_help)
    dtypes = ("auto", *DTYPE_BYTES)
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="of what is not FP8 (auto: the checkpoint's)")
    for name, kind, default, metavar, text in (
        ("--device-memory", float, 80.0, "GIB", "GiB of each device for weights and KV cache (default 80)"),
        (
            "--survive",
            int,
            None,
            "N",
            "replicas that may be lost; room for their blocks is kept (default 1 of several)",
        ),
        ("--step-tokens", int, 256, "N", "tokens of a decode step of all replicas, for the bytes sent (default 256)"),
        ("--suggest", int, None, "N", "list the valid layouts of N devices, best first"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plan, or the suggestions, and returns 0. Raises ConfigError for what cannot be planned."""
    config = ModelConfig.load(args.model)
    checked = check_tensors(args.model, config)
    if not 0 < args.device_memory < 2**30:
        raise ConfigError(f"--device-memory is {args.device_memory}, must be above 0 GiB")
    settings = PlanSettings(
        dtype=config.dtype if args.dtype == "auto" else args.dtype,
        device_bytes=int(args.device_memory * GIB),
        step_tokens=args.step_tokens,
        survive=args.survive,
    )
    name = args.model.resolve().name
    if args.suggest is not None:
        if (given := next((name for name in _LAYOUT_OPTIONS if getattr(args, name) is not None), None)) is not None:
            raise ConfigError(f"--suggest tries every layout; drop {flag(given)}, or drop --suggest")
        suggestions = suggest(config, args.suggest, settings, args.nnodes)
        print(_suggestions_json(name, suggestions) if args.json else _suggestions_table(name, suggestions))
    else:
        plan = make_plan(config, layout_from(args, args.nnodes), settings)
        print(_plan_json(name, checked, plan, settings) if args.json else _plan_table(name, checked, plan, settings))
    return 0


def check_tensors(folder: Path, config: ModelConfig) -> str:
    """Holds what the folder says of its tensors against the config; says what there was. Raises CheckpointError."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_bytes())["weight_map"])
            is_whole = all((folder / file).is_file() for file in set(weight_map.values()))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as err:
            raise CheckpointError(f"{index} is damaged: {type(err).__name__}: {err}") from err
        if not is_whole:
            check_names(folder, weight_map.keys(), config)
            return "config.json and the index"
    elif not (folder / SINGLE_FILE).is_file():
        return "config.json alone"
    Checkpoint.open(folder).check(config)
    return "config.json and the headers of the weights"


def _plan_table(name: str, checked: str, plan: Plan, settings: PlanSettings) -> str:
    layout = plan.layout
    head = [
        f"{name}, from {checked}: {layout.flags()}",
        f"dp {layout.dp} x attn_tp {layout.attn_tp} = {layout.world} ranks; MLP over {layout.mlp_tp}, "
        f"experts over {layout.moe} (ep {layout.ep} x moe_tp {layout.moe_tp}); {settings.dtype}, "
        f"{settings.device_bytes / GIB:g} GiB a device",
        "",
    ]
    columns = ["rank", "replica", *KINDS, "weights GiB", "reserve GiB", "KV bytes/token", "KV tokens"]
    rows = [
        [
            str(rank.rank),
            str(rank.dp_rank),
            *(f"{rank.weights[kind] / GIB:.3f}" for kind in KINDS),
            f"{rank.weight_bytes / GIB:.3f}",
            f"{rank.reserve_bytes / GIB:.3f}",
            f"{rank.kv_bytes_per_token}",
            f"{rank.kv_tokens}",
        ]
        for rank in plan.ranks
    ]
    sent = ", ".join(f"{kind} {num_bytes / 2**20:.1f}" for kind, num_bytes in plan.sent_bytes.items() if num_bytes)
    tail = [
        "",
        f"fullest over mean: {plan.fullest_over_mean:.4f}",
        f"KV tokens of all replicas: {plan.kv_tokens}; replicas that may be lost: {plan.losses}",
        f"each rank sends {sum(plan.sent_bytes.values()) / 2**20:.1f} MiB in a step of {settings.step_tokens} tokens"
        + (f" ({sent})" if sent else ""),
    ]
    if plan.missing_bytes:
        tail.append(f"DOES NOT FIT: the fullest rank lacks {plan.missing_bytes / GIB:.2f} GiB (--device-memory)")
    return "\n".join([*head, *_aligned([columns, *rows]), *tail])


def _plan_json(name: str, checked: str, plan: Plan, settings: PlanSettings) -> str:
    return json.dumps({"model": name, "checked": checked, **_facts(plan), **asdict(settings), "ranks": _ranks(plan)})


def _suggestions_table(name: str, suggestions: Sequence[Suggestion]) -> str:
    rows = [["", "layout", "weights GiB", "KV tokens", "MiB sent/step", "why here"]]
    for place, suggestion in enumerate(suggestions, start=1):
        plan = suggestion.plan
        rows.append(
            [
                str(place),
                plan.layout.flags(),
                f"{max(rank.weight_bytes for rank in plan.ranks) / GIB:.2f}",
                str(plan.kv_tokens),
                f"{sum(plan.sent_bytes.values()) / 2**20:.1f}",
                suggestion.reason,
            ]
        )
    return "\n".join([f"{name}: {len(suggestions)} valid layouts, best first", "", *_aligned(rows, left=(1, 5))])


def _suggestions_json(name: str, suggestions: Sequence[Suggestion]) -> str:
    layouts = [{"reason": suggestion.reason, **_facts(suggestion.plan)} for suggestion in suggestions]
    return json.dumps({"model": name, "suggestions": layouts})


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "flags": plan.layout.flags(),
        "layout": asdict(plan.layout),
        "fullest_over_mean": plan.fullest_over_mean,
        "fullest_weight_bytes": max(rank.weight_bytes for rank in plan.ranks),
        "missing_bytes": plan.missing_bytes,
        "kv_tokens": plan.kv_tokens,
        "losses": plan.losses,
        "sent_bytes_per_step": sum(plan.sent_bytes.values()),
        "sent_bytes_by_kind": plan.sent_bytes,
    }


def _ranks(plan: Plan) -> list[dict[str, Any]]:
    return [{**asdict(rank), "weight_bytes": rank.weight_bytes} for rank in plan.ranks]


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
