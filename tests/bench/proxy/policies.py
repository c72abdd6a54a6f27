"""The routing policies on a simulated, skewed workload: how long requests take. Nothing real runs.

    python tests/bench/proxy/policies.py

Four replicas serve 8 requests each at a time; one of them is half as fast. Requests come at random moments, most with
short prompts and some with very long ones; sessions come back, so that their prompts begin alike, and a beginning that
a replica has seen costs it nothing. Prints a table and, as the last line, JSON.
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
from dataclasses import dataclass, field

from proxy.picker import Picker
from proxy.replicas import InFlight, Replica
from proxy.routing import Routing

REPLICAS = 4
SLOTS = 8
TOKENS_PER_S = 20_000.0  # of a prompt, per slot
DECODE_S = 0.4  # mean
REQUESTS = 2_000
RATE = 28.0  # requests per second
SESSIONS = 60
SEEN_BLOCKS = 600  # that a replica keeps


@dataclass
class Server:
    """One simulated replica."""

    replica: Replica
    speed: float
    free: list[float] = field(default_factory=lambda: [0.0] * SLOTS)  # when each slot is free
    seen: dict[bytes, None] = field(default_factory=dict)

    def run(self, prompt: list[bytes], decode_s: float, now_s: float) -> float:
        """When a request of these blocks, sent now, ends."""
        fresh = [block for block in prompt if block not in self.seen]
        for block in prompt:
            self.seen.pop(block, None)
            self.seen[block] = None
        while len(self.seen) > SEEN_BLOCKS:
            del self.seen[next(iter(self.seen))]
        work_s = (sum(map(len, fresh)) / 4 / TOKENS_PER_S + decode_s) / self.speed
        end_s = max(now_s, heapq.heappop(self.free)) + work_s
        heapq.heappush(self.free, end_s)
        return end_s


def simulate(policy: Routing, seed: int) -> list[float]:
    """Seconds that each request took."""
    draws = random.Random(seed)
    picker = Picker(policy, random.Random(seed))
    servers = {}
    for number in range(REPLICAS):
        replica = Replica(replica_id=f"r{number}", incarnation="", url="", models={}, is_backend=True, last_seen_s=0.0)
        servers[replica.replica_id] = Server(replica, 0.5 if number == 0 else 1.0)
    known = [server.replica for server in servers.values()]
    turns = {number: [] for number in range(SESSIONS)}  # the blocks of each session's prompt so far
    ends: list[tuple[float, int, Replica, InFlight, float]] = []
    now_s, took = 0.0, []
    for number in range(REQUESTS):
        now_s += draws.expovariate(RATE)
        while ends and ends[0][0] <= now_s:
            end_s, _, replica, place, sent_s = heapq.heappop(ends)
            place.release()
            replica.answered(end_s - sent_s)
        session = min(int(draws.expovariate(1 / 12)), SESSIONS - 1)
        size = 40 if draws.random() < 0.08 else 2  # blocks of 256 bytes that this turn adds
        turns[session] = (turns[session] + [draws.randbytes(128).hex().encode() for _ in range(size)])[-120:]
        prompt = turns[session]
        body = b'{"messages":' + b"".join(prompt)
        replica = picker.pick(known, body, b"%d" % session)
        place = InFlight(replica, len(body) // 4)
        end_s = servers[replica.replica_id].run(prompt, draws.expovariate(1 / DECODE_S), now_s)
        heapq.heappush(ends, (end_s, number, replica, place, now_s))
        took.append(end_s - now_s)
    return took


def main() -> None:
    """Prints the table."""
    results = {}
    print("| policy | mean s | p50 s | p99 s |\n|---|---|---|---|")
    for policy in Routing:
        took = sorted(took_s for seed in range(2) for took_s in simulate(policy, seed))
        row = {"mean_s": statistics.fmean(took), "p50_s": took[len(took) // 2], "p99_s": took[int(len(took) * 0.99)]}
        results[policy] = {name: round(value, 3) for name, value in row.items()}
        print(f"| {policy} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
