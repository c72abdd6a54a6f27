"""Bodies that are almost right, against a replica of the demo model: `python -m tests.fuzz --bodies 20000 --seed 1`.

From a seed, good bodies of every endpoint are changed at random places into nasty ones. Whatever they are, no answer
may be a 5xx, nothing may be left of them afterwards, and a stream beside them must go on as if they were not there.
Prints its counts as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from tests.probed_replica import probed_replica
from tests.request_bodies import GOOD

AT_ONCE: Final = 6
PATIENCE_S: Final = 5.0  # then the client hangs up
NASTY: Final[list[Any]] = [
    *(None, True, False, 0, -1, 1, 3.5, 1e308, -1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64, 10**100),
    *("", "x", "auto", "required", "\ud800", "\udfff\ud800", "\x00", "\u2028", "\N{ROCKET}" * 100, "a" * 20_000),
    *("<|im_end|>", "<think>", "<tool_call>", "{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "1" * 400),
    *(
        [],
        {},
        [[]],
        [None],
        [{}],
        {"": {}},
        {"type": "object"},
        {"$ref": "#"},
        {"a": float("nan")},
        ["x"] * 300,
        [1] * 3000,
    ),
    *(
        {"type": ["string", 5]},
        {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"},
        {"enum": []},
        {"x": ["\ud83d"]},
    ),
]
FIELDS: Final = sorted(
    {name for _, body in GOOD for name in body}
    | {"frequency_penalty", "top_p", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids", "suffix"}
    | {"parallel_tool_calls", "reasoning_effort", "add_generation_prompt", "best_of", "model", "max_completion_tokens"}
)


@dataclass
class Report:
    """What came of it."""

    statuses: Counter[int] = field(default_factory=Counter)
    hung_up: int = 0
    probes: int = 0  # streams beside them
    longest_gap_s: float = 0.0  # in one of those
    failures: list[str] = field(default_factory=list)


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path, good = draw.choice(GOOD)
    body = copy.deepcopy(good)
    for _ in range(draw.choice([1, 1, 2, 4])):
        _change(draw, body)
    raw = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    if draw.random() < 0.1:
        at = draw.randrange(len(raw) + 1)
        raw = draw.choice([raw[:at], raw[:at] + draw.randbytes(2) + raw[at + 1 :], raw + raw, b"[" * 5000 + raw])
    return path, raw


def _change(draw: random.Random, body: dict[str, Any]) -> None:
    """Puts something nasty somewhere, takes something away, or moves it."""
    if draw.random() < 0.3:
        body[draw.choice(FIELDS)] = copy.deepcopy(draw.choice(NASTY))
        return
    places = list(_places(body))
    if not places:
        return
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    elif draw.random() < 0.2:
        other, other_key = draw.choice(places)
        holder[key] = copy.deepcopy(other[other_key])
    elif draw.random() < 0.1:
        for _ in range(draw.choice([3, 200])):
            holder[key] = {"properties": holder[key]} if draw.random() < 0.5 else [holder[key]]
    else:
        holder[key] = copy.deepcopy(draw.choice(NASTY))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


async def fuzz(num_bodies: int, seed: int) -> Report:
    """Sends so many bodies to a replica of its own. It is an error if that has anything left to do afterwards, or if
    the stream beside says anything else than before."""
    report = Report()
    bodies = iter(range(num_bodies))
    async with (
        probed_replica(max_model_len=192) as (replica, probe),
        ClientSession(timeout=ClientTimeout(PATIENCE_S)) as session,
    ):

        async def client() -> None:
            for number in bodies:
                path, raw = mutated(random.Random(f"{seed}/{number}"))
                await _send(session, replica.url + path, raw, report, f"seed {seed} body {number} {path}")

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    report.probes, report.longest_gap_s = probe.num_streams, probe.longest_gap_s
    return report


async def _send(session: ClientSession, url: str, raw: bytes, report: Report, name: str) -> None:
    try:
        async with session.post(url, data=raw, headers={"Content-Type": "application/json"}) as response:
            text = await response.text()
    except TimeoutError:
        report.hung_up += 1
        return
    except ClientError as err:
        report.failures.append(f"{name}: {err!r}")
        return
    report.statuses[response.status] += 1
    if response.status >= 500 or '"internal error"' in text:
        report.failures.append(f"{name}: {response.status} {text[:300]} for {raw[:300]!r}")
    elif response.status >= 400 and not json.loads(text)["error"]["message"]:
        report.failures.append(f"{name}: {response.status} without a message")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    started_s = time.monotonic()
    report = asyncio.run(fuzz(args.bodies, args.seed))
    for failure in report.failures:
        print(failure, file=sys.stderr)
    counts = {"bodies": args.bodies, "seed": args.seed, "statuses": report.statuses, "hung_up": report.hung_up}
    beside = {"probes": report.probes, "longest_gap_s": round(report.longest_gap_s, 2)}
    took_s = round(time.monotonic() - started_s)
    print(json.dumps({**counts, **beside, "failures": len(report.failures), "s": took_s}))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
