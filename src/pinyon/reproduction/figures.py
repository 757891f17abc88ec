"""All figures by name."""

from __future__ import annotations

from pinyon.reproduction.figure import Figure
from pinyon.reproduction.mooncake import FIG9, FIG10
from pinyon.reproduction.mooncake_workloads import TABLE2
from pinyon.reproduction.wild import BY_RATIO
from pinyon.reproduction.wild_ablation import ABLATION
from pinyon.reproduction.wild_days import FIG29

__all__ = ["FIGURES"]

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (FIG9, FIG10, TABLE2, *BY_RATIO, ABLATION, FIG29)}
