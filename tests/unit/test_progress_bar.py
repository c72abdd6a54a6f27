"""The bar while weights load."""

from __future__ import annotations

import io

from replica.frames import Progress
from replica.progress_bar import ProgressBar

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_that_grows_and_ends() -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal)
    bar.update(Progress(done_bytes=2 * MIB, total_bytes=8 * MIB))
    bar.update(Progress(done_bytes=8 * MIB, total_bytes=8 * MIB))
    _, first, second = terminal.getvalue().split("\r")
    assert first == f"loading weights [{'#' * 10}{' ' * 30}] 2 / 8 MiB"
    assert second == f"loading weights [{'#' * 40}] 8 / 8 MiB\n"


def test_a_log_file_sees_nothing() -> None:
    file = io.StringIO()
    ProgressBar(file).update(Progress(done_bytes=1, total_bytes=2))
    assert file.getvalue() == ""


def test_a_checkpoint_without_bytes_draws_nothing() -> None:
    terminal = Terminal()
    ProgressBar(terminal).update(Progress(done_bytes=0, total_bytes=0))
    assert terminal.getvalue() == ""
