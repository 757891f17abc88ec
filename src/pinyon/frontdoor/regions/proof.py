"""That a peer is of the federation, and that a request is as it was when it left its own region.

Both ends of a stream choose a nonce. Who knows the federation's secret can answer the other's with an HMAC, and signs
each request with the nonce of the side that serves it: what was written down on one stream is good for no other.
"""

from __future__ import annotations

import hmac
import os

__all__ = [
    "NONCE_BYTES",
    "caller_proof",
    "is_nonce",
    "new_nonce",
    "raw_proof",
    "request_proof",
    "same",
    "welcome_proof",
]

NONCE_BYTES = 16
NONCE_BYTES_MAX = 64


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def is_nonce(value: bytes) -> bool:
    return NONCE_BYTES <= len(value) <= NONCE_BYTES_MAX


def welcome_proof(secret: bytes, hello_nonce: bytes, nonce: bytes, region: str, lb_id: str) -> bytes:
    """Empty without a secret."""
    return _proof(secret, b"pinyon-peer-v1 welcome", hello_nonce, nonce, region.encode(), lb_id.encode())


def request_proof(secret: bytes, nonce: bytes, hops: int, submission: bytes) -> bytes:
    """Empty without a secret. ``nonce`` is the serving side's."""
    return _proof(secret, b"pinyon-peer-v1 request", nonce, str(hops).encode(), submission)


def raw_proof(secret: bytes, nonce: bytes, hops: int, head: bytes) -> bytes:
    """Empty without a secret. ``nonce`` is the serving side's; ``head`` has the hash of the body."""
    return _proof(secret, b"pinyon-peer-v1 raw", nonce, str(hops).encode(), head)


def caller_proof(secret: bytes, nonce: bytes, region: str, lb_id: str) -> bytes:
    """Empty without a secret. ``nonce`` is the serving side's."""
    return _proof(secret, b"pinyon-peer-v1 caller", nonce, region.encode(), lb_id.encode())


def same(proof: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(proof, expected)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    if not secret:
        return b""
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")
