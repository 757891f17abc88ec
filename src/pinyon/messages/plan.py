"""The plan of an attempt, as signed text in the body of a request to an engine's OpenAI-compatible server.

Clients of a load balancer cannot send plans: it removes their ``kv_transfer_params``. Clients that reach the engine
itself cannot either, if the cluster has a secret."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import InvalidArgument

FIELD: Final = "kv_transfer_params"
"""The field of the body, which engines hand to their connectors."""
NAME: Final = "pinyon"
"""The plan's name in that field."""
PLAN_CHARS_MAX: Final = 64 << 10
_MAC_BYTES: Final = 16


def seal_plan(plan: bytes, secret: bytes) -> str:
    """Returns a serialized :class:`worker_pb2.Plan` as text, signed with the cluster's secret."""
    return urlsafe_b64encode(_mac(plan, secret) + plan).decode("ascii")


def open_plan(text: object, secret: bytes) -> worker_pb2.Plan:
    """Returns the plan. Raises :class:`InvalidArgument` if it is none, or is signed with another secret."""
    if not isinstance(text, str) or len(text) > PLAN_CHARS_MAX:
        raise InvalidArgument("must be text", field=NAME)
    plan = worker_pb2.Plan()
    try:
        data = urlsafe_b64decode(text)
        if not hmac.compare_digest(_mac(data[_MAC_BYTES:], secret), data[:_MAC_BYTES]):
            raise InvalidArgument("is signed with another secret", field=NAME)
        plan.ParseFromString(data[_MAC_BYTES:])
    except InvalidArgument:
        raise
    except Exception:  # the library's own error is no public class
        raise InvalidArgument("cannot be read", field=NAME) from None
    return plan


def _mac(plan: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, b"pinyon-v1 plan" + plan, "sha256")[:_MAC_BYTES]
