"""Servers that do not join (`--backend URL`): probes, and requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from proxy.backends import ProbeFailed, parse_models
from tests.commands import free_port
from tests.protocol.proxy_fakes import MODEL, answer_ok, eventually, fake_replica, hello, joined, running_proxy

FAST = {"probe_interval_s": 0.03, "probe_timeout_s": 0.3}


@dataclass
class FakeBackend:
    """Another OpenAI-compatible server, whose health a test decides."""

    url: str = ""
    health: int = 200
    models: tuple[str, ...] = (MODEL,)
    is_hung: bool = False
    probes: int = 0
    keys: list[str] = field(default_factory=list)
    asked: int = 0
    may_end: bool = False  # whether it ends itself when it is asked to


@asynccontextmanager
async def fake_backend(port: int = 0) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend()

    async def health(request: web.Request) -> web.StreamResponse:
        backend.probes += 1
        if backend.is_hung:
            await asyncio.Event().wait()
        return web.Response(status=backend.health)

    async def models(request: web.Request) -> web.StreamResponse:
        backend.keys.append(request.headers.get("Authorization", ""))
        listed = [{"id": model, "object": "model", "created": 1, "owned_by": "them"} for model in backend.models]
        return web.json_response({"object": "list", "data": listed})

    async def chat(request: web.Request) -> web.StreamResponse:
        backend.asked += 1
        return await answer_ok(request)

    async def terminate(request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if backend.may_end else 404)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.get("/terminate", terminate)])
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        backend.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield backend
    finally:
        await runner.cleanup()


async def test_a_backend_is_served_with_the_models_it_lists_as_it_lists_them() -> None:
    async with fake_backend() as backend:
        backend.models = ("a", "b")
        async with running_proxy(backends=(backend.url + "/v1/",), api_key="key", **FAST) as proxy:
            await proxy.wait_state(backend.url, "live")
            async with proxy.client.get(f"{proxy.url}/v1/models") as response:
                listed = (await response.json())["data"]
            assert [(model["id"], model["owned_by"]) for model in listed] == [("a", "them"), ("b", "them")]
            async with proxy.ask("b") as response:
                assert response.status == 200
            assert backend.asked == 1 and set(backend.keys) == {"Bearer key"}


async def test_a_backend_without_a_health_route_is_judged_by_its_models() -> None:
    async with fake_backend() as backend:
        backend.health = 404
        async with running_proxy(backends=(backend.url,), **FAST) as proxy:
            await proxy.wait_state(backend.url, "live")


async def test_a_backend_goes_out_after_failed_probes_and_comes_back_after_good_ones() -> None:
    async with fake_backend() as backend, running_proxy(backends=(backend.url,), **FAST) as proxy:
        await proxy.wait_state(backend.url, "live")
        backend.health, backend.probes = 500, 0
        await proxy.wait_state(backend.url, "unreachable")
        assert backend.probes >= 3
        async with proxy.ask() as response:
            assert response.status == 503
        backend.health, backend.probes = 200, 0
        await proxy.wait_state(backend.url, "live")
        assert backend.probes >= 2 and backend.asked == 0


async def test_a_dead_backend_is_out_with_the_first_refused_request_and_back_when_it_listens() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with running_proxy(backends=(url,), probe_interval_s=0.2) as proxy, fake_replica(answer_ok) as replica:
        async with fake_backend(port):
            await proxy.wait_state(url, "live")
        async with joined(proxy, hello(replica.url)):
            for _ in range(4):
                async with proxy.ask() as response:
                    assert response.status == 200
            assert (await proxy.nodes())[url]["state"] == "unreachable"
            async with fake_backend(port):
                await proxy.wait_state(url, "live")


async def test_a_hung_backend_delays_no_other_and_goes_out() -> None:
    async with fake_backend() as hung, fake_backend() as good:
        async with running_proxy(backends=(hung.url, good.url), **FAST) as proxy:
            await proxy.wait_state(hung.url, "live")
            hung.is_hung, good.probes = True, 0
            await proxy.wait_state(hung.url, "unreachable")
            assert good.probes > 10, "the other was probed all the while"
            assert (await proxy.nodes())[good.url]["state"] == "live"


async def test_models_that_a_backend_learns_later_are_served() -> None:
    async with fake_backend() as backend, running_proxy(backends=(backend.url,), **FAST) as proxy:
        await proxy.wait_state(backend.url, "live")
        backend.models = ("new",)

        async def is_served() -> bool:
            async with proxy.ask("new") as response:
                return response.status == 200

        await eventually(is_served, "the new model is known")


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"data": 5}', b'{"data": [{}]}', b'{"data": ["x"]}', b"[" * 9999]
)
def test_what_is_no_list_of_models_fails_the_probe(body: bytes) -> None:
    with pytest.raises(ProbeFailed):
        parse_models(body)
