"""How many instances each model should have, by :class:`pinyon.placement.scaling.Scaler`: told, for whoever starts and
stops them."""

from __future__ import annotations

from prometheus_client import Gauge

from pinyon.core.clock import Clock
from pinyon.placement.fleet import Fleet
from pinyon.placement.policy import PlacementDecision
from pinyon.placement.scaling import Scaler, ScalingSettings

__all__ = ["Sizing"]

MODELS_MAX = 64


class Sizing:
    """Those that compute prompts, of models that have any. ``look`` now and then."""

    def __init__(self, fleet: Fleet, settings: ScalingSettings, wanted: Gauge, clock: Clock) -> None:
        self._fleet, self._settings, self._wanted, self._clock = fleet, settings, wanted, clock
        self._scalers: dict[str, Scaler] = {}

    def placed(self, model: str, decision: PlacementDecision | None, slo_s: float) -> None:
        """A request of the model was; None: there was no place for it."""
        scaler = self._scalers.get(model)
        if scaler is None:
            return
        if decision is None:
            scaler.placed(float("inf"), 0.0, self._clock(), slo_s)
        else:
            scaler.placed(decision.ttft_s, decision.prefill_s, self._clock(), slo_s)

    def look(self) -> None:
        """Decide, and tell what changes."""
        now_s = self._clock()
        queues_s: dict[str, list[float]] = {}
        for state in self._fleet.instances():
            if state.info.role.prefills and state.schedulable:
                queues_s.setdefault(state.info.model, []).append(state.prefill_queue_s(now_s))
        for model in [each for each in self._scalers if each not in queues_s]:
            del self._scalers[model]
            self._wanted.remove(model)
        for model, queues in queues_s.items():
            if model not in self._scalers:
                if len(self._scalers) >= MODELS_MAX:
                    continue
                self._scalers[model] = Scaler(self._settings, now_s)
                self._wanted.labels(model).set(len(queues))
            if change := self._scalers[model].decide(queues, now_s):
                self._wanted.labels(model).set(len(queues) + change)
