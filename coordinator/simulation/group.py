"""One simulated group: its nodes, members, store and network, built from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from coordinator.clock import ClockSettings
from coordinator.simulation.account import Account
from coordinator.simulation.collectives import ProcessGroup
from coordinator.simulation.engines import Engine
from coordinator.simulation.progress import Progress
from coordinator.simulation.settings import PREFILL_DELAY_S, PROGRESS_DEADLINE_S, STARTUP_DEADLINE_S
from coordinator.simulation.stores import StoreServer
from coordinator.simulation.supervisors import Supervisor
from coordinator.simulation.work import Request
from coordinator.simulation.world import End, Network, Process, World

if TYPE_CHECKING:
    from coordinator.simulation.faults import Points

SIZES: Final = (1, 2, 2, 3, 3, 4, 4, 4, 6, 6, 8, 8, 12, 16)
BIG_SIZES: Final = (32, 48, 64)
BIG_ODDS: Final = 0.02


class Group:
    """Everything of one seed."""

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        size = random.choice(BIG_SIZES if random.random() < BIG_ODDS else SIZES)
        num_nodes = random.choice([n for n in (1, 2, 2, 3, 4) if size % n == 0])
        self.min_members = 1 if random.random() < 0.8 else random.randint(1, size)  # fewer have no room for all weights
        self.settings = ClockSettings(
            group="simulated",
            size=size,
            config={"model": "m"},
            startup_deadline_s=STARTUP_DEADLINE_S,
            progress_deadline_s=PROGRESS_DEADLINE_S,
            prefill_delay_s=PREFILL_DELAY_S,
            why_not=self.why_not,
        )
        self.network = Network(world)
        self.store = StoreServer(world)
        self.account = Account(self)
        self.progress = Progress(self)
        self.points: Points | None = None
        self.supervisors = [Supervisor(self, place) for place in range(num_nodes)]
        self.engines = [Engine(self, rank, rank * num_nodes // size) for rank in range(size)]
        for engine in self.engines:
            self.supervisors[engine.place].engines.append(engine)
        self.store.committed = self.account.committed
        self.store.lost = self.account.lost
        self._process_groups: dict[int, ProcessGroup] = {}
        self.is_wedging = False  # the next process group that is built never ends a collective
        names = (size, num_nodes, self.min_members)
        world.note("%d members on %d nodes, at least %d must live", *names)

    def start(self) -> None:
        """Everything is started at once, as by hand on each node."""
        for supervisor in self.supervisors:
            supervisor.start()
        for engine in self.engines:
            engine.start()

    def why_not(self, members: tuple[int, ...]) -> str:
        """Too few members have no room for all weights."""
        if len(members) >= self.min_members:
            return ""
        return f"{len(members)} members have no room for the weights, {self.min_members} have"

    def connect(self, client: Process, place: int, answer: Callable[[End | None], None]) -> None:
        """Dials the clock on a node: an end, None where nobody listens, and silence where the network is cut."""
        world, target = self.world, self.supervisors[place]
        mine = client.place if isinstance(client, Engine | Supervisor) else place

        def arrive() -> None:
            if self.network.is_cut(mine, place):
                return
            if not target.is_alive or target.master is None or not client.is_alive:
                world.after(world.random.uniform(0.0001, 0.001), client, answer, None)
                return
            near, far = self.network.connect(client, mine, target, place)
            world.after(world.random.uniform(0.0001, 0.001), client, answer, near)
            # The kernel takes the connection; the process greets it when it runs.
            world.after(0.0, target, self._greet, target, far)

        world.after(world.random.uniform(0.0001, 0.001), None, arrive)

    def process_group(self, epoch: int) -> ProcessGroup:
        """That of an epoch, which its first member builds."""
        if epoch not in self._process_groups:
            self._process_groups[epoch] = ProcessGroup(self.world, epoch, self.account.members(epoch))
            if self.is_wedging:
                self._process_groups[epoch].is_wedged, self.is_wedging = True, False
                self.progress.num_wedges += 1
        return self._process_groups[epoch]

    def newest_process_group(self) -> ProcessGroup | None:
        """The one that steps now, if any ever did."""
        return self._process_groups[max(self._process_groups)] if self._process_groups else None

    def reach(self, point: str) -> None:
        """Somebody is at a point of the protocol at which a fault may be waiting."""
        if self.points is not None:
            self.points.reach(point)

    def submit(self, engine: Engine) -> None:
        """A client asks a member for something."""
        if engine.is_alive:
            random = self.world.random
            request = Request(prompt_tokens=random.randint(1, 50), output_tokens=random.randint(1, 12))
            self.progress.work_came(engine)
            self.world.after(0.0, engine, engine.submit, request)

    def _greet(self, target: Supervisor, end: End) -> None:
        if target.master is None:
            end.close()
        else:
            target.master.connected(end)
