"""/v1/messages at the proxy: its own errors have Anthropic's shapes, and Anthropic's key header is read."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import aiohttp
import pytest

from proxy.framing import chunk
from tests.http_answers import EVENT_CHUNKS
from tests.protocol.proxy_fakes import hello, joined, raw_replica, running_proxy

MESSAGES: Final = "/v1/messages"


@pytest.mark.parametrize(
    ("path", "headers", "status", "kind"),
    [
        (MESSAGES, {"X-Api-Key": "k"}, 503, "overloaded_error"),
        (f"{MESSAGES}?beta=true", {"X-Api-Key": "k"}, 503, "overloaded_error"),
        (f"{MESSAGES}/count_tokens", {"X-Api-Key": "x"}, 401, "authentication_error"),
        (MESSAGES, {"Authorization": "Bearer k", "X-Priority": "x"}, 400, "invalid_request_error"),
    ],
)
async def test_errors_of_the_proxy_have_anthropics_shape(
    path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    async with running_proxy(api_key="k") as proxy, aiohttp.ClientSession() as client:
        async with client.post(proxy.url + path, json={}, headers=headers) as response:
            body = await response.json()
            assert response.status == status and response.headers["X-Request-Id"]
        assert body == {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


async def test_a_cut_stream_of_a_message_ends_with_anthropics_error_event() -> None:
    event = b'event: ping\ndata: {"type": "ping"}\n\n'

    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_CHUNKS + chunk(event))

    async with running_proxy() as proxy, raw_replica(breaks_off) as replica, joined(proxy, hello(replica.url)):
        async with proxy.client.post(proxy.url + MESSAGES, json={"stream": True}) as response:
            text = await response.read()
        begin = event + b"event: error\ndata: "
        assert text.startswith(begin) and text.endswith(b"\n\n")
        error = json.loads(text.removeprefix(begin))
        assert (error["type"], error["error"]["type"]) == ("error", "api_error") and error["error"]["message"]
        assert await proxy.metric('lockstep_proxy_requests_total{route="/v1/messages",status="200"}') == 1
