"""What figures read from workloads and from their own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pinyon_lab.figures.figure import Basis, Tell, Value
from pinyon_lab.figures.workload import Workload

__all__ = ["basis", "claimed", "close", "counting", "number", "share", "shown"]


def basis(workload: Workload) -> Basis:
    return Basis.CONSTRUCTION if workload.generated else Basis.MEASURED


def shown(workload: Workload) -> str:
    """In a picture."""
    return f"{workload.name} ({Basis.CONSTRUCTION})" if workload.generated else workload.name


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def number(row: Mapping[str, Value], key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return value


def claimed(*rows: Mapping[str, Value]) -> Basis:
    """Of what is said of them."""
    return Basis.CONSTRUCTION if any(row["basis"] == Basis.CONSTRUCTION for row in rows) else Basis.MEASURED


def close(ours: float, printed: float) -> bool:
    """Within a fifth: ours, the papers give no error."""
    return abs(ours - printed) <= printed / 5


def counting(tell: Tell, text: str, all_of: int) -> Callable[[int], None]:
    """What hears how many are done, and tells it with ``text``."""
    return lambda done: tell(f"{text}, {share(done, all_of):.0%}")
