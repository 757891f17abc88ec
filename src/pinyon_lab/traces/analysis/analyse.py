"""The figures of "KVCache cache in the wild" §3 by number, for any trace; and DualMap's Fig. 14."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinyon.core.errors import InvalidArgument
from pinyon_lab.traces.analysis import hits, memory, turns
from pinyon_lab.traces.analysis.columns import TraceColumns
from pinyon_lab.traces.analysis.figure import TraceFigure
from pinyon_lab.traces.analysis.groups import Categories, Windows
from pinyon_lab.traces.analysis.reuse import Locality, ReuseTimes
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
    cross, times, locality = hits.CrossUser(columns), ReuseTimes(columns, categories, hours), Locality(columns)
    makers: dict[str, tuple[str, Callable[[TraceFigure], None]]] = {
        "4": ("ideal hit ratio of an unlimited cache", lambda figure: hits.hit_ratio(figure, survey, windows)),
        "5": ("types of requests and their multi-turn ratio", lambda figure: hits.request_types(figure, survey)),
        "6": ("hits on what another user stored", cross.figure),
        "7": ("hits by user", lambda figure: hits.hits_by_user(figure, survey)),
        "8": ("requests by user", lambda figure: hits.requests_by_user(figure, columns)),
        "9": ("turns", lambda figure: turns.turn_numbers(figure, columns)),
        "10": ("mean and deviation of turns by user", lambda figure: turns.turns_by_user(figure, columns)),
        "11": ("frequency of a next turn", lambda figure: turns.next_turns(figure, columns, categories, windows)),
        "12": ("reuse time of all requests", times.of_all),
        "13": ("reuse time of single-turn requests", times.of_singles),
        "14": ("reuse time of multi-turn requests by type", times.of_multi),
        "15": ("exponential fit of reuse time by category and hour", times.fits),
        "16": ("hit ratio by offset and stride of what is cached", locality.of_all),
        "17": ("hit ratio of multi-turn requests by offset and stride", locality.of_multi),
        "18": ("hit ratio of single-turn requests by type, offset and stride", locality.of_singles),
        "19": ("lifespan of blocks", lambda figure: memory.lifespans(figure, survey)),
        "20": (
            "mean lifespan of blocks by category",
            lambda figure: memory.mean_lifespans(figure, survey, categories, windows),
        ),
        "21": ("KV size of a request", lambda figure: memory.request_sizes(figure, columns)),
        "22": ("capacity for the ideal hit ratio", lambda figure: memory.ideal_capacity(figure, survey, windows)),
        "dualmap-14": ("shared prefix rate (DualMap, Fig. 14)", lambda figure: hits.shared_prefix(figure, survey)),
    }
    bare = not len(columns.blocks)
    if not bare and not WITHOUT_BLOCKS.issuperset(names):
        takers: dict[str, Callable[[Step], None]] = {
            "6": cross.take,
            **dict.fromkeys(("12", "13", "14", "15"), times.take),
            **dict.fromkeys(("16", "17", "18"), locality.take),
        }
        survey.run({takers[name] for name in names if name in takers}, progress)
    figures = []
    for name in names:
        title, make = makers[name]
        if bare and name not in WITHOUT_BLOCKS:
            title, make = f"figure {name}", lambda figure: figure.without("the trace has no blocks")
        figures.append(TraceFigure(name, title))
        make(figures[-1])
    return figures
