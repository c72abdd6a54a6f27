"""What a replica serves is served through the proxy, with the same answers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Final

import aiohttp

from tests.protocol.fake_loop import FakeLoop, replica
from tests.protocol.proxy_fakes import hello, joined, running_proxy

USER: Final = {"role": "user", "content": "hi"}
ASKED: Final[list[tuple[str, str, Any, int]]] = [
    ("GET", "/version", None, 200),
    ("GET", "/version?x=1", None, 200),
    ("GET", "/openapi.json", None, 200),
    ("POST", "/tokenize", {"prompt": "a \N{ROCKET}", "return_token_strs": True}, 200),
    ("POST", "/tokenize", {"messages": [USER]}, 200),
    ("POST", "/tokenize", {"prompt": 5}, 400),
    ("POST", "/detokenize", {"tokens": [16, 17]}, 200),
    ("POST", "/v1/messages/count_tokens", {"messages": [USER]}, 200),
    ("POST", "/v1/chat/completions", {"messages": [USER], "temperature": -1}, 400),
    ("GET", "/v1/responses/resp_1", None, 404),
    ("DELETE", "/v1/responses/resp_1", None, 404),
    ("POST", "/v1/responses/resp_1/cancel", None, 404),
]


async def test_proxy_passes_on_all_that_a_replica_is_asked() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        url = await stack.enter_async_context(replica(FakeLoop()))
        await stack.enter_async_context(joined(proxy, hello(url, model="tiny-moe")))
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(method: str, at: str, body: Any) -> tuple[int, Any]:
            async with session.request(method, at, json=body) as response:
                return response.status, await response.json()

        for method, path, body, status in ASKED:
            direct = await ask(method, url + path, body)
            assert direct[0] == status, (path, direct)
            assert await ask(method, proxy.url + path, body) == direct, path
        async with session.request("PUT", proxy.url + "/v1/responses/resp_1") as response:
            assert response.status == 405
        passed = await proxy.metric('lockstep_proxy_requests_total{route="/tokenize",status="200"}')
        assert passed == 2 and await proxy.in_flight() == 0
