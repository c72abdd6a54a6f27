"""A command in a terminal, as a person has it: keys in, what is shown out."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

CTRL_C: Final = "\x03"
CTRL_D: Final = "\x04"
PATIENCE_S: Final = 30.0


@dataclass
class Terminal:
    """A running command. `shown` is all that it has shown and that no `expect` has passed."""

    process: asyncio.subprocess.Process
    screen: int
    shown: str = ""

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self.screen, keys.encode())

    async def expect(self, text: str) -> str:
        """What is shown up to the text; fails when it is not shown soon."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while text not in self.shown:
                    self.shown += (await asyncio.to_thread(os.read, self.screen, 4096)).decode(errors="replace")
        except (TimeoutError, OSError):  # the terminal's end is an error when the command is gone
            raise AssertionError(f"{text!r} is not shown but {self.shown!r}") from None
        before, _, self.shown = self.shown.partition(text)
        return before + text

    async def ended(self) -> int:
        """The exit code."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


def _take_terminal() -> None:
    """Ctrl-C comes from the terminal that controls a process, unless whoever runs the tests has it ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@asynccontextmanager
async def terminal(*argv: str, **environment: str) -> AsyncIterator[Terminal]:
    """Runs a command in a terminal of its own."""
    screen, line = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=line,
        stdout=line,
        stderr=line,
        env={**os.environ, "TERM": "dumb", **environment},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(line)
    try:
        yield Terminal(process, screen)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(screen)
