"""What servers say of themselves: their models, and how many requests their batches hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

from pinyon.frontdoor.upstreams.reading import MODEL_CHARS_MAX
from pinyon.frontdoor.upstreams.server import Server

ANSWER_S: Final = 5.0
BYTES_MAX: Final = 1 << 20
SERVER_MODELS_MAX: Final = 256
"""A model and adapters for it."""
DESCRIPTION_BYTES_MAX: Final = 4 << 10
"""Of one model; one that is longer is named, and not described."""
CAPACITY_MAX: Final = 1 << 20


async def discover_models(server: Server) -> dict[str, Mapping[str, Any]] | str:
    """By name, as it describes them; or why there are none, a sentence without a capital. Raises
    :class:`Unavailable`."""
    said = await server.ask(b"/v1/models", ANSWER_S, BYTES_MAX)
    if said.status in (401, 403):
        return "it wants an API key, or another one (--upstream-api-key-file)"
    if said.status == 404:  # an old text-generation-inference
        name = (await _told(server, b"/info")).get("model_id")
        return {str(name): {}} if _is_name(name) else "it has no /v1/models"
    if said.status != 200:
        return f"its /v1/models answers {said.status}"
    try:
        listed = json.loads(said.body)["data"]
        found: dict[str, Mapping[str, Any]] = {}
        for each in listed[:SERVER_MODELS_MAX]:
            if _is_name(each["id"]):
                found[each["id"]] = each if _can_be_shown(each) else {}
    except (ValueError, LookupError, TypeError, RecursionError):
        return "its /v1/models is no list of models"
    return found or "it lists no model"


def _can_be_shown(description: Mapping[str, Any]) -> bool:
    """Returns whether it is small, and JSON for others too: Python reads numbers that JSON has not."""
    try:
        return len(json.dumps(description, allow_nan=False)) <= DESCRIPTION_BYTES_MAX
    except ValueError:
        return False


async def discover_capacity(server: Server) -> int:
    """Requests in its batch; 0: it does not say, as vLLM does not. Raises :class:`Unavailable`."""
    kind = "" if server.kind is None else server.kind.name
    if kind == "sglang":
        for path in (b"/server_info", b"/get_server_info"):
            if info := await _told(server, path):
                states = info.get("internal_states")
                first = states[0] if type(states) is list and states and type(states[0]) is dict else {}
                return _count(first.get("effective_max_running_requests_per_dp")) or _count(
                    info.get("max_running_requests")
                )
    elif kind == "tgi":
        return _count((await _told(server, b"/info")).get("max_batch_size"))
    elif kind == "llamacpp":
        return _count((await _told(server, b"/props")).get("total_slots"))
    return 0


async def _told(server: Server, path: bytes) -> Mapping[str, Any]:
    """The JSON object of an answer 200; an empty one for any other status, and for what is none. Raises as
    :meth:`Server.ask`."""
    said = await server.ask(path, ANSWER_S, BYTES_MAX)
    try:
        value = from_json(said.body) if said.status == 200 else None
    except ValueError:
        value = None
    return value if type(value) is dict else {}


def _is_name(name: Any) -> bool:
    return type(name) is str and 0 < len(name) <= MODEL_CHARS_MAX and name.isprintable()


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value <= CAPACITY_MAX else 0
