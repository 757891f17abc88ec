"""The reuse in a trace's requests: "KVCache cache in the wild" §3, figure by figure, for any trace."""

from pinyon_lab.traces.analysis.analyse import FIGURES, analyse, checked_figures
from pinyon_lab.traces.analysis.columns import TraceColumns, read_columns
from pinyon_lab.traces.analysis.figure import TraceFigure
from pinyon_lab.traces.analysis.reuse import day_fits

__all__ = ["FIGURES", "TraceColumns", "TraceFigure", "analyse", "checked_figures", "day_fits", "read_columns"]
