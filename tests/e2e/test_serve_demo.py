"""`make serve`: from nothing to an answer, and back to nothing."""

from __future__ import annotations

import signal
import sys

from tests.commands import STOP_TIMEOUT_S, Commands, free_port, is_listening, wait_until


def test_the_demo_answers_and_ctrl_c_leaves_nothing_behind(commands: Commands) -> None:
    port = free_port()
    demo = commands.start(sys.executable, "-m", "deploy.serve_demo", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: f"curl {url}/" in demo.log() or demo.process.poll() is not None, "a curl line", 90)
    assert "What is 57 + 68?\n125\n" in demo.log()
    assert len([line for line in demo.log().splitlines() if "replica ready" in line]) == 2

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(timeout=STOP_TIMEOUT_S) == 0
    assert len([line for line in demo.log().splitlines() if "replica stopped" in line]) == 2
    assert "did not stop" not in demo.log()
    demo.assert_gone()
    assert not is_listening(url)


def test_a_taken_port_ends_the_demo_with_the_reason(commands: Commands) -> None:
    taken = commands.proxy()
    port = taken.url.rsplit(":", 1)[1]
    demo = commands.start(sys.executable, "-m", "deploy.serve_demo", "--port", port)
    assert demo.process.wait(timeout=STOP_TIMEOUT_S) == 1
    assert port in demo.log() and "proxy ended by itself with exit code 2" in demo.log()
    demo.assert_gone()


def test_a_killed_replica_ends_the_demo(commands: Commands) -> None:
    port = free_port()
    demo = commands.start(sys.executable, "-m", "deploy.serve_demo", "--port", str(port))
    wait_until(lambda: "curl http" in demo.log(), "a curl line", 90)
    first, _second = demo.pids_of("replica")
    demo.kill(first)
    assert demo.process.wait(timeout=STOP_TIMEOUT_S) == 1
    assert "ended by itself with exit code -9" in demo.log()
    demo.assert_gone()
