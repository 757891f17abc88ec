"""The figures of "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving"."""

from pinyon_lab.papers.mooncake.capacity import fig1, fig6, fig7, fig15
from pinyon_lab.papers.mooncake.figures import PAPER, fig9, fig10, table2
from pinyon_lab.papers.mooncake.scheduling import fig5, fig8, fig11
from pinyon_lab.papers.mooncake.transfer import eq2, fig13, fig14

__all__ = ["FIGURES", "PAPER"]

FIGURES = (fig1, eq2, fig5, fig6, fig7, fig8, fig9, fig10, fig11, fig13, fig14, fig15, table2)
