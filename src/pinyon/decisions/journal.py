"""Journals of a service's decisions: what their headers say, and their replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pinyon.batching import BatchRequest, Prompt, PromptWork, StepPlan, StepSeen
from pinyon.core.errors import InvalidArgument
from pinyon.core.journal import Codec, Replay, replay
from pinyon.decisions.admission import Grant
from pinyon.decisions.front import FRONT_GONE, FRONT_INPUTS, FrontConfig, FrontDecisions
from pinyon.decisions.instance import INSTANCE_INPUTS, InstanceConfig, InstanceDecisions
from pinyon.eviction import Traits, Use
from pinyon.eviction.evictor import Rows
from pinyon.eviction.fit import Fit
from pinyon.paging import Reservation, Swap
from pinyon.routing.rates import Rates

JOURNAL_TYPES = (
    *(BatchRequest, Fit, Grant, Prompt, PromptWork, Rates),
    *(Reservation, Rows, StepPlan, StepSeen, Swap, Traits, Use),
)
"""The types of the values that the decisions are told and that they return."""

_CONFIGS = {"instance": InstanceConfig, "front": FrontConfig}


def journal_header(config: InstanceConfig | FrontConfig, **more: str) -> dict[str, Any]:
    """Returns the header of a journal. ``more`` is for people: which service wrote it."""
    kind = next(kind for kind, one in _CONFIGS.items() if type(config) is one)
    return {**more, "decisions": kind, "config": asdict(config)}


def replay_journal(lines: Iterable[str]) -> Replay:
    """Replays a journal: see :func:`pinyon.core.journal.replay`."""
    return replay(lines, _build, Codec(JOURNAL_TYPES), {**INSTANCE_INPUTS, **FRONT_INPUTS}, FRONT_GONE)


def _build(header: Mapping[str, Any]) -> Mapping[str, object]:
    kind, config = header.get("decisions"), header.get("config")
    try:
        if kind == "instance":
            instance = InstanceDecisions(InstanceConfig(**config))  # type: ignore[arg-type]  # that is what is tried
            return {name: getattr(instance, name) for name in INSTANCE_INPUTS}
        if kind == "front":
            front = FrontDecisions(FrontConfig(**config))  # type: ignore[arg-type]
            return {name: getattr(front, name) for name in FRONT_INPUTS}
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"no configuration of {kind} decisions: {error}") from error
    raise InvalidArgument(f"a journal of unknown decisions: {kind!r:.100}")
