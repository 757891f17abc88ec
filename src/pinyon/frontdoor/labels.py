"""The class and owner of a request, as its client, its API key and its route say."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import TURN_MAX, RequestClass
from pinyon.frontdoor.auth import Client
from pinyon.openai.parse import Call, PromptInput


@dataclass(slots=True)
class Labels:
    """The labels that a client gives beside its call, by headers or in a message; empty, 0 or None if it gives none."""

    kind: str = ""
    turn: int = 0
    session: str = ""
    user: str = ""
    priority: int | None = None
    geographies: tuple[str, ...] = ()
    cache_salt: str = ""
    no_store: bool = False


def classify(
    labels: Labels, call: Call, client: Client, arrived_unix_s: float, geographies_field: str = "geographies"
) -> RequestClass:
    """Returns the request's class; labels override the call's fields, which override the key's.

    The tenant is the key's alone. If the key names geographies, the client may only choose among them. Raises
    :class:`InvalidArgument`.
    """
    geographies = allowed_geographies(labels, client, geographies_field)
    priority = labels.priority if labels.priority is not None else call.priority
    conversation = call.prompt_field == "messages"
    return RequestClass(
        kind=labels.kind or client.kind or ("chat" if conversation else "completion"),
        turn=labels.turn or _turn(call.prompt),
        session=labels.session,
        user=labels.user or call.user,
        priority=client.priority if priority is None else priority,
        arrived_unix_s=arrived_unix_s,
        tenant=client.tenant,
        geographies=geographies,
        cache_salt=labels.cache_salt or call.cache_salt,
        no_store=labels.no_store,
    )


def allowed_geographies(labels: Labels, client: Client, field: str = "x-pinyon-geographies") -> tuple[str, ...]:
    """Returns where the request may be served; empty for no restriction. Raises :class:`InvalidArgument`."""
    allowed = client.geographies
    outside = [name for name in labels.geographies if allowed and name not in allowed]
    if outside:
        raise InvalidArgument(f"This API key allows {', '.join(allowed)}, not {', '.join(outside)}.", field=field)
    return labels.geographies or allowed


def _turn(prompt: PromptInput) -> int:
    """Returns how many messages are the user's; 1 for a prompt that is no conversation."""
    spoken = sum(message.get("role") == "user" for message in prompt) if isinstance(prompt, list) else 0
    return min(TURN_MAX, max(1, spoken))
