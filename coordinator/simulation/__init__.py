"""The whole protocol under simulated time, network and faults, from a seed.

The real state machines run here: `Clock` in a master, `MemberState` in each member, `LeaseWatch` in each standby. What
drives them on sockets (master.py, member.py, standby.py) and what they ask (scripts/*.lua, ranks, clients) is modelled.
The invariants, checked after every event:

- All members of an epoch enter the same collectives, with the same sizes, in the same order (collectives.py).
- A batch is committed once, and each token of a request is published once, in order (work.py).
- Every epoch is committed before anybody is told of it, once, by one master; epochs only grow; who was evicted never
  comes back, and nobody runs what another master or epoch released (account.py).
- While a member lives that no fault has hit, and those that are left suffice, it goes on within a bound; while only
  the store fails it does not even pause. Nobody is evicted that no fault has hit. Nobody waits for ever (progress.py).
"""

from coordinator.simulation.faults import KINDS
from coordinator.simulation.run import Result, simulate
from coordinator.simulation.world import Violation

__all__ = ["KINDS", "Result", "Violation", "simulate"]
