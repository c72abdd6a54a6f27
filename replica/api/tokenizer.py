"""Text <-> token ids with the `tokenizers` package alone, and the incremental way back from tokens to text.

A stream's text must not depend on how its tokens were grouped, and a character whose bytes are spread over tokens must
never show as U+FFFD. A byte-level tokenizer (GPT-2's scheme: Qwen, Llama 3, ...) makes that exact: every token stands
for bytes, so an incremental UTF-8 decoder does it. Other decoders look at their neighbours (SentencePiece drops the
first space of a text, WordPiece joins its pieces), so there each token is decoded with those before it as context.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import tokenizers

from replica.errors import BadRequest, CheckpointError

LONG_TEXT_CHARS: Final = 4096  # encoding takes about 1 ms from here on, so it goes to a thread
MAX_HELD_TOKENS: Final = 16  # a character has 4 bytes, so what is still no text after so many tokens never will be
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text, as they come. The joined text does not depend on the grouping."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; what may still change with the next token is held back."""

    def flush(self) -> str:
        """What is held back, at the end: U+FFFD for a character that was cut off."""


class Tokenizer:
    """The tokenizer of a checkpoint."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._bytes_by_id = _byte_level_vocabulary(backend)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `folder`/tokenizer.json. Raises CheckpointError."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no tokenizer.json; save it with a fast tokenizer") from None
        except (OSError, ValueError) as err:
            raise CheckpointError(f"cannot read {path}: {err}") from err
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as err:  # the Rust side raises plain Exception for whatever it cannot parse
            raise CheckpointError(f"cannot read {path}: {err}") from err

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text and as bytes; text that is no whole characters has U+FFFD in it."""
        if self._bytes_by_id is not None:
            raw = self._bytes_by_id.get(token_id, b"")
            return raw.decode(errors="replace"), raw
        text = self.decode([token_id], skip_special_tokens=False)
        return text, text.encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token spelled exactly so."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole token list. Ids outside the vocabulary are no text."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text; `add_special_tokens` lets the tokenizer put its own around it, such as a leading BOS.

        Raises BadRequest for a text that is no Unicode.
        """
        if not text.isascii():
            _check_unicode(text)
        # Of all encode functions only the batch ones let other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    async def encode_off_loop(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`encode`, in a thread when the text is long, so that the event loop goes on."""
        if len(text) < LONG_TEXT_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental detokenizer for one choice."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._bytes_by_id is not None:
            return ByteDetokenizer(self._bytes_by_id, skipped)
        return WindowDetokenizer(self._backend, skipped)


class ByteDetokenizer:
    """For byte-level tokenizers: each token is some bytes, whatever stands beside it."""

    def __init__(self, bytes_by_id: dict[int, bytes], skipped: frozenset[int]) -> None:
        self._bytes_by_id = bytes_by_id
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """See Detokenizer."""
        bytes_by_id, skipped = self._bytes_by_id, self._skipped
        return self._utf8.decode(b"".join([bytes_by_id.get(i, b"") for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: what a token adds is the difference that it makes to a window of the last tokens.

    `_window` holds the tokens of the last emitted piece (`_window[:_emitted]`, the context) and those held back.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._window: list[int] = []
        self._emitted = 0  # tokens of the window whose text is out
        self._context = ""  # their text, when decoded alone

    def push(self, token_ids: Iterable[int]) -> str:
        """See Detokenizer."""
        # One by one: a window that depended on the grouping would make the text depend on it.
        return "".join([self._push_one(i) for i in token_ids if i not in self._skipped])

    def flush(self) -> str:
        """See Detokenizer."""
        return self._advance(self._text(self._window))

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text(self._window)
        num_held = len(self._window) - self._emitted
        if num_held < MAX_HELD_TOKENS and (text.endswith(REPLACEMENT) or len(text) <= len(self._context)):
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        """Emits what the held tokens add to the window's `text`; they become the context."""
        piece = text[len(self._context) :]
        del self._window[: self._emitted]
        self._emitted = len(self._window)
        self._context = self._text(self._window)
        return piece

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text


def _byte_level_vocabulary(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """The bytes of each token id, or None when the decoder is not byte-level."""
    decoder: dict[str, Any] = json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    if decoder.get("type") != "ByteLevel":
        return None
    alphabet = _byte_level_alphabet()
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    by_id: dict[int, bytes] = {}
    for token, token_id in vocabulary.items():
        try:
            by_id[token_id] = bytes([alphabet[char] for char in token])
        except KeyError:  # a token spelled outside the alphabet, as added ones may be, stands for itself
            by_id[token_id] = token.encode()
    return by_id


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's 256 characters and the bytes they stand for: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise BadRequest(
            f"the prompt holds a lone surrogate (U+{ord(text[err.start]):04X}) at character {err.start}, "
            "which is no Unicode text; send surrogates in pairs"
        ) from err
