"""What joins a rank on another machine with its engine, where neither a socketpair, a pipe nor shared memory reaches.

The rank's end (`run`) dials the engine's (`RankDoor`) twice. Each connection begins with a greeting: the engine's
token, which of the two it is, and the rank's number in its replica.

    frames     those of frames.py, both ways
    lifeline   engine -> rank: the epoch on the board, whenever the worker is to look at it; its EOF ends the worker
               rank -> engine: the collectives entered, every RANK_BEAT_S from the worker's first beat on; its EOF
               says that the rank is gone

Numbers are 8 bytes, big-endian. They come from the board of one end and go to that of the other (rank_board.py), so the
worker and the executor are those of a rank on this machine. A machine that vanishes sends no EOF: what it does not
acknowledge for GONE_S ends its connections.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final

from replica.errors import ConfigError
from replica.rank_board import RANK_BEAT_S, RankBoard, board_file

logger = logging.getLogger(__name__)

Address = tuple[str, int]

DIAL_S: Final = 10.0
GREETING_S: Final = 5.0  # who has dialled says so soon who it is
GONE_S: Final = 20
_PROBE_S: Final = 5  # between questions to a peer that is silent
_BACKLOG: Final = 1024  # connections that the kernel accepts meanwhile, so that strangers keep nobody out
_FRAMES: Final = 0
_LIFELINE: Final = 1
_GREETING: Final = struct.Struct(">32sBH")  # token, connection, local rank
_NUMBER: Final = struct.Struct(">q")


class RankDoor:
    """Where the ranks of one replica dial their engine: `admit`, once. `close` it in any case."""

    def __init__(self, host: str, num_ranks: int) -> None:
        """Listens at a free port of `host`, this machine's address for the ranks. Raises ConfigError."""
        self.token = secrets.token_bytes(32)
        self._num_ranks = num_ranks
        self._arrived: dict[tuple[int, int], socket.socket] = {}  # by connection and rank
        self._is_complete = asyncio.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as err:
            raise ConfigError(f"ranks cannot reach this machine at {host}: {err.strerror}") from err
        self._sock.setblocking(False)
        self.address: Address = self._sock.getsockname()[:2]

    async def admit(self) -> list[tuple[socket.socket, socket.socket]]:
        """Waits until all ranks have dialled. Returns the frames and the lifeline of each; strangers are dropped."""
        async with asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(self._accept())
            await self._is_complete.wait()
            accepting.cancel()
        arrived = [(self._arrived[_FRAMES, rank], self._arrived[_LIFELINE, rank]) for rank in range(self._num_ranks)]
        self._arrived.clear()  # they are the caller's
        self.close()
        return arrived

    def close(self) -> None:
        """Lets nobody else in. May be called again."""
        self._sock.close()
        for sock in self._arrived.values():
            sock.close()
        self._arrived.clear()

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as greetings:
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
                greetings.create_task(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        is_admitted = False
        try:
            async with asyncio.timeout(GREETING_S):
                token, connection, rank = _GREETING.unpack(await _received(sock, _GREETING.size))
            is_known = hmac.compare_digest(token, self.token) and rank < self._num_ranks
            is_admitted = is_known and connection in (_FRAMES, _LIFELINE) and (connection, rank) not in self._arrived
        except (OSError, EOFError, TimeoutError):
            pass  # as one that says something else
        finally:
            if not is_admitted:
                sock.close()
        if not is_admitted:
            logger.warning("a stranger dialled the port of the ranks, it was dropped")
            return
        _tune(sock)
        self._arrived[connection, rank] = sock
        if len(self._arrived) == 2 * self._num_ranks:
            self._is_complete.set()


class Lifeline:
    """The engine's end of one rank's lifeline. What comes over it is read by a thread: the event loop may be busy."""

    def __init__(self, sock: socket.socket, board: RankBoard, local_rank: int) -> None:
        """Must be made where the event loop runs."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # done at the rank's end
        self._sock = sock
        self._board = board
        self._local_rank = local_rank
        sock.setblocking(True)
        threading.Thread(target=self._read, name=f"lifeline {local_rank}", daemon=True).start()

    def release(self) -> None:
        """Makes the worker look at the board, with this end's epoch on it."""
        with suppress(OSError):  # the rank is gone, which is seen elsewhere
            self._sock.sendall(_NUMBER.pack(self._board.epoch))  # less than any socket's buffer: it does not block

    def close(self) -> None:
        """Ends the worker, if it runs."""
        with suppress(OSError):  # it is not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone would not
        self._sock.close()

    def _read(self) -> None:
        count = self._board.count_of(self._local_rank)
        while (number := _next_number(self._sock)) is not None:
            count[0] = number
            self._board.beat(self._local_rank)
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def run(engine: Address, token: bytes, *, local_rank: int, num_ranks: int) -> int:
    """A rank's worker, in this process and its main thread; `num_ranks` are of its replica. Returns its exit code.

    The process has the environment of worker_environment.py.
    """
    from replica import worker  # only here: the engine loads this module, too

    frames = _dial(engine, token, _FRAMES, local_rank)
    lifeline = _dial(engine, token, _LIFELINE, local_rank)  # open as long as the process: threads use it
    with board_file(num_ranks) as file:
        board = RankBoard(num_ranks, file.fileno())
        wake_read, wake_write = os.pipe()
        threading.Thread(target=_follow_epochs, args=(lifeline, board, wake_write), daemon=True).start()
        threading.Thread(target=_report, args=(lifeline, board, local_rank), daemon=True).start()
        return worker.main([str(frames.detach()), str(wake_read), str(file.fileno())])


def _follow_epochs(lifeline: socket.socket, board: RankBoard, wake: int) -> None:
    """Hands on to the worker what its engine says; `wake` is what the worker takes for the engine's own pipe."""
    while (epoch := _next_number(lifeline)) is not None:
        board.epoch = epoch
        os.write(wake, b"r")
    os.close(wake)


def _report(lifeline: socket.socket, board: RankBoard, local_rank: int) -> None:
    count = board.count_of(local_rank)
    with suppress(OSError):  # the engine is gone, which `_follow_epochs` sees
        while True:
            if board.has_begun(local_rank):  # until then a deadline of its own counts, for torch takes long to load
                lifeline.sendall(_NUMBER.pack(int(count[0])))
            time.sleep(RANK_BEAT_S)


def _dial(engine: Address, token: bytes, connection: int, local_rank: int) -> socket.socket:
    sock = socket.create_connection(engine, timeout=DIAL_S)
    sock.sendall(_GREETING.pack(token, connection, local_rank))
    sock.settimeout(None)
    _tune(sock)
    return sock


def _tune(sock: socket.socket) -> None:
    """Frames go at once, and a peer whose machine is gone is noticed, whether or not there is something to send."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _PROBE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, GONE_S // _PROBE_S),
        (socket.TCP_USER_TIMEOUT, 1000 * GONE_S),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, name, value)


async def _received(sock: socket.socket, num_bytes: int) -> bytes:
    """Raises EOFError when there are fewer."""
    received = b""
    while len(received) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def _next_number(sock: socket.socket) -> int | None:
    """None when the peer is gone."""
    try:
        data = sock.recv(_NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None
