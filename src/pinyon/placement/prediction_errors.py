"""How far predictions were off lately, by model."""

from __future__ import annotations

from collections import deque
from statistics import fmean

WINDOW = 256
"""Placements of a model whose errors count."""
MODELS_MAX = 64
"""Of more, nothing is kept: their names come from instances."""
MEASURED_MIN_S = 1e-3
"""Shorter times count as this much: what a share of almost nothing is says nothing."""


class PredictionErrors:
    """Relative errors of the last placements."""

    def __init__(self) -> None:
        self._errors: dict[str, deque[float]] = {}

    def add(self, model: str, predicted_s: float, measured_s: float) -> bool:
        """One more. Returns whether it is the first one of its model."""
        errors = self._errors.get(model)
        first = errors is None
        if errors is None:
            if len(self._errors) >= MODELS_MAX:
                return False
            errors = self._errors[model] = deque(maxlen=WINDOW)
        errors.append(abs(measured_s - predicted_s) / max(measured_s, MEASURED_MIN_S))
        return first

    def mean(self, model: str) -> float:
        """The mean of ``|measured - predicted| / measured`` of the last ones; 0 if there are none."""
        errors = self._errors.get(model)
        return fmean(errors) if errors else 0.0
