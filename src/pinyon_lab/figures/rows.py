"""What figures read from workloads and from their own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon_lab.figures.figure import Basis, Row, Rows, Tell, Value
from pinyon_lab.figures.workload import Workload


def basis(workload: Workload) -> Basis:
    return Basis.CONSTRUCTION if workload.generated else Basis.MEASURED


def shown(workload: Workload) -> str:
    """In a picture."""
    return f"{workload.name} ({Basis.CONSTRUCTION})" if workload.generated else workload.name


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return value


def those(rows: Rows, /, **where: Value) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def cell(rows: Rows, key: str, /, **where: Value) -> float:
    """The number in the only row that has these values."""
    (row,) = those(rows, **where)
    return number(row, key)


def column(rows: Rows, key: str, /, **where: Value) -> list[float]:
    """The numbers in those rows that have these values."""
    return [number(row, key) for row in those(rows, **where)]


def points(rows: Rows, x: str, y: str) -> list[tuple[float, float]]:
    """For a course."""
    return list(zip(column(rows, x), column(rows, y), strict=True))


def claimed(*rows: Row) -> Basis:
    """Of what is said of them."""
    return Basis.CONSTRUCTION if any(row["basis"] == Basis.CONSTRUCTION for row in rows) else Basis.MEASURED


def close(ours: float, printed: float) -> bool:
    """Within a fifth: ours, the papers give no error."""
    return abs(ours - printed) <= printed / 5


def up_to(values: Sequence[float], form: str) -> str:
    """From the least to the most, as text."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def counting(tell: Tell, text: str, all_of: int) -> Callable[[int], None]:
    """What hears how many are done, and tells it with ``text``."""
    return lambda done: tell(f"{text}, {share(done, all_of):.0%}")
