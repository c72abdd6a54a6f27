"""Masks that fail or come late end their own sequence, each in its own way; the others get theirs."""

from __future__ import annotations

import threading

import pytest

from replica.constraints import MaskFiller
from replica.request import Constraint, ConstraintFailed, FinishReason, SamplingParams, Sequence


class Mask:
    """A constraint that gives this mask, or raises, perhaps after something else."""

    def __init__(self, result: bytes | Exception, after: threading.Event | None = None) -> None:
        self._result, self._after = result, after

    def mask(self, output_ids: list[int], banned_ids: frozenset[int]) -> bytes | None:
        if self._after is not None:
            self._after.wait(10)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def sequence(constraint: Constraint | None) -> Sequence:
    params = SamplingParams(max_tokens=5, seed=0)
    return Sequence(request_id="r", choice=0, prompt_ids=[1], params=params, constraint=constraint)


async def test_each_constrained_sequence_gets_its_mask() -> None:
    masked, free = sequence(Mask(b"\x01")), sequence(None)
    assert await MaskFiller().fill([masked, free]) == []
    assert (masked.mask, free.mask) == (b"\x01", None)


async def test_grammar_that_fails_would_fail_elsewhere_and_says_what_to_do() -> None:
    failing, other = sequence(Mask(ConstraintFailed("too wide"))), sequence(Mask(b"\x01"))
    assert await MaskFiller().fill([failing, other]) == [
        (
            failing,
            FinishReason.ERROR,
            "the answer cannot follow its grammar any further, ask for a simpler one: too wide",
        )
    ]
    assert other.mask == b"\x01"


async def test_mask_that_is_late_is_this_machines_fault_and_can_go_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replica.constraints.MASK_DEADLINE_S", 0.2)
    release = threading.Event()
    late, other = sequence(Mask(b"\x02", after=release)), sequence(Mask(b"\x01"))
    try:
        assert await MaskFiller().fill([late, other]) == [
            (late, FinishReason.LOST, "the grammar's next tokens were not known after 0.2 s")
        ]
    finally:
        release.set()
    assert other.mask == b"\x01" and late.mask is None
