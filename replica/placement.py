"""Where the ranks of a group are to run on a Ray cluster: arithmetic over what its nodes have, without ray.

Attention is computed by the ranks of one replica together, so a replica goes to one node where the nodes are large
enough, and the replicas are dealt out evenly: then the loss of a node costs as few replicas as it can. With --nnodes,
each command's replicas go to its own machine. Where a replica does not fit a node, Ray packs its ranks on as few as it
can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replica.config import ReplicaConfig
from replica.errors import ConfigError

Resources = Mapping[str, float]  # by Ray's names: CPU, GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    address: str
    resources: Resources  # all that it has, used or not


def rank_needs(config: ReplicaConfig, device: str) -> Resources:
    """What each rank reserves."""
    return {"GPU": 1, "CPU": 1} if device.startswith("cuda") else {"CPU": config.num_threads or 1}


def check_size(config: ReplicaConfig, needs: Resources, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if the group is larger than the cluster, with how much is missing."""
    have = {kind: sum(node.resources.get(kind, 0) for node in nodes) for kind in needs}
    world = config.layout.world
    if missing := _missing(needs, world, have):
        raise ConfigError(
            f"{config.layout.flags()} --executor ray needs {_amounts(needs, world)}, the Ray cluster has "
            f"{_amounts(have)}: {missing}; add nodes or make the layout smaller"
        )


def not_placed(config: ReplicaConfig, needs: Resources, free: Resources, waited_s: float) -> ConfigError:
    """The error for ranks that the cluster could hold, had it nothing else to do."""
    num_ranks = config.layout.attn_tp
    missing = _missing(needs, num_ranks, free) or "they are on too many nodes"
    return ConfigError(
        f"the ranks of replica {config.dp_rank} need {_amounts(needs, num_ranks)}, of which the Ray cluster had not "
        f"enough free for {waited_s:g} s: {missing}; end what uses them"
    )


def home(config: ReplicaConfig, needs: Resources, nodes: Sequence[Node], own_address: str) -> str | None:
    """The address of the node for all ranks of this replica; None where not all replicas fit a node each."""
    is_spread = config.layout.nnodes == 1
    nodes = sorted((n for n in nodes if is_spread or n.address == own_address), key=lambda node: node.address)
    rooms = [ranks_that_fit(needs, node) // config.layout.attn_tp for node in nodes]  # in replicas
    homes: dict[int, str] = {}
    for dp_rank in config.local_dp_ranks:
        most = max(rooms, default=0)
        if not most:
            return None
        roomiest = rooms.index(most)
        rooms[roomiest] -= 1
        homes[dp_rank] = nodes[roomiest].address
    return homes[config.dp_rank]


def ranks_that_fit(needs: Resources, node: Node) -> int:
    """How many ranks a node can hold."""
    return min(int(node.resources.get(kind, 0) // amount) for kind, amount in needs.items())


def _missing(needs: Resources, num_ranks: int, have: Resources) -> str:
    lacks = {kind: num_ranks * amount - have.get(kind, 0) for kind, amount in needs.items()}
    lacks = {kind: amount for kind, amount in lacks.items() if amount > 0}
    return f"{_amounts(lacks)} missing" if lacks else ""


def _amounts(resources: Resources, times: int = 1) -> str:
    amounts = {kind: times * amount for kind, amount in resources.items()}
    return " and ".join(f"{amount:g} {kind}{'' if amount == 1 else 's'}" for kind, amount in amounts.items())
