"""The requests of one member, and the batches that it makes of them: a scheduler in miniature.

Here the second invariant is checked: a batch is committed once, and the tokens of each request are published once
each, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.simulation.world import Violation


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, and so many tokens to answer it with."""

    prompt_tokens: int
    output_tokens: int
    num_published: int = 0
    num_planned: int = 0  # published, or to be published by a batch that is not committed
    has_failed: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is to come."""
        return self.has_failed or self.num_published == self.output_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What a member runs in one step: each request's next token, by its index."""

    decodes: tuple[tuple[Request, int], ...] = ()
    prefills: tuple[tuple[Request, int], ...] = ()

    @property
    def counts(self) -> tuple[int, int]:
        """Decode and prefill tokens, as an arrival says them."""
        return len(self.decodes), sum(request.prompt_tokens for request, _ in self.prefills)


@dataclass(slots=True)
class Work:
    """The requests of one member."""

    requests: list[Request] = field(default_factory=list)
    _committed: set[tuple[int, int]] = field(default_factory=set)  # epochs and steps

    @property
    def unfinished(self) -> list[Request]:
        """Requests that wait for tokens."""
        return [request for request in self.requests if not request.is_finished]

    def plan(self) -> Batch:
        """What would run next, given that what runs now commits."""
        open_requests = [r for r in self.requests if not r.has_failed and r.num_planned < r.output_tokens]
        return Batch(
            decodes=tuple((r, r.num_planned) for r in open_requests if r.num_planned),
            prefills=tuple((r, 0) for r in open_requests if not r.num_planned),
        )

    def run(self, batch: Batch) -> None:
        """The batch is on its way."""
        for request, index in (*batch.decodes, *batch.prefills):
            request.num_planned = index + 1

    def commit(self, epoch: int, step: int, batch: Batch) -> None:
        """All ranks have reported the step: its tokens are published."""
        if (epoch, step) in self._committed:
            raise Violation(f"step {step} of epoch {epoch} is committed twice")
        self._committed.add((epoch, step))
        for request, index in (*batch.decodes, *batch.prefills):
            if request.has_failed or request.num_published != index:
                raise Violation(f"token {index} is published after {request.num_published} of {request}")
            request.num_published += 1

    def roll_back(self) -> None:
        """What is not committed is dropped, to be planned again."""
        for request in self.requests:
            request.num_planned = request.num_published

    def fail(self) -> None:
        """All that is not finished ends with an error."""
        for request in self.unfinished:
            request.has_failed = True
