"""What a replica tells of its group over HTTP."""

from __future__ import annotations

from aiohttp import ClientSession

from replica.group_state import PARTS
from replica.step_clock import Reconfiguration
from tests.protocol.fake_loop import FakeLoop, replica

REASON = "member 1 (b) was lost before step 7: its connection ended (EOF)"


def evict(loop: FakeLoop) -> None:
    loop.group.changed(
        Reconfiguration(
            epoch=2, members=(0, 2), evicted=((1,),), kinds=("lost",), reason=REASON, detect_s=0.01, agree_s=0.02
        )
    )
    loop.group.connected(rebuild_s=0.03, reload_s=0.04)
    loop.group.stepped(0.05)


async def test_group_tells_members_evictions_and_the_parts_of_the_last_pause(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        evict(loop)
        async with session.get(url + "/group") as response:
            state = await response.json()
    assert (state["state"], state["epoch"], state["members"], state["dp_rank"]) == ("running", 2, [0, 2], 0)
    (eviction,) = state["evicted"]
    assert (eviction["dp_ranks"], eviction["kinds"], eviction["reason"]) == ([1], ["lost"], REASON)
    seconds = [0.01, 0.02, 0.03, 0.04, 0.05]
    assert state["last_reconfiguration"] == {f"{part}_s": s for part, s in zip(PARTS, seconds, strict=True)}


async def test_metrics_count_evictions_and_the_seconds_of_each_part(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        evict(loop)
        async with session.get(url + "/metrics") as response:
            text = await response.text()
    labels = 'engine="0",model_name="tiny-moe"'
    assert f"lockstep_group_members{{{labels}}} 2.0" in text
    assert 'lockstep_evictions_total{engine="0",kind="lost",model_name="tiny-moe"} 1.0' in text
    assert f"lockstep_reconfigurations_total{{{labels}}} 1.0" in text
    for part, seconds in zip(PARTS, (0.01, 0.02, 0.03, 0.04, 0.05), strict=True):
        assert f'lockstep_reconfiguration_seconds_total{{{labels},part="{part}"}} {seconds}' in text
