"""One figure of a paper: its inputs, our numbers, and the paper's words beside them.

Only numbers that are printed in a paper's text count as the paper's: nothing is read off its pictures. Where no number
is printed, the shape that the text states is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pinyon_lab.figures.workload import Basis as Basis
from pinyon_lab.figures.workload import Workload
from pinyon_lab.pictures import Panel, Picture

Value = str | int | float | None
Row = Mapping[str, Any]
"""The values of a row by the keys of their columns, and further values that are not shown."""


class RowList(list[dict[str, Any]]):
    """The rows of a figure, or some of them; every method looks only at rows that have the values ``where``."""

    def those(self, **where: Value) -> RowList:
        return RowList(row for row in self if all(row[key] == value for key, value in where.items()))

    def cell(self, key: str, /, **where: Value) -> Any:
        """Returns the value in the only row."""
        (row,) = self.those(**where)
        return row[key]

    def column(self, key: str, /, **where: Value) -> list[Any]:
        """Returns the values of a column."""
        return [row[key] for row in self.those(**where)]

    def by(self, name: str, key: str, /, **where: Value) -> dict[str, Any]:
        """Returns the values of a column by the text in column ``name``."""
        return {str(row[name]): row[key] for row in self.those(**where)}

    def cells(self, one: str, other: str, key: str, /, **where: Value) -> dict[tuple[Any, Any], Any]:
        """Returns the values of a column by the values in two others."""
        return {(row[one], row[other]): row[key] for row in self.those(**where)}

    def points(self, x: str, y: str) -> list[tuple[float, float]]:
        """Returns the points of a curve."""
        return [(row[x], row[y]) for row in self]


Tell = Callable[[str], None]
"""A receiver of progress messages."""
Clock = Callable[[], int]
"""A clock of the calling thread's CPU time, in ns. Nothing here reads any other clock."""


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    form: str = ""
    """A format specification for :func:`format`."""
    basis: Basis | None = None
    """The basis of the column's numbers; None: the column describes the row."""


def columns(basis: Basis | None = None, /, **shown: str | tuple[str, str]) -> list[Column]:
    """Returns columns of one basis by key; each is a title, or a title and a form."""
    parts = {key: (each, "") if isinstance(each, str) else each for key, each in shown.items()}
    return [Column(key, title, form, basis) for key, (title, form) in parts.items()]


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper's text, and our finding."""

    said: str
    """The paper's own words."""
    section: str
    printed: Value
    """The paper's number; None: not printed, only the shape is compared."""
    ours: Value
    basis: Basis
    agrees: bool
    why: str
    """The reason for a difference, or the way of comparing."""
    order: bool = False
    """True if the order is as the text says, although the printed number is not reached."""

    @property
    def verdict(self) -> str:
        if self.agrees:
            return "agrees"
        if not self.order:
            return "differs"
        return "agrees in part" if self.printed is None else "order agrees, outside the range"


class Compared(NamedTuple):
    """Our number and the printed one as text, and whether they agree."""

    ours: str
    agrees: bool
    printed: str | None = None


class Table:
    """The columns of a figure, its rows as they are found, and the paper's statements beside our findings."""

    def __init__(self, given: FigureInputs, *columns: Column, section: str = "", basis: Basis = Basis.MODELLED) -> None:
        """Starts empty. By default, claims are about the figure's ``section`` and rest on ``basis``."""
        self.columns = columns
        self.rows = RowList()
        self.claims: list[Claim] = []
        self._section, self._basis = section or given.section, basis

    def add(self, *values: Value, **more: Value) -> None:
        """Adds a row: a value for each column, in their order; ``more`` are not shown."""
        keys = [column.key for column in self.columns]
        self.rows.append({**dict(zip(keys, values, strict=True)), **more})

    def says(
        self,
        said: str,
        ours: Value,
        agrees: bool,
        why: str = "",
        *,
        printed: Value = None,
        order: bool = False,
        section: str = "",
        basis: Basis | None = None,
    ) -> None:
        """Adds a claim, see :class:`Claim`."""
        section, basis = section or self._section, basis or self._basis
        self.claims.append(Claim(said, section, printed, ours, basis, agrees, why, order))

    def finds(self, said: str, compared: Compared, why: str = "", **more: Any) -> None:
        """Adds a claim about a number that the paper prints, or about several alike."""
        self.says(said, compared.ours, compared.agrees, why, printed=compared.printed, **more)

    def result(self, title: str, panels: Sequence[Panel], notes: Sequence[str] = ()) -> Result:
        """Returns the result, with a picture of that title."""
        return Result(self.columns, self.rows, self.claims, notes, Picture(title, panels))


@dataclass(frozen=True, slots=True)
class Result:
    columns: Sequence[Column]
    rows: RowList
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


class FigureInputs(NamedTuple):
    """The inputs of a figure."""

    workloads: Sequence[Workload]
    tell: Tell
    clock: Clock
    """The clock for figures that measure CPU time."""
    section: str
    """The section of the paper that discusses the figure."""
    quick: bool
    """True to make the figure roughly, with shorter and fewer runs, where it has a quick way."""

    def shown(self, name: str) -> str:
        """Returns a workload's name for a picture, with its basis where it was generated."""
        return next(each.shown for each in self.workloads if each.name == name)


By = Callable[[FigureInputs], Result]
"""A function that makes a figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that can be made: it ``needs`` some workloads, ``likes`` others, and ``measures`` CPU time or not."""

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
        """Makes the figure. Raises ``ValueError`` if it measures and there is no clock."""
        if self.measures and clock is None:
            raise ValueError(f"{self.name} measures CPU time and needs a clock")
        section, *_ = self.section.split(",")
        return self.by(FigureInputs(workloads, tell, clock or (lambda: 0), section, quick))


def figure(
    name: str,
    paper: str,
    section: str,
    title: str,
    needs: tuple[str, ...] = (),
    likes: tuple[str, ...] = (),
    **ways: bool,
) -> Callable[[By], Figure]:
    """Returns a decorator that makes the function a :class:`Figure`; ``ways``: ``measures`` and ``has_quick_way``."""
    return lambda by: Figure(name, paper, section, title, needs, likes, by, **ways)
