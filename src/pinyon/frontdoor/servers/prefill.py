"""The prompt of a request computed at another server than the one that decodes it.

The prefill server gets the prompt's tokens and is asked for one more. Then its memory, or the KV store, has their KV,
and the decode server's plan says so. Whatever fails there costs only time: the decode server computes what it does not
get."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from pydantic_core import to_json

from pinyon.api.common.v1 import common_pb2
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.failures import Broke
from pinyon.frontdoor.servers.body import with_additions
from pinyon.frontdoor.servers.given_prompt import COMPLETION
from pinyon.frontdoor.servers.instance_servers import InstanceServer
from pinyon.frontdoor.servers.request import ServerRequest

ANSWER_BYTES_MAX = 64 << 10
LARGE_BYTES = 256 << 10
"""The size of a prompt's tokens from which the body is written beside the event loop."""


async def compute_prompt(known: InstanceServer, forward: ServerRequest, plan: str, limit_s: float) -> None:
    """Has the server compute the prompt, by a request for one token. Raises :class:`Unavailable` if it did not."""
    tokens = forward.asks.tokens_le32
    make = asyncio.to_thread(_body, forward) if len(tokens) > LARGE_BYTES else None
    body = with_additions(_body(forward) if make is None else await make, plan, forward.salt)
    known.server.outstanding += 1
    try:
        async with asyncio.timeout(limit_s):
            answer = await known.server.send(COMPLETION.encode(), forward.fields, body, limit_s)
            try:
                if answer.status != 200 or await answer.whole(ANSWER_BYTES_MAX) is None:
                    fails = answer.status > 500 and answer.status != 503  # the request may be to blame for 500
                    said = f"It answered {answer.status}."
                    raise Broke(said, begun=True) if fails else Unavailable(said)
            finally:
                answer.close()
    except TimeoutError:
        raise Broke(f"It took longer than {limit_s:g} s.", begun=False, silent=True) from None
    finally:
        known.ended()


def _body(forward: ServerRequest) -> bytes:
    values: dict[str, Any] = {
        "model": forward.asked.model,
        "prompt": np.frombuffer(forward.asks.tokens_le32, "<u4").tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if forward.asked.priority:
        values["priority"] = forward.asked.priority
    return to_json(values)


def whole(placement: common_pb2.Placement) -> common_pb2.Placement:
    """Returns the placement without the prefill instance: the decode instance computes, and asks the store itself."""
    found = common_pb2.Placement()
    found.CopyFrom(placement)
    found.prefill_instance_id, found.prefill_address = placement.decode_instance_id, placement.decode_address
    found.ClearField("fetches")
    found.ask_store = True
    return found
