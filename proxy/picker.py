"""The policy of one proxy, with what it remembers between requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from proxy import routing
from proxy.replicas import Replica
from proxy.routing import PrefixIndex, Routing
from proxy.scan import prompt_blocks

PREFIX_ENTRIES: Final = 200_000  # about 25 MB

Policy = Callable[[Sequence[Replica], bytes, bytes | None], Replica]


class Picker:
    """Picks one of the replicas that may have a request."""

    def __init__(self, policy: Routing, draws: random.Random | None = None) -> None:
        self._draws = draws or random.Random()
        self._turn = 0
        self._seen = PrefixIndex(PREFIX_ENTRIES)
        self._by_policy: Policy = {
            Routing.LEAST_LOAD: lambda found, body, session: routing.least_load(found, self._turn),
            Routing.ROUND_ROBIN: lambda found, body, session: routing.round_robin(found, self._turn),
            Routing.POWER_OF_TWO: lambda found, body, session: routing.power_of_two(found, self._draw(), self._draw()),
            Routing.PREFIX: lambda found, body, session: self._by_prefix(found, body),
            Routing.SESSION: lambda found, body, session: self._by_session(found, session),
            Routing.EXPECTED_LATENCY: lambda found, body, session: routing.expected_latency(found, self._turn),
            Routing.RANDOM: lambda found, body, session: routing.drawn(found, self._draw()),
        }[policy]

    def pick(self, candidates: Sequence[Replica], body: bytes, session: bytes | None) -> Replica:
        """One of the candidates, of which there is at least one; `session` is the client's session key, if any."""
        self._turn += 1
        return self._by_policy(candidates, body, session)

    def _draw(self) -> float:
        return self._draws.random()

    def _by_session(self, candidates: Sequence[Replica], session: bytes | None) -> Replica:
        return routing.session(candidates, session) if session else routing.least_load(candidates, self._turn)

    def _by_prefix(self, candidates: Sequence[Replica], body: bytes) -> Replica:
        blocks = prompt_blocks(body)
        replica = routing.prefix(candidates, self._seen.depths(blocks), self._turn)
        self._seen.saw(blocks, replica.replica_id)
        return replica
