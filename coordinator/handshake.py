"""Both ends of a connection prove that they know the group's secret, without showing it.

The master sends a random nonce; the member signs it together with its whole Hello, which has a nonce of its own;
the master signs that. So a recorded handshake is worth nothing to another, and neither end heeds a stranger. What
follows is neither encrypted nor signed: this keeps strangers out of a group, it does not make a hostile network safe.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace
from typing import Final

from coordinator.messages import Accepted, Challenge, Hello, encode

NONCE_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16
_MEMBER: Final = b"lockstep member"
_MASTER: Final = b"lockstep master"


def checked_secret(secret: bytes) -> bytes:
    """`secret` itself. Raises ValueError when it is too short to keep anybody out."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the group's secret has {len(secret)} bytes, needs at least {MIN_SECRET_BYTES}")
    return secret


def new_challenge() -> Challenge:
    """A greeting that no other connection gets."""
    return Challenge(nonce=secrets.token_bytes(NONCE_BYTES))


def sign(hello: Hello, secret: bytes, challenge: Challenge) -> Hello:
    """The member's answer to a challenge."""
    bare = replace(hello, nonce=secrets.token_bytes(NONCE_BYTES), proof=b"")
    return replace(bare, proof=_mac(secret, _MEMBER, challenge.nonce, encode(bare)))


def is_signed(hello: Hello, secret: bytes, challenge: Challenge) -> bool:
    """Whether whoever sent `hello` in answer to `challenge` knows the secret."""
    wanted = _mac(secret, _MEMBER, challenge.nonce, encode(replace(hello, proof=b"")))
    return len(hello.nonce) == NONCE_BYTES and hmac.compare_digest(hello.proof, wanted)


def accept(hello: Hello, secret: bytes) -> Accepted:
    """The master's proof, for the member that sent `hello`."""
    return Accepted(proof=_mac(secret, _MASTER, hello.nonce, hello.proof))


def is_genuine(accepted: Accepted, hello: Hello, secret: bytes) -> bool:
    """Whether whoever accepted `hello` knows the secret."""
    return hmac.compare_digest(accepted.proof, accept(hello, secret).proof)


def _mac(secret: bytes, role: bytes, nonce: bytes, text: bytes) -> bytes:
    # The nonce goes in hashed, so that its length, which a peer chooses, cannot shift the boundary to the text.
    return hmac.digest(secret, role + hashlib.sha256(nonce).digest() + text, "sha256")
