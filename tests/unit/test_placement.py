"""Which node of a Ray cluster a replica goes to, and what is said when there is not enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.layout import Layout
from replica.placement import Node, check_size, home, not_placed, rank_needs

CPU_RANK = {"CPU": 1}
GPU_RANK = {"CPU": 1, "GPU": 1}


def nodes(*sizes: float, kind: str = "GPU") -> list[Node]:
    """Nodes of so many devices, each with 64 CPUs."""
    return [
        Node(address=f"10.0.0.{number}", resources={"CPU": 64, "memory": 1e12, **({kind: size} if size else {})})
        for number, size in enumerate(sizes)
    ]


def config_of(*, dp: int, tp: int, nnodes: int = 1, node_rank: int = 0) -> ReplicaConfig:
    several = {"master_port": 7000, "group_secret": "a secret of 16 bytes"} if nnodes > 1 else {}
    return ReplicaConfig(
        model=Path("m"), layout=Layout.resolve(dp=dp, tp=tp, nnodes=nnodes), node_rank=node_rank, **several
    )


def homes(config: ReplicaConfig, cluster: list[Node], own: str = "10.0.0.0") -> list[str | None]:
    """Of each of the command's replicas."""
    return [home(replace(config, dp_rank=rank), GPU_RANK, cluster, own) for rank in config.local_dp_ranks]


def test_a_rank_reserves_its_gpu_or_its_threads() -> None:
    config = config_of(dp=1, tp=1)
    assert rank_needs(config, "cuda") == GPU_RANK
    assert rank_needs(config, "cpu") == CPU_RANK
    assert rank_needs(replace(config, num_threads=8), "cpu") == {"CPU": 8}


def test_replicas_are_dealt_out_evenly_over_nodes_that_hold_them_whole() -> None:
    assert homes(config_of(dp=4, tp=8), nodes(4, 8)) == ["10.0.0.1", "10.0.0.1", "10.0.0.0", "10.0.0.1"]
    assert homes(config_of(dp=2, tp=8), nodes(8, 8)) == ["10.0.0.0", "10.0.0.1"]
    assert homes(config_of(dp=2, tp=8), nodes(0, 4, 4)) == ["10.0.0.1", "10.0.0.2"], "a head without devices"


def test_ray_packs_all_where_one_replica_fits_no_node() -> None:
    assert homes(config_of(dp=2, tp=8), nodes(6, 2)) == [None, None]
    assert homes(config_of(dp=1, tp=8), nodes(4, 4)) == [None]


def test_each_machine_of_several_keeps_its_replicas_if_they_fit() -> None:
    config = config_of(dp=4, tp=8, nnodes=2, node_rank=1)
    assert homes(config, nodes(4, 4), own="10.0.0.1") == ["10.0.0.1", "10.0.0.1"]
    assert homes(config, nodes(8, 2), own="10.0.0.1") == [None, None]
    assert homes(config, nodes(8, 8), own="10.9.9.9") == [None, None], "a machine that is no node"


def test_a_group_larger_than_the_cluster_is_told_how_much_is_missing() -> None:
    config = config_of(dp=2, tp=8)
    check_size(config, GPU_RANK, nodes(4, 4))
    with pytest.raises(ConfigError) as raised:
        check_size(config, GPU_RANK, nodes(4, 1))
    assert str(raised.value) == (
        "--dp 2 --tp 8 --executor ray needs 8 CPUs and 8 GPUs, the Ray cluster has 128 CPUs and 5 GPUs: "
        "3 GPUs missing; add nodes or make the layout smaller"
    )


def test_ranks_for_which_nothing_is_free_are_told_what_is_missing() -> None:
    config = config_of(dp=2, tp=8)
    assert "4 CPUs and 4 GPUs, of which the Ray cluster had not enough free for 30 s: 4 CPUs and 1 GPU missing" in str(
        not_placed(config, GPU_RANK, {"GPU": 3}, 30)
    )
    assert "for 30 s: they are on too many nodes" in str(not_placed(config, CPU_RANK, {"CPU": 4.0}, 30))
