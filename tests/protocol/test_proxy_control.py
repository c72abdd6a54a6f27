"""The control connection: joining, silence, leaving, and strangers on the port."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from urllib.parse import urlsplit

import aiohttp
import msgpack
import pytest

from proxy import control
from proxy.protocol import CONTROL_PATH, MAX_FRAME_BYTES, Refused, Welcome, encode
from proxy.registry import LIVE_FOR_S
from tests.protocol.proxy_fakes import (
    RunningProxy,
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

NOWHERE = "http://127.0.0.1:9"  # a replica that is only spoken of


async def test_a_replica_is_welcomed_told_how_often_to_report_and_routable() -> None:
    async with running_proxy(heartbeat_timeout_s=6.0) as proxy, control_line(proxy) as line:
        await line.say(hello(NOWHERE, replica_id="r"))
        welcome = await line.hear()
        assert isinstance(welcome, Welcome) and welcome.report_interval_s == 2.0
        await line.report(running=3, waiting=1)
        await eventually(lambda: load_is(proxy, "r", running=3, waiting=1), "the report is known")
        assert (await proxy.nodes())["r"]["state"] == "live"
        assert await proxy.metric('lockstep_proxy_replica_running_sequences{replica="r"}') == 3
        assert await proxy.metric('lockstep_proxy_replicas{state="live"}') == 1


async def load_is(proxy: RunningProxy, replica_id: str, **expected: int) -> bool:
    load = (await proxy.nodes())[replica_id]["load"] or {}
    return all(load.get(name) == value for name, value in expected.items())


@pytest.mark.parametrize("politely", [True, False])
async def test_the_end_of_the_connection_means_gone_at_once(politely: bool) -> None:
    async with running_proxy() as proxy, joined(proxy, hello(NOWHERE, replica_id="r")) as line:
        if politely:
            await line.socket.close()
        else:
            line.socket._response.connection.transport.abort()  # type: ignore[union-attr]
        assert await proxy.wait_state("r", None) < 1.0
        async with proxy.ask() as response:
            assert response.status == 503


async def test_a_silent_replica_gets_no_new_requests_until_it_speaks_again() -> None:
    async with running_proxy(heartbeat_timeout_s=0.4) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url, replica_id="r"), beats=False) as line:
            await proxy.wait_state("r", "suspect")
            await asyncio.sleep(LIVE_FOR_S)  # for so long requests go by a list made before
            async with proxy.ask() as response:
                assert response.status == 503
            await line.report()
            await proxy.wait_state("r", "live")
            async with proxy.ask() as response:
                assert response.status == 200


async def test_a_line_that_stays_silent_is_cut_so_that_the_replica_dials_anew() -> None:
    async with running_proxy(heartbeat_timeout_s=0.1) as proxy:
        async with joined(proxy, hello(NOWHERE, replica_id="r"), beats=False) as line:
            refused = await line.hear()
            assert isinstance(refused, Refused) and "nothing came" in refused.reason
            assert (await line.socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
            await proxy.wait_state("r", None)
        assert await proxy.metric("lockstep_proxy_strangers_total") == 0


async def test_a_leaving_replica_keeps_its_running_stream_and_gets_no_new_request() -> None:
    async with running_proxy() as proxy, fake_replica(stream_for_ever) as replica:
        async with joined(proxy, hello(replica.url, replica_id="r")) as line, proxy.ask() as running:
            await running.content.readchunk()
            await line.leave()
            await proxy.wait_state("r", "leaving")
            async with proxy.ask() as refused:
                assert refused.status == 503
            await line.socket.close()
            await proxy.wait_state("r", None)
            for _ in range(5):
                assert (await running.content.readchunk())[0] == b'data: {"choices": []}\n\n'


async def test_a_new_life_of_a_replica_replaces_the_old_whose_connection_is_closed() -> None:
    async with running_proxy() as proxy, joined(proxy, hello(NOWHERE, replica_id="r", incarnation="a")) as old:
        async with joined(proxy, hello(NOWHERE, replica_id="r", incarnation="b")):
            closed = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
            assert (await old.socket.receive(timeout=5)).type in closed
            await asyncio.sleep(0.05)  # the old connection's end must not take the new one with it
            nodes = await proxy.nodes()
            assert nodes["r"]["incarnation"] == "b" and nodes["r"]["state"] == "live"


async def test_a_life_that_reconnects_still_counts_what_it_has_in_flight() -> None:
    async with running_proxy() as proxy, fake_replica(answer_never) as replica:
        introduction = hello(replica.url, replica_id="r")
        async with joined(proxy, introduction):
            asking = asyncio.create_task(proxy.client.post(f"{proxy.url}/v1/completions", json={}))
            await eventually(lambda: in_flight_is(proxy, 1), "the request is in flight")
        await proxy.wait_state("r", None)
        async with joined(proxy, introduction):
            assert await proxy.in_flight() == 1
            asking.cancel()
            await eventually(lambda: in_flight_is(proxy, 0), "the request has ended")


async def in_flight_is(proxy: RunningProxy, count: int) -> bool:
    return await proxy.in_flight() == count


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "protocol version is 99"),
        ({"url": "not a url"}, "not an address to send requests to"),
        ({"url": "http://h:99999"}, "not an address to send requests to"),
        ({"model": ""}, "must not be empty"),
        ({"url": "http://.:80"}, "not an address to send requests to"),
        ({"url": "http://u:p@h:80"}, "not an address to send requests to"),
        ({"replica_id": ""}, "must not be empty"),
        ({"replica_id": "r" * 257}, "replica_id has 257 characters, limit is 256"),
        ({"replica_id": "r\n2026 INFO forged"}, "must have printable characters only"),
        ({"incarnation": "\x1b[2J"}, "must have printable characters only"),
        ({"model": "m\u2028"}, "must have printable characters only"),
        ({"url": "http://h/" + "x" * 256}, "url has 265 characters"),
    ],
)
async def test_a_hello_that_cannot_be_accepted_is_refused_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    async with running_proxy() as proxy, control_line(proxy) as line:
        await line.say(hello(NOWHERE, **changes))
        refused = await line.hear()
        assert isinstance(refused, Refused) and reason in refused.reason
        assert (await line.socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
        assert await proxy.nodes() == {}


async def test_a_namesake_at_another_url_is_refused_and_told_of_the_first_which_stays() -> None:
    async with running_proxy() as proxy, joined(proxy, hello(NOWHERE, replica_id="r", incarnation="a")):
        async with control_line(proxy) as line:
            await line.say(hello("http://127.0.0.1:10", replica_id="r", incarnation="b"))
            refused = await line.hear()
            assert isinstance(refused, Refused) and NOWHERE in refused.reason
        nodes = await proxy.nodes()
        assert nodes["r"]["incarnation"] == "a" and nodes["r"]["state"] == "live"


@pytest.mark.parametrize("after_hello", [False, True])
async def test_pings_do_not_keep_a_line_open_on_which_nothing_is_said(after_hello: bool) -> None:
    async with running_proxy(heartbeat_timeout_s=0.1) as proxy, control_line(proxy) as line:
        if after_hello:
            await line.say(hello(NOWHERE))
            await line.hear()

        async def ping() -> None:
            while True:
                await line.socket.ping()
                await asyncio.sleep(0.02)

        pinging = asyncio.create_task(ping())
        try:
            refused = await line.hear()
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        assert isinstance(refused, Refused) and "nothing came" in refused.reason


async def test_a_block_of_the_proxy_itself_makes_no_replica_suspect() -> None:
    async with running_proxy(heartbeat_timeout_s=0.6) as proxy, fake_replica(answer_ok) as replica:
        async with joined(proxy, hello(replica.url), beats=False) as line:
            await line.report()
            await asyncio.sleep(0.1)  # the proxy ticks
            asyncio.get_running_loop().call_soon(time.sleep, 0.8)  # this event loop is the proxy's too
            await asyncio.sleep(0)
            async with proxy.ask() as response:
                assert response.status == 200


async def test_replicas_and_operators_must_show_the_token_where_there_is_one() -> None:
    async with running_proxy(proxy_token="secret") as proxy:
        for wrong in ("", "Secret", "secret2", "s\u00e9cret"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                async with control_line(proxy, token=wrong):
                    pass
            assert caught.value.status == 401
        async with aiohttp.ClientSession() as stranger, stranger.get(f"{proxy.url}/nodes/status") as response:
            assert response.status == 401 and "token" in (await response.json())["error"]["message"]
        async with control_line(proxy, token="secret") as line:
            await line.say(hello(NOWHERE, replica_id="r"))
            assert isinstance(await line.hear(), Welcome)
            assert "r" in await proxy.nodes()


FRAMES = {
    "random bytes": random.Random(1).randbytes(500),
    "empty": b"",
    "no map": msgpack.packb([1, 2, 3]),
    "unknown type": msgpack.packb({"type": "goodbye"}),
    "field missing": msgpack.packb({"type": "hello"}),
    "a proxy's message": encode(Welcome(proxy_id="p", report_interval_s=1.0)),
    "too large": b"x" * (MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("after_hello", [False, True])
async def test_a_frame_that_does_not_belong_ends_the_connection_and_nothing_else(
    frame: bytes, after_hello: bool
) -> None:
    async with running_proxy() as proxy, joined(proxy, hello(NOWHERE, replica_id="good")):
        async with control_line(proxy) as line:
            if after_hello:
                await line.say(hello(NOWHERE, replica_id="bad"))
                await line.hear()
            await line.socket.send_bytes(frame)
            message = await line.socket.receive(timeout=5)
            while message.type is aiohttp.WSMsgType.BINARY:
                message = await line.socket.receive(timeout=5)
            assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        await proxy.wait_state("bad", None)
        assert (await proxy.nodes())["good"]["state"] == "live"
        assert await proxy.metric("lockstep_proxy_strangers_total") == (0 if after_hello else 1)


async def test_a_text_frame_a_second_hello_and_a_mute_peer_end_the_connection() -> None:
    async with running_proxy(heartbeat_timeout_s=0.2) as proxy:
        async with control_line(proxy) as line:
            await line.socket.send_str("hello")
            assert "binary" in (await line.hear()).reason  # type: ignore[union-attr]
        async with joined(proxy, hello(NOWHERE), beats=False) as line:
            await line.say(hello(NOWHERE))
            assert "does not send Hello here" in (await line.hear()).reason  # type: ignore[union-attr]
        async with control_line(proxy) as line:
            assert "nothing came" in (await line.hear()).reason  # type: ignore[union-attr]
        assert await proxy.nodes() == {}


async def test_strangers_on_the_port_are_counted_logged_once_and_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noise = random.Random(7)
    greetings = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
    ]
    async with running_proxy() as proxy, fake_replica(answer_ok) as replica, joined(proxy, hello(replica.url)):
        address = urlsplit(proxy.url)
        with caplog.at_level(logging.INFO):
            for number in range(40):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(greetings[number] if number < len(greetings) else noise.randbytes(300) + b"\r\n\r\n")
                async with asyncio.timeout(5):
                    answer = await reader.read()
                assert not answer or answer.startswith(b"HTTP/1.")
                writer.close()
        lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == 1 and "stranger dropped" in lines[0].message and "\n" not in lines[0].getMessage()
        assert all(record.exc_info is None for record in lines)
        assert await proxy.metric("lockstep_proxy_strangers_total") >= 30
        async with proxy.ask() as response:
            assert response.status == 200


async def test_the_control_path_answers_plain_http_with_an_error() -> None:
    async with running_proxy() as proxy:
        async with proxy.client.get(proxy.url + CONTROL_PATH) as response:
            assert response.status == 400 and "WebSocket" in (await response.json())["error"]["message"]
        async with proxy.client.post(proxy.url + CONTROL_PATH) as response:
            assert response.status == 405 and "GET" in response.headers["Allow"]


async def test_there_are_no_more_control_connections_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONTROL_CONNECTIONS", 2)
    async with running_proxy() as proxy, control_line(proxy):
        async with control_line(proxy):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                async with control_line(proxy):
                    pass
            assert caught.value.status == 503

        async def has_room() -> bool:
            try:
                async with control_line(proxy):
                    return True
            except aiohttp.WSServerHandshakeError:
                return False

        await eventually(has_room, "a closed connection makes room")


async def test_a_reported_load_of_an_older_report_is_not_shown() -> None:
    async with running_proxy() as proxy, joined(proxy, hello(NOWHERE, replica_id="r"), beats=False) as line:
        line.sequence = 9
        await line.report(running=2)
        await eventually(lambda: load_is(proxy, "r", running=2), "the first report is known")
        line.sequence = 3
        await line.report(running=7)
        line.sequence = 10
        await line.report(running=2, waiting=5)
        await eventually(lambda: load_is(proxy, "r", waiting=5), "the last report is known")
        assert await load_is(proxy, "r", running=2)
