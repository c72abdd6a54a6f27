"""One `replica serve` and its three processes: what happens when one of them dies, freezes or is told to stop."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import requests

from tests.commands import BIN, DEMO_MODEL, READY, Command, Commands, free_port, wait_until
from tests.faults.streams import LONG_ANSWER, streaming

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start_replica(commands: Commands, *options: str) -> Command:
    """A ready replica of the demo model without a proxy, on a port that it keeps when it restarts."""
    port = str(free_port())
    replica = commands.start(
        str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", port, "--num-threads", "1", *options
    )
    replica.wait_ready()
    return replica


def pid_of(replica: Command, part: str) -> int:
    """The replica's one `engine` or `worker`."""
    (pid,) = replica.pids_of(f"replica.{part}")
    return pid


def health(url: str) -> int:
    """The status of /health; 0 when nobody listens."""
    try:
        return requests.get(f"{url}/health", timeout=5).status_code
    except requests.ConnectionError:
        return 0


def ask(url: str) -> requests.Response:
    return requests.post(f"{url}/v1/completions", json={"prompt": "count", "max_tokens": 2}, timeout=30)


def num_lives(replica: Command) -> int:
    return len(READY.findall(replica.log()))


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / CLOCK_TICKS_PER_S


def test_a_killed_worker_fails_its_requests_and_the_replica_comes_back(commands: Commands) -> None:
    replica = start_replica(commands)
    with streaming(replica.url) as stream:
        replica.kill(pid_of(replica, "worker"))
    assert not stream.is_done
    assert "SIGKILL" in str(stream.errors)
    wait_until(lambda: num_lives(replica) == 2, "the second life")
    assert ask(replica.url).status_code == 200
    assert "Traceback" not in replica.log()


def test_a_worker_killed_while_nothing_runs_is_replaced_too(commands: Commands) -> None:
    replica = start_replica(commands)
    replica.kill(pid_of(replica, "worker"))
    wait_until(lambda: health(replica.url) != 200, "the loss to be noticed", 2)
    wait_until(lambda: num_lives(replica) == 2, "the second life")


def test_a_frozen_worker_turns_health_bad_and_is_replaced(commands: Commands) -> None:
    replica = start_replica(commands, "--progress-deadline-s", "1")
    with streaming(replica.url) as stream:
        worker = pid_of(replica, "worker")
        os.kill(worker, signal.SIGSTOP)
        assert wait_until(lambda: health(replica.url) == 503, "bad health") < 2
        assert not stream.errors
    assert "was not done after 3 s" in str(stream.errors)
    wait_until(lambda: worker not in replica.pids(), "the end of the frozen worker")
    wait_until(lambda: num_lives(replica) == 2, "the second life")
    assert health(replica.url) == 200


def test_a_killed_engine_leaves_no_worker_and_is_restarted(commands: Commands) -> None:
    replica = start_replica(commands)
    worker = pid_of(replica, "worker")
    replica.kill(pid_of(replica, "engine"))
    wait_until(lambda: worker not in replica.pids(), "the end of the worker", 1)
    wait_until(lambda: num_lives(replica) == 2, "the second life")
    assert ask(replica.url).status_code == 200


def test_nothing_outlives_a_killed_supervisor(commands: Commands) -> None:
    replica = start_replica(commands)
    with streaming(replica.url) as stream:
        assert len(replica.pids()) == 3
        replica.process.kill()
        wait_until(lambda: not replica.pids(), "the end of engine and worker", 1)
    assert stream.is_cut
    replica.process.wait()
    replica.assert_gone()


def test_sigterm_lets_a_running_answer_end_and_refuses_new_ones(commands: Commands) -> None:
    replica = start_replica(commands)
    with streaming(replica.url, max_tokens=200) as stream:
        replica.process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(replica.url) == 503, "draining", 2)
        refused = ask(replica.url)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert stream.is_alive()
    assert stream.is_done and not stream.errors
    assert '"completion_tokens": 200' in json.dumps(stream.events[-1]["usage"])
    assert replica.process.wait(20) == 0
    replica.assert_gone()


def test_a_drain_is_bounded(commands: Commands) -> None:
    replica = start_replica(commands, "--drain-timeout-s", "0.5")
    with streaming(replica.url) as stream:
        replica.process.send_signal(signal.SIGTERM)
    assert len(stream.events) < LONG_ANSWER
    assert replica.process.wait(20) == 0
    replica.assert_gone()


def test_a_second_signal_stops_at_once(commands: Commands) -> None:
    replica = start_replica(commands)
    with streaming(replica.url) as stream:
        replica.process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(replica.url) == 503, "draining", 2)
        replica.process.send_signal(signal.SIGINT)
        stopped_s = time.monotonic()
        assert replica.process.wait(20) == 0
        assert time.monotonic() - stopped_s < 3
    assert len(stream.events) < LONG_ANSWER
    replica.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_counts_once(commands: Commands, number: signal.Signals) -> None:
    replica = start_replica(commands)
    with streaming(replica.url, max_tokens=200) as stream:
        os.killpg(replica.process.pid, number)
    assert stream.is_done and not stream.errors
    assert replica.process.wait(20) == 0
    replica.assert_gone()
    assert "Traceback" not in replica.log()


def test_a_replica_that_loads_is_stopped_by_one_signal(commands: Commands) -> None:
    replica = commands.start(str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0")
    wait_until(lambda: "memory planned" in replica.log(), "the start of the engine")
    assert replica.stop() == 0


def test_a_quiet_replica_uses_no_cpu_no_torch_in_its_engine_and_shows_no_secret(commands: Commands) -> None:
    os.environ["LOCKSTEP_API_KEY"] = "a-secret-key"
    try:
        replica = start_replica(commands)
    finally:
        del os.environ["LOCKSTEP_API_KEY"]
    engine, worker = pid_of(replica, "engine"), pid_of(replica, "worker")
    assert "libtorch" not in Path(f"/proc/{engine}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{worker}/maps").read_text()
    assert ask(replica.url).status_code == 401  # so the key did arrive
    for pid in replica.pids():
        assert b"a-secret-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    before_s = {pid: cpu_s(pid) for pid in replica.pids()}
    time.sleep(2)
    assert all(cpu_s(pid) - before_s[pid] < 0.02 for pid in before_s)  # of 2 s: under a hundredth of a core


def assert_refused(commands: Commands, message: str, *arguments: str, within_s: float) -> None:
    """The command ends with code 2 and exactly one line that is no log record."""
    started_s = time.monotonic()
    replica = commands.start(str(BIN / "replica"), "serve", *arguments)
    assert replica.process.wait(20) == 2, replica.log()
    assert time.monotonic() - started_s < within_s
    (line,) = (line for line in replica.log().splitlines() if " INFO " not in line)
    assert message in line and line.startswith("replica")


def test_bad_usage_is_refused_within_a_second_in_one_line(commands: Commands) -> None:
    assert_refused(commands, "unrecognized arguments: --nope", str(DEMO_MODEL), "--nope", within_s=1)
    assert_refused(commands, "--max-num-seqs is 0", str(DEMO_MODEL), "--max-num-seqs", "0", within_s=1)


def test_a_taken_port_is_refused_in_one_line(commands: Commands) -> None:
    replica = start_replica(commands)
    port = replica.url.rsplit(":", 1)[1]
    assert_refused(commands, f"cannot listen at 127.0.0.1:{port}", str(DEMO_MODEL), "--port", port, within_s=5)
    assert ask(replica.url).status_code == 200


def test_a_missing_or_damaged_checkpoint_is_refused_in_one_line(commands: Commands, tmp_path: Path) -> None:
    assert_refused(commands, "/no/such/model is not a folder", "/no/such/model", "--port", "0", within_s=5)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.is_file():
            content = file.read_bytes()
            (damaged / file.name).write_bytes(content[: len(content) // 2] if "safetensors" in file.name else content)
    assert_refused(commands, "safetensors", str(damaged), "--port", "0", within_s=5)


def test_a_cache_of_a_wrong_size_is_refused_in_one_line(commands: Commands) -> None:
    arguments = (str(DEMO_MODEL), "--port", "0", "--kv-cache-gb")
    assert_refused(commands, "--kv-cache-gb is 1e+06", *arguments, "1e6", within_s=5)
    # The worker says this one, before it loads.
    assert_refused(commands, "one sequence may have 4096", *arguments, "1e-4", within_s=20)


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_while_they_start_ends_the_command_with_0(
    commands: Commands, number: signal.Signals, num_processes: int
) -> None:
    replica = commands.start(str(BIN / "replica"), "serve", str(DEMO_MODEL), "--port", "0")
    wait_until(lambda: len(replica.pids()) == num_processes, f"{num_processes} processes")
    time.sleep(0.02)  # in the imports of the last one
    os.killpg(replica.process.pid, number)
    assert replica.process.wait(20) == 0, replica.log()
    replica.assert_gone()
    assert "Traceback" not in replica.log()
