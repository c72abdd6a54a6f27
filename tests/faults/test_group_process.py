"""One `replica serve` with a group of two replicas of two ranks each: what happens when all of it dies, is stopped, is
missing or differs. When some of it dies or freezes: test_group_survives.py."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from replica.config import ReplicaConfig
from replica.layout import Layout
from tests.commands import BIN, DEMO_MODEL, READY, Command, Commands, free_port, wait_until
from tests.faults.streams import streaming
from tests.faults.survival import replicas_of

SECRET = "a secret of the group"
NOTICED_S = 5.0  # from a death to the end of every request of the group, on a busy machine
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start_group(commands: Commands, *options: str) -> Command:
    """A ready group, at two ports that it keeps when it restarts."""
    return commands.group("--port", str(two_free_ports()), *options)


def two_free_ports() -> int:
    """The first of two ports, both free a moment ago and none that the kernel gives to who asks for any."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as one, socket.socket() as next_one:
            with suppress(OSError):  # taken
                one.bind(("127.0.0.1", port))
                next_one.bind(("127.0.0.1", port + 1))
                return port


def num_ready(group: Command) -> int:
    """Over all lives."""
    return len(READY.findall(group.log()))


def ask(url: str) -> requests.Response:
    return requests.post(f"{url}/v1/completions", json={"prompt": "count", "max_tokens": 2}, timeout=30)


def assert_comes_back(group: Command) -> None:
    wait_until(lambda: num_ready(group) == 4, "the second life of both replicas", 60)
    assert [ask(url).status_code for url in group.urls] == [200, 200]


def verdicts(group: Command) -> list[str]:
    """What the supervisor says of a life that ended."""
    return [line for line in group.log().splitlines() if " ERROR " in line and "replica.supervisor" in line]


def test_a_group_that_has_lost_all_of_its_replicas_is_started_again(commands: Commands) -> None:
    group = start_group(commands)
    with ExitStack() as stack:
        streams = [stack.enter_context(streaming(url)) for url in group.urls]
        for pid in group.pids_of("replica.engine"):
            os.kill(pid, signal.SIGKILL)
    assert all(stream.is_cut for stream in streams)
    assert_comes_back(group)
    (verdict,) = [line for line in verdicts(group) if "restarting" in line]
    assert "reason='member" in verdict and "no member is left" in verdict


def test_a_worker_that_is_killed_ends_the_requests_of_its_replica_so_that_another_can_go_on(
    commands: Commands,
) -> None:
    group = start_group(commands)
    victim, other = replicas_of(group)
    with streaming(victim.url) as stream, streaming(other.url, max_tokens=100) as survivor:
        group.kill(victim.worker_pids[1])
    (error,) = stream.errors
    assert "killed by SIGKILL" in str(error) and "'code': 'replica_lost'" in str(error)
    assert stream.status == 200 and not stream.is_done and survivor.is_done and not survivor.errors


def test_a_worker_killed_while_the_group_is_parked_is_noticed(commands: Commands) -> None:
    group = start_group(commands)
    group.kill(group.pids_of("replica.worker")[0])
    wait_until(lambda: "group reconfigures epoch=2" in group.log(), "the next epoch", NOTICED_S)
    wait_until(lambda: len(verdicts(group)) == 1, "the end of the replica", NOTICED_S)
    assert "replica lost" in verdicts(group)[0]


def test_a_signal_lets_the_answers_of_all_replicas_end(commands: Commands) -> None:
    group = start_group(commands)
    with ExitStack() as stack:
        long, short = (
            stack.enter_context(streaming(url, max_tokens=max_tokens))
            for url, max_tokens in zip(group.urls, (150, 40), strict=True)
        )
        group.process.send_signal(signal.SIGTERM)
        wait_until(lambda: {ask(url).status_code for url in group.urls} == {503}, "draining")
        assert long.is_alive()
    assert [stream.is_done and not stream.errors for stream in (long, short)] == [True, True]
    assert group.process.wait(20) == 0
    group.assert_gone()


def test_a_second_signal_stops_all_at_once(commands: Commands) -> None:
    group = start_group(commands)
    with streaming(group.url) as stream:
        group.process.send_signal(signal.SIGTERM)
        wait_until(lambda: {ask(url).status_code for url in group.urls} == {503}, "draining")
        group.process.send_signal(signal.SIGTERM)
        assert group.process.wait(20) == 0
    assert not stream.is_done or not stream.errors
    group.assert_gone()


def test_a_group_that_loads_is_stopped_by_one_signal(commands: Commands) -> None:
    group = commands.start(str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0", "--dp", "2", "--tp", "2")
    wait_until(lambda: group.log().count("memory planned") == 2, "the start of the engines")
    assert group.stop() == 0


def test_no_process_of_a_parked_group_uses_more_than_a_hundredth_of_a_core(commands: Commands) -> None:
    group = start_group(commands)
    assert [ask(url).status_code for url in group.urls] == [200, 200]
    time.sleep(0.5)
    pids = group.pids()
    assert len(pids) == 7  # supervisor, 2 engines, 4 workers
    before_s = {pid: cpu_s(pid) for pid in pids}
    time.sleep(5)
    assert max(cpu_s(pid) - before_s[pid] for pid in pids) <= 0.05  # in 5 s


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / CLOCK_TICKS_PER_S


def test_a_missing_member_is_named_at_the_start_up_deadline(commands: Commands) -> None:
    argv = (str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0", "--dp", "2", "--tp", "2")
    group = commands.start(*argv, "--startup-timeout-s", "8")
    wait_until(lambda: len(group.pids_of("replica.engine")) == 2, "both engines")
    os.kill(sorted(group.pids_of("replica.engine"))[1], signal.SIGSTOP)
    began_s = time.monotonic()
    assert group.process.wait(30) == 1
    assert time.monotonic() - began_s < 8 + NOTICED_S
    (line,) = verdicts(group)
    assert "the group did not start within 8 s: dp_rank 1 has not joined" in line
    group.assert_gone()


def assert_refused(commands: Commands, message: str, *options: str) -> None:
    """The command ends with code 2 and one line, and no engine was started."""
    refused = commands.start(str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0", *options)
    assert refused.process.wait(20) == 2, refused.log()
    (line,) = refused.log().splitlines()
    assert message in line and line.startswith("replica")


def test_a_wrong_layout_is_refused_in_one_line_before_anything_starts(commands: Commands) -> None:
    assert_refused(commands, "--dp 3 does not divide the 4 ranks of --tp 4; nearest valid", "--dp", "3", "--tp", "4")
    assert_refused(commands, "query heads do not divide over attn_tp 3", "--tp", "3")


def test_a_taken_master_port_is_refused_in_one_line(commands: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"cannot serve the group's clock at 127.0.0.1:{port}: "
        assert_refused(commands, message, "--dp", "2", "--tp", "2", "--master-port", str(port))


def test_a_replica_that_differs_is_refused_by_the_field_and_nobody_notices(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    master_port = free_port()
    monkeypatch.setenv("LOCKSTEP_GROUP_SECRET", SECRET)
    monkeypatch.setenv("DP_MASTER_PORT", str(master_port))
    group = start_group(commands, "--group", "g", "--max-num-batched-tokens", "512")
    config = ReplicaConfig(
        model=DEMO_MODEL,
        layout=Layout.resolve(dp=2, tp=4),
        dp_rank=1,
        port=0,
        group="g",
        group_secret=SECRET,
        master_port=master_port,
        max_num_batched_tokens=512,
    )
    with streaming(group.url, max_tokens=300) as stream:
        differs = refusal_of(replace(config, max_num_batched_tokens=1024))
        assert "max_num_batched_tokens is 1024, the group's is 512: all members need the same" in differs
        assert "tp is" in refusal_of(replace(config, layout=Layout.resolve(dp=2, tp=2)))
        assert "dp_rank 1 is taken by" in refusal_of(config)
        assert "secret" in refusal_of(replace(config, group_secret="another secret, as long"))
    assert stream.is_done and not stream.errors


def refusal_of(config: ReplicaConfig) -> str:
    """The one line with which an engine that nobody supervises ends, code 2."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "replica.engine", str(theirs.fileno())]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
        ours.sendall(config.to_json().encode() + b"\n")
        _, log = engine.communicate(timeout=30)
    assert engine.returncode == 2, log
    (line,) = (line for line in log.splitlines() if " INFO " not in line)
    return line
