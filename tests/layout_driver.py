"""Runs one script of steps in any layout, with the ranks as threads of this process or wherever the caller has them.

A script says what every replica computes in every step: batches of different sizes and kinds, and often none. Its
sequences are known beforehand to their last token, so every layout computes the same, and what it finds after each
token can be held against what one rank found.

In bf16 and FP8 the choice of experts can be as known as the tokens ("pinned"): a router's near tie that rounding
decides otherwise sends the token through other experts, and then no bound on its logits says anything about the layout.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from replica.frames import StepInput
from replica.groups import CollectiveCount, Groups, Transport, shared_groups
from replica.layers import ExpertMlp
from replica.layout import Layout
from tests.step_driver import Driven, RankModel, StepDriver, frame_order, make_frame, shuffled_blocks

NUM_BLOCKS: Final = 64  # of each replica's cache
MAX_CHUNK: Final = 16
PROMPT_LENS: Final = (1, 23, 3, 9, 17, 2, 30, 6)
NUM_OUTPUT: Final = 3
DEADLINE_S: Final = 60.0

Evictions = Sequence[Sequence[int]]  # the replicas (dp ranks) of each


@dataclass(frozen=True)
class Reference:
    """What one rank computes: sequences with their greedy outputs, and the logits after each token [tokens, V]."""

    sequences: list[list[int]]
    prompt_lens: list[int]
    logits: list[Tensor]
    routing: list[list[Tensor]]  # [sequences][MoE layers], the router's logits for each token [tokens, E]


@dataclass(frozen=True)
class Script:
    """For each step, each replica's frame; and which places the rows of its logits belong to."""

    frames: list[list[StepInput]]  # [steps][dp]
    places: list[list[list[tuple[int, int]]]]  # [steps][dp] (sequence, position) of each row

    def parts(self, count: int) -> list[Script]:
        """It, cut into so many scripts of as many steps, but for the last."""
        bounds = [len(self.frames) * part // count for part in range(count + 1)]
        return [Script(self.frames[a:b], self.places[a:b]) for a, b in itertools.pairwise(bounds)]


def make_reference(folder: Path, dtype: torch.dtype) -> Reference:
    """Random prompts, and what a replica of one rank makes of each alone."""
    driver = StepDriver(folder, num_blocks=NUM_BLOCKS, dtype=dtype)
    draw = random.Random(1)
    vocab_size = driver.config.vocab_size
    sequences = [driver.add([draw.randrange(vocab_size) for _ in range(length)]) for length in PROMPT_LENS]
    recorders = [_RecordingRouter(mlp.router) for mlp in expert_layers(driver.rank)]
    for mlp, recorder in zip(expert_layers(driver.rank), recorders, strict=True):
        mlp.router = recorder  # type: ignore[assignment]
    routing = []
    for s in sequences:
        driver.generate(s, NUM_OUTPUT + 1)  # the last one is not fed back
        routing.append([recorder.take() for recorder in recorders])
    return Reference(
        sequences=[s.token_ids[:-1] for s in sequences],
        prompt_lens=[s.prompt_len for s in sequences],
        logits=[torch.cat(s.logits) for s in sequences],
        routing=routing,
    )


def expert_layers(model: RankModel) -> list[ExpertMlp]:
    """The MoE layers of a model, in order."""
    return [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, ExpertMlp)]


class _RecordingRouter:
    def __init__(self, router: Callable[[Tensor], Tensor]) -> None:
        self._router = router
        self._logits: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self._logits.append(self._router(x))
        return self._logits[-1]

    def take(self) -> Tensor:
        """All since the last time [tokens, E]."""
        logits, self._logits = torch.cat(self._logits), []
        return logits


class _PinnedRouter:
    """Gives the tokens at `places` the reference's router logits."""

    def __init__(self, reference: Reference, layer: int) -> None:
        self._reference, self._layer = reference, layer
        self.places: list[tuple[int, int]] = []

    def __call__(self, x: Tensor) -> Tensor:
        assert len(x) == len(self.places), "each token is routed by its owner alone"
        logits = [self._reference.routing[sequence][self._layer][position] for sequence, position in self.places]
        return torch.stack(logits) if logits else x.new_zeros(0, self._reference.routing[0][self._layer].shape[1])


def make_script(reference: Reference, layout: Layout, seed: int, evicted: Evictions = ()) -> Script:
    """Deals the sequences to the replicas at random, and their tokens to steps. Each fifth time a replica idles.

    Replicas that will be evicted have no sequences, but take part until then.
    """
    draw = random.Random(seed)
    replicas: list[list[Driven]] = [[] for _ in range(layout.dp)]
    lost = {dp_rank for together in evicted for dp_rank in together}
    surviving = [sequences for dp_rank, sequences in enumerate(replicas) if dp_rank not in lost]
    numbers: dict[Driven, int] = {}
    for number, (token_ids, prompt_len) in enumerate(zip(reference.sequences, reference.prompt_lens, strict=True)):
        s = Driven(token_ids, prompt_len)
        numbers[s] = number
        draw.choice(surviving).append(s)
    free = [shuffled_blocks(NUM_BLOCKS, seed + dp_rank) for dp_rank in range(layout.dp)]
    frames, places = [], []
    while any(s.num_computed < len(s.token_ids) for s in numbers):
        step_frames, step_places = [], []
        for dp_rank in range(layout.dp):
            chunks = {} if draw.random() < 0.2 else _chunks(replicas[dp_rank], draw)
            order = frame_order(chunks)
            step_frames.append(make_frame(order, chunks, free[dp_rank]))
            step_places.append([(numbers[s], s.num_computed + i) for s in order for i in range(chunks[s])])
            for s in order:
                s.num_computed += chunks[s]
        tokens = np.array([len(frame.token_ids) for frame in step_frames], np.int32)
        frames.append([replace(frame, step=len(frames), group_tokens=tokens) for frame in step_frames])
        places.append(step_places)
    return Script(frames, places)


def _chunks(sequences: list[Driven], draw: random.Random) -> dict[Driven, int]:
    """What a replica computes in one step: prompts in chunks, then the known outputs one by one."""
    chunks = {}
    for s in sequences:
        left = len(s.token_ids) - s.num_computed
        if left and draw.random() < 0.9:
            chunks[s] = draw.randint(1, min(MAX_CHUNK, max(1, s.prompt_len - s.num_computed)))
    return chunks


def run_rank(model: RankModel, groups: Groups, script: Script, pinned: Reference | None = None) -> list[Tensor]:
    """One rank's way through a script: the logits [N, V] of each step (of no rows, if it is not its replica's first).

    With `pinned`, tokens go to the experts that they had there.
    """
    routers = []
    if pinned is not None:
        for layer, mlp in enumerate(expert_layers(model)):
            routers.append(_PinnedRouter(pinned, layer))
            mlp.router = routers[-1]  # type: ignore[assignment]
    layout, rank = groups.layout, groups.attention.ranks[groups.attention.position]
    dp_rank, logits = layout.dp_rank(rank), []
    for frames, places in zip(script.frames, script.places, strict=True):
        start, stop = layout.owned_tokens(len(places[dp_rank]), layout.local_rank(rank))
        for router in routers:
            router.places = places[dp_rank][start:stop]
        logits.append(model.forward(frames[dp_rank], groups))
    return logits


@dataclass(frozen=True)
class RankRun:
    """What a rank found until it was evicted, or to the end."""

    logits: list[Tensor]  # of each step
    weight_bytes: int


def run_in_threads(
    folder: Path,
    layout: Layout,
    script: Script,
    dtype: torch.dtype,
    pinned: Reference | None = None,
    evicted: Evictions = (),
) -> list[RankRun]:
    """[world] with the ranks as threads. A rank that raises, or waits too long, fails them all.

    The evictions come one by one, at equal distances in the script. Replicas that are evicted stop before it; the
    others take over and go on with the caches that they have.
    """
    membership = [_members(layout, evicted[:epoch]) for epoch in range(len(evicted) + 1)]
    meetings = {
        (epoch, ranks): _Meeting(len(ranks))
        for epoch, members in enumerate(membership)
        for rank in range(layout.world)
        for ranks in shared_groups(layout, rank, members)
    }

    def rank_main(rank: int) -> RankRun:
        try:
            model = RankModel(folder, layout, rank, num_blocks=NUM_BLOCKS, dtype=dtype)
            logits: list[Tensor] = []
            for epoch, (members, part) in enumerate(zip(membership, script.parts(len(membership)), strict=True)):
                if layout.dp_rank(rank) not in members:
                    break
                if epoch:
                    model.take_over(evicted[epoch - 1])
                transports: dict[tuple[int, ...], Transport] = {
                    ranks: MemoryTransport(meetings[epoch, ranks], ranks.index(rank))
                    for ranks in shared_groups(layout, rank, members)
                }
                groups = Groups.connect(layout, rank, transports, CollectiveCount(), members)
                logits += run_rank(model, groups, part, pinned)
            return RankRun(logits, model.weight_bytes)
        except BaseException:
            for meeting in meetings.values():
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(layout.world) as pool:
        runs = [pool.submit(rank_main, rank) for rank in range(layout.world)]
    errors = [run.exception() for run in runs]
    cause = next((error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)), None)
    if cause is not None:
        raise cause
    return [run.result() for run in runs]


def _members(layout: Layout, evicted: Evictions) -> list[int]:
    lost = {dp_rank for together in evicted for dp_rank in together}
    return [dp_rank for dp_rank in range(layout.dp) if dp_rank not in lost]


class _Meeting:
    """Where the ranks of one group lay down what they send."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self.parts: list[tuple[Tensor, ...]] = [()] * size


class MemoryTransport:
    """A Transport between threads."""

    def __init__(self, meeting: _Meeting, position: int) -> None:
        self._meeting = meeting
        self._position = position

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """See Transport; parts of other sizes than agreed are an error."""
        meeting = self._meeting
        meeting.parts[self._position] = torch.split(sent, list(send_rows))
        meeting.barrier.wait()
        parts = [parts[self._position] for parts in meeting.parts]
        assert [len(part) for part in parts] == list(receive_rows), "ranks disagree on the sizes"
        torch.cat(parts, out=received)
        meeting.barrier.wait()  # nobody lays down the next thing before all have taken this one


@dataclass(frozen=True)
class Comparison:
    """How far a layout's logits are from the reference's."""

    largest_error: float
    wrong_tokens: int  # another argmax, where the reference's first two differ by more than twice the bound
    near_ties: int  # another argmax where they do not
    num_places: int


def compare(
    reference: Reference, layout: Layout, script: Script, logits: list[list[Tensor]], bound: float
) -> Comparison:
    """Holds the logits [world][steps] of all replicas' first ranks against the reference; the others must have none."""
    largest, wrong, near, seen = 0.0, 0, 0, set()
    for rank, steps in enumerate(logits):
        for number, rows in enumerate(steps):
            if layout.local_rank(rank):
                assert not len(rows)
                continue
            places = script.places[number][layout.dp_rank(rank)]
            assert len(rows) == len(places)
            seen |= set(places)
            for row, (sequence, position) in zip(rows, places, strict=True):
                expected = reference.logits[sequence][position]
                largest = max(largest, float((row - expected).abs().max()))
                if row.argmax() != expected.argmax():
                    first, second = expected.topk(2).values.tolist()
                    is_near = first - second <= 2 * bound
                    near, wrong = near + is_near, wrong + (not is_near)
    assert len(seen) == sum(map(len, reference.sequences)), "some tokens were never computed"
    return Comparison(largest, wrong, near, len(seen))
