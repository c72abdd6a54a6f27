"""What operators and browsers get: keys with limits, /nodes/..., CORS, TLS, traces and the access log."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.protocol import encode
from tests.protocol.proxy_fakes import (
    CHAT,
    answer_never,
    answer_ok,
    control_line,
    eventually,
    fake_replica,
    hello,
    joined,
    running_proxy,
    stream_for_ever,
)
from tests.protocol.test_proxy_backends import FAST, fake_backend


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """(certificate, key) of 127.0.0.1, as PEM files."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=proxy"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_keys_of_a_file_are_wanted_and_their_limits_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys.alice]\nkey = "a"\nmax_requests = 1\n[keys.bob]\nkey = "b"\n', encoding="utf-8")
    async with running_proxy(api_key_file=str(file)) as proxy, fake_replica(answer_never) as replica:
        async with joined(proxy, hello(replica.url)), aiohttp.ClientSession() as client:

            async def ask(key: str) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(proxy.url + CHAT, json={}, headers=headers) as response:
                    assert response.status == 401 or int(response.headers["Retry-After"]) >= 1
                    return response.status

            running = [asyncio.create_task(ask("a"))]

            async def runs() -> bool:
                return replica.open_requests == len(running)

            await eventually(runs, "Alice's first request runs")
            assert await ask("a") == 429 and await ask("c") == 401
            running.append(asyncio.create_task(ask("b")))
            await eventually(runs, "Bob's runs beside it")
            for task in running:
                task.cancel()


async def test_the_replica_is_told_the_priority_of_a_key_unless_the_request_names_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys.alice]\nkey = "a"\npriority = "low"\n[keys.bob]\nkey = "b"\n', encoding="utf-8")
    async with running_proxy(api_key_file=str(file)) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)):
            for key, own in (("a", {}), ("a", {"X-Priority": "high"}), ("b", {}), ("b", {"X-Priority": "low"})):
                headers = {"Authorization": f"Bearer {key}", **own}
                async with proxy.client.post(proxy.url + CHAT, json={}, headers=headers) as response:
                    assert response.status == 200
        assert [received.all("X-Priority") for received in replica.received] == [["low"], ["high"], [], ["low"]]


async def test_a_server_is_added_shown_removed_and_terminated_in_lmdeploy_s_shapes() -> None:
    async with fake_backend() as backend, running_proxy(**FAST) as proxy:

        async def ask(action: str, body: object) -> tuple[int, Any]:
            async with proxy.client.post(f"{proxy.url}/nodes/{action}", json=body) as response:
                return response.status, await response.json()

        node = {"url": backend.url + "/v1", "status": {"models": ["early"], "role": 1, "speed": 3}}
        assert await ask("add", node) == (200, "Added successfully")
        async with proxy.ask("early") as response:
            assert response.status == 200, "a server that names its models needs no look first"
        assert await ask("add", {"url": backend.url}) == (200, "Added successfully"), "what is known stays"
        await proxy.wait_state(backend.url, "live")
        async with proxy.client.get(f"{proxy.url}/nodes/status") as response:
            (url, shown), *others = (await response.json()).items()
        assert url == backend.url and not others
        assert shown["models"] == ["tiny"] and shown["role"] == 1 and shown["unfinished"] == 0
        assert shown["speed"] is None and len(shown["latency"]) == 1
        assert await ask("remove", {"url": backend.url}) == (200, "Deleted successfully")
        assert await proxy.nodes() == {} and (await ask("remove", {"url": backend.url}))[0] == 400
        assert (await ask("add", {"url": backend.url}))[0] == 200
        status, said = await ask("terminate", {"url": backend.url})
        assert status == 200 and said == f"Failed to terminate node {backend.url}: it answered 404"
        assert await proxy.nodes() == {}
        backend.may_end = True
        assert (await ask("add", {"url": backend.url}))[0] == 200
        assert await ask("terminate", {"url": backend.url}) == (200, "Terminated successfully")
        for wrong in ({}, [], {"url": 5}, {"url": "localhost"}, {"url": "http://h", "status": 3}):
            assert (await ask("add", wrong))[0] == 400


async def test_errors_have_openai_s_four_fields_and_its_names_of_kinds() -> None:
    async with running_proxy(api_key="k", max_body_mb=0.001) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)):
            none = ("invalid_request_error", None)
            cases = [
                (("POST", CHAT, b"x" * 5000, "k"), 413, none),
                (("POST", CHAT, b"{}", "wrong"), 401, ("invalid_request_error", "invalid_api_key")),
                (("POST", CHAT, b'{"model": "other"}', "k"), 404, ("invalid_request_error", "model_not_found")),
                (("GET", "/v1/models/other", b"", "k"), 404, ("invalid_request_error", "model_not_found")),
                (("GET", CHAT, b"", "k"), 405, ("invalid_request_error", "method_not_supported")),
                (("GET", "/nowhere", b"", "k"), 404, none),
                (("POST", "/nodes/add", b"{", "k"), 400, none),
            ]
            for (method, path, body, key), status, (kind, code) in cases:
                headers = {"Authorization": f"Bearer {key}"}
                async with proxy.client.request(method, proxy.url + path, data=body, headers=headers) as response:
                    error = (await response.json())["error"]
                assert response.status == status and response.content_type == "application/json", path
                assert isinstance(error.pop("message"), str)
                assert error == {"type": kind, "param": None, "code": code}, path


async def test_nodes_and_the_control_connection_want_the_proxy_s_token() -> None:
    async with running_proxy(proxy_token="t") as proxy, aiohttp.ClientSession() as anybody:
        for action in ("add", "remove", "terminate"):
            async with anybody.post(f"{proxy.url}/nodes/{action}", json={"url": "http://h:1"}) as response:
                assert response.status == 401
        async with anybody.get(f"{proxy.url}/nodes/status") as response:
            assert response.status == 401
        with pytest.raises(aiohttp.WSServerHandshakeError):
            async with control_line(proxy, token="wrong"):
                pass


async def test_a_page_of_an_allowed_origin_may_ask_and_another_may_not() -> None:
    async with running_proxy(cors_origins=("https://a.example",)) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url)):
            for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
                headers = {"Origin": origin}
                async with proxy.client.post(proxy.url + CHAT, json={}, headers=headers) as response:
                    assert response.status == 200
                    assert response.headers.get("Access-Control-Allow-Origin") == allowed
                async with proxy.client.get(f"{proxy.url}/v1/models", headers=headers) as response:
                    assert response.headers.get("Access-Control-Allow-Origin") == allowed
            preflight = {"Origin": "https://a.example", "Access-Control-Request-Headers": "authorization"}
            async with proxy.client.options(proxy.url + CHAT, headers=preflight) as response:
                assert response.status == 204 and "POST" in response.headers["Access-Control-Allow-Methods"]
                assert response.headers["Access-Control-Allow-Headers"] == "authorization"


async def test_without_an_allowed_origin_nothing_is_said_about_any() -> None:
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        async with proxy.client.post(proxy.url + CHAT, json={}, headers={"Origin": "https://a"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_all_of_it_works_over_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=cert)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(tls_cert=cert, tls_key=key))
        replica = await stack.enter_async_context(fake_replica(answer_ok))
        url = proxy.url.replace("http:", "https:")
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)))
        line = await stack.enter_async_context(client.ws_connect(f"{url}/nodes/control"))
        await line.send_bytes(encode(hello(replica.url)))
        await line.receive_bytes()
        for size in (10, 300_000):
            async with client.post(url + CHAT, data=b'{"x": "' + b"y" * size + b'"}') as response:
                assert response.status == 200
        async with client.get(f"{url}/health") as response:
            assert response.status == 200
        assert [len(received.body) for received in replica.received] == [19, 300_009]


async def test_the_trace_context_reaches_the_replica_unchanged() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        headers = {"traceparent": parent, "tracestate": "a=1,b=2"}
        async with proxy.client.post(proxy.url + CHAT, json={}, headers=headers) as response:
            assert response.status == 200
        assert replica.received[0].all("traceparent") == [parent]
        assert replica.received[0].all("tracestate") == ["a=1,b=2"]


async def test_every_request_leaves_a_line_in_the_access_log_and_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "access.log"

    async def generate(request: web.Request) -> web.StreamResponse:
        return await (stream_for_ever if "long" in request.headers.get("X-Name", "") else answer_ok)(request)

    async with running_proxy(access_log=str(file)) as proxy, fake_replica(generate) as replica:
        async with joined(proxy, hello(replica.url, replica_id="r")):
            body = {"model": "tiny", "messages": ["secret"]}
            async with proxy.client.post(proxy.url + CHAT, json=body, headers={"X-Request-Id": "one"}) as response:
                await response.read()
            async with proxy.client.post(proxy.url + CHAT, json=body, headers={"X-Name": "long"}) as response:
                await response.content.readany()
                response.close()
            async with proxy.ask("unknown") as response:
                assert response.status == 404

            async def is_logged() -> bool:
                return file.read_text().count("\n") == 3

            await eventually(is_logged, "all three are logged")
    lines = {line["outcome"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert "secret" not in file.read_text()
    assert lines["whole"]["request_id"] == "one" and lines["whole"]["replica"] == "r"
    assert lines["whole"]["model"] == "tiny" and lines["whole"]["status"] == 200 and lines["whole"]["attempts"] == 1
    assert lines["left"]["status"] == 499 and lines["left"]["answer_bytes"] > 0
    assert lines["error"]["status"] == 404 and lines["error"]["attempts"] == 0


async def test_the_proxy_s_own_time_is_measured_apart_from_the_replica_s() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return await answer_ok(request)

    async with running_proxy() as proxy, fake_replica(slow) as replica:
        async with joined(proxy, hello(replica.url, replica_id="r")):
            async with proxy.ask() as response:
                assert response.status == 200
            assert await proxy.metric("lockstep_proxy_own_seconds_count") == 1
            assert await proxy.metric("lockstep_proxy_own_seconds_sum") < 0.5
            assert await proxy.metric('lockstep_proxy_first_byte_seconds_sum{replica="r"}') >= 0.6
            outcome = 'lockstep_proxy_replica_requests_total{outcome="whole",replica="r"}'
            other = 'lockstep_proxy_replica_requests_total{replica="r",outcome="whole"}'
            assert await proxy.metric(outcome) + await proxy.metric(other) == 1


async def test_a_session_stays_on_its_replica_and_a_rank_can_be_asked_for() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(routing="session"))
        fakes = [await stack.enter_async_context(fake_replica(answer_ok)) for _ in range(3)]
        for rank, replica in enumerate(fakes):
            await stack.enter_async_context(joined(proxy, hello(replica.url, dp_rank=rank, replica_id=f"r{rank}")))

        async def ask(**headers: str) -> int:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            async with proxy.client.post(proxy.url + CHAT, json={}, headers=names) as response:
                return response.status

        for _ in range(6):
            assert await ask(X_Session_Id="mine") == 200
        assert sorted(len(replica.received) for replica in fakes) == [0, 0, 6]
        before = len(fakes[1].received)
        for _ in range(3):
            assert await ask(X_data_parallel_rank="1", X_Session_Id="mine") == 200
        assert len(fakes[1].received) == before + 3
        assert await ask(X_data_parallel_rank="9") == 400 and await ask(X_data_parallel_rank="x") == 400
