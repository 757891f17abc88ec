"""The figures of FEATHER."""

from pinyon_lab.papers.feather.batches import fig3_2, fig3_4, fig3_5, fig3_6, fig3_8, fig3_9, fig3_10, fig3_11
from pinyon_lab.papers.feather.costs import fig5_9, fig5_11, table5_1
from pinyon_lab.papers.feather.learning import fig5_12, fig5_13, fig5_14, fig5_17
from pinyon_lab.papers.feather.load import fig5_1, fig5_2, fig5_3, fig5_4, fig5_5, fig5_6, fig5_7
from pinyon_lab.papers.feather.runs import PAPER
from pinyon_lab.papers.feather.systems import fig5_8, fig5_10, fig5_15, fig5_16, table3_1

__all__ = ["FIGURES", "PAPER"]

FIGURES = (
    *(fig3_2, fig3_4, fig3_5, fig3_6, fig3_8, fig3_9, fig3_10, fig3_11, table3_1),
    *(fig5_1, fig5_2, fig5_3, fig5_4, fig5_5, fig5_6, fig5_7),
    *(fig5_8, fig5_9, fig5_10, fig5_11, table5_1),
    *(fig5_12, fig5_13, fig5_14, fig5_15, fig5_16, fig5_17),
)
