"""Hours of load in minutes: a whole replica in this process, but for its ranks, whose place a script takes.

Requests come over real sockets to the real HTTP side, scheduler, step loop, grammars and metrics. What is simulated is
the time: a step takes none of it, since its tokens come of a table, and nobody waits between two requests. A simulated
minute is the requests of one (REQUESTS_PER_S), each answered or left by its client; after it the replica is idle, no
block is taken, no task is left, and what it holds then should be what it held a minute before.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NoReturn

import numpy as np

from replica.api.served_model import ServedModel
from replica.config import ReplicaConfig
from replica.frames import I32, Logprobs, LogprobsWanted, StepInput, StepOutput
from replica.model_config import ModelConfig
from tests.commands import DEMO_MODEL
from tests.protocol.http_probe import tasks_end
from tests.served_replica import served_replica
from tests.soak.growth import num_objects, num_open_files, rss_mib
from tests.soak.traffic import Client, draw_ask

REQUESTS_PER_S: Final = 10
NUM_CLIENTS: Final = 24
NUM_BLOCKS: Final = 512  # so few that sequences are preempted, and that the prefix cache forgets
MAX_TOKENS: Final = 160
DISOBEDIENCE: Final = 0.002  # of constrained tokens, those that break their grammar
CONFIG: Final = ReplicaConfig(model=DEMO_MODEL, max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512)
SCRIPT: Final = (
    "<think>\nhm\n</think>\n\nyes \N{ROCKET} e\N{COMBINING ACUTE ACCENT} 漢字 and on it goes, END of that.\n\n"
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> 7 times 6 is 42<|im_end|>'
    "one more answer, without any thought, which is quite long and says nothing at all \N{ROCKET}\N{ROCKET}<|im_end|>"
)


class ScriptedExecutor:
    """In place of ranks. Each sequence reads on in one long text, from where its seed says."""

    def __init__(self, model: ServedModel) -> None:
        self._script = np.array(model.tokenizer.encode(SCRIPT, add_special_tokens=False), np.int32)
        self._draw = random.Random(1)

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        on_sent()
        await asyncio.sleep(0)  # as if it took time: clients come and go meanwhile
        at = (step_input.seeds + step_input.choices.astype(np.uint64)) % np.uint64(len(self._script))
        token_ids = self._script[(at.astype(np.int64) + step_input.output_indices) % len(self._script)]
        if step_input.edits is not None:
            for row, mask in zip(step_input.edits.mask_rows, step_input.edits.masks, strict=True):
                token_ids[row] = self._allowed(mask)
        logprobs = None if step_input.logprobs is None else _made_up(step_input.logprobs, token_ids)
        return StepOutput(step=step_input.step, token_ids=token_ids, logprobs=logprobs)

    async def failed(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def _allowed(self, mask: I32) -> int:
        """Any token that the mask allows, and seldom one that it does not."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        if self._draw.random() < DISOBEDIENCE:
            bits = 1 - bits
        return int(self._draw.choice(np.flatnonzero(bits)))


def _made_up(wanted: LogprobsWanted, token_ids: I32) -> Logprobs:
    targets = np.where(wanted.targets < 0, token_ids[wanted.rows], wanted.targets)
    top = np.broadcast_to(np.arange(wanted.num_top, dtype=np.int32), (len(targets), wanted.num_top))
    found = np.concatenate([targets[:, None], top], axis=1).astype(np.int32)
    return Logprobs(token_ids=found, values=-found.astype(np.float32) / 100)


@dataclass
class Held:
    """What the process held after each simulated minute, and the statuses of all answers."""

    rss_mib: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)
    objects: dict[int, Counter[str]] = field(default_factory=dict)  # minute -> type -> how many
    statuses: Counter[int | None] = field(default_factory=Counter)  # None: the client left

    def grown(self, since_min: int, until_min: int, *, by: int) -> dict[str, int]:
        """The types of which there are so many more objects than there were, and how many more."""
        more = self.objects[until_min] - self.objects[since_min]
        return {name: number for name, number in more.items() if number > by}


async def simulate(num_minutes: int, *, requests_per_min: int, count_objects_at: tuple[int, ...] = ()) -> Held:
    """So many minutes of load. Objects are counted after those of them that are named; minutes count from 1.

    Raises AssertionError or TimeoutError when a sequence, a block or a task is left after one of them.
    """
    held = Held()
    model = ServedModel.load(CONFIG, ModelConfig.load(DEMO_MODEL))
    async with served_replica(CONFIG, model, ScriptedExecutor(model), num_blocks=NUM_BLOCKS) as served:
        await asyncio.sleep(0.1)  # the step loop has begun
        idle_tasks = asyncio.all_tasks()
        for minute in range(1, num_minutes + 1):
            numbers = iter(range(requests_per_min))
            await asyncio.gather(*(_ask_on(Client(served.url), minute, numbers, held) for _ in range(NUM_CLIENTS)))
            await served.until(lambda: served.loop.stats().free_blocks == NUM_BLOCKS)
            assert not served.loop.num_unfinished
            await tasks_end(idle_tasks)
            held.rss_mib.append(rss_mib())
            held.open_files.append(num_open_files())
            if minute in count_objects_at:
                held.objects[minute] = num_objects()
    return held


async def _ask_on(client: Client, minute: int, numbers: Iterator[int], held: Held) -> None:
    for number in numbers:
        ask = draw_ask(random.Random(f"{minute}/{number}"), max_tokens=MAX_TOKENS)
        held.statuses[await client.ask(ask)] += 1
    await client.close()
