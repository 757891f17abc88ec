"""The figures of "KVCache cache in the wild" §3 by number, for any trace; and DualMap's Fig. 14."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces.analysis.columns import TraceColumns
from pinyon_lab.traces.analysis.figure import TraceFigure
from pinyon_lab.traces.analysis.groups import Categories, Windows
from pinyon_lab.traces.analysis.hits import (
    CrossUser,
    hit_ratio,
    hits_by_user,
    request_types,
    requests_by_user,
    shared_prefix,
)
from pinyon_lab.traces.analysis.memory import ideal_capacity, lifespans, lifespans_by_category, request_sizes
from pinyon_lab.traces.analysis.reuse import Locality, ReuseTimes
from pinyon_lab.traces.analysis.turns import next_turns, turn_numbers, turns_by_user
from pinyon_lab.traces.analysis.uses import Step, Survey

FIGURES = (*map(str, range(4, 23)), "dualmap-14")
WITHOUT_BLOCKS = {"8", "9", "10", "11", "21"}
"""The figures for which times, lengths and names are enough."""
CATEGORIES_MAX = 16
HOUR_S = 3600.0


def checked_figures(names: Sequence[str]) -> list[str]:
    """Returns these figures in their order; none given: all. Raises :class:`InvalidArgument` for an unknown one."""
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise InvalidArgument(f"no figure {unknown[0]!r}; known: {', '.join(FIGURES)}", field="figure")
    return [name for name in FIGURES if name in names or not names]


def analyse(
    columns: TraceColumns,
    names: Sequence[str] = FIGURES,
    window_s: float = 600.0,
    progress: Callable[[int], None] = lambda _: None,
) -> list[TraceFigure]:
    """Returns the figures of a trace. Figs. 4, 11, 20 and 22 have windows of ``window_s``; the paper's heat maps have
    ten minutes. Calls ``progress`` with the number of requests done. Raises :class:`InvalidArgument`."""
    windows = Windows(columns.time_s, window_s)
    hours = Windows(columns.time_s, max(HOUR_S, window_s))
    categories = Categories(columns, CATEGORIES_MAX)
    survey = Survey(columns, parts=not {"16", "17", "18"}.isdisjoint(names))
    cross, times, locality = CrossUser(columns), ReuseTimes(columns, categories, hours), Locality(columns)
    makers: dict[str, Callable[[], TraceFigure]] = {
        "4": lambda: hit_ratio(survey, windows),
        "5": lambda: request_types(survey),
        "6": cross.figure,
        "7": lambda: hits_by_user(survey),
        "8": lambda: requests_by_user(columns),
        "9": lambda: turn_numbers(columns),
        "10": lambda: turns_by_user(columns),
        "11": lambda: next_turns(columns, categories, windows),
        "12": times.of_all,
        "13": times.of_singles,
        "14": times.of_multi,
        "15": times.fits,
        "16": locality.of_all,
        "17": locality.of_multi,
        "18": locality.of_singles,
        "19": lambda: lifespans(survey),
        "20": lambda: lifespans_by_category(survey, categories, windows),
        "21": lambda: request_sizes(columns),
        "22": lambda: ideal_capacity(survey, windows),
        "dualmap-14": lambda: shared_prefix(survey),
    }
    bare = not len(columns.blocks)
    if not bare and not WITHOUT_BLOCKS.issuperset(names):
        takers: dict[str, Callable[[Step], None]] = {
            "6": cross.take,
            **dict.fromkeys(("12", "13", "14", "15"), times.take),
            **dict.fromkeys(("16", "17", "18"), locality.take),
        }
        survey.run({takers[name] for name in names if name in takers}, progress)
    without = "the trace has no blocks"
    return [
        TraceFigure(name, f"figure {name}", left_out=without) if bare and name not in WITHOUT_BLOCKS else makers[name]()
        for name in names
    ]
