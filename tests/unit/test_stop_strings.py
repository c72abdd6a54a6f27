"""A text ends at its first stop string, no part of which is ever seen, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.api.stop_strings import StopStrings

LETTERS = st.text("ab\N{ROCKET}", max_size=12)


def ended(text: str, stops: tuple[str, ...], *, keeps: bool) -> tuple[str, str | None]:
    """The rule, said without pieces: the first to be complete, of those the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if keeps else end - len(stop)], stop
    return text, None


@given(LETTERS, st.lists(LETTERS.filter(bool), min_size=1, max_size=4), st.lists(st.integers(1, 4)), st.booleans())
def test_pieces_make_no_difference(text: str, stops: list[str], cuts: list[int], keeps: bool) -> None:
    stopper, rest, said = StopStrings(tuple(stops), keeps=keeps), text, ""
    for size in [*cuts, *[1] * len(text)]:
        piece, rest = rest[:size], rest[size:]
        if stopper.found is None:
            said += stopper.push(piece)
            assert ended(text, tuple(stops), keeps=keeps)[0].startswith(said)
    if stopper.found is None:
        said += stopper.flush()
    assert (said, stopper.found) == ended(text, tuple(stops), keeps=keeps)


def test_stop_string_over_pieces_is_held_back_until_it_is_decided() -> None:
    stopper = StopStrings(("\n\nQ:",), keeps=False)
    assert [stopper.push(piece) for piece in ("a\n", "b\n", "\nQ", "x", "\n\nQ", ":c")] == [
        *("a", "\nb", "", "\n\nQx", "", ""),
    ]
    assert stopper.found == "\n\nQ:"


@pytest.mark.parametrize(("keeps", "said"), [(True, "one two"), (False, "one ")])
def test_stop_string_stays_on_request(keeps: bool, said: str) -> None:
    assert StopStrings(("two",), keeps=keeps).push("one two three") == said


def test_stop_string_that_ends_where_none_counts_is_none() -> None:
    stopper = StopStrings(("ab",), keeps=False)
    assert stopper.push("ab", counts=False) + stopper.push("a", counts=False) == "ab"
    assert stopper.push("b") == "" and stopper.found == "ab"
