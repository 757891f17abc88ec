"""One figure of a paper: what it needs, our numbers, and the paper's words beside them.

Only numbers that are printed in a paper's text count as the paper's: nothing is read off its pictures. Where none is
printed, the shape that the text states is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pinyon_lab.figures.workload import Workload
from pinyon_lab.pictures import Panel, Picture

Value = str | int | float | None
Row = Mapping[str, Value]
Rows = Sequence[Row]
Tell = Callable[[str], None]
"""Hears what is being done."""
Clock = Callable[[], int]
"""CPU time of the calling thread, in ns. Nothing here reads one by itself."""


class Basis(StrEnum):
    """What a number of ours rests on."""

    MEASURED = "measured"
    """Counted in a replay of a trace that somebody recorded or published, by the code that serves; or CPU time that
    this code took, on the machine at hand."""
    MODELLED = "modelled"
    """A formula stands in for a machine."""
    CONSTRUCTION = "by construction"
    """The workload was generated, with the paper's statistics put in."""


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    form: str = ""
    """As :func:`format` has it."""
    basis: Basis | None = None
    """None: it says what the row is of."""


class Table:
    """The columns of a figure, and its rows as they are found."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns
        self.rows: list[dict[str, Value]] = []

    def add(self, *values: Value, **more: Value) -> None:
        """A row: a value for each column, in their order; ``more`` are not shown."""
        keys = [column.key for column in self.columns]
        self.rows.append({**dict(zip(keys, values, strict=True)), **more})

    def result(self, title: str, panels: Sequence[Panel], claims: Sequence[Claim], notes: Sequence[str] = ()) -> Result:
        """With a picture of that title."""
        return Result(self.columns, self.rows, claims, notes, Picture(title, panels))


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper's text says, and what we find."""

    said: str
    """In its words."""
    section: str
    printed: Value
    """The paper's number; None: not printed, only the shape is compared."""
    ours: Value
    basis: Basis
    agrees: bool
    why: str
    """Where the two differ, or how they were compared."""
    order: bool = False
    """Who is ahead of whom is as the text says, though the printed number is not found."""

    @property
    def verdict(self) -> str:
        if self.agrees:
            return "agrees"
        if not self.order:
            return "differs"
        return "agrees in part" if self.printed is None else "order agrees, outside the range"


@dataclass(frozen=True, slots=True)
class Section:
    """Where a paper's text says something, and what our numbers beside it rest on if nothing else is said."""

    name: str
    basis: Basis = Basis.MODELLED

    def says(
        self,
        said: str,
        ours: Value,
        agrees: bool,
        why: str = "",
        *,
        printed: Value = None,
        order: bool = False,
        basis: Basis | None = None,
    ) -> Claim:
        return Claim(said, self.name, printed, ours, basis or self.basis, agrees, why, order)


@dataclass(frozen=True, slots=True)
class Result:
    columns: Sequence[Column]
    rows: Rows
    claims: Sequence[Claim]
    notes: Sequence[str]
    picture: Picture

    def as_json(self) -> dict[str, Any]:
        return {
            "columns": [asdict(column) for column in self.columns],
            "rows": [dict(row) for row in self.rows],
            "claims": [asdict(claim) for claim in self.claims],
            "notes": list(self.notes),
        }


class Given(NamedTuple):
    """What a figure is made from."""

    workloads: Sequence[Workload]
    tell: Tell
    clock: Clock
    """For figures that measure CPU time."""
    quick: bool
    """Roughly, with shorter and fewer runs, where it has such a way."""


By = Callable[[Given], Result]
"""What makes a figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """``needs`` and ``likes`` are names of workloads: those that it cannot and can be made without. ``measures``: CPU
    time."""

    name: str
    paper: str
    section: str
    title: str
    needs: tuple[str, ...]
    likes: tuple[str, ...]
    by: By
    measures: bool = False
    has_quick_way: bool = False

    def make(
        self, workloads: Sequence[Workload], tell: Tell, clock: Clock | None = None, *, quick: bool = False
    ) -> Result:
        """Raises ``ValueError`` if it measures, and there is no clock."""
        if self.measures and clock is None:
            raise ValueError(f"{self.name} measures CPU time and needs a clock")
        return self.by(Given(workloads, tell, clock or (lambda: 0), quick))


def figure(
    name: str,
    paper: str,
    section: str,
    title: str,
    needs: tuple[str, ...] = (),
    likes: tuple[str, ...] = (),
    **ways: bool,
) -> Callable[[By], Figure]:
    """What it decorates makes the figure, and becomes it. ``ways``: whether it ``measures``, and ``has_quick_way``."""
    return lambda by: Figure(name, paper, section, title, needs, likes, by, **ways)
