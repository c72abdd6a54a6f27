"""What tests ask a replica's HTTP server with: whole answers, streams, and connections that break off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import ClientSession

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
BODY: Final[dict[str, Any]] = {"model": "tiny-moe", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}
PROMPT: Final[dict[str, Any]] = {"model": "tiny-moe", "prompt": "one two"}
ANSWER: Final = "yes \N{ROCKET}"


async def post(session: ClientSession, url: str, body: Any, **further: Any) -> tuple[int, Any]:
    async with session.post(url, json=body, **further) as response:
        return response.status, await response.json()


async def stream(session: ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, each of which must be one HTTP chunk; [DONE] as it is."""
    events: list[Any] = []
    async with session.post(url, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        gathered = b""
        async for piece, is_chunk_end in response.content.iter_chunks():
            gathered += piece
            if is_chunk_end:
                assert gathered.startswith(b"data: ") and gathered.endswith(b"\n\n") and gathered.count(b"\n") == 2
                text = gathered[len(b"data: ") : -2].decode()
                events.append(text if text == "[DONE]" else json.loads(text))
                gathered = b""
        assert gathered == b""
    return events


@asynccontextmanager
async def raw_client(url: str, request: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has sent these bytes; it ends abruptly."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


def raw_request(body: dict[str, Any], *, path: str = CHAT, missing: int = 0) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    return head + text[: len(text) - missing]


async def tasks_end(before: set[asyncio.Task[Any]]) -> None:
    """Waits until only these tasks are left."""
    async with asyncio.timeout(5):
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)
