"""What the state of a group does to requests: they go elsewhere, wait, or are told that their replica is lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from tests.protocol.proxy_fakes import (
    ControlLine,
    FakeReplica,
    Handler,
    RunningProxy,
    answer_never,
    answer_ok,
    eventually,
    fake_replica,
    hello,
    joined,
    running_proxy,
    stream_for_ever,
)


class Member:
    """A replica of a group: its server, and the control connection on which it says what its group does."""

    def __init__(self, replica: FakeReplica, line: ControlLine) -> None:
        self.replica = replica
        self.line = line

    async def says(self, epoch: int, *members: int, **more: Any) -> None:
        await self.line.report(epoch=epoch, members=list(members), **more)


async def join(stack: AsyncExitStack, proxy: RunningProxy, group: str, rank: int, handler: Handler) -> Member:
    replica = await stack.enter_async_context(fake_replica(handler))
    introduction = hello(replica.url, replica_id=f"{group}{rank}", group=group, dp_rank=rank)
    return Member(replica, await stack.enter_async_context(joined(proxy, introduction, beats=False)))


async def status(proxy: RunningProxy) -> int:
    async with proxy.ask() as response:
        await response.read()
        return response.status


async def waiting(proxy: RunningProxy, count: int) -> bool:
    return await proxy.metric("lockstep_proxy_waiting_requests") == count


async def test_while_the_only_group_reconfigures_requests_wait_and_then_run() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        first, second = [await join(stack, proxy, "g", rank, answer_ok) for rank in range(2)]
        await second.says(1, 0, 1)
        await first.says(1, 0, 1, is_reconfiguring=True)
        await proxy.wait_state("g0", "reconfiguring")
        nodes = await proxy.nodes()
        assert nodes["g1"]["state"] == "reconfiguring", "the unit is the group"
        assert nodes["g1"]["group"] == {"name": "g", "epoch": 1, "state": "reconfiguring"}
        asking = [asyncio.create_task(status(proxy)) for _ in range(3)]
        await eventually(lambda: waiting(proxy, 3), "they wait")
        await first.says(2, 0, 1)
        assert await asyncio.wait_for(asyncio.gather(*asking), 5) == [200] * 3
        assert len(first.replica.received) == 3, "the other one is not in the new epoch yet"
        await second.says(2, 0, 1)
        await proxy.wait_state("g1", "live")


async def test_the_wait_for_a_group_has_a_deadline() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(queue_timeout_s=0.3))
        member = await join(stack, proxy, "g", 0, answer_ok)
        await member.says(1, 0, is_reconfiguring=True)
        await proxy.wait_state("g0", "reconfiguring")
        async with asyncio.timeout(5), proxy.ask() as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "overloaded"
        assert member.replica.received == []


async def test_while_one_group_reconfigures_requests_go_to_another_at_once() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        changing = [await join(stack, proxy, "g", rank, answer_ok) for rank in range(2)]
        other = await join(stack, proxy, "h", 0, answer_ok)
        await changing[1].says(4, 0, 1, is_reconfiguring=True)
        await proxy.wait_state("g0", "reconfiguring")
        assert [await status(proxy) for _ in range(6)] == [200] * 6
        assert len(other.replica.received) == 6
        assert await proxy.metric('lockstep_proxy_groups{state="live"}') == 1
        assert await proxy.metric('lockstep_proxy_groups{state="reconfiguring"}') == 1
        assert await proxy.metric('lockstep_proxy_group_epoch{group="g"}') == 4


async def test_a_group_whose_members_are_gone_is_out_at_once_and_nobody_waits_for_it() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        members = [await join(stack, proxy, "g", rank, answer_ok) for rank in range(2)]
        for member in members:
            await member.says(1, 0, 1, is_reconfiguring=True)
        await proxy.wait_state("g1", "reconfiguring")
        asking = asyncio.create_task(status(proxy))
        await eventually(lambda: waiting(proxy, 1), "it waits")
        for member in members:
            await member.line.socket.close()
        assert await asyncio.wait_for(asking, 2) == 503
        assert await status(proxy) == 503


async def test_a_stream_on_an_evicted_replica_ends_with_replica_lost_though_its_connection_stays_open() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        frozen = await join(stack, proxy, "g", 0, stream_for_ever)
        await frozen.says(1, 0, 1)
        response = await stack.enter_async_context(proxy.ask(stream=True))
        await response.content.readchunk()
        survivor = await join(stack, proxy, "g", 1, answer_ok)
        await survivor.says(1, 0, 1)
        await survivor.says(2, 1)
        text = await asyncio.wait_for(response.text(), 5)
        error = json.loads(text.rstrip().rpartition("data: ")[2])["error"]
        assert error["code"] == "replica_lost" and error["type"] == "server_error" and error["param"] is None
        assert "[DONE]" not in text
        assert (await proxy.nodes())["g0"]["state"] == "evicted" and await proxy.in_flight() == 0
        await eventually(frozen.replica.is_idle, "the connection to the lost replica is closed")
        assert await status(proxy) == 200 and len(survivor.replica.received) == 1


async def test_a_request_that_an_evicted_replica_has_not_begun_to_answer_runs_on_another() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        frozen = await join(stack, proxy, "g", 0, answer_never)
        await frozen.says(1, 0, 1)
        asking = asyncio.create_task(status(proxy))

        async def has_it() -> bool:
            return len(frozen.replica.received) == 1

        await eventually(has_it, "the replica has the request")
        survivor = await join(stack, proxy, "g", 1, answer_ok)
        await survivor.says(2, 1)
        assert await asyncio.wait_for(asking, 5) == 200
        assert len(survivor.replica.received) == 1
        assert await proxy.metric('lockstep_proxy_retries_total{reason="replica_lost"}') == 1


async def test_however_many_requests_an_evicted_replica_had_all_run_on_another() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        frozen = await join(stack, proxy, "g", 0, answer_never)
        await frozen.says(1, 0, 1)
        asking = [asyncio.create_task(status(proxy)) for _ in range(40)]

        async def has_them() -> bool:
            return len(frozen.replica.received) == 40

        await eventually(has_them, "the replica has the requests")
        survivor = await join(stack, proxy, "g", 1, answer_ok)
        await survivor.says(2, 1)
        assert await asyncio.wait_for(asyncio.gather(*asking), 10) == [200] * 40


async def test_a_request_that_is_lost_twice_is_not_given_to_a_third_replica() -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        members = [await join(stack, proxy, "g", 0, answer_never)]
        asking = asyncio.create_task(proxy.client.post(f"{proxy.url}/v1/completions", json={}))
        for rank in (1, 2):

            async def has_it() -> bool:
                return len(members[-1].replica.received) == 1

            await members[-1].says(rank, *range(3))
            await eventually(has_it, "the replica has the request")
            members.append(await join(stack, proxy, "g", rank, answer_never))
            await members[-1].says(rank + 1, *range(rank, 3))
        response = await asyncio.wait_for(asking, 5)
        assert response.status == 502 and (await response.json())["error"]["code"] == "replica_lost"
        assert [len(member.replica.received) for member in members] == [1, 1, 0]


@pytest.mark.parametrize("header", ["X-Interrupted", "X-Not-Begun"])
async def test_a_request_that_a_stopping_replica_hands_back_runs_on_another(header: str) -> None:
    async def hand_back(request: web.Request) -> web.StreamResponse:
        body = {"error": {"message": "stopped", "code": "replica_lost"}}
        return web.json_response(body, status=503, headers={header: "1", "Retry-After": "1"})

    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy())
        stopping = await join(stack, proxy, "g", 0, hand_back)
        async with proxy.ask() as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1", "there is no other"
        other = await join(stack, proxy, "h", 0, answer_ok)
        assert [await status(proxy) for _ in range(4)] == [200] * 4
        assert len(other.replica.received) == 4 and len(stopping.replica.received) - 1 <= 4
