"""Which replica a request goes to: first who may have it, then, by policy, which of them. Pure functions.

least-load         the fewest tokens under way; equals take turns
round-robin        each in turn
power-of-two       the less loaded of two drawn at random
prefix             who has seen the longest beginning of this prompt, unless it has much more to do than others
session            always the same one for a session's key, as long as it lives; without a key, least-load
expected-latency   the fewest requests under way times the mean latency of its answers
random             drawn at random
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Final

from proxy.errors import BadRequest, NoReplicaAvailable, UnknownModel
from proxy.replicas import REQUEST_TOKENS, Replica

SPILL_TOKENS: Final = 4096  # a replica may have so much more to do than the idlest before a shared prefix is left alone
SPILL_RATIO: Final = 1.5


class Routing(StrEnum):
    """The policies of `--routing`."""

    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    POWER_OF_TWO = "power-of-two"
    PREFIX = "prefix"
    SESSION = "session"
    EXPECTED_LATENCY = "expected-latency"
    RANDOM = "random"


def candidates(
    live: Sequence[Replica],
    known: Callable[[], Sequence[Replica]],
    *,
    model: str | None,
    tried: Collection[Replica] = (),
    dp_rank: int | None = None,
) -> Sequence[Replica]:
    """The live replicas that may have a request for `model`; `tried` are those that it was already sent to.

    A request whose model cannot be read goes to any replica, which then answers what is wrong with it.
    Raises UnknownModel if nobody serves the model, NoReplicaAvailable if nobody who does can take it now.
    """
    if not live:
        raise NoReplicaAvailable("no replica is ready; try again shortly")
    serving = live if model is None else [replica for replica in live if model in replica.models]
    if not serving and not any(model in replica.models for replica in known()):
        served = ", ".join(sorted({name for replica in live for name in replica.models}))
        raise UnknownModel(f"model {model!r} is not served here; served: {served}")
    if dp_rank is not None:
        serving = [replica for replica in serving if replica.dp_rank == dp_rank]
        if not serving and not any(replica.dp_rank == dp_rank for replica in known()):
            raise BadRequest(f"X-data-parallel-rank is {dp_rank}, which no replica here has")
    if tried:
        serving = [replica for replica in serving if replica not in tried]
    if not serving:
        raise NoReplicaAvailable("no replica that serves this model can take the request now; try again shortly")
    return serving


def least_load(candidates: Sequence[Replica], turn: int) -> Replica:
    """The candidate with the fewest tokens under way; among equals, `turn` takes them in order."""
    if len(candidates) == 1:
        return candidates[0]
    loads = [replica.load for replica in candidates]
    least = min(loads)
    if loads.count(least) == 1:
        return candidates[loads.index(least)]
    ties = [replica for replica, load in zip(candidates, loads, strict=True) if load == least]
    return ties[turn % len(ties)]


def round_robin(candidates: Sequence[Replica], turn: int) -> Replica:
    """Each in turn."""
    return candidates[turn % len(candidates)]


def drawn(candidates: Sequence[Replica], draw: float) -> Replica:
    """The one that a number in [0, 1) falls on."""
    return candidates[int(draw * len(candidates))]


def power_of_two(candidates: Sequence[Replica], draw: float, other_draw: float) -> Replica:
    """The less loaded of two different ones that the numbers fall on."""
    first = drawn(candidates, draw)
    if len(candidates) == 1:
        return first
    second = drawn([replica for replica in candidates if replica is not first], other_draw)
    return min(first, second, key=lambda replica: replica.load)


def session(candidates: Sequence[Replica], key: bytes) -> Replica:
    """The one that this key ranks highest: when a replica goes, only its own sessions move (rendezvous hashing)."""
    return max(candidates, key=lambda replica: blake2b(key, digest_size=8, key=_name(replica)).digest())


def expected_latency(candidates: Sequence[Replica], turn: int) -> Replica:
    """The one on which a request should end first; one that never answered counts as the fastest that did."""
    known = [replica.latency_s for replica in candidates if replica.latency_s]
    guess_s = min(known, default=1.0)
    waits = [(replica.in_flight + 1) * (replica.latency_s or guess_s) for replica in candidates]
    least = min(waits)
    ties = [replica for replica, wait_s in zip(candidates, waits, strict=True) if wait_s == least]
    return ties[turn % len(ties)]


def prefix(candidates: Sequence[Replica], depths: Mapping[str, int], turn: int) -> Replica:
    """Who has seen the most blocks of the prompt (`depths`, by replica id), unless it is far busier than others."""
    idlest = least_load(candidates, turn)
    deepest = max(depths.get(replica.replica_id, 0) for replica in candidates)
    if deepest == 0:
        return idlest
    best = least_load([each for each in candidates if depths.get(each.replica_id, 0) == deepest], turn)
    is_far_busier = best.load > idlest.load + SPILL_TOKENS and best.load > SPILL_RATIO * (idlest.load + REQUEST_TOKENS)
    return idlest if is_far_busier else best


def _name(replica: Replica) -> bytes:
    return blake2b(replica.replica_id.encode(), digest_size=32).digest()


class PrefixIndex:
    """Which replicas have seen which beginnings of prompts, the oldest forgotten first. Pure state.

    A beginning is the hash of its blocks (scan.prompt_blocks), so an entry is small whatever the prompt. The bound
    holds at every insert.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._owners: dict[int, str] = {}  # hash -> replica id that saw it last; oldest use first

    def __len__(self) -> int:
        return len(self._owners)

    def depths(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many of the prompt's first blocks each replica has seen."""
        depths: dict[str, int] = {}
        owners = self._owners
        for number, block in enumerate(blocks, 1):
            owner = owners.get(block)
            if owner is None:
                break  # beginnings are nested: who saw a longer one saw this one
            depths[owner] = number
        return depths

    def saw(self, blocks: Sequence[int], replica_id: str) -> None:
        """The replica is sent a prompt of these blocks."""
        owners = self._owners
        for block in reversed(blocks):  # the shortest is used most, so it is forgotten last
            owners.pop(block, None)
            owners[block] = replica_id
        while len(owners) > self._max_entries:
            del owners[next(iter(owners))]
