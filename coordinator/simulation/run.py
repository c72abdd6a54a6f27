"""One seed, from start to rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.messages import STOP
from coordinator.simulation.faults import KINDS, LAST_S, Faults
from coordinator.simulation.group import Group
from coordinator.simulation.world import Inconclusive, Violation, World

LOOK_S: Final = 0.25
LAST_WORK_S: Final = LAST_S + 1.0
COMMAND_ODDS: Final = 0.2  # of one with each burst of requests
MAX_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a seed."""

    seed: int
    size: int
    num_events: int
    simulated_s: float
    num_epochs: int
    num_masters: int  # leases that were taken
    num_batches: int
    violation: str  # empty where everything held
    trace: tuple[str, ...]


def simulate(seed: int, faults: Sequence[str] = tuple(KINDS)) -> Result:
    """Runs one seed, with faults of these names. The same seed and names give the same result."""
    world = World(seed)
    group = Group(world)
    violation = ""
    try:
        _Life(group).run(faults)
    except Violation as broken:
        violation = str(broken)
    except Inconclusive:
        world.note("the rest is not judged")
    except Exception as err:  # a state machine that breaks is a violation as well, and needs its trace
        violation = f"{type(err).__name__}: {err}"
    return Result(
        seed=seed,
        size=group.settings.size,
        num_events=world.num_events,
        simulated_s=world.now_s,
        num_epochs=group.account.num_epochs,
        num_masters=group.account.num_masters,
        num_batches=group.account.num_batches,
        violation=violation,
        trace=tuple(world.trace()) if violation else (),
    )


class _Life:
    """A group from its start until it is at rest after the last fault, and has then done one thing more."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._world = group.world
        self._faults = Faults(group)
        self._is_probed = False  # the last requests have been sent
        self._is_over = False

    def run(self, faults: Sequence[str]) -> None:
        """Raises Violation."""
        world = self._world
        self._group.start()
        self._faults.plan(faults)
        self._ask()
        world.after(LOOK_S, None, self._look)
        world.run(lambda: self._is_over)

    def _ask(self) -> None:
        """Clients come at random, in bursts; then the group is idle for a while."""
        group, world, random = self._group, self._world, self._world.random
        for _ in range(random.randint(1, 3)):
            group.submit(random.choice(group.engines))
        if random.random() < COMMAND_ODDS:
            self._command(f"command of {world.now_s:.3f} s")
        pause_s = random.choice([random.uniform(0.0, 0.2), random.uniform(0.5, 2.0)])
        if world.now_s + pause_s < LAST_WORK_S:
            world.after(pause_s, None, self._ask)

    def _command(self, name: str) -> None:
        for supervisor in self._group.supervisors:
            self._world.after(0.0, supervisor, supervisor.command, name)

    def _look(self) -> None:
        group, world, progress = self._group, self._world, self._group.progress
        progress.look()
        is_quiet = world.now_s > LAST_WORK_S and not self._faults.pending and progress.is_at_rest
        if is_quiet and not self._is_probed:
            self._is_probed = True
            for engine in group.engines:
                group.submit(engine)
            if world.random.random() < 0.3:
                progress.has_stopped = True
                self._command(STOP)
        elif is_quiet:
            group.account.look_at_commands()
            self._is_over = True
            return
        if world.now_s > MAX_S:
            raise Violation(f"nothing has come to rest within {MAX_S:g} s")
        world.after(LOOK_S, None, self._look)
