"""Reasoning apart from content, the same however the text is cut."""

from __future__ import annotations

import itertools
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.api.reasoning import ReasoningSplitter, Split, is_opened_by

PIECES: Final = st.sampled_from(["<think>", "</think>", "<", "think>", "</", "</thin", "\n", "\n\n", " ", "a", "yes\n"])


def split(pieces: list[str], *, opened: bool = False) -> Split:
    splitter = ReasoningSplitter(opened=opened)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return Split("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n <think>hm</think>yes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes\n", True, "hm", "yes\n"),
        ("\nhm\n\nmore\n\n</think>yes", True, "hm\n\nmore", "yes"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("yes", False, "", "yes"),
        (" \n yes", False, "", " \n yes"),
        ("<thing> is no tag", False, "", "<thing> is no tag"),
        ("<thin", False, "", "<thin"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("yes</think>", False, "", "yes</think>"),
        ("<think>cut off\n", False, "cut off", ""),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("", True, "", ""),
        ("  ", False, "", "  "),
    ],
)
def test_answer_is_split_at_its_tags(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split([text], opened=opened) == Split(reasoning, content)
    assert split(list(text), opened=opened) == Split(reasoning, content)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), cuts=st.lists(st.integers(0, 40), max_size=8), opened=st.booleans())
def test_every_cut_of_an_answer_gives_the_same_split(pieces: list[str], cuts: list[int], opened: bool) -> None:
    text = "".join(pieces)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    cut = [text[start:end] for start, end in itertools.pairwise(ends)]
    assert split(cut, opened=opened) == split([text], opened=opened)


def test_text_is_passed_on_as_soon_as_it_is_decided() -> None:
    splitter = ReasoningSplitter(opened=False)
    assert splitter.push("<thi") == Split()
    assert splitter.push("nk>\nso") == Split(reasoning="so")
    assert splitter.push(" far\n</") == Split(reasoning=" far")
    assert splitter.push("b>") == Split(reasoning="\n</b>")
    assert splitter.push("\n</think>\n") == Split()
    assert splitter.push("yes") == Split(content="yes")
    assert splitter.push("</think>") == Split(content="</think>")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_prompt_says_whether_it_has_opened_the_reasoning(prompt: str, opened: bool) -> None:
    assert is_opened_by(prompt) is opened
