"""The scheduler under random events: whatever happens, all sequences end with their own tokens, and nothing leaks.

`SCHEDULER_EXAMPLES=10000` asks for more than CI does.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduler_trial import Limits, Step, Trial

NUM_EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES", "400"))
NUM_SEEDS = NUM_EXAMPLES // 50

LIMITS = st.builds(
    Limits,
    num_blocks=st.integers(1, 14),
    max_num_seqs=st.integers(1, 5),
    max_tokens=st.integers(1, 12),
    max_prefill_tokens=st.none() | st.integers(1, 6),
    has_prefix_cache=st.booleans(),
)
# Of three texts, so that many begin alike, with a tail of their own. Of one text all blocks are alike.
PROMPTS = st.builds(
    lambda text, shared, tail: [1000 * text + i * (text - 1) for i in range(shared)] + tail,
    st.integers(1, 3),
    st.integers(0, 24),
    st.lists(st.integers(100, 102), min_size=1, max_size=6),
)
ADDS = st.tuples(st.just("add"), PROMPTS, st.integers(1, 12), st.integers(-1, 1), st.booleans())
ABORTS = st.tuples(st.just("abort"), st.integers(0, 20))
STEPS = st.tuples(
    st.just("step"),
    st.builds(
        Step,
        is_withheld=st.sampled_from((False, False, False, True)),
        schedules_ahead=st.booleans(),
        aborted=st.none() | st.none() | st.integers(0, 20),
        is_taken_back=st.sampled_from((False, False, False, True)),
        others_decode=st.booleans(),
    ),
)


@pytest.mark.timeout(60 + NUM_EXAMPLES)
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(limits=LIMITS, events=st.lists(ADDS | STEPS | STEPS | ABORTS, max_size=60))
def test_whatever_happens_every_sequence_ends_with_its_own_tokens(limits: Limits, events: list[tuple]) -> None:
    trial = Trial(limits)
    for kind, *what in events:
        if kind == "add":
            prompt_ids, max_tokens, priority, echoes = what
            trial.add(prompt_ids, max_tokens, priority=priority, echoes=echoes)
        elif kind == "abort":
            trial.abort(what[0])
        else:
            trial.step(what[0])
    trial.finish()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_long_crowd_with_shared_beginnings_ends_with_its_own_tokens(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(
        num_blocks=rng.choice([12, 30, 200]),
        max_num_seqs=rng.choice([2, 8, 20]),
        max_tokens=rng.choice([8, 24, 64]),
        max_prefill_tokens=rng.choice([None, 4, 16]),
        has_prefix_cache=rng.random() < 0.8,
    )
    trial = Trial(limits)
    texts = [[rng.randrange(100, 200) for _ in range(40)] for _ in range(4)]
    for _ in range(150):
        for _ in range(rng.choice([0, 0, 1, 3])):
            prompt_ids = [*rng.choice(texts)[: rng.randrange(40)], rng.randrange(100, 200)]
            trial.add(prompt_ids, rng.randrange(1, 30), priority=rng.choice([0, 0, 0, 1]), echoes=rng.random() < 0.1)
        if rng.random() < 0.1:
            trial.abort(rng.randrange(1000))
        trial.step(
            Step(
                is_withheld=rng.random() < 0.1,
                schedules_ahead=rng.random() < 0.7,
                aborted=rng.randrange(1000) if rng.random() < 0.05 else None,
                is_taken_back=rng.random() < 0.05,
                others_decode=rng.random() < 0.3,
            )
        )
    trial.finish()
