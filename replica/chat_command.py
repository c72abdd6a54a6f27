"""`replica chat MODEL`: a small terminal chat for trying a model, with a server of its own or with any (`--url URL`).

Answers are shown as they come, reasoning dimmed. Ctrl-C stops an answer, Ctrl-D leaves, /reset begins anew. From a pipe
each line is a question, and nothing but answers is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, TextIO

from replica.chat_client import ChatFailed, Conversation, Piece, Server
from replica.errors import ConfigError

HELP: Final = "Ctrl-C stops an answer, Ctrl-D leaves, /reset begins a new conversation"
START_TIMEOUT_S: Final = 1800.0  # a large checkpoint on a slow disk
STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.1
_READY: Final = re.compile(r"\bready\b.*\burl=(\S+)")
_ERROR: Final = re.compile(r"^replica: error: (.*)$", re.MULTILINE)
# What a model may write and a terminal would obey.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# The server ends when the chat does, however that is: it holds the other end of a pipe (process_tree.py).
_SERVE: Final = (
    "import sys; from replica.process_tree import follow_parent; from replica.cli import main; "
    "follow_parent(int(sys.argv[1])); sys.exit(main(sys.argv[2:]))"
)


def add_chat_parser(commands: Any, *, api_key: str) -> None:
    """Adds the verb to argparse's subparsers; its namespace has `run`. `api_key` is the one of the environment."""
    chat = commands.add_parser(
        "chat",
        help="talk to a model in this terminal",
        description=f"Talks to a model in this terminal. {HELP}.",
        allow_abbrev=False,
    )
    chat.add_argument("model", nargs="?", help="checkpoint folder to serve; with --url the name of a served model")
    chat.add_argument("--url", help="server to talk to, such as http://127.0.0.1:8000, instead of starting one")
    chat.add_argument(
        "--api-key", default=api_key, help="its API key; better given in the environment as LOCKSTEP_API_KEY"
    )
    chat.set_defaults(run=run_chat)


def run_chat(args: argparse.Namespace) -> int:
    """Talks until the input ends; returns the exit code. Raises ConfigError for what cannot be talked to."""
    if not (args.model or args.url):
        raise ConfigError("name a checkpoint folder to talk to, or a server with --url")
    try:
        if args.url:
            return talk_to(Server.at(args.url, api_key=args.api_key), args.model)
        with local_server(Path(args.model)) as url:
            return talk_to(Server.at(url, api_key=args.api_key), None)
    except ChatFailed as err:
        print(f"replica: error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was anything to say
        return 1


def talk_to(server: Server, model: str | None) -> int:
    """Talks to a model of a server, the first one if none is named. Raises ChatFailed."""
    models = server.models()
    if not models:
        raise ChatFailed(f"{server.url} serves no model yet; try again shortly")
    if model is not None and model not in models:
        raise ChatFailed(f"{server.url} does not serve {model!r}; it serves {', '.join(models)}")
    model = model or models[0]
    if sys.stdin is None or sys.stdout is None:
        raise ChatFailed("standard input or output is closed")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() gets history and editing by it)
        print(f"{model} at {server.url}. {HELP}.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show every character shows the others
    try:
        talk(Conversation(server, model), sys.stdin, sys.stdout)
    except OSError as err:  # whoever read the answers is gone, or their disk is full
        with open(os.devnull, "w") as nowhere:  # for what is still buffered, lest the interpreter fail at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise ChatFailed(f"cannot read questions or write answers: {err}") from err
    return 0


def talk(conversation: Conversation, questions: TextIO, answers: TextIO) -> None:
    """Question and answer in turns, until the questions end."""
    while True:
        try:
            question = _next_question(questions)
        except KeyboardInterrupt:  # what was being typed is dropped
            print(file=answers)
            continue
        if question is None:
            return
        if question.startswith("/"):
            if question == "/reset":
                conversation.reset()
            else:
                print(f"{question} is no command. {HELP}.", file=sys.stderr)
        elif question:
            _show_answer(conversation, question, answers)


def _next_question(questions: TextIO) -> str | None:
    """None at the end."""
    if not questions.isatty():
        line = questions.readline()
        return line.strip() if line else None
    try:
        return input("\n> ").strip()
    except EOFError:
        print()
        return None


def _show_answer(conversation: Conversation, question: str, answers: TextIO) -> None:
    pieces = conversation.ask(question)
    is_dim = False
    try:
        for piece in pieces:
            is_dim = _show(piece, answers, is_dim=is_dim)
    except KeyboardInterrupt:
        pass  # the answer is stopped by closing it
    except ChatFailed as err:
        answers.flush()
        print(f"\nreplica: error: {err}", file=sys.stderr)
    finally:
        pieces.close()
        if is_dim:
            answers.write(_PLAIN)
        print(file=answers, flush=True)


def _show(piece: Piece, answers: TextIO, *, is_dim: bool) -> bool:
    """Whether what follows would be dim."""
    wants_dim = piece.is_reasoning and answers.isatty()
    if wants_dim is not is_dim:
        answers.write(_DIM if wants_dim else _PLAIN + "\n\n")
    if answers.isatty() or not piece.is_reasoning:
        answers.write(_CONTROL.sub("", piece.text))
        answers.flush()
    return wants_dim


@contextlib.contextmanager
def local_server(folder: Path) -> Iterator[str]:
    """The URL of a server of a checkpoint, for as long as the block runs. Raises ChatFailed if it does not start."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+") as log:
        command = [
            sys.executable,
            "-c",
            _SERVE,
            str(reader),
            "serve",
            str(folder),
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        # In a process group of its own: a Ctrl-C in this terminal is for the answer alone.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[reader], process_group=0
        )
        os.close(reader)
        try:
            yield _wait_ready(process, log, folder)
        finally:
            _stop(process)
            os.close(writer)


def _wait_ready(process: subprocess.Popen[bytes], log: IO[str], folder: Path) -> str:
    print(f"loading {folder} ...", file=sys.stderr, flush=True)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        has_ended = process.poll() is not None
        log.seek(0)
        text = log.read()
        if found := _READY.search(text):
            return found[1]
        if has_ended:
            error = _ERROR.search(text)
            raise ChatFailed(error[1] if error else f"the server ended before it was ready:\n{text[-2000:]}")
        if time.monotonic() > deadline_s:
            raise ChatFailed(f"the server was not ready after {START_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Twice asked, it does not wait for what still runs; nothing does but a stopped answer."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                return
    process.kill()
    process.wait()
