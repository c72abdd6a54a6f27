"""Every valid layout of 1, 2, 3, 4, 6 and 8 ranks computes what one rank does: `make layouts`.

The ranks are threads here, and what they send each other goes through memory; tests/e2e/test_layout_processes.py has
some of the layouts with real processes.
"""

from __future__ import annotations

import pytest
import torch

from replica.layout import valid_layouts
from replica.model_config import ModelConfig
from tests.layout_cases import CASES, WORLDS, Checked
from tests.layout_driver import run_in_threads


@pytest.fixture(scope="module", params=[name for name in CASES if name != "demo FP8 float32"])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    torch.set_num_threads(1)
    return Checked(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
def test_every_valid_layout_gives_the_logits_and_tokens_of_one_rank(
    checked: Checked, world: int, request: pytest.FixtureRequest
) -> None:
    layouts = list(valid_layouts(world, ModelConfig.load(checked.folder)))
    for seed, layout in enumerate(layouts):
        script = checked.script(layout, seed)
        checked.check(
            layout, script, run_in_threads(checked.folder, layout, script, checked.case.dtype, checked.pinned)
        )
    print(f"{len(layouts)} layouts of {world} ranks, {checked.report(request.node.name)}")
