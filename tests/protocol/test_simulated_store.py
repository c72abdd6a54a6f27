"""The simulated store does what the scripts do on a real Redis: random calls to both, with equal answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordinator import keys
from coordinator.errors import CoordinatorError
from coordinator.membership import Membership
from coordinator.simulation.stores import Mastership
from coordinator.store import Record
from tests.redis_server import RedisServer, redis_server

GROUP = "g"
NUM_SEEDS = 12
NUM_CALLS = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


class Both:
    """A real store and a simulated one, with one holder's memory for both."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        server.call("FLUSHALL")
        self.server = server
        self.random = random.Random(seed)
        self.simulated = Mastership()
        self.real = {holder: Membership.at(server.url, GROUP) for holder in "abc"}
        self.tokens = dict.fromkeys(self.real, 0)
        self.num_leases = 0
        self.now_s = 0.0  # the simulated lease runs out when the test says so, as the real one

    async def call(self) -> None:
        """One call to both."""
        holder = self.random.choice("abc")
        real, token = self.real[holder], self.tokens[holder]
        mine = {"token": token, "holder": holder, "address": f"{holder}:1"}
        match self.random.randrange(8):
            case 0 | 1:
                await self._take_lease(holder)
            case 2 if token:
                epoch, record = self.random.randrange(12), real._record
                await self._same(real.renew(token, epoch), "renew", **mine, epoch=epoch, record=record)
            case 3 | 4 if token:
                record = Record(epoch=self.random.randrange(1, 12), members=(0, 1), evicted=(), config_hash=holder)
                await self._same(real.commit(token, record), "commit", **mine, record=record)
            case 5 if token:
                await self._same(real.release(token), "release", token=token, holder=holder)
            case 6 if self.random.random() < 0.3:
                self.server.call("FLUSHALL")
                self.simulated = Mastership()
            case 7:
                self.server.call("DEL", keys.lease(GROUP))
                self.simulated.lease = 0
        await self._same(real.view(), "view")

    async def _take_lease(self, holder: str) -> None:
        seen = {"seen_token": self.random.randrange(4), "seen_epoch": self.random.randrange(8)}
        replaces = self.random.choice([None, self.random.randrange(1, 6)])
        arguments: dict[str, Any] = {"holder": holder, "address": f"{holder}:1", "replaces": replaces, **seen}
        lease = await self._same(self.real[holder].take_lease(**arguments), "take_lease", **arguments)
        if not isinstance(lease, CoordinatorError):
            self.tokens[holder] = lease.token
            self.num_leases += 1

    async def _same(self, real: Any, name: str, **arguments: Any) -> Any:
        async def on_redis() -> Any:
            return await real

        def simulated() -> Any:
            return getattr(self.simulated, name)(self.now_s, **arguments)

        try:
            answer = await on_redis()
        except CoordinatorError as err:
            answer = err
        wanted = outcome(simulated)
        if isinstance(wanted, CoordinatorError):
            assert type(answer) is type(wanted), (name, arguments, answer, wanted)
            assert str(answer) == str(wanted)
        else:
            assert answer == wanted, (name, arguments)
        return answer


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CoordinatorError as err:
        return err


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_random_calls_have_the_same_answers(server: RedisServer, seed: int) -> None:
    both = Both(server, seed)
    try:
        for _ in range(NUM_CALLS):
            await both.call()
    finally:
        for store in both.real.values():
            await store.close()
    assert both.num_leases > 5
