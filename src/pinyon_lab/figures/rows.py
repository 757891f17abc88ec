"""Helpers of figures: the basis of their numbers, and ways to compare, tell and draw these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pinyon_lab.figures.figure import Basis, Compared, Row, Tell
from pinyon_lab.pictures import Bars, Course


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def bars(
    title: str,
    y_label: str,
    values: Mapping[tuple[Any, Any], float],
    form: str = ".0%",
    *,
    group: Callable[[Any], str] = str,
    label: Callable[[Any], str] = str,
) -> Bars:
    """Returns a panel of values by group and label; ``group`` and ``label`` return the text of each."""
    groups, labels = (list(dict.fromkeys(key[place] for key in values)) for place in (0, 1))
    of_label = {label(each): [values.get((name, each)) for name in groups] for each in labels}
    return Bars(title, y_label, [group(each) for each in groups], of_label, form)


def courses(
    values: Mapping[tuple[Any, Any], float], label: Callable[[Any], str] = str, solid: Any = None
) -> list[Course]:
    """Returns the curves of values by label and x; if there is a ``solid`` one, the others are dashed."""
    return [
        Course(label(each), [(x, y) for (name, x), y in values.items() if name == each], solid not in (None, each))
        for each in dict.fromkeys(name for name, _ in values)
    ]


def claimed(*rows: Row) -> Basis:
    """Returns the basis of a claim about these rows."""
    return Basis.CONSTRUCTION if any(row["basis"] == Basis.CONSTRUCTION for row in rows) else Basis.MEASURED


def close(ours: float, printed: float) -> bool:
    """Returns whether our number is within a fifth of the printed one: our own bound, as the papers give no error."""
    return abs(ours - printed) <= printed / 5


def near(ours: float, printed: float, form: str = "{:.2f}×", text: str = "") -> Compared:
    """Compares our number with a printed one, both in ``form`` if the paper's ``text`` is not another."""
    return Compared(form.format(ours), close(ours, printed), text or form.format(printed))


def told(found: Mapping[str, float], form: str = ".2f") -> str:
    return ", ".join(f"{at}: {format(each, form)}" for at, each in found.items())


def every(found: Mapping[str, float], holds: Callable[[float], bool]) -> Compared:
    """Tells the values by name, and whether all are as the text says."""
    return Compared(told(found), all(map(holds, found.values())))


def up_to(values: Sequence[float], form: str) -> str:
    """Returns the range of the values, from the least to the greatest, as text."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def counting(tell: Tell, text: str, all_of: int) -> Callable[[int], None]:
    """Returns a function that takes the number of items done and tells the share with ``text``."""
    return lambda done: tell(f"{text}, {share(done, all_of):.0%}")
