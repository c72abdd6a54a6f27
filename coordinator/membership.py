"""A group's membership in Redis: the master's lease, the committed members, and commands for the master.

Each change is one script in `scripts/`, which compares the token of who asks. A store that lost its data, because it
was flushed, came back empty or failed over to a copy that lags, is given the highest token, epoch and record again by
the next renewal or commit of the living master. A store in which somebody else has put something under the group's keys
counts as one that does not answer, until it is deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from importlib.resources import files
from typing import Any, Final, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from coordinator import keys
from coordinator.errors import Fenced, LeaseHeld, StoreGarbled, StoreUnavailable
from coordinator.redis_client import connect, disconnect, within
from coordinator.store import LEASE_S, Lease, MasterAddress, Record, View, split_address

CALL_S: Final = 0.6  # for any call, connecting and loading its script included
CHECK_S: Final = 0.3  # to find out what is wrong with what the store holds
MAX_COMMANDS: Final = 64  # that wait for a master
MAX_COMMAND_CHARS: Final = 200
SCRIPTS: Final = ("take_lease", "renew", "commit", "release", "view", "add_command", "take_commands")
FENCED: Final = "FENCED "  # how a script's refusal begins

T = TypeVar("T")


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
        self._received: list[str] = []  # entries of commands that were given out, and that the list has yet

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
            await self._sound(split_address, rest[0])
            raise LeaseHeld(token, rest[0])
        epoch, record = rest
        self._record = await self._sound(_record, record)
        self._token, self._holder, self._address = token, holder, address
        self._received = []  # the clock that begins now has been given none
        return Lease(token=token, epoch=epoch, record=self._record)

    async def renew(self, token: int, epoch: int) -> int:
        """See Store."""
        record = self._record.to_json() if self._record else ""
        args = [token, self._holder, self._address, epoch, record, _lease_ms()]
        return cast(int, await self._run("renew", [self._mastership, self._lease, self._commands], args))

    async def commit(self, token: int, record: Record) -> None:
        """See Store."""
        await self._run("commit", [self._mastership], [token, self._holder, self._address, record.to_json()])
        self._record = record

    async def release(self, token: int) -> None:
        """See Store."""
        await self._run("release", [self._mastership, self._lease, self._commands], [token, self._holder])

    async def master(self) -> MasterAddress | None:
        """See Store."""
        view = await self.view()
        if not view.is_leased:
            return None
        host, port = await self._sound(split_address, view.address)
        return MasterAddress(token=view.token, host=host, port=port)

    async def view(self) -> View:
        """See Store."""
        answer = await self._run("view", [self._mastership, self._lease], [])
        token, epoch, record, address, holder, is_leased = answer
        number = await self._sound(int, token)
        return View(
            token=number,
            epoch=await self._sound(int, epoch),
            record=await self._sound(_record, record),
            address=address,
            is_leased=bool(is_leased),
            is_over=number > 0 and not holder,
        )

    async def commands(self, pending: Collection[str]) -> list[str]:
        """See Store."""
        over = [entry for entry in self._received if _name(entry) not in pending]
        args = [self._token, self._holder, *over]
        entries = cast(list[str], await self._run("take_commands", [self._mastership, self._commands], args))
        new = [_name(entry) for entry in entries if entry not in self._received]
        self._received = entries
        return new

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

    async def check(self) -> None:
        """Looks at everything that is stored. Raises StoreGarbled where no group has written it, StoreUnavailable."""
        kinds = {self._mastership: "hash", self._lease: "string", self._commands: "list"}
        reading = self._client.pipeline(transaction=False)
        for key in kinds:
            reading.type(key)
        reading.hmget(self._mastership, list(_FORMS))
        reading.get(self._lease)
        try:
            answers = await within(CHECK_S, reading.execute(raise_on_error=False))
        except (RedisError, OSError) as err:  # TimeoutError is an OSError
            raise StoreUnavailable(f"Redis did not show what it holds: {err or type(err).__name__}") from err
        *found, fields, token = answers
        for (key, kind), is_kind in zip(kinds.items(), found, strict=True):
            if isinstance(is_kind, str) and is_kind not in (kind, "none"):
                raise _garbled(key, f"is a {is_kind}, not a {kind}")
        if refusals := [answer for answer in answers if isinstance(answer, RedisError)]:
            raise StoreUnavailable(f"Redis did not show what it holds: {refusals[0]}") from refusals[0]
        for (name, form), text in zip(_FORMS.items(), fields, strict=True):
            if text and not _has_form(form, text):
                raise _garbled(self._mastership, f"has {name} {text!r:.100}")
        if token and not _has_form(int, token):
            raise _garbled(self._lease, f"is {token!r:.100}")

    async def _sound(self, form: Callable[[str], T], text: str) -> T:
        """What a stored text says. Raises StoreGarbled where it is not of the form."""
        try:
            return form(text)
        except ValueError as err:
            await self.check()
            raise StoreUnavailable(f"Redis answered {text!r:.100}, and holds something else by now") from err

    async def _run(self, script: str, script_keys: list[str], args: list[Any]) -> Any:
        """Applies a script. Raises Fenced where it says so, StoreUnavailable for any other failure."""
        try:
            return await within(CALL_S, self._scripts[script](keys=script_keys, args=args))
        except ResponseError as err:
            if str(err).startswith(FENCED):
                raise Fenced(str(err).removeprefix(FENCED)) from err
            await self.check()
            raise StoreUnavailable(f"Redis refused {script}: {err}") from err
        except (RedisError, OSError) as err:  # TimeoutError is an OSError
            raise StoreUnavailable(f"Redis did not answer {script}: {err or type(err).__name__}") from err


def _script(name: str) -> str:
    return (files("coordinator") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")


def _name(entry: str) -> str:
    """The command in an entry of the list."""
    return entry.partition(" ")[2]


def _lease_ms() -> int:
    return round(LEASE_S * 1000)


def _record(text: str) -> Record | None:
    """Raises ValueError."""
    return Record.from_json(text) if text else None


# What the fields of the mastership hash must be.
_FORMS: Final[dict[str, Callable[[str], object]]] = {
    "token": int,
    "epoch": int,
    "address": split_address,
    "record": Record.from_json,
}


def _has_form(form: Callable[[str], object], text: str) -> bool:
    try:
        form(text)
    except ValueError:
        return False
    return True


def _garbled(key: str, what: str) -> StoreGarbled:
    return StoreGarbled(f"{key} {what}, which no group has written: delete this key, or take another --group")
