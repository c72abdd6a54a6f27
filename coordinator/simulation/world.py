"""Simulated time, processes that die and freeze, and connections between them that delay, cut and never reorder."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

TRACE_LINES: Final = 400
SPIKE_ODDS: Final = 0.003  # of a frame
MAX_SPIKE_S: Final = 0.15


class Violation(AssertionError):
    """An invariant does not hold."""


class Inconclusive(Exception):
    """More has been lost than the protocol can make up for; what follows is not judged."""


class Died(Exception):
    """The process that was running has been killed in the middle of what it did."""


class World:
    """Everything that happens, in order of time. The same seed gives the same world."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self.after_event: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._trace: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=TRACE_LINES)

    def after(self, delay_s: float, process: Process | None, action: Callable[..., None], *args: Any) -> None:
        """`action` happens in `process` after so long, if that lives; once it has thawed, if it is frozen."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._sequence, process, action, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Lets things happen until `until` says so, which is asked after each event, or nothing is left to happen."""
        while self._heap and not until():
            self.now_s, _, process, action, args = heapq.heappop(self._heap)
            if process is None:
                action(*args)
            else:
                process.do(action, args)
            self.num_events += 1
            self.after_event()

    def note(self, text: str, *args: Any) -> None:
        """A line for the trace of a seed that fails."""
        self._trace.append((self.now_s, text, args))

    def trace(self) -> list[str]:
        """The last lines, with their times."""
        return [f"{time_s:9.4f} s  {text % args if args else text}" for time_s, text, args in self._trace]


class Process:
    """Something that acts only while it lives and is not frozen. While it is frozen, what comes in waits, in order."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.frozen_s = 0.0  # since when, if it is
        self.thawed_s = 0.0  # when it last thawed
        self.sends_left: int | None = None  # it is killed instead of sending once more than this
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._at_end: list[Callable[[], None]] = []

    def do(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Runs `action` as this process."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._backlog.append((action, args))
            return
        try:
            action(*args)
        except Died:
            return

    def every(self, interval_s: Callable[[], float], action: Callable[[], None], first_s: float = 0.0) -> None:
        """Runs `action` at intervals for life. A frozen process does not catch up on those that it missed."""

        def again() -> None:
            self.world.after(interval_s(), self, again)
            action()

        self.world.after(first_s, self, again)

    def at_end(self, action: Callable[[], None]) -> None:
        """`action` happens when the process ends, however it does: what the kernel does then."""
        self._at_end.append(action)

    def count_send(self) -> None:
        """To be called before each frame that it sends. Raises Died where that was one too many."""
        if self.sends_left is not None:
            self.sends_left -= 1
            if self.sends_left < 0:
                self.kill("between two frames")
                raise Died

    def kill(self, why: str) -> None:
        """Ends it."""
        if not self.is_alive:
            return
        self.world.note("%s ends: %s", self.name, why)
        self.is_alive = False
        self._backlog.clear()
        for action in self._at_end:
            action()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen, self.frozen_s = True, self.world.now_s
        self.world.note("%s freezes", self.name)

    def thaw(self) -> None:
        """SIGCONT: first of all it does what waited for it."""
        if not self.is_frozen:
            return
        self.is_frozen, self.thawed_s = False, self.world.now_s
        self.world.note("%s thaws", self.name)
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.world.after(0.0, self, action, *args)


class End:
    """One process's end of a connection. What is sent arrives in order, if ever; other connections may overtake."""

    def __init__(self, network: Network, owner: Process, place: int) -> None:
        self.owner = owner
        self.place = place  # the node it is on
        self.is_open = True
        self.peer: End
        self._receive: Callable[[Any], None] | None = None
        self._ended: Callable[[], None] = lambda: None
        self._early: list[Any] = []  # what came before anybody listened
        self._network = network
        self._latency_s = network.world.random.uniform(0.00005, 0.002)
        self._free_s = 0.0  # when what was sent last will have arrived

    def listen(self, receive: Callable[[Any], None], ended: Callable[[], None]) -> None:
        """Has each frame, and the end of the connection, reported from now on, those that have come included."""
        self._receive, self._ended = receive, ended
        early, self._early = self._early, []
        for message in early:
            receive(message)
        if not self.is_open:
            ended()

    def send(self, message: Any) -> None:
        """Sends a frame, to arrive some time later."""
        if self.is_open:
            self.owner.count_send()
            self._carry(self._arrive, message)

    def close(self) -> None:
        """Ends the connection; the other end learns of it after what was sent before."""
        if self.is_open:
            self.is_open = False
            self._carry(self._end)

    def _carry(self, deliver: Callable[..., None], *args: Any) -> None:
        world = self._network.world
        delay_s = self._latency_s * (0.5 + world.random.random())
        if world.random.random() < SPIKE_ODDS:
            delay_s += world.random.random() * MAX_SPIKE_S
        self._free_s = max(self._free_s, world.now_s + delay_s)
        world.after(self._free_s - world.now_s, None, self._through, deliver, args)

    def _through(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Reaches the other node, unless the network is cut there: then it waits, as a retransmission would."""
        if not self._network.hold(self.place, self.peer.place, self._through, deliver, args):
            self.peer.owner.do(deliver, args)

    def _arrive(self, message: Any) -> None:
        peer = self.peer
        if not peer.is_open:
            return
        if peer._receive is None:
            peer._early.append(message)
        else:
            peer._receive(message)

    def _end(self) -> None:
        if self.peer.is_open:
            self.peer.is_open = False
            self.peer._ended()


class Network:
    """Which nodes reach each other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._cuts: dict[frozenset[int], list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    def connect(self, client: Process, client_place: int, server: Process, server_place: int) -> tuple[End, End]:
        """The two ends of a connection that stands. A process's connections end with it."""
        mine, its = End(self, client, client_place), End(self, server, server_place)
        mine.peer, its.peer = its, mine
        client.at_end(mine.close)
        server.at_end(its.close)
        return mine, its

    def cut(self, a: int, b: int) -> None:
        """Nothing passes between two nodes any more."""
        self._cuts.setdefault(frozenset((a, b)), [])
        self.world.note("the network is cut between node %d and node %d", a, b)

    def heal(self, a: int, b: int) -> None:
        """What was held passes, in order."""
        for action, args in self._cuts.pop(frozenset((a, b)), []):
            self.world.after(0.0, None, action, *args)
        self.world.note("the network is whole between node %d and node %d", a, b)

    def is_cut(self, a: int, b: int) -> bool:
        """Whether nothing passes."""
        return a != b and frozenset((a, b)) in self._cuts

    def hold(self, a: int, b: int, action: Callable[..., None], *args: Any) -> bool:
        """Keeps something for when the network is whole, if it is not."""
        if not self.is_cut(a, b):
            return False
        self._cuts[frozenset((a, b))].append((action, args))
        return True
