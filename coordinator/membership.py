"""A group's membership in Redis: the master's lease, the committed members, and commands for the master.

Each change is one script in `scripts/`, which compares the token of who asks. A store that lost its data, because it
was flushed, came back empty or failed over to a copy that lags, is given the highest token, epoch and record again by
the next renewal or commit of the living master.
"""

from __future__ import annotations

import asyncio
import secrets
from importlib.resources import files
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from coordinator import keys
from coordinator.errors import Fenced, LeaseHeld, StoreUnavailable
from coordinator.redis_client import connect, disconnect
from coordinator.store import LEASE_S, Lease, MasterAddress, Record, View, split_address

CALL_S: Final = 0.6  # for any call, connecting and loading its script included
MAX_COMMANDS: Final = 64  # that wait for a master
MAX_COMMAND_CHARS: Final = 200
SCRIPTS: Final = ("take_lease", "renew", "commit", "release", "view", "add_command", "take_commands")
FENCED: Final = "FENCED "  # how a script's refusal begins


class Membership:
    """The Store in Redis, for one process and one group. Not on the step path: a call costs up to CALL_S."""

    def __init__(self, client: Redis, group: str) -> None:
        keys.checked_group(group)
        self._client = client
        self._mastership = keys.mastership(group)
        self._lease = keys.lease(group)
        self._commands = keys.commands(group)
        self._scripts = {name: client.register_script(_script(name)) for name in SCRIPTS}
        self._token = 0
        self._holder = ""
        self._address = ""
        self._record: Record | None = None  # the last that is known to be committed
        self._received: list[str] = []  # entries of commands, to be dropped from the list by the next call

    @classmethod
    def at(cls, url: str, group: str) -> Membership:
        """The store of `group` in the Redis at `url`. Raises ValueError for a URL or a name that cannot be."""
        return cls(connect(url), group)

    async def take_lease(
        self, *, holder: str, address: str, seen_token: int, seen_epoch: int, replaces: int | None = None
    ) -> Lease:
        """See Store."""
        args = [holder, address, seen_token, seen_epoch, replaces or 0, _lease_ms()]
        is_mine, token, *rest = await self._run("take_lease", [self._mastership, self._lease], args)
        if not is_mine:
            raise LeaseHeld(token, rest[0])
        epoch, record = rest
        self._token, self._holder, self._address = token, holder, address
        self._record = _record(record)
        return Lease(token=token, epoch=epoch, record=self._record)

    async def renew(self, token: int, epoch: int) -> None:
        """See Store."""
        record = self._record.to_json() if self._record else ""
        args = [token, self._holder, self._address, epoch, record, _lease_ms()]
        await self._run("renew", [self._mastership, self._lease], args)

    async def commit(self, token: int, record: Record) -> None:
        """See Store."""
        await self._run("commit", [self._mastership], [token, self._holder, self._address, record.to_json()])
        self._record = record

    async def release(self, token: int) -> None:
        """See Store."""
        await self._run("release", [self._mastership, self._lease], [token, self._holder])

    async def master(self) -> MasterAddress | None:
        """See Store."""
        view = await self.view()
        if not view.is_leased:
            return None
        try:
            host, port = split_address(view.address)
        except ValueError:  # another wrote something else there
            return None
        return MasterAddress(token=view.token, host=host, port=port)

    async def view(self) -> View:
        """See Store."""
        answer = await self._run("view", [self._mastership, self._lease], [])
        token, epoch, committed_epoch, address, holder, is_leased = answer
        return View(
            token=token,
            epoch=epoch,
            committed_epoch=committed_epoch,
            address=address,
            is_leased=bool(is_leased),
            is_over=token > 0 and not holder,
        )

    async def commands(self) -> list[str]:
        """See Store."""
        args = [self._token, self._holder, *self._received]
        entries = cast(list[str], await self._run("take_commands", [self._mastership, self._commands], args))
        self._received = entries
        return [entry.partition(" ")[2] for entry in entries]

    async def command(self, name: str) -> None:
        """See Store."""
        if not 0 < len(name) <= MAX_COMMAND_CHARS:
            raise ValueError(f"a command has 1 to {MAX_COMMAND_CHARS} characters, this has {len(name)}")
        entry = f"{secrets.token_hex(8)} {name}"
        if not await self._run("add_command", [self._commands], [entry, MAX_COMMANDS]):
            raise ValueError(f"{MAX_COMMANDS} commands wait already, and no master takes them")

    async def close(self) -> None:
        """See Store."""
        await disconnect(self._client)

    async def _run(self, script: str, script_keys: list[str], args: list[Any]) -> Any:
        """Applies a script. Raises Fenced where it says so, StoreUnavailable for any other failure."""
        # In a task of its own, because redis-py swallows a cancellation that comes together with the server's answer.
        call = asyncio.ensure_future(self._scripts[script](keys=script_keys, args=args))
        try:
            await asyncio.wait({call}, timeout=CALL_S)
        finally:
            call.cancel()
            call.add_done_callback(_take_error)
        if not call.done():
            raise StoreUnavailable(f"Redis did not answer {script} within {CALL_S:g} s")
        try:
            return call.result()
        except ResponseError as err:
            if str(err).startswith(FENCED):
                raise Fenced(str(err).removeprefix(FENCED)) from err
            raise StoreUnavailable(f"Redis refused {script}: {err}") from err
        except (RedisError, OSError) as err:  # TimeoutError is an OSError
            raise StoreUnavailable(f"Redis did not answer {script}: {err or type(err).__name__}") from err


def _take_error(call: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more, or whoever does has its error."""
    if not call.cancelled():
        call.exception()


def _script(name: str) -> str:
    return (files("coordinator") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")


def _lease_ms() -> int:
    return round(LEASE_S * 1000)


def _record(text: str) -> Record | None:
    """Raises StoreUnavailable where another wrote something else there: nothing may be decided on it."""
    try:
        return Record.from_json(text) if text else None
    except ValueError as err:
        raise StoreUnavailable(str(err)) from err
