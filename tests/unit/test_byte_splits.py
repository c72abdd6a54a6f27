"""However the bytes of an answer are spread over tokens, what it says is the same.

A model may write any text in many ways: by the tokens that its tokenizer would choose, or byte by byte. The demo
model's vocabulary has every single byte, so any split that a model could make can be made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.fake_loop import MODEL
from tests.unit.test_choice import CALL, PARTS, encode, make, run

TOKENIZER: Final = MODEL.tokenizer
# The bytes of a token -> the token; of special ones only those that the model's answers have in them.
BY_BYTES: Final = {
    raw: i for i in range(MODEL.vocab_size) if (raw := TOKENIZER.token_text(i)[1]) and i not in MODEL.end_token_ids
}
LONGEST: Final = max(map(len, BY_BYTES))
TEXTS: Final = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=8).map("".join)
SHORT_TEXTS: Final = [
    *("\N{ROCKET}", "e\N{COMBINING ACUTE ACCENT}", "漢字", "\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-6}"),
    *("한", "سل", "\N{DEVANAGARI LETTER KA}\N{DEVANAGARI SIGN VIRAMA}", "a\N{ZERO WIDTH JOINER}b"),
]


def splits(raw: bytes) -> Iterator[list[int]]:
    """Every way to write these bytes in tokens."""
    if not raw:
        yield []
    for length in range(1, min(LONGEST, len(raw)) + 1):
        token_id = BY_BYTES.get(raw[:length])
        if token_id is not None:
            for rest in splits(raw[length:]):
                yield [token_id, *rest]


def drawn_split(data: st.DataObject, raw: bytes) -> list[int]:
    """One way to write these bytes in tokens."""
    token_ids: list[int] = []
    at = 0
    while at < len(raw):
        lengths = [n for n in range(1, min(LONGEST, len(raw) - at) + 1) if raw[at : at + n] in BY_BYTES]
        length = data.draw(st.sampled_from(lengths))
        token_ids.append(BY_BYTES[raw[at : at + length]])
        at += length
    return token_ids


def test_every_single_byte_is_a_token() -> None:
    assert all(bytes([byte]) in BY_BYTES for byte in range(256))


@pytest.mark.parametrize("text", SHORT_TEXTS)
def test_every_split_of_a_short_text_gives_the_text(text: str) -> None:
    ways = list(splits(text.encode()))
    assert [BY_BYTES[bytes([byte])] for byte in text.encode()] in ways
    for token_ids in ways:
        assert run(make(is_chat=False), token_ids, [1] * len(token_ids)).said.content == text


@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=TEXTS, stops=st.sampled_from([(), ("stop",), ("st", "\n\n", "字", "\N{ROCKET}")]))
def test_every_split_of_an_answer_says_the_same(data: st.DataObject, text: str, stops: tuple[str, ...]) -> None:
    token_ids = drawn_split(data, text.encode())
    expected = run(make(stops), encode(text), [])
    whole = run(make(stops), token_ids, data.draw(st.lists(st.integers(1, 9), max_size=20)))
    assert (whole.reasoning, whole.said) == (expected.reasoning, expected.said)
    assert (whole.finish_reason, whole.stopped_by) == (expected.finish_reason, expected.stopped_by)


def test_call_of_a_tool_written_byte_by_byte_is_a_call() -> None:
    token_ids = [BY_BYTES[bytes([byte])] for byte in f"<think>hm</think>{CALL}".encode()]
    whole = run(make(), token_ids, [])
    assert (whole.said.content, whole.reasoning) == ("", "hm")
    assert [(call.name, call.arguments) for call in whole.said.calls] == [("f", '{"x": "\N{ROCKET}"}')]
