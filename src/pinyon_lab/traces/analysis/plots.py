"""What is drawn, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Bars", "Heat", "Line", "Lines", "Plot"]


class Line(NamedTuple):
    """``y[i]`` at ``x[i]``, x ascending. ``dashed``: in the colour of the line before."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


class Lines(NamedTuple):
    """Courses in one coordinate system; ``time``: x in seconds, ticks as h:mm. y begins at 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    time: bool = False


class Bars(NamedTuple):
    """A group of bars for each category, one bar in it for each label; values below 0 do not occur."""

    title: str
    y_label: str
    categories: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]


class Heat(NamedTuple):
    """Rows from the top, a label each; None: nothing to show. ``unit`` names the colour."""

    title: str
    x_label: str
    unit: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    numbers: bool = False
    """Written into the cells as percent."""


Plot = Lines | Bars | Heat
