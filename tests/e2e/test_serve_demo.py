"""`make serve`: from nothing to an answer, and back to nothing."""

from __future__ import annotations

import signal
import sys

from tests.commands import READY_TIMEOUT_S, STOP_TIMEOUT_S, Command, Commands, free_port, is_listening, wait_until


def start_demo(commands: Commands, port: int) -> Command:
    """The demo, without waiting for it."""
    return commands.start(sys.executable, "-m", "deploy.serve_demo", "--port", str(port))


def wait_for_answer(demo: Command, port: int) -> None:
    """Waits until the demo has printed its last line, the curl command."""
    last_line = f"curl http://127.0.0.1:{port}/"
    wait_until(lambda: last_line in demo.log() or demo.process.poll() is not None, "a curl line", READY_TIMEOUT_S)
    assert last_line in demo.log(), demo.log()


def num_lines(log: str, text: str) -> int:
    """Lines of a log that have the text."""
    return sum(text in line for line in log.splitlines())


def test_the_demo_answers_and_ctrl_c_leaves_nothing_behind(commands: Commands) -> None:
    port = free_port()
    demo = start_demo(commands, port)
    wait_for_answer(demo, port)
    assert "What is 57 + 68?\n125\n" in demo.log()
    assert num_lines(demo.log(), "replica ready") == 2

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(timeout=STOP_TIMEOUT_S) == 0
    assert num_lines(demo.log(), "replica stopped") == 2
    assert "did not stop" not in demo.log()
    demo.assert_gone()
    assert not is_listening(f"http://127.0.0.1:{port}")


def test_a_taken_port_ends_the_demo_with_the_reason(commands: Commands) -> None:
    taken = commands.proxy()
    port = int(taken.url.rsplit(":", 1)[1])
    demo = start_demo(commands, port)
    assert demo.process.wait(timeout=STOP_TIMEOUT_S) == 1
    assert str(port) in demo.log() and "proxy ended by itself with exit code 2" in demo.log()
    demo.assert_gone()


def test_a_killed_replica_ends_the_demo(commands: Commands) -> None:
    port = free_port()
    demo = start_demo(commands, port)
    wait_for_answer(demo, port)
    first, _second = demo.pids_of("replica")
    demo.kill(first)
    assert demo.process.wait(timeout=STOP_TIMEOUT_S) == 1
    assert "ended by itself with exit code -9" in demo.log()
    demo.assert_gone()
