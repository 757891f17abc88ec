"""The figures of SkyWalker."""

from pinyon_lab.papers.skywalker.runs import PAPER
from pinyon_lab.papers.skywalker.serving import fig4b, fig8, fig9, fig10
from pinyon_lab.papers.skywalker.sharing import fig3, fig5, fig6

__all__ = ["FIGURES", "PAPER"]

FIGURES = (fig3, fig4b, fig5, fig6, fig8, fig9, fig10)
