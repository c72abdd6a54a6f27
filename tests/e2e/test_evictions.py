"""Groups that lose replicas in the middle of their sequences go on with the logits of one rank; and the check can fail.

`make layouts` checks all layouts. The ranks are threads; tests/e2e/test_regroup.py has processes that die.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch

from replica.layers import DenseMlp, ExpertMlp
from replica.layout import Layout
from replica.weights import WeightReader
from tests.layout_cases import CASES, Checked
from tests.layout_driver import Evictions

LOSSES: Final[dict[str, tuple[Layout, Evictions]]] = {
    "half of two": (Layout.resolve(dp=2, tp=2), [(0,)]),
    "one of three, then another": (Layout.resolve(dp=3, tp=3), [(1,), (0,)]),
    "two of three replicas of two ranks": (Layout.resolve(dp=3, tp=6, ep=3), [(0, 2)]),
    "a whole narrow group, then half of the other": (Layout.resolve(dp=4, mlp_tp=4, moe_tp=2, ep=1), [(0, 1), (3,)]),
    "experts of another ep rank": (Layout.resolve(dp=2, tp=4, moe_tp=2, ep=2), [(1,)]),
    "one of a wide MLP": (Layout.resolve(dp=4, mlp_tp=4, moe_tp=1, ep=2), [(2,)]),
}
ALL: Final = tuple(LOSSES)
RUNS: Final = [
    *(("random float32", name) for name in ALL),
    *(("random FP8", name) for name in ALL[1:5]),
    *(("demo bfloat16", name) for name in ALL[1:3]),
]


@pytest.fixture(scope="module", params=dict.fromkeys(case for case, _ in RUNS))
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    torch.set_num_threads(1)
    return Checked(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(("checked", "name"), RUNS, indirect=["checked"])
def test_survivors_go_on_with_the_logits_and_tokens_of_one_rank(checked: Checked, name: str) -> None:
    layout, evicted = LOSSES[name]
    checked.run_in_threads(layout, evicted=evicted)


@pytest.mark.parametrize("kind", [ExpertMlp, DenseMlp])
def test_blocks_that_nobody_takes_over_are_noticed(
    kind: type[ExpertMlp] | type[DenseMlp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over = kind.take_over

    def only_at_the_start(mlp: ExpertMlp | DenseMlp, weights: WeightReader) -> None:
        if not mlp.parts:
            take_over(mlp, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "take_over", only_at_the_start)
    layout, evicted = LOSSES["half of two"]
    checked = Checked(CASES["random float32"], tmp_path)
    with pytest.raises(AssertionError, match="bound"):
        checked.run_in_threads(layout, evicted=evicted)
