"""The papers' figures, made again: the papers' claims beside our results.

Beside them stand the figures that this package does not make: those of other commands, and those that nothing makes."""

from __future__ import annotations

from typing import NamedTuple

from pinyon_lab.figures.figure import Basis, Claim, Column, Figure, Result
from pinyon_lab.figures.workload import SOURCES, Workload
from pinyon_lab.papers import dualmap, feather, mooncake, skywalker, wild

__all__ = ["ELSEWHERE", "FIGURES", "NOT_MADE", "SOURCES", "Basis", "Claim", "Column", "Figure", "Result", "Workload"]

FIGURES = {each.name: each for paper in (mooncake, dualmap, wild, feather, skywalker) for each in paper.FIGURES}


class Elsewhere(NamedTuple):
    """A figure that ``command`` makes."""

    name: str
    paper: str
    section: str
    title: str
    command: str


class NotMade(NamedTuple):
    paper: str
    figures: str
    why: str


ELSEWHERE = {
    each.name: each
    for each in (
        Elsewhere(
            "mooncake-fig12",
            mooncake.PAPER,
            "§5.4.1, Fig. 12",
            "how long transfers between two nodes take",
            "./dev bench transfer --fig12",
        ),
        Elsewhere("dualmap-fig13b", dualmap.PAPER, "§A.4.2, Fig. 13b", "what a decision costs", "./dev bench dualmap"),
        Elsewhere(
            "dualmap-fig14",
            dualmap.PAPER,
            "§A.5, Fig. 14",
            "how much of a prompt is shared, of any trace",
            "pinyon trace analyze TRACE --figure dualmap-14",
        ),
        Elsewhere(
            "wild-fig4-22",
            wild.PAPER,
            "§3, Figs. 4 to 22",
            "reuse, users, turns, lifespans and sizes, of any trace",
            "pinyon trace analyze TRACE",
        ),
    )
}
"""The figures that other commands make, by name."""

_DRAWN = "drawings and lists of terms: nothing is measured in them"

NOT_MADE = (
    NotMade(mooncake.PAPER, "Figs. 2 to 4, Table 1", f"{_DRAWN}; the others compute with the table's numbers"),
    NotMade(dualmap.PAPER, "Figs. 2, 7 and 9", _DRAWN),
    NotMade(wild.PAPER, "Figs. 1 to 3, 23 and 24, Tables 1 and 2", _DRAWN),
    NotMade(feather.PAPER, "Figs. 3.1, 3.3 and 3.7, chapters 1, 2 and 4, appendix A", _DRAWN),
    NotMade(skywalker.PAPER, "Figs. 1 and 7", _DRAWN),
    NotMade(
        skywalker.PAPER,
        "Figs. 2, 4a and 5b",
        "not reproduced: times, lengths and users of WildChat and ChatBot Arena, whose data sets are not at hand",
    ),
)
