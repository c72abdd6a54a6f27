"""Which replica is chosen, and which error there is when none can be."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import NoReplicaAvailable, UnknownModel
from proxy.replicas import InFlight, Replica
from proxy.routing import candidates, least_load
from proxy.scan import requested_model


def replica(name: str, in_flight: int = 0, models: tuple[str, ...] = ("tiny",)) -> Replica:
    made = Replica(
        replica_id=name,
        incarnation="a",
        url=f"http://{name}",
        models={model: {"id": model} for model in models},
        is_backend=False,
        last_seen_s=0.0,
    )
    for _ in range(in_flight):
        InFlight(made)
    return made


def choose(
    live: list[Replica],
    known: list[Replica],
    *,
    model: str | None,
    tried: list[Replica] | tuple[()] = (),
    turn: int = 0,
) -> Replica:
    return least_load(candidates(live, lambda: known, model=model, tried=tried), turn)


def test_the_replica_with_the_fewest_requests_in_flight_is_chosen() -> None:
    replicas = [replica("a", 3), replica("b", 1), replica("c", 2)]
    assert choose(replicas, replicas, model="tiny", tried=(), turn=7).replica_id == "b"


def test_equals_take_turns() -> None:
    replicas = [replica("a"), replica("b"), replica("busy", 5), replica("c")]
    chosen = Counter(least_load(replicas, turn).replica_id for turn in range(30))
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_a_request_goes_only_to_replicas_that_serve_its_model() -> None:
    replicas = [replica("a", 0, ("other",)), replica("b", 9, ("tiny", "more"))]
    assert choose(replicas, replicas, model="more", tried=(), turn=0).replica_id == "b"


def test_a_request_without_a_readable_model_goes_to_any_replica() -> None:
    replicas = [replica("a", 1, ("other",)), replica("b")]
    assert choose(replicas, replicas, model=None, tried=(), turn=0).replica_id == "b"


def test_a_replica_that_was_tried_is_not_chosen_again() -> None:
    replicas = [replica("a"), replica("b", 5)]
    assert choose(replicas, replicas, model="tiny", tried=[replicas[0]], turn=0).replica_id == "b"
    with pytest.raises(NoReplicaAvailable):
        choose(replicas, replicas, model="tiny", tried=replicas, turn=0)


def test_nobody_live_is_503_with_retry_after_whatever_the_model() -> None:
    for known in ([], [replica("suspect")]):
        for model in ("tiny", "unheard-of", None):
            with pytest.raises(NoReplicaAvailable) as caught:
                choose([], known, model=model, tried=(), turn=0)
            assert caught.value.status == 503 and int(caught.value.headers()["Retry-After"]) >= 1


def test_a_model_that_nobody_serves_is_404_and_names_those_that_are_served() -> None:
    replicas = [replica("a", models=("one", "two"))]
    with pytest.raises(UnknownModel, match="'three' is not served here; served: one, two") as caught:
        choose(replicas, replicas, model="three", tried=(), turn=0)
    assert caught.value.body()["error"]["code"] == "model_not_found"


def test_a_model_whose_only_replica_is_not_live_is_503_and_not_404() -> None:
    live = [replica("a", models=("one",))]
    with pytest.raises(NoReplicaAvailable):
        choose(live, [*live, replica("b", models=("two",))], model="two", tried=(), turn=0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 1000))
def test_nobody_idler_than_the_chosen_one_exists(loads: list[int], turn: int) -> None:
    replicas = [replica(f"r{number}", load) for number, load in enumerate(loads)]
    assert least_load(replicas, turn).in_flight == min(loads)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"messages": [{"model": "inner"}], "model": "tiny"}', "tiny"),
        ('{"model": "grün"}'.encode(), "grün"),
        (b'{"model": 7}', None),
        (b'{"model": null}', None),
        (b"{}", None),
        (b'["model"]', None),
        (b'"model"', None),
        (b"", None),
        (b'{"model": "tiny"', "tiny"),
        (b'{"metadata": {"model": "inner"}}', None),
        (b'{"user": "\\"model\\": \\"no\\"", "model": "tiny"}', "tiny"),
        (b'{"x": "' + b"y" * 9000 + b'", "model" : "t\\u0069ny", "n": {"model": 1}}', "tiny"),
        (b'{"x": "' + b"y" * 9000 + b'", "model":"tiny", "z": "' + b"y" * 9000 + b'"}', "tiny"),
        (b"\xff\xfe\x00", None),
        (b'{"n": ' + b"1" * 5000 + b"}", None),
        (b"[" * 100_000, None),
        (b'--boundary\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny', None),
    ],
    ids=repr,
)
def test_the_model_is_read_from_json_and_anything_else_is_no_error(body: bytes, model: str | None) -> None:
    assert requested_model(body) == model


@given(st.binary(max_size=200) | st.text(max_size=50).map(lambda name: json.dumps({"model": name}).encode()))
def test_reading_the_model_never_raises(body: bytes) -> None:
    assert requested_model(body) is None or isinstance(requested_model(body), str)
