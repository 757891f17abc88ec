"""Journals of a service's decisions: what their headers say, and their replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pinyon.batching import BatchRequest, Prompt, PromptWork, StepPlan, StepSeen
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Replay, replay
from pinyon.decisions.admission import BlockGrant
from pinyon.decisions.front import FRONT_GONE, FRONT_INPUTS, FrontConfig, FrontDecisions
from pinyon.decisions.instance import INSTANCE_INPUTS, InstanceConfig, InstanceDecisions
from pinyon.eviction import Traits, Use
from pinyon.eviction.evictor import Rows
from pinyon.eviction.fit import Fit
from pinyon.paging import Reservation, Swap
from pinyon.routing.rates import Rates

JOURNAL_TYPES = (
    *(BatchRequest, Fit, BlockGrant, Prompt, PromptWork, Rates),
    *(Reservation, Rows, StepPlan, StepSeen, Swap, Traits, Use),
)
"""The types of the values that the decisions take and return."""

_KINDS: dict[str, tuple[Any, Any, Mapping[str, object]]] = {
    "instance": (InstanceConfig, InstanceDecisions, INSTANCE_INPUTS),
    "front": (FrontConfig, FrontDecisions, FRONT_INPUTS),
}
"""The configurations, the decisions and their inputs."""


def journal_header(config: InstanceConfig | FrontConfig, **more: str) -> dict[str, Any]:
    """Returns the header of a journal. ``more`` is for readers, such as the name of the service that wrote it."""
    kind = next(kind for kind, (one, _, _) in _KINDS.items() if type(config) is one)
    return {**more, "decisions": kind, "config": asdict(config)}


def replay_journal(lines: Iterable[str]) -> Replay:
    """Replays a journal: see :func:`pinyon.core.journal.replay`."""
    return replay(lines, _build, Codec(JOURNAL_TYPES), {**INSTANCE_INPUTS, **FRONT_INPUTS}, FRONT_GONE)


def _build(header: Mapping[str, Any]) -> Mapping[str, object]:
    kind, config = header.get("decisions"), header.get("config")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidArgument(f"a journal of unknown decisions: {kind!r:.100}")
    configuration, decisions, inputs = _KINDS[kind]
    try:
        made = decisions(configuration(**config))  # type: ignore[arg-type]  # that is what is tried
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"no configuration of {kind} decisions: {error}") from error
    return {name: getattr(made, name) for name in inputs}
