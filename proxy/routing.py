"""Which replica a request goes to. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from proxy.errors import NoReplicaAvailable, UnknownModel
from proxy.registry import Replica


def choose(
    live: Sequence[Replica],
    known: Sequence[Replica],
    *,
    model: str | None,
    tried: Collection[Replica],
    turn: int,
) -> Replica:
    """The live replica for a request for `model`; `tried` are those that it was already refused by.

    A request whose model cannot be read goes to any replica, which then answers what is wrong with it.
    Raises UnknownModel if nobody serves the model, NoReplicaAvailable if nobody who does can take it now.
    """
    if not live:
        raise NoReplicaAvailable("no replica is ready; try again shortly")
    candidates = [replica for replica in live if model is None or model in replica.models]
    if not candidates and not any(model in replica.models for replica in known):
        served = ", ".join(sorted({name for replica in live for name in replica.models}))
        raise UnknownModel(f"model {model!r} is not served here; served: {served}")
    candidates = [replica for replica in candidates if replica not in tried]
    if not candidates:
        raise NoReplicaAvailable("no replica that serves this model can take the request now; try again shortly")
    return least_load(candidates, turn)


def least_load(candidates: Sequence[Replica], turn: int) -> Replica:
    """The candidate with the fewest requests in flight; among equals, `turn` takes them in order."""
    least = min(replica.in_flight for replica in candidates)
    ties = [replica for replica in candidates if replica.in_flight == least]
    return ties[turn % len(ties)]


def requested_model(body: bytes) -> str | None:
    """The `model` of a JSON body; None if it names none or is no JSON, which is for the replica to judge."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model = request.get("model") if isinstance(request, dict) else None
    return model if isinstance(model, str) else None
