"""`replica chat MODEL` starts a server of its own, and nothing of it is left, however the chat ends."""

from __future__ import annotations

import subprocess

from tests.commands import BIN, DEMO_MODEL, READY_TIMEOUT_S, Commands, wait_until

CHAT = (str(BIN / "replica"), "chat", str(DEMO_MODEL))


def test_chat_answers_what_comes_through_a_pipe_and_ends_with_it() -> None:
    asked = "What is 12 + 30?\n\n/reset\nReverse the word l o c k.\n"
    done = subprocess.run(CHAT, input=asked, capture_output=True, text=True, timeout=READY_TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "42\nk c o l\n"), done.stderr
    assert done.stderr == f"loading {DEMO_MODEL} ...\n"


def test_chat_that_is_killed_leaves_no_server(commands: Commands) -> None:
    chat = commands.start(*CHAT, stdin=subprocess.PIPE)
    assert chat.process.stdin is not None
    chat.process.stdin.write(b"What is 12 + 30?\n")
    chat.process.stdin.flush()
    wait_until(lambda: "42\n" in chat.log(), "an answer", READY_TIMEOUT_S)
    assert len(chat.pids()) > 2
    chat.kill()
    chat.process.stdin.close()
    chat.assert_gone()
