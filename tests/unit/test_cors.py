"""Which origins may read answers, and what their pages are told."""

from __future__ import annotations

import pytest

from proxy.cors import Cors

EXPOSED = b"Access-Control-Expose-Headers: X-Request-Id, Retry-After"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), b"https://a", None),
        (("https://a",), None, None),
        (("https://a",), b"https://b", None),
        (("https://a",), b"https://a.evil", None),
        (("https://a", "https://b"), b"https://b", b"https://b"),
        (("*",), b"https://anybody", b"*"),
        (("*",), b"null", b"*"),
        (("https://a",), b"https://\xff", None),
    ],
)
def test_an_allowed_origin_is_told_so_and_any_other_nothing(
    origins: tuple[str, ...], origin: bytes | None, allowed: bytes | None
) -> None:
    lines = Cors(origins).lines(origin)
    wanted = [] if allowed is None else [b"Access-Control-Allow-Origin: " + allowed, EXPOSED, b"Vary: Origin"]
    assert lines == wanted
