"""How the mastership moves: when a supervisor may begin as its group's first master, or take over from a lost one.

The rules of a standby:

- **Its lease has run out, and it does not answer.** A master whose clock still greets whoever connects serves its
  members, even when it cannot reach the store to renew: nothing is taken from it. When it falls silent after that, the
  standby waits for as long as members do: who takes over before they look for another master finds none of them.
- **Refused is dead.** When the master's address refuses connections twice, a moment apart, no process listens there:
  the lease is replaced at once, by a script that compares the token. Twice, since a new master takes the lease first
  and listens a moment later.
- **An outage of the store is no death.** While the store was away, or this process was paused, the master may have had
  no chance to renew, and another master may have come whom the store has forgotten. Each gets one lease's time from
  when the store answers again.
- **A store that has lost its data is believed again when the master has restored it**, which takes one renewal. Nothing
  is taken over from what it says until then: it may name members that were evicted long ago.
- **Over is over.** A lease that was given up belonged to a group that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from coordinator.errors import LeaseHeld, StoreUnavailable
from coordinator.member import MAX_SILENCE_S
from coordinator.store import LEASE_S, Lease, Store, View, split_address

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
PROBE_S: Final = 0.4  # for a master to greet whoever connects
MAX_GAP_S: Final = 1.5  # looks further apart than this mean that this process was paused


class Probe(Enum):
    """What connecting to the master's address came to."""

    GREETED = "greeted"  # a clock is served there
    SILENT = "silent"  # frozen, unreachable or just starting
    REFUSED = "refused"  # nobody listens


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The lease may be taken."""

    replaces: int | None  # the token whose lease has not run out, but whose master is dead
    why: str


class LeaseWatch:
    """A standby's judgement. Pure state; every `now_s` comes from the same monotonic clock."""

    def __init__(self) -> None:
        self.seen_token = 0
        self.seen_epoch = 0
        self._committed_epoch = 0  # the highest that a membership was ever committed for
        self._view: View | None = None  # the last, while the store answers and is to be believed
        self._has_begun = False  # the group: this node's members were told of an epoch
        self._looked_s = 0.0
        self._answers_since_s = 0.0  # the store has answered, and was sound, since then
        self._greeted_s = -math.inf  # when the master last did
        self._refused_since: tuple[int, float] | None = None  # the token at whose address nobody listens since when

    def missed(self) -> None:
        """The store did not answer."""
        self._view = None

    def saw(self, view: View, probe: Probe, told_epoch: int, now_s: float) -> None:
        """What the store says, what the address that it names did, and which epoch this node's members were told of."""
        self._committed_epoch = max(self._committed_epoch, told_epoch)  # members are told of what is committed
        is_sound = view.token >= self.seen_token and view.committed_epoch >= self._committed_epoch
        self._committed_epoch = max(self._committed_epoch, view.committed_epoch)
        self.seen_token = max(self.seen_token, view.token)
        self.seen_epoch = max(self.seen_epoch, view.epoch, told_epoch)
        self._has_begun = told_epoch > 0
        if self._view is None or now_s - self._looked_s > MAX_GAP_S:
            self._answers_since_s = now_s
        self._looked_s = now_s
        self._view = view if is_sound else None
        if probe is Probe.GREETED:
            self._greeted_s = now_s
        if probe is not Probe.REFUSED:
            self._refused_since = None
        elif self._refused_since is None or self._refused_since[0] != view.token:
            self._refused_since = (view.token, now_s)

    def claim(self, now_s: float) -> Claim | None:
        """Whether the lease may be taken, as of the last look. A group that has not begun is not a standby's."""
        view = self._view
        if view is None or view.is_over or not self._has_begun or now_s - self._answers_since_s < LEASE_S:
            return None
        if self._refused_since is not None and now_s - self._refused_since[1] >= POLL_S:
            replaces = view.token if view.is_leased else None
            return Claim(replaces=replaces, why=f"nobody listens at {view.address}")
        if not view.is_leased and now_s - self._greeted_s >= MAX_SILENCE_S:
            return Claim(replaces=None, why=f"the master at {view.address} neither renews its lease nor answers")
        return None


async def take_over(store: Store, *, holder: str, address: str, told_epoch: Callable[[], int]) -> Lease:
    """Waits until the master is lost, and returns its lease, which is this process's from now on.

    `told_epoch` says the last epoch that this node's members were told of, 0 before the first: until then there is
    nothing to take over. A node whose members have all died may be the master all the same. Whoever gets the lease is
    to listen at `address` at once.
    """
    watch = LeaseWatch()
    while True:
        try:
            view = await store.view()
            probe = await _probe(view.address) if view.address else Probe.SILENT
            watch.saw(view, probe, told_epoch(), time.monotonic())
            if claim := watch.claim(time.monotonic()):
                lease = await store.take_lease(
                    holder=holder,
                    address=address,
                    seen_token=watch.seen_token,
                    seen_epoch=watch.seen_epoch,
                    replaces=claim.replaces,
                )
                logger.warning("taking over as master token=%d epoch=%d why=%s", lease.token, lease.epoch, claim.why)
                return lease
        except StoreUnavailable:
            watch.missed()  # nothing can be taken over meanwhile; the members wait as long as they have decided to
        except LeaseHeld:
            pass  # another standby was quicker; it is the one to watch now
        await asyncio.sleep(POLL_S)


async def begin(store: Store, *, holder: str, address: str) -> Lease:
    """The lease of a group that starts afresh. Raises LeaseHeld where the group lives, StoreUnavailable.

    A mastership that was not given up may be about to move to a standby, which has the first right to it.
    """
    view = await store.view()
    deadline_s = time.monotonic() + 2 * LEASE_S
    while view.token and not view.is_over and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
        previous, view = view, await store.view()
        if view.is_leased and view.token != previous.token:
            break
    return await store.take_lease(holder=holder, address=address, seen_token=view.token, seen_epoch=view.epoch)


async def _probe(address: str) -> Probe:
    """Connects as a stranger, whom a clock greets with a challenge."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(*split_address(address))
            return Probe.GREETED if await reader.read(1) else Probe.SILENT
    except ConnectionRefusedError:
        return Probe.REFUSED
    except (OSError, ValueError):  # no answer in time, no way there, no such name
        return Probe.SILENT
    finally:
        if writer is not None:
            writer.transport.abort()
