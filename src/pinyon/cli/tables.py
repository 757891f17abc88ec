"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table


def table(*columns: str, title: str = "", right: Collection[str] = (), whole: bool = False) -> Table:
    """``right``: columns of numbers. ``whole``: no cell is broken where the terminal is narrow."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=whole, overflow="fold")
    return made
