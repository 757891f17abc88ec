"""The number of instances that each model should have, by :class:`pinyon.placement.scaling.Scaler`.

A gauge shows it to the system that starts and stops instances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client import Gauge

from pinyon.core.clock import Clock
from pinyon.placement.fleet import Fleet
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scaling import Scaler, ScalingSettings

MODELS_MAX = 64
GONE_S = 600.0
"""Seconds without any instance after which a model's gauge is removed; until then, its instances may come back."""


@dataclass(slots=True)
class _Size:
    """One model's scaler, wanted number of instances, and when an instance was last seen."""

    scaler: Scaler
    wanted: int
    seen_s: float


class Sizing:
    """The wanted numbers of prompt-computing instances, of models that have any; ``look`` has to be called regularly.

    Only decisions change a wanted number: an instance that is lost should come back."""

    def __init__(self, fleet: Fleet, settings: ScalingSettings, wanted: Gauge, clock: Clock) -> None:
        self._fleet, self._settings, self._wanted, self._clock = fleet, settings, wanted, clock
        self._sizes: dict[str, _Size] = {}

    def placed(self, request: PlacementRequest, decision: PlacementDecision) -> None:
        """Counts a placed request."""
        if request.model not in self._sizes:
            return
        limit_s = request.ttft_limit_s(decision.own_s)
        slo_s = limit_s if math.isfinite(limit_s) else 0.0
        scaler = self._sizes[request.model].scaler
        scaler.placed(decision.ttft_s, decision.prefill_s, self._clock(), slo_s, decision.own_s)

    def refused(self, model: str) -> None:
        """Counts a request for the model that was refused for now, but may be placed later."""
        if model in self._sizes:
            self._sizes[model].scaler.placed(math.inf, 0.0, self._clock())

    def look(self) -> None:
        """Decides about each model and updates the gauges; does nothing while the fleet is settling."""
        if self._fleet.settling:
            return
        now_s = self._clock()
        queues_s: dict[str, list[float]] = {}
        draining: set[str] = set()
        for state in self._fleet.instances():
            if not state.info.role.prefills:
                continue
            if state.schedulable:
                queues_s.setdefault(state.info.model, []).append(state.prefill_queue_s(now_s))
            elif state.load.draining:
                draining.add(state.info.model)
        for model, size in list(self._sizes.items()):
            if model in queues_s:
                size.seen_s = now_s
            elif model in draining or now_s - size.seen_s > GONE_S:
                del self._sizes[model]
                self._wanted.remove(model)
        for model, queues in queues_s.items():
            if model not in self._sizes:
                if len(self._sizes) >= MODELS_MAX:
                    continue
                self._sizes[model] = _Size(Scaler(self._settings, now_s), len(queues), now_s)
                self._wanted.labels(model).set(len(queues))
            self._decide(model, self._sizes[model], queues, now_s)

    def _decide(self, model: str, size: _Size, queues_s: list[float], now_s: float) -> None:
        change = size.scaler.decide(queues_s, now_s)
        if change > 0:
            wanted = max(size.wanted, len(queues_s) + change)
        elif change < 0 and len(queues_s) >= size.wanted:  # else some of the wanted instances are missing
            wanted = len(queues_s) + change
        else:
            return
        size.wanted = wanted
        self._wanted.labels(model).set(wanted)
