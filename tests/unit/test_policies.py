"""The routing policies: what each promises, for any loads."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import BadRequest, NoReplicaAvailable
from proxy.picker import Picker
from proxy.replicas import REQUEST_TOKENS, InFlight, Replica
from proxy.routing import (
    SPILL_TOKENS,
    PrefixIndex,
    Routing,
    candidates,
    drawn,
    expected_latency,
    least_load,
    power_of_two,
    prefix,
    round_robin,
    session,
)
from proxy.scan import MAX_BLOCKS, prompt_blocks


def replicas(*loads: int) -> list[Replica]:
    """Replicas with so many tokens under way."""
    made = []
    for number, tokens in enumerate(loads):
        made.append(
            Replica(
                replica_id=f"r{number}",
                incarnation="a",
                url=f"http://r{number}",
                models={"tiny": {}},
                is_backend=False,
                last_seen_s=0.0,
                dp_rank=number,
                in_flight_tokens=tokens,
                load=tokens,
            )
        )
    return made


LOADS = st.lists(st.integers(0, 10_000), min_size=1, max_size=8)
DRAW = st.floats(0, 1, exclude_max=True)


@given(LOADS, st.integers(0, 1000))
def test_least_load_is_never_beaten(loads: list[int], turn: int) -> None:
    assert least_load(replicas(*loads), turn).load == min(loads)


@given(LOADS, DRAW, DRAW)
def test_of_two_drawn_the_busiest_of_all_is_never_taken_unless_all_are_alike(
    loads: list[int], draw: float, other: float
) -> None:
    chosen = power_of_two(replicas(*loads), draw, other)
    assert len(loads) == 1 or chosen.load < max(loads) or loads.count(max(loads)) > 1


@given(LOADS, st.integers(0, 1000))
def test_round_robin_takes_each_once_in_a_round(loads: list[int], turn: int) -> None:
    all_of_them = replicas(*loads)
    taken = [round_robin(all_of_them, turn + step).replica_id for step in range(len(loads))]
    assert sorted(taken) == sorted(replica.replica_id for replica in all_of_them)


@given(LOADS, DRAW)
def test_a_draw_always_falls_on_somebody(loads: list[int], draw: float) -> None:
    assert drawn(replicas(*loads), draw).replica_id in {f"r{number}" for number in range(len(loads))}


@given(st.integers(2, 8), st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=50), st.data())
def test_when_a_replica_goes_only_its_own_sessions_move(count: int, keys: list[bytes], data: st.DataObject) -> None:
    all_of_them = replicas(*[0] * count)
    gone = data.draw(st.sampled_from(all_of_them))
    left = [replica for replica in all_of_them if replica is not gone]
    for key in keys:
        before = session(all_of_them, key)
        assert before is gone or session(left, key) is before


def test_sessions_are_spread_evenly() -> None:
    taken = Counter(session(replicas(0, 0, 0, 0), b"%d" % key).replica_id for key in range(4000))
    assert all(850 < count < 1150 for count in taken.values())


def test_expected_latency_weighs_what_is_under_way_with_how_long_it_takes() -> None:
    fast, slow = replicas(0, 0)
    fast.latency_s, slow.latency_s = 0.1, 1.0
    for _ in range(8):
        InFlight(fast)
        assert expected_latency([slow, fast], 0) is fast
    InFlight(fast)
    InFlight(fast)
    assert expected_latency([slow, fast], 0) is slow


@given(LOADS, st.lists(st.floats(0.001, 100), min_size=8, max_size=8), st.integers(0, 1000))
def test_expected_latency_is_never_beaten(loads: list[int], latencies: list[float], turn: int) -> None:
    known = replicas(*loads)
    for replica, load, latency_s in zip(known, loads, latencies, strict=False):
        replica.in_flight, replica.latency_s = load, latency_s
    chosen = expected_latency(known, turn)
    assert all((chosen.in_flight + 1) * chosen.latency_s <= (each.in_flight + 1) * each.latency_s for each in known)


@pytest.mark.parametrize("policy", Routing)
@given(LOADS, st.binary(max_size=600), st.none() | st.binary(min_size=1, max_size=9), st.integers(0, 99))
def test_every_policy_picks_a_candidate_whatever_it_is_asked(
    policy: Routing, loads: list[int], body: bytes, session_key: bytes | None, seed: int
) -> None:
    picker, known = Picker(policy, random.Random(seed)), replicas(*loads)
    for _ in range(3):
        assert picker.pick(known, b'{"prompt": "' + body, session_key) in known


def test_a_replica_that_never_answered_is_neither_shunned_nor_flooded() -> None:
    known, new = replicas(0, 0)
    known.latency_s = 0.5
    InFlight(known)
    assert expected_latency([known, new], 0) is new
    InFlight(new)
    InFlight(new)
    assert expected_latency([known, new], 0) is known


def test_a_mean_latency_follows_the_newest_answers() -> None:
    (replica,) = replicas(0)
    replica.answered(1.0)
    assert replica.latency_s == 1.0
    for _ in range(30):
        replica.answered(2.0)
    assert 1.99 < replica.latency_s < 2.0


def body(*turns: str) -> bytes:
    return b'{"model": "tiny", "messages": [' + "".join(turns).encode() + b"]}"


def test_a_longer_conversation_begins_with_the_blocks_of_the_shorter() -> None:
    first, second = "a" * 700, "b" * 700
    short, long = prompt_blocks(body(first)), prompt_blocks(body(first, second))
    assert len(short) >= 2 and long[: len(short) - 1] == short[:-1] and len(long) > len(short)
    assert (
        prompt_blocks(b'{"model": "other", "temperature": 1, "messages": [' + first.encode() + b"]}")[:2] == short[:2]
    )
    assert prompt_blocks(b"{}") == []


@given(st.binary(max_size=3000))
def test_blocks_of_anything_are_bounded(prompt: bytes) -> None:
    assert len(prompt_blocks(b'{"prompt": ' + prompt * 40)) <= MAX_BLOCKS


def test_a_prompt_goes_where_its_beginning_was_seen_and_a_new_one_to_the_idlest() -> None:
    index, all_of_them = PrefixIndex(1000), replicas(500, 0, 100)
    blocks = prompt_blocks(body("a" * 2000))
    assert prefix(all_of_them, index.depths(blocks), 0).replica_id == "r1"
    index.saw(blocks, "r0")
    assert prefix(all_of_them, index.depths(prompt_blocks(body("a" * 2000, "b" * 900))), 0).replica_id == "r0"
    assert prefix(all_of_them, index.depths(prompt_blocks(body("c" * 2000))), 0).replica_id == "r1"


def test_the_longest_known_beginning_wins() -> None:
    index = PrefixIndex(1000)
    index.saw([1, 2, 3, 4], "r0")
    index.saw([1, 2, 9], "r1")
    assert index.depths([1, 2, 3, 4, 5]) == {"r1": 2, "r0": 4}
    assert prefix(replicas(0, 0), index.depths([1, 2, 3, 4, 5]), 0).replica_id == "r0"
    assert prefix(replicas(0, 0), index.depths([1, 2, 9]), 0).replica_id == "r1"


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_shared_beginning_is_left_alone_only_when_its_replica_is_far_busier(busy: int, idle: int) -> None:
    chosen = prefix(replicas(busy, idle), {"r0": 7}, 0)
    if busy <= idle + SPILL_TOKENS:
        assert chosen.replica_id == "r0"
    if busy > idle + SPILL_TOKENS and busy > 1.5 * (idle + REQUEST_TOKENS):
        assert chosen.replica_id == "r1"


@given(st.lists(st.lists(st.integers(0, 500), max_size=30), max_size=60))
def test_the_index_is_bounded_at_every_insert(prompts: list[list[int]]) -> None:
    index = PrefixIndex(100)
    for blocks in prompts:
        index.saw(blocks, "r0")
        assert len(index) <= 100


def test_a_rank_that_is_asked_for_is_the_only_candidate() -> None:
    all_of_them = replicas(0, 0, 0)

    def ask(live: list[Replica], rank: int) -> list[str]:
        found = candidates(live, lambda: all_of_them, model="tiny", dp_rank=rank)
        return [replica.replica_id for replica in found]

    assert ask(all_of_them, 1) == ["r1"]
    with pytest.raises(NoReplicaAvailable):
        ask(all_of_them[:1], 1)
    with pytest.raises(BadRequest, match="X-data-parallel-rank is 7"):
        ask(all_of_them, 7)
