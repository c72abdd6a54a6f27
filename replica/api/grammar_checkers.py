"""The processes that try grammars (grammar_check.py), from the engine's side.

Each tries one grammar at a time. The first is started for the first grammar, another one whenever all are busy, up to
one a core and four in all; one that does not answer in time is killed, and costs nobody but its own grammar.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from replica.errors import Unavailable
from replica.process_tree import ignoring_signals

MAX_CHECKERS: Final = 4  # each holds the vocabulary
CHECK_DEADLINE_S: Final = 5.0
START_DEADLINE_S: Final = 60.0  # a process reads the vocabulary first
WAIT_DEADLINE_S: Final = 30.0  # for a process that has time
MAX_WAITING: Final = 256
TOO_MUCH_MEMORY: Final = "compiling it takes too much memory"


class GrammarCheckers:
    """All of them. `vocabulary` is asked for the line that a new process begins with. On the event loop."""

    def __init__(self, vocabulary: Callable[[], str]) -> None:
        self._vocabulary = vocabulary
        self._room = asyncio.Semaphore(min(MAX_CHECKERS, len(os.sched_getaffinity(0))))
        self._num_waiting = 0
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """For a process that has time, or room for another one. Raises Unavailable when too many wait, or too long."""
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable(f"{self._num_waiting} grammars wait to be compiled")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(WAIT_DEADLINE_S):
                await self._room.acquire()
        except TimeoutError as err:
            raise Unavailable(f"other grammars were compiled for {WAIT_DEADLINE_S:g} s") from err
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._room.release()

    async def check(self, grammar: str) -> str:
        """What is wrong with the grammar, or "". To be called in a `turn`. Raises Unavailable."""
        checker = await self._living() or await self._start()
        is_answered = False
        try:
            async with asyncio.timeout(CHECK_DEADLINE_S):
                line = await _ask(checker, json.dumps(grammar))
            is_answered = bool(line)
            return str(json.loads(line)) if line else TOO_MUCH_MEMORY
        except TimeoutError:
            return f"compiling it takes more than {CHECK_DEADLINE_S:g} s"
        except ConnectionError:
            return TOO_MUCH_MEMORY
        finally:
            if is_answered:
                self._idle.append(checker)
            else:
                await self._end(checker)

    async def close(self) -> None:
        """Ends all processes."""
        for checker in list(self._all):
            await self._end(checker)

    async def _living(self) -> Process | None:
        """An idle process. One that has ended meanwhile says nothing of the grammar that comes next."""
        while self._idle:
            checker = self._idle.pop()
            if checker.returncode is None:
                return checker
            await self._end(checker)
        return None

    async def _start(self) -> Process:
        command = ignoring_signals((sys.executable, "-m", "replica.api.grammar_check"))
        checker = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        self._all.add(checker)
        is_ready = False
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                is_ready = bool(await _ask(checker, self._vocabulary() + "\n" + json.dumps('start: "a"')))
        except (TimeoutError, ConnectionError) as err:
            raise Unavailable("the process that tries grammars did not start; try again") from err
        finally:
            if not is_ready:
                await self._end(checker)
        if not is_ready:
            raise Unavailable("the process that tries grammars ended while it started; try again")
        return checker

    async def _end(self, checker: Process) -> None:
        self._all.discard(checker)
        if checker in self._idle:
            self._idle.remove(checker)
        if checker.returncode is None:
            checker.kill()
        await checker.wait()


async def _ask(checker: Process, lines: str) -> bytes:
    """The process's next line; empty when it has ended."""
    assert checker.stdin is not None and checker.stdout is not None
    checker.stdin.write(lines.encode() + b"\n")
    await checker.stdin.drain()
    return await checker.stdout.readline()
