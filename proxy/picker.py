"""The policy of one proxy, with what it remembers between requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from proxy import routing
from proxy.registry import Replica
from proxy.routing import PrefixIndex, Routing
from proxy.scan import prompt_blocks

PREFIX_ENTRIES: Final = 200_000  # about 25 MB


class Picker:
    """Picks one of the replicas that may have a request."""

    def __init__(self, policy: Routing, draws: random.Random | None = None) -> None:
        self._policy = policy
        self._draws = draws or random.Random()
        self._turn = 0
        self._seen = PrefixIndex(PREFIX_ENTRIES)

    def pick(self, candidates: Sequence[Replica], body: bytes, session: bytes | None) -> Replica:
        """One of the candidates, of which there is at least one; `session` is the client's session key, if any."""
        self._turn += 1
        match self._policy:
            case Routing.LEAST_LOAD:
                return routing.least_load(candidates, self._turn)
            case Routing.PREFIX:
                return self._by_prefix(candidates, body)
            case Routing.ROUND_ROBIN:
                return routing.round_robin(candidates, self._turn)
            case Routing.POWER_OF_TWO:
                return routing.power_of_two(candidates, self._draws.random(), self._draws.random())
            case Routing.SESSION if session:
                return routing.session(candidates, session)
            case Routing.EXPECTED_LATENCY:
                return routing.expected_latency(candidates, self._turn)
            case Routing.RANDOM:
                return routing.drawn(candidates, self._draws.random())
        return routing.least_load(candidates, self._turn)

    def _by_prefix(self, candidates: Sequence[Replica], body: bytes) -> Replica:
        blocks = prompt_blocks(body)
        replica = routing.prefix(candidates, self._seen.depths(blocks), self._turn)
        self._seen.saw(blocks, replica.replica_id)
        return replica
