"""The membership store in simulated memory: the transitions of scripts/*.lua, and a server that fails in every way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coordinator.errors import CoordinatorError, Fenced, LeaseHeld, StoreUnavailable
from coordinator.membership import CALL_S
from coordinator.simulation.world import Process, World
from coordinator.store import LEASE_S, Lease, MasterAddress, Record, View, split_address

Answer = Callable[[Any], None]  # is given the result, or the error


@dataclass
class Mastership:
    """What the store holds, and its transitions. A test compares them with the scripts on a real server."""

    token: int = 0
    epoch: int = 0
    holder: str = ""
    address: str = ""
    record: Record | None = None
    lease: int = 0  # the token whose master lives; 0 for none
    expires_s: float = 0.0

    def take_lease(
        self, now_s: float, *, holder: str, address: str, seen_token: int, seen_epoch: int, replaces: int | None
    ) -> Lease:
        """take_lease.lua"""
        committed = self.record.epoch if self.record else 0
        token = self.token
        if self.holder != holder or token < seen_token:
            if self._leased(now_s) not in (0, replaces):
                raise LeaseHeld(self.lease, self.address)
            token = max(token, seen_token) + 1
            committed = self.epoch
        self.token, self.holder, self.address = token, holder, address
        self.epoch = max(self.epoch, seen_epoch + 1, committed + 1)
        self._hold(now_s)
        return Lease(token=token, epoch=self.epoch, record=self.record)

    def renew(self, now_s: float, *, token: int, holder: str, address: str, epoch: int, record: Record | None) -> int:
        """renew.lua, where nobody leaves commands"""
        self._check(token, holder)
        self.token, self.holder, self.address = token, holder, address
        self.epoch = max(self.epoch, epoch)
        if record is not None and (self.record is None or self.record.epoch < record.epoch):
            self.record = record
        self._hold(now_s)
        return 0

    def commit(self, now_s: float, *, token: int, holder: str, address: str, record: Record) -> None:
        """commit.lua"""
        self._check(token, holder)
        if self.record == record:
            return
        if record.epoch < self.epoch or (self.record is not None and record.epoch <= self.record.epoch):
            raise Fenced(f"the store is at epoch {self.epoch}, the membership is for {record.epoch}")
        self.token, self.holder, self.address = token, holder, address
        self.epoch, self.record = record.epoch, record

    def release(self, now_s: float, *, token: int, holder: str) -> None:
        """release.lua"""
        if (self.token, self.holder) == (token, holder):
            self.holder, self.lease = "", 0

    def view(self, now_s: float) -> View:
        """view.lua"""
        return View(
            token=self.token,
            epoch=self.epoch,
            record=self.record,
            address=self.address,
            is_leased=self._leased(now_s) != 0,
            is_over=self.token > 0 and not self.holder,
        )

    def _check(self, token: int, holder: str) -> None:
        if self.token > token or (self.token == token and self.holder != holder):
            raise Fenced(f"the lease has token {self.token}, this master has {token}")

    def _hold(self, now_s: float) -> None:
        self.lease, self.expires_s = self.token, now_s + LEASE_S

    def _leased(self, now_s: float) -> int:
        return self.lease if now_s < self.expires_s else 0


def _address(view: View) -> MasterAddress:
    host, port = split_address(view.address)
    return MasterAddress(token=view.token, host=host, port=port)


class StoreServer:
    """The server. Calls that it is frozen for are carried out when it thaws, whoever still waits for them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.data = Mastership()
        self._far_s = world.random.choice([0.005, 0.005, 0.02, 0.1])  # the most that one way takes
        self.committed: Callable[[int, Record], None] = lambda token, record: None  # told of each commit that was done
        self.lost: Callable[[Record | None], None] = lambda record: None  # told of a loss, and of what is left
        self.is_down = False
        self.is_frozen = False
        self.unreachable: set[int] = set()  # the nodes that the network is cut to
        self.reply_loss = 0.0  # odds that a reply is lost
        self._held: list[Callable[[], None]] = []
        self._copies: deque[Mastership] = deque(maxlen=8)  # what a copy that lags may know

    def call(self, caller: Process, place: int, name: str, answer: Answer, **arguments: Any) -> None:
        """Asks for a transition; `answer` happens in `caller`, once, within CALL_S."""
        call = _Call(caller, place, answer)
        self.world.after(CALL_S, caller, call.answer, StoreUnavailable(f"no answer to {name}"))
        if self.is_down:
            self._reply(call, StoreUnavailable("connection refused"))
        elif place not in self.unreachable:
            self.world.after(self._latency_s(), None, self._reach, partial(self._carry_out, call, name, arguments))

    def freeze(self) -> None:
        """It answers nothing, and forgets nothing."""
        self.is_frozen = True
        self.world.note("the store freezes")

    def thaw(self) -> None:
        """It carries out what has come meanwhile, in no certain order: each came on a connection of its own."""
        self.is_frozen = False
        self.world.note("the store thaws")
        held, self._held = self._held, []
        self.world.random.shuffle(held)
        for carry_out in held:
            carry_out()

    def lose_data(self) -> None:
        """It was flushed, or has come back empty."""
        self.data = Mastership()
        self._copies.clear()
        self.world.note("the store has lost its data")
        self.lost(None)

    def fail_over(self) -> None:
        """A copy that lags behind has taken its place."""
        if self._copies:
            self.data = self.world.random.choice(self._copies)
            self._copies.clear()
            self.world.note("the store fails over to a copy at token %d, epoch %d", self.data.token, self.data.epoch)
            self.lost(self.data.record)

    def _reach(self, carry_out: Callable[[], None]) -> None:
        if self.is_frozen:
            self._held.append(carry_out)
        elif not self.is_down:
            carry_out()

    def _carry_out(self, call: _Call, name: str, arguments: dict[str, Any]) -> None:
        before = replace(self.data)
        try:
            result = getattr(self.data, name)(self.world.now_s, **arguments)
        except CoordinatorError as err:
            result = err
        else:
            if name == "commit" and before.record != self.data.record:
                self.world.note("committed %s", self.data.record)
                self.committed(arguments["token"], arguments["record"])
            if name in ("commit", "take_lease"):
                self._copies.append(before)
        if self.world.random.random() >= self.reply_loss and call.place not in self.unreachable:
            self._reply(call, result)

    def _reply(self, call: _Call, result: Any) -> None:
        self.world.after(self._latency_s(), call.caller, call.answer, result)

    def _latency_s(self) -> float:
        return self.world.random.uniform(0.0002, self._far_s)


class _Call:
    """A call that is answered once."""

    def __init__(self, caller: Process, place: int, answer: Answer) -> None:
        self.caller = caller
        self.place = place
        self._answer: Answer | None = answer

    def answer(self, result: Any) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer(result)


class StoreClient:
    """One process's way to the store: what membership.Membership is on a real one."""

    def __init__(self, server: StoreServer, process: Process, place: int) -> None:
        self._server = server
        self._process = process
        self._place = place
        self._holder = ""
        self._address = ""
        self._record: Record | None = None

    def take_lease(self, answer: Answer, *, holder: str, address: str, **seen: Any) -> None:
        """Answers a Lease, LeaseHeld or StoreUnavailable."""

        def taken(result: Any) -> None:
            if isinstance(result, Lease):
                self._holder, self._address, self._record = holder, address, result.record
            answer(result)

        self._call("take_lease", taken, holder=holder, address=address, **seen)

    def renew(self, answer: Answer, token: int, epoch: int) -> None:
        """Answers None, Fenced or StoreUnavailable."""
        mine: dict[str, Any] = {"holder": self._holder, "address": self._address, "record": self._record}
        self._call("renew", answer, token=token, epoch=epoch, **mine)

    def commit(self, answer: Answer, token: int, record: Record) -> None:
        """Answers None, Fenced or StoreUnavailable."""

        def done(result: Any) -> None:
            if result is None:
                self._record = record
            answer(result)

        self._call("commit", done, token=token, holder=self._holder, address=self._address, record=record)

    def release(self, token: int) -> None:
        """Nobody waits for the answer."""
        self._call("release", lambda result: None, token=token, holder=self._holder)

    def view(self, answer: Answer) -> None:
        """Answers a View or StoreUnavailable."""
        self._call("view", answer)

    def master(self, answer: Answer) -> None:
        """Answers a MasterAddress, None or StoreUnavailable."""

        def seen(result: Any) -> None:
            if isinstance(result, View):
                result = _address(result) if result.is_leased else None
            answer(result)

        self._call("view", seen)

    def _call(self, name: str, answer: Answer, **arguments: Any) -> None:
        self._process.count_send()
        self._server.call(self._process, self._place, name, answer, **arguments)
