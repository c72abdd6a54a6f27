"""`make serve`: a proxy and two replicas of the demo model on this machine's CPU, to try Lockstep with.

Starts them, waits until all are ready, asks one question and stays until Ctrl-C. One task per command starts it,
passes its log on and stops it; the first that ends, or a signal, ends the task group and so everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL: Final = Path(__file__).parent / "models" / "tiny-moe"
COMMANDS: Final = Path(sys.executable).parent  # where setup put `proxy` and `replica`
REPLICA_OPTIONS: Final = ("--num-threads", "1", "--kv-cache-gb", "0.25")  # room for two on a laptop
DRAIN_OPTIONS: Final = ("--drain-timeout-s", "5")  # a demo is over when its user says so
READY: Final = re.compile(r"\bready\b.*\burl=(\S+)")
QUESTION: Final = "What is 57 + 68?"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """All settings of the demo."""

    port: int = 8000  # of the proxy; 0 picks a free one
    num_replicas: int = 2
    ready_timeout_s: float = 120.0
    answer_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0  # after SIGTERM; then SIGKILL


class DemoFailed(Exception):
    """The demo cannot go on. The message is for the user."""


class StopRequested(Exception):
    """Ctrl-C, or a signal with the same meaning."""


class Command:
    """One child process. `url` is set once its log says that it is ready."""

    def __init__(self, name: str, *argv: str) -> None:
        self.name, self.argv = name, argv
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, *, stop_timeout_s: float) -> None:
        """Runs until cancelled, then stops the process. Raises DemoFailed when it ends by itself."""
        process = await asyncio.create_subprocess_exec(
            str(COMMANDS / self.argv[0]),
            *self.argv[1:],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C reaches only us, so that each command is told to stop once
        )
        try:
            await self._pass_log_on(process)
            code = await process.wait()
        finally:
            await self._stop(process, stop_timeout_s)
        raise DemoFailed(f"{self.name} ended by itself with exit code {code}; its last lines are above")

    async def _pass_log_on(self, process: asyncio.subprocess.Process) -> None:
        """Prints the log until its end, which is that of the process and all of its children."""
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            print(f"{self.name:9} | {line}", file=sys.stderr, flush=True)
            found = READY.search(line)
            if found and not self.url.done():
                self.url.set_result(found[1])

    async def _stop(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        """Ends a process, which may have ended already, and waits for it."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._pass_log_on(process)
                await process.wait()
        except TimeoutError:
            print(f"{self.name} did not stop within {timeout_s:g} s and is killed", file=sys.stderr)
            process.kill()
            await process.wait()


async def raise_on_signal() -> None:
    """Raises StopRequested at the first SIGINT, SIGTERM or SIGHUP."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, received.set)
    await received.wait()
    raise StopRequested


def ask(url: str, question: str, *, timeout_s: float) -> str:
    """One answer of the model. Blocking. Raises DemoFailed when there is none in time."""
    body = json.dumps({"model": MODEL.name, "messages": [{"role": "user", "content": question}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                content: str = json.load(response)["choices"][0]["message"]["content"]
                return content
        except urllib.error.HTTPError as err:
            # A replica that has just become ready may still be on its way to the proxy.
            if err.code != 503 or time.monotonic() > deadline_s:
                raise DemoFailed(f"{url} answered {err.code}: {err.read().decode(errors='replace')}") from err
            time.sleep(0.1)
        except OSError as err:
            raise DemoFailed(f"{url} gave no answer within {timeout_s:g} s: {err}") from err


async def demo(config: DemoConfig) -> None:
    """Everything, until a signal (StopRequested) or a failure (DemoFailed); both come in an ExceptionGroup."""
    async with asyncio.TaskGroup() as tasks:

        def start(run: Coroutine[Any, Any, None]) -> None:
            tasks.create_task(run)

        start(raise_on_signal())
        proxy = Command("proxy", "proxy", "serve", "--port", str(config.port), *DRAIN_OPTIONS)
        start(proxy.run(stop_timeout_s=config.stop_timeout_s))
        try:
            async with asyncio.timeout(config.ready_timeout_s):
                url = await proxy.url
                options = ("--port", "0", "--proxy-url", url, *REPLICA_OPTIONS, *DRAIN_OPTIONS)
                serve = ("replica", "serve", str(MODEL), *options)
                replicas = [Command(f"replica-{i}", *serve) for i in range(config.num_replicas)]
                for replica in replicas:
                    start(replica.run(stop_timeout_s=config.stop_timeout_s))
                await asyncio.gather(*(replica.url for replica in replicas))
        except TimeoutError as err:
            raise DemoFailed(f"not ready within {config.ready_timeout_s:g} s; the log is above") from err
        answer = await asyncio.to_thread(ask, url, QUESTION, timeout_s=config.answer_timeout_s)
        print(greeting(url, answer), flush=True)


def greeting(url: str, answer: str) -> str:
    """What the user sees once all is ready."""
    body = json.dumps({"model": MODEL.name, "messages": [{"role": "user", "content": "Reverse the word l o c k."}]})
    return f"""
{QUESTION}
{answer}

{MODEL.name} is served at {url} (Ctrl-C stops it). Try:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
"""


def main(argv: list[str]) -> int:
    """Exit code 0 when stopped by a signal, 1 when something failed."""
    parser = argparse.ArgumentParser(description="Serve the demo model with a proxy and two replicas on the CPU.")
    parser.add_argument("--port", type=int, default=DemoConfig().port, help="port of the proxy; 0 picks a free one")
    args = parser.parse_args(argv)
    code = 0
    try:
        asyncio.run(demo(DemoConfig(port=args.port)))
    except* StopRequested:
        pass  # the normal way out
    except* DemoFailed as failures:
        print(f"make serve: {failures.exceptions[0]}", file=sys.stderr)
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
