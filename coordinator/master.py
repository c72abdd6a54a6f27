"""The master's end of the clock: a TCP server around Clock, for the process that supervises the replicas.

Strangers get nothing but a random challenge: their bytes, connections and halves of frames are dropped, and logged at
most once in STRANGER_LOG_S. A connection that has not proved itself may send one small frame, may live for
HANDSHAKE_S, and is the first to go when there are more than MAX_STRANGERS of them.

A master that holds a lease renews it beside the steps, which never wait for the store. While the store is away steps go
on, and no membership changes. One whose lease was given to another is deposed: it drops its members, who look for the
other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from dataclasses import dataclass
from typing import Final, cast

from coordinator.clock import ENDED, Clock, ClockSettings, Commit, Expel, Output, Phase
from coordinator.errors import Deposed, Fenced, GroupFailed, JoinRefused, ProtocolError, StoreUnavailable
from coordinator.handshake import accept, checked_secret, is_signed, new_challenge
from coordinator.messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    Beat,
    FrameBuffer,
    Hello,
    MemberMessage,
    Message,
    Refused,
    encode,
)
from coordinator.store import Lease, Record, Store

logger = logging.getLogger(__name__)

MAX_STRANGERS: Final = 128
# asyncio accepts as many connections in one turn of its loop as its backlog says. Few, so that a flood of them takes
# turns with the members' frames; the kernel's own queue is long, so that a member that dials meanwhile gets in.
ACCEPTS_PER_TURN: Final = 16
BACKLOG: Final = 1024
HANDSHAKE_S: Final = 2.0
STRANGER_LOG_S: Final = 10.0
RENEW_S: Final = 0.5  # between renewals of the lease
COMMIT_RETRY_S: Final = 0.05
CLOSE_S: Final = 0.02  # some turns of the loop, in which connections end, also those that were just being accepted


async def bind(host: str, port: int) -> socket.socket:
    """A socket for `Master.start`, that has its port: a free one where `port` is 0. Raises OSError."""
    family = (await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))[0][0]
    return socket.create_server((host, port), family=family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mastership:
    """What makes this master the only one of its group."""

    store: Store
    lease: Lease
    is_takeover: bool  # go on with the members of the lease's record; otherwise a whole group starts afresh


class Master:
    """Serves one group's clock. `start`, then `run` until the group has ended, then `close`."""

    def __init__(self, settings: ClockSettings, secret: bytes, mastership: Mastership | None = None) -> None:
        """Without a `mastership` nothing outlives this process, and nobody else can be the master."""
        self.clock = _clock(settings, mastership)
        self._secret = checked_secret(secret)
        self._mastership = mastership
        self._server: asyncio.Server | None = None
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._members: dict[int, _Connection] = {}  # by dp rank
        self._commit: Commit | None = None  # under way
        self._has_commit = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_closed = False
        self._num_dropped = 0  # strangers since the last log line
        self._stranger_logged_s = -STRANGER_LOG_S

    async def start(self, listener: socket.socket) -> None:
        """Serves at a socket that `bind` returned, which is this master's from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=ACCEPTS_PER_TURN)
        listener.listen(BACKLOG)

    async def run(self) -> None:
        """Returns when the group has stopped as asked. Raises GroupFailed, or Deposed when another master took over."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._watch_deadlines())]
            if self._mastership is not None:
                beside.append(tasks.create_task(self._renew(self._mastership)))
                beside.append(tasks.create_task(self._perform_commits(self._mastership)))
            await self._ended.wait()
            for task in beside:
                task.cancel()
        if self.clock.phase is Phase.FAILED:
            raise GroupFailed(self.clock.failure)
        if self.clock.phase is Phase.DEPOSED:
            raise Deposed(self.clock.failure)

    def command(self, name: str) -> None:
        """All members act on `name` at the same step, the next one; before the group runs, that is its first."""
        self._send(self.clock.command(name, time.monotonic()))

    async def close(self) -> None:
        """Drops every connection and frees the port."""
        if self._server is not None:
            self._server.close()
        self._is_closed = True
        for connection in [*self._strangers, *self._members.values()]:
            connection.transport.close()
        self._strangers.clear()
        self._members.clear()
        await asyncio.sleep(CLOSE_S)

    # What connections report

    def on_connected(self, connection: _Connection) -> None:
        """A connection has come; nothing is known of it yet."""
        if self._is_closed:
            connection.transport.close()
            return
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            self.drop_stranger(next(iter(self._strangers)), f"more than {MAX_STRANGERS} connections without a Hello")

    def on_first_message(self, connection: _Connection, message: Message) -> None:
        """A connection introduces itself."""
        if not isinstance(message, Hello):
            self.drop_stranger(connection, f"began with {type(message).__name__}, not Hello")
            return
        if not is_signed(message, self._secret, connection.challenge):
            connection.send(encode(Refused(reason="its secret is not the group's")))
            self.drop_stranger(connection, "a Hello with another secret")
            return
        try:
            outputs = self.clock.hello(message, time.monotonic())
        except JoinRefused as refusal:
            # Who gets here knows the secret, so each of these is worth a line of its own.
            logger.warning("member refused replica_id=%s reason=%s", message.replica_id, refusal)
            connection.send(encode(Refused(reason=str(refusal))))
            self.forget_stranger(connection)
            return
        connection.become_member(message.dp_rank)
        del self._strangers[connection]
        self._members[message.dp_rank] = connection
        connection.send(encode(accept(message, self._secret)))
        self._send(outputs)

    def on_message(self, connection: _Connection, dp_rank: int, message: Message) -> None:
        """A member's message has come."""
        if isinstance(message, MemberMessage):
            self._send(self.clock.receive(dp_rank, message, time.monotonic()))
        else:
            self.on_member_lost(connection, dp_rank, f"it sent a {type(message).__name__}")

    def on_member_lost(self, connection: _Connection, dp_rank: int, why: str) -> None:
        """A member's connection has ended, or must. Its rank may be another's by now."""
        if self._members.get(dp_rank) is connection:
            del self._members[dp_rank]
            connection.transport.close()
            self._send(self.clock.lost(dp_rank, why, time.monotonic()))

    def drop_stranger(self, connection: _Connection, why: str) -> None:
        """Ends a connection that is no member's."""
        if self.forget_stranger(connection):
            self._num_dropped += 1
            self._log_strangers(time.monotonic(), f"peer={connection.peer} reason={why}")

    def forget_stranger(self, connection: _Connection) -> bool:
        """As `drop_stranger`, without a word about it. Returns whether it was one."""
        if connection not in self._strangers:
            return False
        del self._strangers[connection]
        connection.transport.close()
        return True

    def _log_strangers(self, now_s: float, last: str) -> None:
        if now_s - self._stranger_logged_s >= STRANGER_LOG_S:
            logger.warning("strangers dropped count=%d last: %s", self._num_dropped, last)
            self._num_dropped = 0
            self._stranger_logged_s = now_s

    # What the clock says

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(self.clock.beat_interval_s)
            now_s = time.monotonic()
            self._broadcast(encode(Beat(epoch=self.clock.epoch, step=self.clock.step, collectives=())))
            self._send(self.clock.tick(now_s))
            for connection in [c for c in self._strangers if now_s - c.connected_s > HANDSHAKE_S]:
                self.drop_stranger(connection, f"no Hello within {HANDSHAKE_S:g} s")
            if self._num_dropped:
                self._log_strangers(now_s, "earlier")

    def _send(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            match output:
                case Commit():
                    self._begin_commit(output)
                case Expel():
                    self._expel(output)
                case _:
                    self._broadcast(encode(output))
        if self.clock.phase in ENDED:
            self._ended.set()

    def _broadcast(self, frame: bytes) -> None:
        for connection in self._members.values():
            connection.send(frame)

    def _expel(self, expel: Expel) -> None:
        if connection := self._members.pop(expel.dp_rank, None):
            connection.send(encode(expel.message))
            connection.transport.close()

    # The store

    def _begin_commit(self, commit: Commit) -> None:
        if self._mastership is None:
            self._send(self.clock.committed(commit.epoch, time.monotonic()))
        else:
            self._commit = commit
            self._has_commit.set()

    async def _perform_commits(self, mastership: Mastership) -> None:
        """Asks the store until it has an answer; it is the clock that sees when that takes too long."""
        is_away = False
        while True:
            await self._has_commit.wait()
            commit = self._commit
            assert commit is not None
            record = Record(
                epoch=commit.epoch,
                members=commit.members,
                evicted=commit.evicted,
                config_hash=self.clock.settings.config_hash,
            )
            try:
                await mastership.store.commit(mastership.lease.token, record)
            except StoreUnavailable as err:
                if not is_away:
                    logger.warning("membership is not committed yet epoch=%d reason=%s", commit.epoch, err)
                is_away = True
                await asyncio.sleep(COMMIT_RETRY_S)
            except Fenced as err:
                self._step_down(str(err))
                return
            else:
                is_away = False
                self._has_commit.clear()
                self._send(self.clock.committed(commit.epoch, time.monotonic()))

    async def _renew(self, mastership: Mastership) -> None:
        """Keeps the lease and takes operators' commands. A store that is away is only missed when members change."""
        store, is_away = mastership.store, False
        while True:
            try:
                if await store.renew(mastership.lease.token, self.clock.epoch):
                    for command in await store.commands(self.clock.pending_commands):
                        self.command(command)
            except StoreUnavailable as err:
                if not is_away:
                    logger.warning("membership store is away: serving goes on, members cannot change reason=%s", err)
                is_away = True
            except Fenced as err:
                self._step_down(str(err))
                return
            else:
                if is_away:
                    logger.info("membership store is back")
                is_away = False
            await asyncio.sleep(RENEW_S)

    def _step_down(self, reason: str) -> None:
        logger.error("this master is deposed reason=%s", reason)
        self._send(self.clock.deposed(reason, time.monotonic()))
        for connection in self._members.values():
            connection.transport.close()
        self._members.clear()


def _clock(settings: ClockSettings, mastership: Mastership | None) -> Clock:
    now_s = time.monotonic()
    everybody = tuple(range(settings.size))
    if mastership is None:
        return Clock(settings, now_s, epoch=1, members=everybody)
    lease = mastership.lease
    if not mastership.is_takeover:
        return Clock(settings, now_s, epoch=lease.epoch, members=everybody)
    if lease.record is None:
        raise ValueError("there is no group to take over: the store has no membership of it")
    record = lease.record
    return Clock(settings, now_s, epoch=lease.epoch, members=record.members, evicted=record.evicted, is_takeover=True)


class _Connection(asyncio.Protocol):
    """One TCP connection: a stranger's, until its Hello has been admitted."""

    transport: asyncio.Transport

    def __init__(self, master: Master) -> None:
        self.challenge = new_challenge()
        self.connected_s = time.monotonic()
        self.peer = ""
        self._master = master
        self._dp_rank: int | None = None
        self._frames = FrameBuffer(MAX_HELLO_BYTES)
        self._is_mute = True  # it has sent nothing yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio and uvloop both set TCP_NODELAY on the sockets that they accept.
        self.transport = cast(asyncio.Transport, transport)
        self.peer = str(transport.get_extra_info("peername"))
        self.send(encode(self.challenge))
        self._master.on_connected(self)

    def become_member(self, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._frames.limit_bytes = MAX_FRAME_BYTES

    def send(self, frame: bytes) -> None:
        # What a member does not read is bounded by the clock: beats until it counts as silent, and MAX_LEAD releases.
        if not self.transport.is_closing():
            self.transport.write(frame)

    def data_received(self, data: bytes) -> None:
        self._is_mute = False
        try:
            for message in self._frames.feed(data):
                if self.transport.is_closing():
                    return
                if self._dp_rank is None:
                    self._master.on_first_message(self, message)
                else:
                    self._master.on_message(self, self._dp_rank, message)
        except ProtocolError as err:
            self._end(str(err))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_mute:
            self._master.forget_stranger(self)  # a standby that looks whether a master is here does that all the time
        self._end(f"its connection ended ({exc or 'EOF'})")

    def _end(self, why: str) -> None:
        if self._dp_rank is None:
            self._master.drop_stranger(self, why)
        else:
            self._master.on_member_lost(self, self._dp_rank, why)
