"""The figures of "KVCache Cache in the Wild"."""

from pinyon_lab.papers.wild.days import fig29
from pinyon_lab.papers.wild.figures import BY_RATIO, PAPER, fig28, qttft

__all__ = ["FIGURES", "PAPER"]

FIGURES = (*BY_RATIO, qttft, fig28, fig29)
