"""Every valid layout of 1, 2, 3, 4, 6 and 8 ranks computes what one rank does, whatever it loses: `make layouts`.

The ranks are threads here, and what they send each other goes through memory; tests/e2e/test_layout_processes.py has
some of the layouts with real processes.
"""

from __future__ import annotations

import pytest
import torch

from replica.layout import valid_layouts
from tests.layout_cases import CASES, WORLDS, Checked, evictions


@pytest.fixture(scope="module", params=[name for name in CASES if name != "demo FP8 float32"])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    torch.set_num_threads(1)
    return Checked(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
def test_every_valid_layout_gives_the_logits_and_tokens_of_one_rank(
    checked: Checked, world: int, request: pytest.FixtureRequest
) -> None:
    layouts = list(valid_layouts(world, checked.config))
    for seed, layout in enumerate(layouts):
        checked.run_in_threads(layout, seed)
    print(f"{len(layouts)} layouts of {world} ranks, {checked.report(request.node.name)}")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [world for world in WORLDS if world > 1])
def test_every_valid_layout_that_loses_replicas_goes_on_with_the_logits_and_tokens_of_one_rank(
    checked: Checked, world: int, request: pytest.FixtureRequest
) -> None:
    runs = [
        (layout, seed, evicted)
        for seed, layout in enumerate(valid_layouts(world, checked.config))
        for evicted in evictions(layout, seed)
        if evicted
    ]
    for layout, seed, evicted in runs:
        checked.run_in_threads(layout, seed, evicted)
    print(f"{len(runs)} losses of {world} ranks, {checked.report(request.node.name)}")
