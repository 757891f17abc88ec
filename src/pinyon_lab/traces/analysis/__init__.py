"""The reuse in a trace's requests: "KVCache cache in the wild" §3, figure by figure, for any trace."""

from pinyon_lab.traces.analysis.analyse import FIGURES, analyse, checked_figures
from pinyon_lab.traces.analysis.columns import Columns, read_columns
from pinyon_lab.traces.analysis.day_fits import day_fits
from pinyon_lab.traces.analysis.figure import Figure, Table

__all__ = ["FIGURES", "Columns", "Figure", "Table", "analyse", "checked_figures", "day_fits", "read_columns"]
