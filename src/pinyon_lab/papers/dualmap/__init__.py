"""The figures of DualMap."""

from pinyon_lab.papers.dualmap.elastic import a6, fig12, fig13
from pinyon_lab.papers.dualmap.runs import PAPER
from pinyon_lab.papers.dualmap.serving import fig1, fig3, fig4, fig5, fig8, fig10, fig11
from pinyon_lab.papers.dualmap.structure import a4, fig6, fig15, table1

__all__ = ["FIGURES", "PAPER"]

FIGURES = (fig1, fig3, fig4, fig5, fig6, fig8, fig10, fig11, fig12, fig13, fig15, a4, table1, a6)
