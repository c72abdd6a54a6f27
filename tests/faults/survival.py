"""A group under load while some of it is broken, and what the clients of those that are left see of it.

The demo model in float32, three replicas of one rank each. Every replica answers long streams; what is done to the
group is done while they run. The survivors' streams must have the tokens of an undisturbed run and a pause of bounded
length, which the replicas themselves split into its parts (GET /group).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import requests

from tests.commands import Command, Commands, wait_until
from tests.faults.streams import Stream, streaming

ROUNDS: Final = range(int(os.environ.get("SURVIVE_ROUNDS", "1")))  # how often each trial is held
PROMPTS: Final = ("Count from 1 to 30.", "What is 12 + 30?")  # one stream each, on every replica
STREAM_TOKENS: Final = 120
CRASH_PAUSE_S: Final = 1.0  # what a survivor's stream may pause for when another replica dies
TIMEOUT_S: Final = 600  # of a test here, on a busy machine; on a quiet one it takes a twentieth of it
NOTICED_S: Final = 10.0  # in which anything that must happen at once has happened, on a busy machine
_READY: Final = re.compile(r" (\d+) replica\.engine replica ready url=(\S+) .*dp_rank=(\d+)")
_WAITING: Final = {
    "7",
    "202",
}  # poll and futex of x86-64: a rank that waits for its peers is in one, for a frame in recv


@dataclass(frozen=True)
class Replica:
    """One replica's processes."""

    dp_rank: int
    url: str
    engine_pid: int
    worker_pids: tuple[int, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """All of them."""
        return (self.engine_pid, *self.worker_pids)

    def group(self) -> dict[str, Any]:
        """What it says of its group."""
        state: dict[str, Any] = requests.get(f"{self.url}/group", timeout=5).json()
        return state

    def ask(self) -> int:
        """The status of a short request."""
        body = {"prompt": "count", "max_tokens": 2}
        return requests.post(f"{self.url}/v1/completions", json=body, timeout=30).status_code


class Group:
    """A running group, over all commands that serve it; limits are beyond `noise_s`."""

    def __init__(self, *commands: Command) -> None:
        self.commands = commands
        self.replicas = sorted(
            (replica for command in commands for replica in replicas_of(command)), key=lambda r: r.dp_rank
        )
        self.answers: dict[str, str] = {}  # by prompt, of an undisturbed run
        self.noise_s = 0.0  # the longest pause of that run: what this machine does to streams by itself
        self._run_undisturbed()

    @classmethod
    def start(cls, commands: Commands, *options: str) -> Group:
        """Three ready replicas in one command."""
        return cls(commands.group("--port", "0", "--dtype", "float32", *options, dp=3, tp=3))

    def log(self) -> str:
        """What all processes have said."""
        return "".join(command.log() for command in self.commands)

    def survivors(self, victims: Collection[Replica]) -> list[Replica]:
        """All replicas but these."""
        return [replica for replica in self.replicas if replica not in victims]

    def _run_undisturbed(self) -> None:
        with under_load(self) as load:
            first = load.streams[self.replicas[0]]
            for stream in first:
                stream.join(timeout=60)
            self.answers = {stream.prompt: stream.text for stream in first}
            self.noise_s = load.pause_s(self.replicas)


class Load:
    """Streams on replicas of a group, and when what was done to it began."""

    def __init__(self, group: Group, streams: dict[Replica, list[Stream]]) -> None:
        self.group, self.streams = group, streams
        self.began_s = time.monotonic()

    def check_survivors(self, what: str, victims: Sequence[Replica], *, limit_s: float) -> None:
        """Waits for the survivors' streams and reports on their pause: it was within the limit and cost no token."""
        survivors = self.group.survivors(victims)
        pause_s = self.pause_s(survivors)
        limit_s += self.group.noise_s
        parts = {name.removesuffix("_s"): _ms(s) for name, s in survivors[0].group()["last_reconfiguration"].items()}
        print(f"survived {what}: pause_ms={_ms(pause_s)} limit_ms={_ms(limit_s)} {parts}")
        assert pause_s <= limit_s, f"the streams of survivors paused for {pause_s:.2f} s, limit is {limit_s:g} s"
        for replica in survivors:
            state = replica.group()
            assert state["members"] == [survivor.dp_rank for survivor in survivors], state
            evicted = {dp_rank for event in state["evicted"] for dp_rank in event["dp_ranks"]}
            assert {victim.dp_rank for victim in victims} <= evicted and all(e["reason"] for e in state["evicted"])
            assert replica.ask() == 200

    def pause_s(self, replicas: Sequence[Replica]) -> float:
        """The longest pause of their streams since the load began, once they have ended well, with all tokens."""
        streams = [stream for replica in replicas for stream in self.streams.get(replica, ())]
        for stream in streams:
            stream.join(timeout=60)
            assert not stream.is_alive() and stream.is_done and not stream.errors, (stream.url, stream.errors)
            assert stream.text == self.group.answers[stream.prompt], "other tokens than those of an undisturbed run"
        return max(stream.longest_pause_s(self.began_s) for stream in streams)

    def check_lost(self, victims: Sequence[Replica]) -> None:
        """The victims' streams have ended, as those of a replica that another one can go on for."""
        for stream in (stream for victim in victims for stream in self.streams[victim]):
            stream.join(timeout=NOTICED_S)
            assert not stream.is_alive() and not stream.is_done
            assert stream.is_cut or [error["code"] for error in stream.errors] == ["replica_lost"], stream.errors


@contextmanager
def under_load(group: Group, replicas: Sequence[Replica] | None = None) -> Iterator[Load]:
    """Streams on these replicas, or on all, whose first tokens have come."""
    with ExitStack() as stack:
        streams = {
            replica: [
                stack.enter_context(streaming(replica.url, max_tokens=STREAM_TOKENS, prompt=prompt))
                for prompt in PROMPTS
            ]
            for replica in replicas or group.replicas
        }
        yield Load(group, streams)


def kill(*pids: int) -> None:
    """SIGKILL to all, one right after the other. Returns when they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(_is_running(pid) for pid in pids), f"the end of {pids}")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped (SIGSTOP), and goes on at the end if it is still there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _stat(pid)[0] == "T", f"process {pid} to be stopped")
        yield
    finally:
        if _is_running(pid):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped_in_a_collective(pid: int) -> Iterator[None]:
    """As `stopped`, while the process's main thread waits for its peers."""
    wait_until(partial(_stops_waiting, pid), f"process {pid} to be stopped in a collective")
    with stopped(pid):
        yield


def wait_gone(pids: Sequence[int], what: str) -> None:
    """Waits until none of the processes is left."""
    wait_until(lambda: not any(_is_running(pid) for pid in pids), what, NOTICED_S)


def wait_for_line(group: Group, text: str) -> None:
    """Waits, without a pause between looks, until a line of the log has the text."""
    deadline_s = time.monotonic() + NOTICED_S
    while text not in group.log():
        assert time.monotonic() < deadline_s, f"not within {NOTICED_S} s: {text}"


def children_of(pid: int) -> list[int]:
    """The processes that it has started and that are left."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _stat(int(name))[1] == str(pid)]


def replicas_of(command: Command) -> list[Replica]:
    """The replicas that a command has started and that are ready, in the order in which they became so."""
    workers = {pid: int(_stat(pid)[1]) for pid in command.pids_of("replica.worker")}
    return [
        Replica(
            dp_rank=int(dp_rank),
            url=url,
            engine_pid=int(engine_pid),
            worker_pids=tuple(pid for pid, parent in sorted(workers.items()) if parent == int(engine_pid)),
        )
        for engine_pid, url, dp_rank in _READY.findall(command.log())
    ]


def _stops_waiting(pid: int) -> bool:
    """Whether the process waited for its peers when it was stopped; if it did not, it goes on."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _stat(pid)[0] == "T", f"process {pid} to be stopped")
    if Path(f"/proc/{pid}/syscall").read_text().split()[0] in _WAITING:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def _stat(pid: int) -> list[str]:
    """State, parent and so on; a state of its own for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["gone", "0"]


def _is_running(pid: int) -> bool:
    return _stat(pid)[0] not in ("gone", "Z", "X")


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
