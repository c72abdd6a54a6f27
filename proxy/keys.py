"""Who may ask: API keys from the command line and from a file, each with a name and limits of its own.

The file is TOML, read again when it changes; a change that cannot be read is logged and the former keys stay.

    [keys.alice]
    key = "sk-..."
    max_requests = 8        # open at once, waiting ones included; 0 or absent: no limit
    max_tokens = 100000     # of the prompts open at once
    priority = "normal"     # of its requests that name none: high, normal or low
"""

from __future__ import annotations

import hashlib
import logging
import os
import tomllib
from typing import Any, Final

from proxy.admission import PRIORITIES, Caller, Priority
from proxy.errors import ConfigError, Unauthorized

logger = logging.getLogger(__name__)

_FIELDS: Final = {"key": str, "max_requests": int, "max_tokens": int, "priority": str}


class ApiKeys:
    """The keys of one proxy. Looked up by their hashes, so that the time taken says nothing about them."""

    def __init__(self, api_key: str, file: str) -> None:
        """Raises ConfigError if the file cannot be read."""
        self._file = file
        self._fixed = {_digest(api_key.encode()): Caller(name="default")} if api_key else {}
        self._anybody = Caller(name="anybody")
        self._callers = dict(self._fixed)
        self._stamp: tuple[int, int, int] | None = None
        if file:
            self._stamp = _stamp(file)
            self._callers |= _read(file)

    def caller(self, authorization: bytes | None, x_api_key: bytes | None = None) -> Caller:
        """Whose key the request shows, in OpenAI's header or, without that, in Anthropic's.

        Raises Unauthorized; without any key here, everyone may ask.
        """
        if not self._callers:
            return self._anybody
        scheme, _, shown = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            shown = x_api_key or b""
        caller = self._callers.get(_digest(shown.strip()))
        if caller is None:
            raise Unauthorized("send the API key as 'Authorization: Bearer ...'")
        return caller

    def reload(self) -> None:
        """Reads the file again if it has changed. A key that stays keeps its count of what is open."""
        if not self._file:
            return
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            read = _read(self._file)
        except ConfigError as err:
            if self._stamp is not None:
                logger.error("API keys not read again, the former ones stay reason=%s", err)
            self._stamp = None
            return
        for digest, caller in read.items():
            former = self._callers.get(digest)
            if former is not None:
                former.name, former.max_requests = caller.name, caller.max_requests
                former.max_tokens, former.priority = caller.max_tokens, caller.priority
                read[digest] = former
        self._callers = {**self._fixed, **read}
        logger.info("API keys read again keys=%d", len(self._callers))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _stamp(file: str) -> tuple[int, int, int]:
    try:
        status = os.stat(file)
    except OSError as err:
        raise ConfigError(f"--api-key-file {file}: {err.strerror}") from err
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(file: str) -> dict[bytes, Caller]:
    try:
        with open(file, "rb") as opened:
            tables: Any = tomllib.load(opened).get("keys", {})
    except OSError as err:
        raise ConfigError(f"--api-key-file {file}: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"--api-key-file {file} is no TOML: {err}") from err
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"--api-key-file {file} has no [keys.NAME] table")
    callers: dict[bytes, Caller] = {}
    for name, table in tables.items():
        digest, caller = _caller(file, name, table)
        if digest in callers:
            raise ConfigError(f"--api-key-file {file}: [keys.{name}] has the key of another name")
        callers[digest] = caller
    return callers


def _caller(file: str, name: str, table: Any) -> tuple[bytes, Caller]:
    where = f"--api-key-file {file}: [keys.{name}]"
    if not isinstance(table, dict) or not table.get("key"):
        raise ConfigError(f"{where} has no key")
    for field, value in table.items():
        if field not in _FIELDS:
            raise ConfigError(f"{where} has {field!r}, known are {', '.join(_FIELDS)}")
        if type(value) is not _FIELDS[field] or (isinstance(value, int) and value < 0):
            raise ConfigError(f"{where} has {field} = {value!r}, which is no {_FIELDS[field].__name__} from 0 on")
    priority = table.get("priority", Priority.NORMAL.name.lower())
    if priority not in PRIORITIES:
        raise ConfigError(f"{where} has priority {priority!r}, must be one of {', '.join(PRIORITIES)}")
    return _digest(table["key"].encode()), Caller(
        name=name,
        max_requests=table.get("max_requests", 0),
        max_tokens=table.get("max_tokens", 0),
        priority=PRIORITIES[priority],
    )
