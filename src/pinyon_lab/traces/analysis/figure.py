"""The results of an analysis: facts, tables and plots of one figure. The caller decides how they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinyon_lab.pictures import Course, Panel

Value = int | float | str | None
Heads = dict[str, str | tuple[str, str]]
"""The columns of a table by key: a form each, or a form and a label."""


class AnalysisColumn(NamedTuple):
    """A column of values. ``form``: a format specification, or ``s`` for seconds."""

    key: str
    form: str = ""
    label: str = ""
    """The title; empty: the key."""

    def shown(self, value: Value) -> str:
        if value is None:
            return "–"
        if isinstance(value, str):
            return value
        return _seconds(value) if self.form == "s" else format(value, self.form)


class Fact(NamedTuple):
    """One number; ``paper`` is the number that the paper's text prints."""

    column: AnalysisColumn
    value: Value
    paper: str = ""


class AnalysisTable(NamedTuple):
    """A table; ``key`` is its name in JSON."""

    key: str
    title: str
    columns: tuple[AnalysisColumn, ...]
    rows: list[tuple[Value, ...]]


@dataclass
class TraceFigure:
    """A figure by the paper's ``number``. If ``left_out`` gives a reason, it has nothing else."""

    number: str
    title: str
    facts: list[Fact] = field(default_factory=list)
    tables: list[AnalysisTable] = field(default_factory=list)
    plots: list[Panel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: str = ""

    def without(self, why: str) -> None:
        """Marks the figure as left out."""
        self.left_out = why

    def fact(self, key: str, label: str, value: Value, form: str = "", paper: str = "") -> None:
        self.facts.append(Fact(AnalysisColumn(key, form, label), value, paper))

    def table(
        self, key: str, title: str, rows: Iterable[tuple[Value, ...]], /, **columns: str | tuple[str, str]
    ) -> None:
        """Adds a table; ``columns`` are by key, each a form, or a form and a label."""
        parts = {name: (each,) if isinstance(each, str) else each for name, each in columns.items()}
        heads = tuple(AnalysisColumn(name, *each) for name, each in parts.items())
        self.tables.append(AnalysisTable(key, title, heads, list(rows)))

    def json(self) -> dict[str, Any]:
        """Returns the figure without plots: tables have the numbers."""
        head: dict[str, Any] = {"figure": self.number, "title": self.title}
        if self.left_out:
            return head | {"left_out": self.left_out}
        facts = {each.column.key: each.value for each in self.facts}
        tables = {
            each.key: [dict(zip((column.key for column in each.columns), row, strict=True)) for row in each.rows]
            for each in self.tables
        }
        return head | facts | tables | ({"notes": self.notes} if self.notes else {})


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 600:
        return f"{value:.3g} s"
    return f"{value / 60:.1f} min" if value < 36000 else f"{value / 3600:.1f} h"


def course(label: str, x: npt.ArrayLike, y: npt.ArrayLike, *, dashed: bool = False) -> Course:
    return Course(label, list(zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True)), dashed)
