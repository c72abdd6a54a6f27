"""What many users ask of a replica, good and bad, drawn from a seed; and a client that asks it over a bare socket.

The client knows just enough HTTP to find the end of an answer, so that it costs little beside the server.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from tests.fuzz import mutated
from tests.request_bodies import TOOL, USER

CHAT: Final = "/v1/chat/completions"
SYSTEM: Final = [f"You are assistant {i}. " + "Answer in few words, and be polite. " * 12 for i in range(6)]
WORDS: Final = "one two three plus minus times is what how many 7 12 40 sum of and \N{ROCKET} é 漢字".split()
STOPS: Final = ["yes", "END", "\n\n", "7"]
PAUSE_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how long its client stays."""

    path: str
    body: bytes
    sent_share: float = 1.0  # of its body; with less than 1 the client leaves in the middle of that
    leaves_after_bytes: int | None = None  # of the answer; None stays to the end


def draw_ask(draw: random.Random, *, max_tokens: int) -> Ask:
    """The next request. An answer has at most `max_tokens` tokens, most have a third of that or less."""
    kind = draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    if kind is _mutated:
        return Ask(*mutated(draw))
    path, body = kind(draw)
    length = min(max_tokens, 1 + int(draw.expovariate(4 / max_tokens)))
    if path != "/tokenize":
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = length
        body |= {"stream": draw.random() < 0.7, "temperature": draw.choice([0, 0.7, 1])}
    raw = json.dumps(body).encode()
    if draw.random() < 0.1:
        return Ask(path, raw, leaves_after_bytes=draw.choice([0, 1, 300, 2000]))
    return Ask(path, raw, sent_share=draw.random() if draw.random() < 0.02 else 1.0)


def _question(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=min(200, 3 + int(draw.expovariate(1 / 20)))))


def _chat(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A chat: often with one of a few beginnings, so that the cache knows some of it."""
    messages = [{"role": "system", "content": draw.choice(SYSTEM)}] if draw.random() < 0.7 else []
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        messages += [USER, {"role": "assistant", "content": "hello"}]
    return CHAT, {"messages": [*messages, {"role": "user", "content": _question(draw)}]}


def _chat_with_options(draw: random.Random) -> tuple[str, dict[str, Any]]:
    options: list[dict[str, Any]] = [
        {"n": 2, "seed": draw.randrange(1000)},
        {"logprobs": True, "top_logprobs": draw.choice([0, 3])},
        {"stop": draw.sample(STOPS, 2), "include_stop_str_in_output": draw.random() < 0.5},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}},
        {"stream_options": {"include_usage": True}, "min_tokens": 1},
        {"ignore_eos": True, "return_token_ids": True},
    ]
    path, body = _chat(draw)
    for chosen in draw.sample(options, 2):
        body |= chosen
    return path, body


def _completion(draw: random.Random) -> tuple[str, dict[str, Any]]:
    ids = [16 + draw.randrange(500) for _ in range(draw.randint(1, 60))]
    prompt = draw.choice([_question(draw), [_question(draw), _question(draw)], ids])
    return "/v1/completions", {"prompt": prompt, "echo": draw.random() < 0.3, "logprobs": draw.choice([None, None, 2])}


def _constrained(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """JSON by one of a few schemas, or by one that nobody has asked for yet."""
    number = draw.randrange(10**9) if draw.random() < 0.2 else draw.randrange(20)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [f"x{number}", "y"]}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    path, body = _chat(draw)
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return path, body


def _with_tools(draw: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _chat(draw)
    return path, body | {"tools": [TOOL], "tool_choice": draw.choice(["auto", "required", "none"])}


def _other_api(draw: random.Random) -> tuple[str, dict[str, Any]]:
    question = _question(draw)
    if draw.random() < 0.2:
        return "/tokenize", {"prompt": question}
    if draw.random() < 0.5:
        return "/v1/responses", {"input": question}
    return "/v1/messages", {"messages": [{"role": "user", "content": question}]}


def _refused(draw: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = _chat(draw)
    wrong = draw.choice(
        [
            {"model": "unknown"},
            {"temperature": -1},
            {"messages": []},
            {"messages": [{"role": "user", "content": "too long " * 20_000}]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}}},
        ]
    )
    return path, body | wrong


def _mutated(draw: random.Random) -> tuple[str, bytes]:
    return mutated(draw)


# Out of a hundred requests.
KINDS: Final[list[tuple[Callable[[random.Random], tuple[str, Any]], int]]] = [
    (_chat, 42),
    (_chat_with_options, 20),
    (_completion, 14),
    (_constrained, 6),
    (_with_tools, 5),
    (_other_api, 6),
    (_refused, 4),
    (_mutated, 3),
]


class Client:
    """One client. It keeps its connection from one request to the next, unless it leaves early or is told to close."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, ask: Ask) -> int | None:
        """The answer's status, once all of it has come; None if the client has left before."""
        if self._connection is None:
            self._connection = await asyncio.open_connection(*self._address)
        reader, writer = self._connection
        stays = ask.sent_share == 1.0 and ask.leaves_after_bytes is None
        head = f"POST {ask.path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(ask.body)}\r\n\r\n"
        writer.write(head.encode() + ask.body[: int(len(ask.body) * ask.sent_share)])
        try:
            if stays:
                status, stays = await _answer(reader)
                return status
            if ask.sent_share == 1.0 and ask.leaves_after_bytes:
                await reader.read(ask.leaves_after_bytes)
            await asyncio.sleep(PAUSE_S)  # so that the server has begun
            return None
        finally:
            if not stays:
                await self.close()

    async def close(self) -> None:
        """Leaves, whatever the server is doing."""
        if self._connection is not None:
            _, writer = self._connection
            self._connection = None
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Reads an answer to its end: its status, and whether the connection goes on."""
    head, last = (await reader.readuntil(b"\r\n\r\n")).lower(), b""
    _, has_length, length = head.partition(b"content-length:")
    if has_length:
        await reader.readexactly(int(length.partition(b"\r\n")[0]))
    else:
        assert b"transfer-encoding: chunked" in head, head
        while (size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)) > 0:
            last = await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    is_broken_off = b'"error"' in last  # after that a server closes, although its head did not say so
    return int(head[9:12]), b"connection: close" not in head and not is_broken_off
