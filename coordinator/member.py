"""A member's end of the clock, for an engine's step loop.

    member = Member(hello=..., host=..., port=..., secret=..., ...)
    reconfigure = await member.join()                              # the first epoch; later ones: `reconfigured`
    go = await member.ready(blob)
    while True:
        member.arrive(decode_tokens=..., prefill_tokens=...)       # again, to replace it, until it is released
        release = await member.released()                          # then act on its commands and start its forward
        ...                                                        # the next arrive comes here, while the forward runs
        member.done(release.step)                                  # all ranks have reported: the batch is committed

What a member may do when is in member_state.py; here are the connection and the waits. Every wait ends: with what was
waited for, with a newer epoch, or with the error that ends the membership. A member whose master is lost looks for one
by itself. A parked member costs a frame each way, twice a second.

Beats come from a thread, so that a busy event loop does not look like a dead process. Two threads write to the one
socket, hence the lock, which is held for one non-blocking send; only the event loop reads. That is why this end uses
the socket itself: a transport may be written to from its loop's thread alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from coordinator.errors import JoinFailed, JoinRefused, MasterLost, ProtocolError, StoreUnavailable
from coordinator.handshake import checked_secret, is_genuine, sign
from coordinator.member_state import MemberState
from coordinator.messages import (
    BEAT_INTERVAL_S,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Challenge,
    FrameBuffer,
    Go,
    Hello,
    Message,
    Reconfigure,
    Refused,
    Release,
    encode,
)
from coordinator.store import LEASE_S

logger = logging.getLogger(__name__)

CONNECT_S: Final = 2.0  # for one attempt to join, up to the Accepted
MAX_RETRY_S: Final = 1.0  # between attempts to join
# A new master waits one second for its members: whoever looks for it must come by in less, even when the address that
# it tried first belongs to a master which is frozen and answers nothing.
FIND_S: Final = 0.2  # for asking where the master is
LOOK_S: Final = LEASE_S + 3.0  # for another master, until a member gives up
REDIAL_S: Final = 0.4  # for one attempt, up to the Accepted
REDIAL_PAUSE_S: Final = 0.1
# What `silence_s` should be at most where another master may take over: less than the lease (2 s), so that members look
# for the next master by the time that it waits for them.
MAX_SILENCE_S: Final = 1.5
MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES  # a master that reads so little is lost
READ_BYTES: Final = 64 * 1024

FindMaster = Callable[[], Awaitable[tuple[str, int] | None]]


async def _same_master() -> tuple[str, int] | None:
    """For a group whose master does not move."""
    return None


class Member:
    """One member of a group. To be used from one event loop; `close` it in any case.

    `collectives` and `is_alive` are called from the beat's thread: collectives that each rank of this member has
    entered in this epoch, and whether all of its ranks live; no beat is sent while they do not.

    `find_master` says where the group's master is by now (host, port), or None where it does not know; then the
    address that was good last is tried again.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        host: str,
        port: int,
        secret: bytes,
        startup_deadline_s: float,
        silence_s: float,
        collectives: Callable[[], tuple[int, ...]],
        is_alive: Callable[[], bool] = lambda: True,
        find_master: FindMaster = _same_master,
        redial_s: float = LOOK_S,
    ) -> None:
        self._state = MemberState(silence_s=silence_s, redial_s=redial_s)
        self._hello = hello
        self._address = (host, port)
        self._secret = checked_secret(secret)
        self._startup_deadline_s = startup_deadline_s
        self._collectives = collectives
        self._is_alive = is_alive
        self._find_master = find_master
        self._socket: socket.socket | None = None
        self._frames = FrameBuffer(MAX_FRAME_BYTES)
        self._challenge: Challenge | None = None
        self._acceptance: asyncio.Future[None] | None = None  # of the connection that is being made
        self._is_accepted = False  # the connection carries more than a handshake
        self._changed = asyncio.Event()  # set by everything that comes in
        self._watch: asyncio.TimerHandle | None = None
        self._redialling: asyncio.Task[None] | None = None
        self._unsent = bytearray()
        self._lock = threading.Lock()  # of `_unsent`, and of writing to the socket
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="clock-beats", daemon=True)

    @property
    def epoch(self) -> int:
        """The epoch that `ready` was called in; 0 before the first."""
        return self._state.epoch

    @property
    def step(self) -> int:
        """The next that `released` returns."""
        return self._state.step

    @property
    def is_looking(self) -> bool:
        """Whether the master is lost and another one is looked for."""
        return self._state.is_looking

    async def join(self) -> Reconfigure:
        """Dials the master until it answers, then waits for the other members; their absence is the master's to judge.

        Returns the first epoch. Raises JoinRefused, JoinFailed when there is no master by the start-up deadline,
        GroupFailed or MasterLost.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._startup_deadline_s
        retry_s = BEAT_INTERVAL_S / 4
        while not self._is_accepted:
            try:
                async with asyncio.timeout_at(min(deadline_s, loop.time() + CONNECT_S)):
                    await self._connect(self._address)
            except (OSError, MasterLost) as err:  # TimeoutError is an OSError
                if loop.time() >= deadline_s:
                    address = "{}:{}".format(*self._address)
                    limit = f"{self._startup_deadline_s:g} s"
                    raise JoinFailed(f"no master at {address} within {limit}: {err or type(err).__name__}") from err
                await asyncio.sleep(min(retry_s, max(0.0, deadline_s - loop.time())))
                retry_s = min(2 * retry_s, MAX_RETRY_S)
        logger.info("master accepted this member, waiting for the others dp_rank=%d", self._hello.dp_rank)
        self._beats.start()
        self._watch_master()
        return await self.reconfigured(0)

    async def superseded(self) -> None:
        """Waits until there is an epoch that `reconfigured` has not returned yet, for who must first cut something off.

        Raises Evicted, GroupFailed or MasterLost.
        """
        while not self._state.is_superseded:
            await self._change()

    async def reconfigured(self, after_epoch: int) -> Reconfigure:
        """Waits for an epoch after `after_epoch`. What it supersedes goes on until `ready` is called.

        Raises Evicted, GroupFailed or MasterLost.
        """
        while (reconfigure := self._state.offer(after_epoch)) is None:
            await self._change()
        return reconfigure

    async def ready(self, blob: bytes) -> Go:
        """Says that this member could step in the epoch that `join` or `reconfigured` returned last, and waits for all.

        What ran in the epoch before must be cut off by then. Raises Superseded, Evicted, GroupFailed or MasterLost.
        """
        self._send(self._state.ready(blob))
        while self._state.go is None:
            await self._change()
            self._state.check()
        return self._state.go

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """Stands ready for `step` with these tokens, or with none. Replaces what was said for that step.

        A replacement may come too late: what counts is what the release says.
        """
        self._send(self._state.arrive(decode_tokens=decode_tokens, prefill_tokens=prefill_tokens))

    def want(self, command: str) -> None:
        """Asks for a command to be put into a release; asks on until one carries it."""
        if arrive := self._state.want(command):
            self._send(arrive)

    async def released(self) -> Release:
        """The release of `step`, once this member has arrived for it.

        Raises Superseded, Evicted, GroupFailed or MasterLost.
        """
        while (release := self._state.next_release()) is None:
            await self._change()
        return release

    def done(self, step: int) -> None:
        """All ranks have reported `step`: its batch is committed. In order, each released step once."""
        self._send(self._state.done(step))

    def fault(self, step: int, what: str) -> None:
        """A collective of `step` raised. What follows is the next epoch, with or without this member."""
        self._send(self._state.fault(step, what))

    async def failed(self) -> None:
        """Waits for the error that ends this membership and raises it, for who waits for something else meanwhile."""
        while True:
            await self._change()

    def close(self) -> None:
        """Leaves. After a release that carries `stop` this is the orderly end, before it a loss to the group."""
        self._closing.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._redialling is not None:
            self._redialling.cancel()
        self._state.end(MasterLost("this member has left its group"))
        self._changed.set()
        self._disconnect()
        if self._beats.is_alive():
            self._beats.join(timeout=1.0)

    # Connecting

    async def _connect(self, address: tuple[str, int]) -> None:
        """Returns when a master has accepted this member. Raises OSError, MasterLost or JoinRefused."""
        loop = asyncio.get_running_loop()
        try:
            self._socket = await _dial(*address)
            self._frames, self._challenge = FrameBuffer(MAX_FRAME_BYTES), None
            self._unsent.clear()
            self._acceptance = loop.create_future()
            loop.add_reader(self._socket, self._read)
            await self._acceptance
        except BaseException:  # an attempt that was given up or cancelled leaves nothing behind
            self._disconnect()
            raise
        finally:
            self._acceptance = None
        self._address = address

    async def _redial(self) -> None:
        """Looks for a master until one has accepted this member, or until it has looked for too long."""
        while self._state.is_looking:
            try:
                address = await self._master_address()
                async with asyncio.timeout(REDIAL_S):
                    await self._connect(address)
            except JoinRefused as err:
                self._state.refused(str(err))
                self._changed.set()
            except (OSError, MasterLost) as err:  # TimeoutError is an OSError
                logger.debug("no master yet reason=%s", err or type(err).__name__)
                await asyncio.sleep(REDIAL_PAUSE_S)

    async def _master_address(self) -> tuple[str, int]:
        try:
            async with asyncio.timeout(FIND_S):
                return await self._find_master() or self._address
        except (StoreUnavailable, TimeoutError):
            return self._address  # whoever is there may still be the master

    def _disconnect(self) -> None:
        with self._lock:
            gone, self._socket, self._is_accepted = self._socket, None, False
        if gone is not None:
            asyncio.get_running_loop().remove_reader(gone)
            gone.close()

    def _shake_hands(self, message: Message) -> None:
        match message:
            case Challenge() if self._challenge is None:
                if message.version != PROTOCOL_VERSION:
                    raise JoinRefused(f"the master speaks version {message.version}, this member {PROTOCOL_VERSION}")
                self._challenge = message
                self._hello = sign(replace(self._hello, epoch=self._state.told_epoch), self._secret, message)
                with self._lock:
                    self._write(encode(self._hello))
            case Accepted() if self._challenge is not None:
                if not is_genuine(message, self._hello, self._secret):
                    raise JoinRefused("whoever answers at the master's address does not know the group's secret")
                if self._acceptance is not None and not self._acceptance.done():  # else the attempt was just given up
                    self._acceptance.set_result(None)
                    self._is_accepted = True
                    self._state.accepted(time.monotonic())
            case Refused():
                raise JoinRefused(message.reason)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not part of a handshake")

    # Receiving, on the event loop

    async def _change(self) -> None:
        """Returns when something has come in. Raises the error that ended the membership."""
        if self._state.error is not None:
            raise self._state.error
        self._changed.clear()
        await self._changed.wait()
        if self._state.error is not None:
            raise self._state.error

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            received = self._socket.recv(READ_BYTES)
            if not received:
                self._lose(MasterLost("the master closed the connection"))
                return
            self._state.heard(time.monotonic())
            self._changed.set()
            for message in self._frames.feed(received):
                if self._is_accepted:
                    self._state.take(message)
                else:
                    self._shake_hands(message)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as err:
            self._lose(MasterLost(f"the master's connection failed: {err}"))
        except ProtocolError as err:
            self._lose(MasterLost(f"the master sent what is no message: {err}"))
        except JoinRefused as err:
            self._lose(err)
        if self._state.error is not None:
            self._disconnect()

    def _lose(self, error: MasterLost | JoinRefused) -> None:
        """The connection is of no more use: an attempt has failed, or the master is lost."""
        self._disconnect()
        if self._acceptance is not None and not self._acceptance.done():
            self._acceptance.set_exception(error)
        self._state.lose_master(str(error), time.monotonic())
        self._changed.set()
        self._look_for_master()

    def _look_for_master(self) -> None:
        if self._state.is_looking and (self._redialling is None or self._redialling.done()):
            self._redialling = asyncio.get_running_loop().create_task(self._redial())

    def _watch_master(self) -> None:
        self._read()  # what has come while this loop was busy speaks for the master
        was_connected = self._state.is_connected
        self._state.tick(time.monotonic())
        if was_connected and not self._state.is_connected:
            self._disconnect()
            self._look_for_master()
        if self._state.error is None:
            self._watch = asyncio.get_running_loop().call_later(self._state.beat_interval_s, self._watch_master)
        else:
            self._changed.set()

    # Sending, from either thread

    def _send(self, message: Message) -> None:
        """Sends to the master, if there is one: what is said while it is lost is void with its epoch."""
        frame = encode(message)
        with self._lock:
            if self._is_accepted:
                self._write(frame)

    def _write(self, frame: bytes) -> None:
        """Sends what the socket takes now; the rest goes before the next frame. To be called under the lock."""
        assert self._socket is not None
        self._unsent += frame
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            if len(self._unsent) > MAX_UNSENT_BYTES:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The event loop sees the same end at its next read, and what the master had still to say before it.
            return

    def _beat(self) -> None:
        while not self._closing.wait(self._state.beat_interval_s):
            if self._is_alive():
                self._send(self._state.beat(self._collectives()))


async def _dial(host: str, port: int) -> socket.socket:
    """A connected socket that does not block. Raises OSError."""
    loop = asyncio.get_running_loop()
    refusal = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        dialled = socket.socket(family, kind, protocol)
        dialled.setblocking(False)
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(dialled, address)
        except BaseException as err:
            dialled.close()
            if not isinstance(err, OSError):
                raise
            refusal = err  # another address may do
        else:
            return dialled
    raise refusal
