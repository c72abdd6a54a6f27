"""Ranks on a Ray cluster of two nodes: the right tokens, and a group that survives the loss of an actor.

`make ray` holds the whole accuracy check (RAY_QUESTIONS) and takes a node away, too.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.commands import BIN, DEMO_MODEL, Commands, free_port, wait_until
from tests.e2e.cluster import num_live
from tests.e2e.test_accuracy import Ties, ask_all, check_end, check_is_greedy, prompt_ids
from tests.faults.survival import CRASH_PAUSE_S, Group, kill, under_load, wait_gone
from tests.ray_cluster import SECOND_NODE, RayCluster, ray_cluster

pytest.importorskip("ray", reason="ray is not installed")

NUM_QUESTIONS: Final = int(os.environ.get("RAY_QUESTIONS", "24"))
SEED: Final = 7
RANK: Final = re.compile(r"rank placed rank=(\d+) node=(\S+) pid=(\d+)")
SERVE: Final = ("--executor", "ray", "--dtype", "float32", "--kv-cache-gb", "0.1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes, of which the first has room for three ranks."""
    with ray_cluster(tmp_path_factory.mktemp("ray"), head_cpus=3, second_cpus=1) as running:
        yield running


def refused(*options: str) -> str:
    """What a command says that does not start: one line, with exit code 2."""
    argv = [str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0", *SERVE, *options]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


def ranks_of(group: Group) -> dict[int, tuple[str, int]]:
    """The node and the process of each rank."""
    return {int(rank): (node, int(pid)) for rank, node, pid in RANK.findall(group.log())}


@pytest.mark.timeout(1800)  # with all questions, on a busy machine
async def test_answers_are_those_of_transformers_and_outlive_an_actor(
    cluster: RayCluster, commands: Commands, corpus: ModuleType
) -> None:
    proxy = commands.proxy()
    options = ("--port", "0", "--proxy-url", proxy.url, *SERVE, "--ray-address", cluster.address)
    group = Group(commands.group(*options))
    ranks = ranks_of(group)
    (far,) = (rank for rank, (node, _) in ranks.items() if node == SECOND_NODE)
    assert len(ranks) == 4, "a replica spans both nodes"

    wait_until(lambda: num_live(proxy.url) == 2, "2 replicas at the proxy")
    rng = random.Random(SEED)
    samples = [corpus.draw(rng) for _ in range(NUM_QUESTIONS)]
    answers = await ask_all(proxy.url, samples)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ties = Ties()
    for sample, answer in zip(samples, answers, strict=True):
        assert answer.prompt_ids == prompt_ids(tokenizer, sample)
        check_is_greedy(model, answer, ties)
        check_end(answer, set(model.generation_config.eos_token_id))
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"\n{NUM_QUESTIONS} questions, {num_tokens} tokens as transformers, {ties.seen} near ties")

    lost = group.replicas[far // 2]
    with under_load(group) as load:
        kill(ranks[far][1])
        load.check_survivors("loss of an actor", [lost], limit_s=CRASH_PAUSE_S)
        load.check_lost([lost])
    wait_gone(
        [lost.engine_pid, *(pid for rank, (_, pid) in ranks.items() if rank // 2 == lost.dp_rank)],
        "the end of the replica whose actor was killed, and of its other actors",
    )
    assert group.commands[0].stop() == 0
    wait_gone([pid for _, pid in ranks.values()], "the end of all actors")


def test_what_cannot_be_placed_is_refused_in_one_line(cluster: RayCluster) -> None:
    too_large = ("--tp", "4", "--num-threads", "2", "--ray-address", cluster.address)
    assert "--dp 1 --tp 4 --executor ray needs 8 CPUs, the Ray cluster has 4 CPUs: 4 CPUs missing" in refused(
        *too_large
    )
    nobody = f"127.0.0.1:{free_port()}"
    assert f"the Ray cluster at {nobody} (--ray-address) cannot be used" in refused("--ray-address", nobody)


@pytest.mark.timeout(300)
@pytest.mark.skipif("RAY_QUESTIONS" not in os.environ, reason="make ray")
def test_a_group_outlives_a_node(cluster: RayCluster, commands: Commands) -> None:
    group = Group(commands.group("--port", "0", *SERVE, "--ray-address", cluster.address))
    (far,) = (rank for rank, (node, _) in ranks_of(group).items() if node == SECOND_NODE)
    lost = group.replicas[far // 2]
    with under_load(group) as load:
        cluster.kill_second()
        load.check_survivors("loss of a node", [lost], limit_s=CRASH_PAUSE_S)
        load.check_lost([lost])
    wait_gone([lost.engine_pid], "the end of the replica that had a rank on the node")
