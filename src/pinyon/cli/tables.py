"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table


def table(*columns: str, title: str = "", right: Collection[str] = (), whole: bool = False) -> Table:
    """Returns an empty table, with the columns of numbers in ``right``.

    With ``whole``, a cell is cut, with a sign of it, where the terminal is narrow, and not broken into lines."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
        )
    return made
