"""Layouts of real processes, connected by TCP, compute what one rank does; and the check of it can fail.

`make layouts` checks all layouts, with threads for ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import pytest
import torch
from torch import Tensor

from replica.frames import StepInput
from replica.groups import Group, Groups
from replica.layout import Layout
from replica.model_config import ModelConfig
from replica.shards import weight_bytes
from replica.tensor_specs import tensor_specs
from tests import layout_driver
from tests.layout_cases import CASES, Checked
from tests.layout_processes import RankProcesses, rank_processes
from tests.step_driver import RankModel

LAYOUTS: Final = {
    "dp 1 tp 2": Layout.resolve(tp=2),
    "dp 2 tp 2": Layout.resolve(dp=2, tp=2),
    "dp 3 tp 3": Layout.resolve(dp=3, tp=3),
    "dp 1 tp 4, attention 4": Layout.resolve(tp=4),
    "dp 2 tp 4, MLP 4, MoE 2": Layout.resolve(dp=2, mlp_tp=4, moe_tp=2, ep=1),
    "dp 2 tp 4, MLP 1": Layout.resolve(dp=2, tp=4, mlp_tp=1),
    "dp 4 tp 4": Layout.resolve(dp=4, tp=4),
    "dp 2, ep 2 x moe_tp 2": Layout.resolve(dp=2, tp=4, moe_tp=2, ep=2),
    "dp 3 tp 6, ep 3": Layout.resolve(dp=3, tp=6, ep=3),
    "dp 4 tp 8, MLP 2, ep 8": Layout.resolve(dp=4, tp=8, mlp_tp=2, ep=8),
}
ALL: Final = tuple(LAYOUTS)
MIXED: Final = ("dp 2 tp 4, MLP 4, MoE 2", "dp 2, ep 2 x moe_tp 2")
RUNS: Final = [
    *(("demo float32", name) for name in ALL),
    *(("demo FP8 float32", name) for name in MIXED),
    *(("demo bfloat16", name) for name in MIXED),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(max(layout.world for layout in LAYOUTS.values())) as processes:
        yield processes


@pytest.fixture(scope="module", params=dict.fromkeys(case for case, _ in RUNS))
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    torch.set_num_threads(1)
    return Checked(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    torch.set_num_threads(1)
    return Checked(CASES["demo float32"], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(("checked", "name"), RUNS, indirect=["checked"])
def test_ranks_in_processes_give_the_logits_and_tokens_of_one_rank(
    checked: Checked, name: str, processes: RankProcesses
) -> None:
    layout = LAYOUTS[name]
    script = checked.script(layout)
    results = processes.run(checked.folder, layout, script, checked.case.dtype, checked.pinned)
    checked.check(layout, script, [result.logits for result in results])
    config = ModelConfig.load(checked.folder)
    specs = tensor_specs(config, str(checked.case.dtype).removeprefix("torch."))
    planned = [sum(kinds.values()) for kinds in weight_bytes(config, layout, specs)]
    assert [result.weight_bytes for result in results] == planned
    assert len({result.num_collectives for result in results}) == 1  # idle replicas take part in every one


def test_a_sum_over_the_wrong_group_is_noticed(float32: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' parts are summed over the MLP's group, half of the ranks that have them."""
    monkeypatch.setattr(Groups, "connect", with_groups(lambda groups: replace(groups, moe=groups.mlp)))
    with pytest.raises(AssertionError, match="bound"):
        check_in_threads(float32, Layout.resolve(dp=4, mlp_tp=2, moe_tp=4, ep=1))


def test_a_sum_that_is_left_out_is_noticed(float32: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_part(group: Group, x: Tensor, rows: Sequence[int]) -> Tensor:
        start = sum(rows[: group.position])
        return x[start : start + rows[group.position]]

    monkeypatch.setattr(Group, "reduce_scatter", own_part)
    with pytest.raises(AssertionError, match="bound"):
        check_in_threads(float32, Layout.resolve(dp=2, tp=2))


def test_a_replica_that_leaves_out_its_empty_steps_is_noticed(
    float32: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = RankModel.forward

    def early_return(model: RankModel, frame: StepInput, groups: Groups) -> Tensor:
        if not len(frame.token_ids):
            return torch.zeros(0, model.config.vocab_size)
        return forward(model, frame, groups)

    monkeypatch.setattr(RankModel, "forward", early_return)
    monkeypatch.setattr(layout_driver, "DEADLINE_S", 1.0)
    # The others pair their collective with the replica's next one, of other sizes, or wait for it in vain.
    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        check_in_threads(float32, Layout.resolve(dp=2, tp=2))


def check_in_threads(checked: Checked, layout: Layout) -> None:
    """As `make layouts` does it."""
    checked.run_in_threads(layout)


def with_groups(change: Callable[[Groups], Groups]) -> Callable[..., Groups]:
    """Groups.connect, with a mistake."""
    connect = Groups.connect
    return lambda *args: change(connect(*args))
