"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table
from rich.text import Text


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    *,
    right: Collection[str] = (),
    whole: bool = False,
) -> Table:
    """Returns a table, with the columns of numbers aligned ``right``.

    With ``whole``, a cell that is too wide for the terminal is cut and marked as cut, and not broken into lines."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
        )
    for row in rows:
        made.add_row(*[Text(cell) for cell in row])  # names come from outside: they are not markup
    return made
