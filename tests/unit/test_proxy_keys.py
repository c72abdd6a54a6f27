"""The API key file, read again when it changes and refused with what is wrong; the journal; the access log."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy.access_log import MAX_UNWRITTEN, AccessLog
from proxy.admission import Caller, Priority
from proxy.errors import ConfigError, Unauthorized
from proxy.journal import Journal
from proxy.keys import ApiKeys
from proxy.outcomes import End

ALICE = '[keys.alice]\nkey = "sk-a"\nmax_requests = 2\npriority = "high"\n'
BOB = '[keys.bob]\nkey = "sk-b"\n'


def write(file: Path, text: str) -> str:
    """Writes the file as an editor would: a new one, moved into place."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)
    return str(file)


def test_without_a_key_everyone_may_ask_and_with_one_only_who_shows_it() -> None:
    assert ApiKeys("", "").caller(None).name == "anybody"
    keys = ApiKeys("k", "")
    assert keys.caller(b"bearer  k").name == "default"
    for shown in (None, b"", b"Bearer", b"Bearer x", b"Basic k", b"Bearer k k", b"Bearer \xff"):
        with pytest.raises(Unauthorized):
            keys.caller(shown)
    assert keys.caller(None, b" k").name == "default" and keys.caller(b"Basic x", b"k").name == "default"
    for shown, other in ((b"Bearer x", b"k"), (None, b"x"), (None, b"")):
        with pytest.raises(Unauthorized):
            keys.caller(shown, other)


def test_keys_of_a_file_have_names_limits_and_a_priority(tmp_path: Path) -> None:
    keys = ApiKeys("k", write(tmp_path / "keys.toml", ALICE + BOB))
    alice = keys.caller(b"Bearer sk-a")
    assert (alice.name, alice.max_requests, alice.max_tokens, alice.priority) == ("alice", 2, 0, Priority.HIGH)
    assert keys.caller(b"Bearer sk-b").name == "bob" and keys.caller(b"Bearer k").name == "default"


def test_a_changed_file_is_read_again_and_a_key_that_stays_keeps_its_count(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = ApiKeys("", write(file, ALICE + BOB))
    alice = keys.caller(b"Bearer sk-a")
    alice.requests = 1
    write(file, ALICE.replace("= 2", "= 9"))
    keys.reload()
    assert keys.caller(b"Bearer sk-a") is alice and (alice.requests, alice.max_requests) == (1, 9)
    with pytest.raises(Unauthorized):
        keys.caller(b"Bearer sk-b")


def test_a_change_that_cannot_be_read_keeps_the_former_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = ApiKeys("", write(file, ALICE))
    for text in ("no toml at all", "[keys]\n"):
        write(file, text)
        keys.reload()
        assert keys.caller(b"Bearer sk-a").name == "alice"
    file.unlink()
    keys.reload()
    assert keys.caller(b"Bearer sk-a").name == "alice"
    write(file, BOB)
    keys.reload()
    assert keys.caller(b"Bearer sk-b").name == "bob"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "is no TOML"),
        ("", "has no"),
        ("keys = 1", "has no"),
        ("[keys.a]", "has no key"),
        ('[keys.a]\nkey = ""', "has no key"),
        ('[keys.a]\nkey = "k"\nlimit = 3', "has 'limit'"),
        ('[keys.a]\nkey = "k"\nmax_requests = -1', "max_requests = -1"),
        ('[keys.a]\nkey = "k"\nmax_requests = "5"', "max_requests = '5'"),
        ('[keys.a]\nkey = "k"\nmax_requests = true', "max_requests = True"),
        ('[keys.a]\nkey = "k"\npriority = "urgent"', "priority 'urgent'"),
        ('[keys.a]\nkey = "k"\n[keys.b]\nkey = "k"', "the key of another name"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ApiKeys("", write(tmp_path / "keys.toml", text))


def test_a_file_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys("", "/nonexistent/keys.toml")


def note(log: AccessLog, request_id: bytes = b"r") -> None:
    request = SimpleNamespace(
        request_id=request_id,
        ticket=SimpleNamespace(caller=Caller(name='a"b')),
        route="/v1/x",
        model="m\n",
        replica=None,
        tried=[],
        size=2,
        answer_bytes=3,
        queue_s=0.0,
        first_byte_s=0.25,
    )
    log.note(request, 200, End.WHOLE, 0.5)  # type: ignore[arg-type]


def test_every_line_of_the_access_log_is_json_whatever_stands_in_it(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "log"))
    note(log)
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["key"] == 'a"b' and json.loads(line)["model"] == "m\n"
    assert json.loads(line)["first_byte_s"] == 0.25


def test_a_log_that_was_moved_away_is_begun_anew_and_lines_are_never_gathered_without_bound(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = AccessLog(str(file))
    for _ in range(MAX_UNWRITTEN):
        note(log, b"old")
    assert file.read_text().count("\n") == MAX_UNWRITTEN
    file.rename(tmp_path / "log.1")
    log.reopen()
    note(log, b"new")
    log.close()
    assert '"new"' in file.read_text() and '"old"' not in file.read_text()


def test_a_log_that_cannot_be_written_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--access-log /nonexistent/log"):
        AccessLog("/nonexistent/log")


def test_a_journal_keeps_all_that_was_sent_or_says_that_it_does_not() -> None:
    journal = Journal(10)
    journal.record(b"12345")
    journal.record(b"67890")
    assert journal.sent() == b"1234567890"
    journal.record(b"x")
    assert journal.sent() is None
