"""A member's end of the clock, for an engine's step loop.

    member = Member(hello=..., host=..., port=..., secret=..., ...)
    welcome = await member.join()
    go = await member.ready(blob)
    while True:
        member.arrive(decode_tokens=..., prefill_tokens=...)   # again, to replace it, until it is released
        release = await member.released()                      # then act on its commands and start its forward
        ...                                                    # the next arrive comes here, while the forward runs
        member.done(release.step)                              # all ranks have reported: the batch is committed

Every wait ends: with what was waited for, when the master's verdict comes, or when the master has been silent for
`silence_s`. A parked member costs a frame each way, 4 times a second.

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
from collections import deque
from collections.abc import Callable
from typing import Final

from coordinator.errors import GroupFailed, JoinFailed, JoinRefused, MasterLost, ProtocolError
from coordinator.handshake import checked_secret, is_genuine, sign
from coordinator.messages import (
    BEAT_INTERVAL_S,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Arrive,
    Beat,
    Challenge,
    Done,
    Failed,
    Fault,
    FrameBuffer,
    Go,
    Hello,
    Message,
    Ready,
    Refused,
    Release,
    Welcome,
    encode,
)

logger = logging.getLogger(__name__)

CONNECT_S: Final = 2.0  # for one attempt, up to the Accepted
MAX_RETRY_S: Final = 1.0  # between attempts
MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES  # a master that reads so little is lost
MAX_FAULT_CHARS: Final = 1000
READ_BYTES: Final = 64 * 1024


class Member:
    """One member of a group. To be used from one event loop; `close` it in any case.

    `collectives` is called from the beat's thread: collectives that each rank of this member has entered so far.
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
    ) -> None:
        self.step = 0  # the next that `released` returns
        self.epoch = 0  # that of the Welcome, once it has come
        self._hello = hello
        self._address = (host, port)
        self._secret = checked_secret(secret)
        self._startup_deadline_s = startup_deadline_s
        self._silence_s = silence_s
        self._collectives = collectives
        self._socket: socket.socket | None = None
        self._frames = FrameBuffer(MAX_FRAME_BYTES)
        self._challenge: Challenge | None = None
        self._accepted = False
        self._welcome: Welcome | None = None
        self._go: Go | None = None
        self._releases: deque[Release] = deque()  # received and not yet taken; the clock's lead bounds them
        self._arrival: tuple[int, int] | None = None  # decode and prefill tokens that stand for `step`
        self._wants: dict[str, None] = {}  # commands asked for and not yet seen in a release
        self._done = -1
        self._error: Exception | None = None
        self._changed = asyncio.Event()  # set by everything that comes in
        self._heard_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        self._lock = threading.Lock()  # of `_unsent`, and of writing to the socket
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="clock-beats", daemon=True)

    async def join(self) -> Welcome:
        """Dials the master until it answers, then waits for the other members; their absence is the master's to judge.

        Raises JoinRefused, JoinFailed when there is no master by the start-up deadline, GroupFailed or MasterLost.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._startup_deadline_s
        retry_s = BEAT_INTERVAL_S / 4
        while not self._accepted:
            try:
                async with asyncio.timeout_at(min(deadline_s, loop.time() + CONNECT_S)):
                    await self._connect()
            except (OSError, MasterLost) as err:  # TimeoutError is an OSError
                self._disconnect()
                self._accepted = False
                if loop.time() >= deadline_s:
                    address = "{}:{}".format(*self._address)
                    limit = f"{self._startup_deadline_s:g} s"
                    raise JoinFailed(f"no master at {address} within {limit}: {err or type(err).__name__}") from err
                await asyncio.sleep(min(retry_s, max(0.0, deadline_s - loop.time())))
                retry_s = min(2 * retry_s, MAX_RETRY_S)
        logger.info("master accepted this member, waiting for the others dp_rank=%d", self._hello.dp_rank)
        self._beats.start()
        self._watch_master()
        while self._welcome is None:
            await self._change()
        self.epoch = self._welcome.epoch
        return self._welcome

    async def ready(self, blob: bytes) -> Go:
        """Says that this member could step, and waits until all could. Raises GroupFailed or MasterLost."""
        self._send(Ready(epoch=self.epoch, blob=blob))
        while self._go is None:
            await self._change()
        return self._go

    def arrive(self, *, decode_tokens: int, prefill_tokens: int) -> None:
        """Stands ready for `step` with these tokens, or with none. Replaces what was said for that step.

        A replacement may come too late: what counts is what the release says.
        """
        self._arrival = (decode_tokens, prefill_tokens)
        self._send_arrival()

    def want(self, command: str) -> None:
        """Asks for a command to be put into a release; asks on until one carries it."""
        self._wants[command] = None
        if self._arrival is not None:
            self._send_arrival()

    async def released(self) -> Release:
        """The release of `step`, once this member has arrived for it. Raises GroupFailed or MasterLost."""
        assert self._arrival is not None, "arrive first"
        while not self._releases:
            await self._change()
        if self._error is not None:
            raise self._error
        release = self._releases.popleft()
        assert release.step == self.step
        self.step += 1
        self._arrival = None
        for command in release.commands:
            self._wants.pop(command, None)
        return release

    def done(self, step: int) -> None:
        """All ranks have reported `step`: its batch is committed. In order, each released step once."""
        assert self._done + 1 == step < self.step
        self._done = step
        self._send(Done(epoch=self.epoch, step=step))

    def fault(self, step: int, what: str) -> None:
        """A collective of `step` raised. The verdict comes as an error from `released`."""
        self._send(Fault(epoch=self.epoch, step=step, what=what[:MAX_FAULT_CHARS]))

    async def failed(self) -> None:
        """Waits for the error that ends this membership and raises it, for who waits for something else meanwhile."""
        while True:
            await self._change()

    def close(self) -> None:
        """Leaves. After a release that carries `stop` this is the orderly end, before it a loss to the group."""
        self._closing.set()
        if self._watch is not None:
            self._watch.cancel()
        self._end(MasterLost("this member has left its group"))
        if self._beats.is_alive():
            self._beats.join(timeout=1.0)

    # Connecting

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._address
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self._disconnect()
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await loop.sock_connect(self._socket, address)
                break
            except OSError as err:
                refusal = err  # another address may do
        else:
            raise refusal
        self._frames, self._challenge, self._error = FrameBuffer(MAX_FRAME_BYTES), None, None
        self._unsent.clear()
        loop.add_reader(self._socket, self._read)
        while not self._accepted:
            await self._change()

    def _disconnect(self) -> None:
        with self._lock:
            gone, self._socket = self._socket, None
        if gone is not None:
            asyncio.get_running_loop().remove_reader(gone)
            gone.close()

    def _shake_hands(self, message: Message) -> None:
        match message:
            case Challenge() if self._challenge is None:
                if message.version != PROTOCOL_VERSION:
                    raise JoinRefused(f"the master speaks version {message.version}, this member {PROTOCOL_VERSION}")
                self._challenge = message
                self._hello = sign(self._hello, self._secret, message)
                self._send(self._hello)
            case Accepted() if self._challenge is not None:
                if not is_genuine(message, self._hello, self._secret):
                    raise JoinRefused("whoever answers at the master's address does not know the group's secret")
                self._accepted = True
            case Refused():
                raise JoinRefused(message.reason)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not part of a handshake")

    # Receiving, on the event loop

    async def _change(self) -> None:
        """Returns when something has come in. Raises the error that ended the membership."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        if self._socket is None or self._error is not None:
            return
        try:
            received = self._socket.recv(READ_BYTES)
            if not received:
                self._end(MasterLost("the master closed the connection"))
                return
            self._heard_s = time.monotonic()
            self._changed.set()
            for message in self._frames.feed(received):
                if self._accepted:
                    self._take(message)
                else:
                    self._shake_hands(message)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as err:
            self._end(MasterLost(f"the master's connection failed: {err}"))
        except ProtocolError as err:
            self._end(MasterLost(f"the master sent what is no message: {err}"))
        except JoinRefused as err:
            self._end(err)

    def _take(self, message: Message) -> None:
        match message:
            case Release():
                self._releases.append(message)
            case Beat():
                return
            case Welcome():
                self._welcome = message
            case Go():
                self._go = message
            case Failed():
                self._end(GroupFailed(message.reason))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a member that was accepted")

    def _end(self, error: Exception) -> None:
        """The first error is the one that everybody who waits gets."""
        if self._error is None:
            self._error = error
        self._changed.set()
        self._disconnect()

    def _watch_master(self) -> None:
        self._read()  # what has come while this loop was busy speaks for the master
        silent_s = time.monotonic() - self._heard_s
        if silent_s > self._silence_s:
            self._end(MasterLost(f"the master was silent for {silent_s:.1f} s"))
        if self._error is None:
            self._watch = asyncio.get_running_loop().call_later(BEAT_INTERVAL_S, self._watch_master)

    # Sending, from either thread

    def _send_arrival(self) -> None:
        assert self._arrival is not None
        decode_tokens, prefill_tokens = self._arrival
        self._send(
            Arrive(
                epoch=self.epoch,
                step=self.step,
                decode_tokens=decode_tokens,
                prefill_tokens=prefill_tokens,
                wants=tuple(self._wants),
            )
        )

    def _send(self, message: Message) -> None:
        """Sends what the socket takes now; the rest goes before the next message. A lost master shows when reading."""
        frame = encode(message)
        with self._lock:
            if self._socket is None:
                return
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
        while not self._closing.wait(BEAT_INTERVAL_S):
            self._send(Beat(epoch=self.epoch, step=self.step, collectives=self._collectives()))
