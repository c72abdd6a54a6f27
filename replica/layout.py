"""Layout: how one group's ranks share attention, MLP and MoE. Pure arithmetic; every degree is taken from here.

The ranks of a group are numbered 0 to world - 1; rank = dp_rank * attn_tp + local_rank. Each kind of layer has a width:
the number of ranks that share its weights. A group of a width is a contiguous block of so many ranks.

    --dp 2 --tp 8     attention {0-3} {4-7}, MLP and MoE {0-7}

Each token has one owner among the ranks of its replica (groups.py tells what they exchange). A group wider than a
replica spans replicas: its ranks compute their parts for the tokens of all of them. A width of 1 means that every rank
computes the layer for the tokens it owns, with whole weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from replica.errors import ConfigError
from replica.model_config import ModelConfig

MAX_WORLD: Final = 1024  # ranks of one group; more is a typing mistake sooner than a plan

Range = tuple[int, int]  # first, and one past the last
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The degrees of one group, checked against each other. `check` holds them against a model."""

    dp: int = 1  # replicas
    attn_tp: int = 1  # ranks of one replica
    mlp_tp: int = 1  # width of a dense MLP
    moe_tp: int = 1  # ranks that share each expert
    ep: int = 1  # parts into which a layer's experts are divided; each has moe_tp ranks
    nnodes: int = 1  # machines, each with dp / nnodes whole replicas

    @classmethod
    def resolve(
        cls,
        *,
        dp: int | None = None,
        tp: int = 1,
        attn_tp: int | None = None,
        mlp_tp: int | None = None,
        moe_tp: int | None = None,
        ep: int | None = None,
        nnodes: int = 1,
    ) -> Layout:
        """The layout that a command line asks for; None is an option not given. Raises ConfigError, with the remedy."""
        asked = {"dp": dp, "tp": tp, "attn_tp": attn_tp, "mlp_tp": mlp_tp, "moe_tp": moe_tp, "ep": ep, "nnodes": nnodes}
        given = {name: value for name, value in asked.items() if value is not None}
        for name, value in given.items():
            if not 1 <= value <= MAX_WORLD:
                raise ConfigError(f"{_flag(name)} is {value}, must be 1 to {MAX_WORLD}")
        mlp = mlp_tp or tp
        moe_tp, ep = _expert_degrees(given)
        world = max(mlp, moe_tp * ep)
        wanted = {**given, "mlp_tp": mlp, "moe_tp": moe_tp, "ep": ep}
        del wanted["tp"]
        _check_world(world)
        options = ", ".join(
            f"{_flag(name)} {given[name]}" for name in ("tp", "mlp_tp", "moe_tp", "ep") if name in given
        )
        ranks = f"the {_ranks(world)} of {options}" + (
            " (--tp counts those of all replicas)" if world < (dp or 1) else ""
        )
        if dp is not None and attn_tp is not None and dp * attn_tp != world:
            product = f"--dp {dp} x --attn-tp {attn_tp} = {dp * attn_tp}"
            raise _refusal(f"{product}, must equal {ranks}", wanted, world)
        for name in ("dp", "attn_tp"):
            if world % given.get(name, 1):
                raise _refusal(f"{_flag(name)} {given[name]} does not divide {ranks}", wanted, world)
        if dp is None:
            dp = world // attn_tp if attn_tp else 1
        return cls(dp=dp, attn_tp=world // dp, mlp_tp=mlp, moe_tp=moe_tp, ep=ep, nnodes=nnodes)

    def __post_init__(self) -> None:
        """Raises ConfigError for degrees that do not fit together, with the nearest that do."""
        for name in ("dp", "attn_tp", "mlp_tp", "moe_tp", "ep", "nnodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}, must be at least 1")
        _check_world(self.world)
        if (widest := max(self.mlp_tp, self.moe)) != self.world:
            detail = f"MLP width {self.mlp_tp} and MoE width {self.moe} make a world of {widest}"
            raise self._refuse(f"{detail}, but dp {self.dp} x attn_tp {self.attn_tp} = {self.world} ranks")
        for what, width in (("MLP", self.mlp_tp), ("MoE", self.moe)):
            if width != 1 and (width % self.attn_tp or self.world % width):
                rule = f"1, or a multiple of attn_tp {self.attn_tp} that divides the {self.world} ranks"
                raise self._refuse(f"{what} width is {width}, must be {rule}")
        if self.dp % self.nnodes:
            raise self._refuse(f"{self.dp} replicas do not divide over --nnodes {self.nnodes}")

    @property
    def world(self) -> int:
        """All ranks of the group."""
        return self.dp * self.attn_tp

    @property
    def moe(self) -> int:
        """Width of a MoE layer: the ranks that hold all its experts between them."""
        return self.moe_tp * self.ep

    def losses(self, survive: int | None) -> int:
        """How many replicas may be lost: `survive`, or 1 of several. Raises ConfigError for more than can be."""
        if survive is None:
            return min(1, self.dp - 1)
        if not 0 <= survive < self.dp:
            raise ConfigError(f"--survive is {survive}, must be 0 to {self.dp - 1}: the group has {self.dp} (--dp)")
        return survive

    def dp_rank(self, rank: int) -> int:
        """The replica that the rank belongs to."""
        return rank // self.attn_tp

    def local_rank(self, rank: int) -> int:
        """The rank's place in its replica."""
        return rank % self.attn_tp

    def mlp_rank(self, rank: int) -> int:
        """The rank's place in its MLP group."""
        return rank % self.mlp_tp

    def moe_rank(self, rank: int) -> tuple[int, int]:
        """The rank's place in its MoE group: (ep_rank, moe_tp_rank)."""
        return divmod(rank % self.moe, self.moe_tp)

    def groups(self, width: int) -> Groups:
        """All groups of ranks that share a layer of this width. Find one's own with `own_group`."""
        return tuple(tuple(range(first, first + width)) for first in range(0, self.world, width))

    def owned_tokens(self, num_tokens: int, local_rank: int) -> Range:
        """Which of its replica's tokens a rank owns; the remainder goes to the first ranks."""
        base, extra = divmod(num_tokens, self.attn_tp)
        start = local_rank * base + min(local_rank, extra)
        return start, start + base + (local_rank < extra)

    def padded_vocab(self, vocab_size: int) -> int:
        """The vocabulary, padded so that each rank of a replica has as many rows."""
        return -(-vocab_size // self.attn_tp) * self.attn_tp

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError if the model cannot be cut so, with the nearest layout that can be."""
        if (reason := self._misfit(config)) is not None:
            raise self._refuse(reason, config)

    def _misfit(self, config: ModelConfig) -> str | None:
        attn_tp, heads, kv_heads = self.attn_tp, config.num_heads, config.num_kv_heads
        if heads % attn_tp:
            return f"{heads} query heads do not divide over attn_tp {attn_tp} (world {self.world} / dp {self.dp})"
        if kv_heads % attn_tp and attn_tp % kv_heads:
            return f"{kv_heads} KV heads neither divide over attn_tp {attn_tp} nor can be repeated evenly on it"
        if not config.num_experts and self.ep > 1:
            return f"--ep is {self.ep}, but the model has no experts"
        widths = {"attention": attn_tp}
        if config.dense_layers:
            widths["MLP"] = self.mlp_tp
        if len(config.dense_layers) < config.num_layers:
            widths["MoE"] = self.moe
        if (joined := math.lcm(*widths.values())) < self.world:
            named = ", ".join(f"{kind} {width}" for kind, width in widths.items())
            return (
                f"the widths of this model's layers ({named}) join only {joined} of {self.world} ranks: "
                f"that is {self.world // joined} independent groups, to be started one by one"
            )
        return None

    def flags(self) -> str:
        """The shortest command-line options that give this layout."""
        options = [f"--dp {self.dp}", f"--tp {self.world}"]
        if self.mlp_tp != self.world:
            options.append(f"--mlp-tp {self.mlp_tp}")
        if self.moe != self.world:
            options.append(f"--moe-tp {self.moe_tp}")
        if self.ep > 1 or self.moe != self.world:
            options.append(f"--ep {self.ep}")
        if self.nnodes > 1:
            options.append(f"--nnodes {self.nnodes}")
        return " ".join(options)

    def _refuse(self, reason: str, config: ModelConfig | None = None) -> ConfigError:
        wanted = {name: getattr(self, name) for name in ("dp", "attn_tp", "mlp_tp", "moe_tp", "ep", "nnodes")}
        return _refusal(reason, wanted, self.world, config)


def own_group(groups: Groups, rank: int) -> tuple[int, ...]:
    """The group that the rank is a member of."""
    return next(group for group in groups if rank in group)


def valid_layouts(world: int, config: ModelConfig | None = None, nnodes: int = 1) -> Iterator[Layout]:
    """Every layout of so many ranks, and for a model, every one that fits it and differs in a layer that it has."""
    has_mlp = config is None or bool(config.dense_layers)
    has_moe = config is None or len(config.dense_layers) < config.num_layers
    for dp in divisors(world):
        if dp % nnodes:
            continue
        attn_tp = world // dp
        widths = sorted({1} | {width for width in divisors(world) if width % attn_tp == 0})
        for mlp_tp in widths if has_mlp else [world]:
            for moe in widths if has_moe else [world]:
                if max(mlp_tp, moe) != world:
                    continue
                for ep in divisors(moe) if has_moe else [1]:
                    layout = Layout(dp=dp, attn_tp=attn_tp, mlp_tp=mlp_tp, moe_tp=moe // ep, ep=ep, nnodes=nnodes)
                    if config is None or layout._misfit(config) is None:
                        yield layout


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _expert_degrees(given: Mapping[str, int]) -> tuple[int, int]:
    """(moe_tp, ep): one that is not given makes their product the larger of --tp and the one that is."""
    tp = given["tp"]
    degrees = {name: given[name] for name in ("moe_tp", "ep") if name in given}
    if not degrees:
        return tp, 1
    width = max(tp, *degrees.values())
    for name, degree in degrees.items():
        if len(degrees) == 1 and width % degree:
            reason = f"{_flag(name)} {degree} does not divide the MoE width {width} (--tp)"
            raise _refusal(reason, {name: degree, "mlp_tp": given.get("mlp_tp", tp), "moe": width}, width)
    moe_tp = degrees.get("moe_tp", width // degrees.get("ep", 1))
    return moe_tp, degrees.get("ep", width // moe_tp)


def _check_world(world: int) -> None:
    if world > MAX_WORLD:
        raise ConfigError(f"the layout has {world} ranks, limit is {MAX_WORLD}; start several groups instead")


def _refusal(reason: str, wanted: Mapping[str, int], world: int, config: ModelConfig | None = None) -> ConfigError:
    """The error, with the valid layout of as many ranks that changes the wanted degrees least, by ratio."""

    def distance(layout: Layout) -> tuple[float, int, int]:
        change = sum(abs(math.log(getattr(layout, name) / degree)) for name, degree in wanted.items())
        return round(change, 6), -layout.moe, -layout.mlp_tp  # of two as near, the one that shares more

    choices = [*valid_layouts(world, config, wanted.get("nnodes", 1))] or [*valid_layouts(world, config)]
    nearest = min(choices, key=distance)
    return ConfigError(f"{reason}; nearest valid for {_ranks(world)}: {nearest.flags()}")


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
