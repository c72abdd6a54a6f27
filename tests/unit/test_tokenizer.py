"""Tokens to text: the same text however the tokens are grouped, and never half a character."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Final

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from replica.api.tokenizer import MAX_HELD_TOKENS, ByteDetokenizer, Tokenizer, WindowDetokenizer
from replica.errors import BadRequest, CheckpointError
from tests.commands import DEMO_MODEL

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
HARD_TEXT: Final = (
    "Hi  there\n\n 漢字かな交じり 한국어 "
    "\N{FAMILY}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-6} "
    "e\N{COMBINING ACUTE ACCENT}n\N{COMBINING TILDE} \N{DEVANAGARI LETTER KA}\N{DEVANAGARI SIGN VIRAMA} 1+2=3"
)
WORDS: Final = st.sampled_from(["Hello", " world", "\n", "  ", *HARD_TEXT, "don't", "<think>", "</think>\n\n"])
TEXTS: Final = st.lists(WORDS, max_size=12).map("".join)


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's scheme: U+2581 for spaces, one before the text, and bytes for what is not in the vocabulary."""
    pieces = ["\u2581", "\u2581Hello", "\u2581world", "He", "l", "o", "w", "d", "r", "1", "+", "漢", "\n"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return backend


def wordpiece_like() -> tokenizers.Tokenizer:
    """BERT's scheme: words are joined with spaces, `##` continues one."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "hello", "wor", "##ld", "##s", "!", ",", "漢"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


DEMO: Final = Tokenizer.load(DEMO_MODEL)
TOKENIZERS: Final = {
    "byte level": DEMO,
    "sentencepiece": Tokenizer(sentencepiece_like()),
    "wordpiece": Tokenizer(wordpiece_like()),
}


def pieces_of(tokenizer: Tokenizer, groups: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [ids[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_every_grouping_of_a_texts_tokens_gives_the_text_back(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, grouped(ids, cuts), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_of_any_tokens_does_not_depend_on_their_grouping(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, 700), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    alone = "".join(pieces_of(tokenizer, [[token_id] for token_id in ids]))
    assert "".join(pieces_of(tokenizer, grouped(ids, cuts))) == alone


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=40), skip_special_tokens=st.booleans())
def test_byte_level_pieces_join_to_what_the_tokenizer_decodes(ids: list[int], skip_special_tokens: bool) -> None:
    pieces = pieces_of(DEMO, [[token_id] for token_id in ids], skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == DEMO.decode(ids, skip_special_tokens=skip_special_tokens)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 7), max_size=20))
def test_wordpiece_pieces_join_to_what_the_tokenizer_decodes(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["wordpiece"]
    assert "".join(pieces_of(tokenizer, [[token_id] for token_id in ids])) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_character_split_over_tokens_appears_whole_with_its_last_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a\N{ROCKET}b", add_special_tokens=False)
    pieces = pieces_of(tokenizer, [[token_id] for token_id in ids])
    assert [piece for piece in pieces if piece] == ["a", "\N{ROCKET}", "b"]
    assert len(ids) >= 6  # the rocket has a token for each of its four bytes


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_character_cut_off_by_the_end_shows_as_replacement_only_at_the_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("ab\N{ROCKET}", add_special_tokens=False)[:-1]
    *pieces, last = pieces_of(tokenizer, [[token_id] for token_id in ids])
    assert "".join(pieces) == "ab"
    assert last and set(last) == {REPLACEMENT}


def test_first_space_is_dropped_and_later_ones_are_kept() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello, world = (tokenizer.token_id(f"\u2581{word}") for word in ("Hello", "world"))
    assert hello is not None and world is not None
    assert pieces_of(tokenizer, [[hello], [world], [hello]]) == ["Hello", " world", " Hello", ""]


def test_special_token_between_words_costs_no_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    end = tokenizer.token_id("</s>")
    assert end is not None
    hello, world = (tokenizer.token_id(f"\u2581{word}") for word in ("Hello", "world"))
    assert hello is not None and world is not None
    assert "".join(pieces_of(tokenizer, [[hello], [end], [world]])) == "Hello world"


def test_special_tokens_are_skipped_unless_they_are_asked_for() -> None:
    ids = DEMO.encode("a<|im_end|>b</think>", add_special_tokens=False)
    assert "".join(pieces_of(DEMO, [ids])) == "ab</think>"
    assert "".join(pieces_of(DEMO, [ids], skip_special_tokens=False)) == "a<|im_end|>b</think>"


def test_bytes_that_never_become_text_are_not_held_for_ever() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    invalid = tokenizer.token_id("<0xFF>")
    assert invalid is not None
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([invalid]) for _ in range(3 * MAX_HELD_TOKENS)]
    assert sum(bool(piece) for piece in pieces) >= 2


def test_byte_level_is_told_apart_from_other_decoders() -> None:
    assert isinstance(DEMO.detokenizer(), ByteDetokenizer)
    assert isinstance(TOKENIZERS["sentencepiece"].detokenizer(), WindowDetokenizer)
    alone = sentencepiece_like()
    alone.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert isinstance(Tokenizer(alone).detokenizer(), ByteDetokenizer)


def test_lone_surrogate_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match=r"lone surrogate \(U\+D83D\) at character 2"):
        DEMO.encode("ab\ud83d", add_special_tokens=False)


async def test_long_text_is_encoded_while_the_event_loop_goes_on() -> None:
    text = "hello world 123 " * 20_000
    encoding = asyncio.create_task(DEMO.encode_off_loop(text, add_special_tokens=False))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns >= 10  # a text that blocked the loop would leave one or two
    assert encoding.result() == DEMO.encode(text, add_special_tokens=False)


def test_missing_and_damaged_tokenizer_files_are_checkpoint_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
